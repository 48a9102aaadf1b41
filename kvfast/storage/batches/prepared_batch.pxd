from libc.stdint cimport int32_t

from kvfast.attention.cascade cimport kv_prefixes
from kvfast.attention.sight cimport kv_member
from kvfast.storage.memory.pool cimport BlockPool


cdef class PreparedBatch:
    cdef BlockPool pool
    cdef readonly Py_ssize_t num_sequences, num_tokens
    cdef const int32_t[:, ::1] table     # (num_sequences, blocks of the longest sequence)
    cdef const int32_t[::1] lens, starts  # seq_lens and cu_seqlens_q
    cdef const int32_t[::1] used         # blocks that are read
    cdef object slots                    # int64 array, without repeats, or None
    cdef kv_prefixes *prefixes           # that sequences share, by the `rule` of a layer, -1 last; NULL if they were not looked for
    cdef int32_t[:, ::1] floats_begin  # (rules, num_sequences) as in kv_context
    cdef list filled           # blocks that the step fills, whose tokens all have float rows; those that begin a sequence come first
    cdef int num_starts        # number of these
    cdef Py_ssize_t step                 # of a pool that keeps float rows

    cdef int check(self, BlockPool pool) except -1
    cdef void fill(self, kv_member *members, int rule) noexcept nogil
    cdef Py_ssize_t num_prefixes
    cdef int look_for_prefixes(self) except -1
    cdef const kv_prefixes *prefixes_of(self, int rule) noexcept
    cdef int set_slots(self, object slot_mapping) except -1


cdef const int32_t[::1] checked_starts(object cu_seqlens_q, Py_ssize_t count, Py_ssize_t num_tokens)
cdef PreparedBatch prepare(BlockPool pool, object block_table, object seq_lens, const int32_t[::1] starts, Py_ssize_t window,
                           Py_ssize_t num_sink_tokens)
