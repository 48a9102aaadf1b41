"""The tokens of a sequence."""
from libc.stdint cimport int16_t

from kvfast.codec.blocks cimport kv_context
from kvfast.codec.encode cimport kv_rotary
from kvfast.core.arrays cimport Rows
from kvfast.storage.block_map cimport BlockMap
from kvfast.storage.pool cimport BlockPool


cdef class BlockTable(BlockMap):
    cdef Py_ssize_t *lengths           # (num_layers,) tokens of each layer
    cdef readonly Py_ssize_t length    # tokens that every layer has
    cdef Py_ssize_t floats_begin       # first tokens without float rows, where blocks are finished; see kv_context
    cdef bint closed                   # its blocks were given back for good
    cdef bint is_counted               # among the sequences of its pool
    cdef Py_ssize_t kept_codes         # of a table without blocks, see `block_bytes`: what it will keep,
    cdef list patched                  # and `_patches`

    cdef void context(self, Py_ssize_t layer, kv_context *context) noexcept nogil
    cdef bint is_writable(self, Py_ssize_t first, Py_ssize_t last) noexcept nogil
    cdef Py_ssize_t floats_needed(self, Py_ssize_t first, Py_ssize_t last) noexcept
    cdef Py_ssize_t skipped_at(self, Py_ssize_t length) noexcept nogil
    cdef int prepare(self, Py_ssize_t n) except -1
    cdef int make_writable(self, Py_ssize_t first, Py_ssize_t last) except -1
    cdef int append(self, Py_ssize_t layer, Rows k, Rows v, const kv_rotary *rotary) except -1
    cdef int advance(self, Py_ssize_t n) except -1
    cdef bint just_counts(self, Py_ssize_t n) noexcept nogil
    cdef void count_tokens(self, Py_ssize_t n) noexcept nogil
    cdef int release_evicted(self) except -1
    cdef Py_ssize_t _floats_begin_at(self, Py_ssize_t length) noexcept nogil
    cdef int _release_float_rows(self) except -1
    cdef int _undo_reopening(self) except -1
    cdef int _reopen_block(self) except -1
    cdef Py_ssize_t codes_end(self) noexcept nogil
    cdef Py_ssize_t num_positions(self) noexcept nogil
    cdef Py_ssize_t _kept_codes(self) noexcept nogil
    cdef Py_ssize_t slots_with_codes(self) noexcept nogil
    cdef void set_kept_codes(self, Py_ssize_t kept_codes) noexcept
    cdef list pieces(self, Py_ssize_t longest)
    cdef list patches(self, Py_ssize_t longest)
    cdef int set_patches(self, list patches) except -1
    cdef int16_t _kept_codes_of_cut(self) noexcept nogil
    cdef int truncate(self, Py_ssize_t n) except -1
    cdef int _wipe_behind(self, Py_ssize_t index) except -1
    cdef int check_truncate(self, Py_ssize_t n) except -1
    cdef dict _check_codes(self, Py_ssize_t length, dict state)
    cdef BlockTable empty(self, BlockPool pool)
    cdef int copy_resume_state(self, BlockTable other) except -1
    cdef Py_ssize_t num_slots(self) noexcept nogil
    cdef Py_ssize_t skipped_of(self, BlockTable other) noexcept
    cdef Py_ssize_t blocks_of(self, BlockTable other) noexcept
    cdef list pieces_of(self, BlockTable other)
    cdef int start(self, digests) except -1
    cdef int begin_with(self, list blocks, Py_ssize_t skipped) except -1
    cdef int reserve(self, Py_ssize_t count, Py_ssize_t pieces) except -1
    cdef int _exchange(self, Py_ssize_t count) except -1
    cdef int open(self, Py_ssize_t count) except -1
    cdef dict resume_state(self)
    cdef int set_resume_state(self, Py_ssize_t length, dict state) except -1
    cdef Py_ssize_t check_resume_state(self, Py_ssize_t length, dict state) except -1
    cdef bint limit(self, Py_ssize_t *window, Py_ssize_t *num_sink_tokens) noexcept nogil
    cdef bint holds(self, Py_ssize_t position) noexcept nogil
    cdef Py_ssize_t oldest(self, Py_ssize_t length) noexcept nogil
    cdef int share(self, BlockTable other) except -1
    cdef int release(self) except -1
    cdef int close(self) except -1
    cdef int check_open(self) except -1
    cdef object rows(self, Py_ssize_t layer, object positions, bint values)
