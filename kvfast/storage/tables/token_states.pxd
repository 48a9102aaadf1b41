"""The states of a sequence's tokens."""
from libc.stdint cimport int16_t

from kvfast.storage.tables.block_map cimport BlockMap


cdef class TokenStates(BlockMap):
    cdef Py_ssize_t *lengths           # (num_layers,) tokens of each layer
    cdef readonly Py_ssize_t length    # tokens that every layer has
    cdef Py_ssize_t floats_begin       # if blocks are sealed, number of first tokens without float rows; see kv_context
    cdef Py_ssize_t kept_codes         # for a table without blocks, see `block_bytes`: its future `_kept_codes`
    cdef list patched                  # and its future `patches`

    cdef Py_ssize_t skipped_at(self, Py_ssize_t length) noexcept nogil
    cdef int prepare(self, Py_ssize_t n) except -1
    cdef int advance(self, Py_ssize_t n) except -1
    cdef bint just_counts(self, Py_ssize_t n) noexcept nogil
    cdef void count_tokens(self, Py_ssize_t n) noexcept nogil
    cdef int release_evicted(self) except -1
    cdef Py_ssize_t floats_begin_at(self, Py_ssize_t length) noexcept nogil
    cdef int _release_float_rows(self) except -1
    cdef int settle(self) except -1
    cdef int _undo_reopening(self) except -1
    cdef int _reopen_block(self) except -1
    cdef Py_ssize_t codes_end(self) noexcept nogil
    cdef Py_ssize_t num_positions(self) noexcept nogil
    cdef Py_ssize_t num_uncounted(self) noexcept nogil
    cdef Py_ssize_t _kept_codes(self) noexcept nogil
    cdef Py_ssize_t slots_with_codes(self) noexcept nogil
    cdef void set_kept_codes(self, Py_ssize_t kept_codes) noexcept
    cdef list pieces(self, Py_ssize_t longest)
    cdef list patches(self, Py_ssize_t longest)
    cdef int set_patches(self, list patches) except -1
    cdef dict _check_codes(self, Py_ssize_t length, dict state)
    cdef Py_ssize_t num_slots(self) noexcept nogil
    cdef dict resume_state(self)
    cdef int set_resume_state(self, Py_ssize_t length, dict state) except -1
    cdef Py_ssize_t check_resume_state(self, Py_ssize_t length, dict state) except -1
    cdef bint holds(self, Py_ssize_t position) noexcept nogil
