"""The states of a sequence's tokens."""
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.tables.block_map cimport BlockMap


# `length` is always the number of tokens that every layer has, and `longest` the number that the longest layer has.
cdef class TokenStates:
    cdef BlockPool pool
    cdef BlockMap map
    cdef Py_ssize_t floats_begin       # if blocks are sealed, number of first tokens without float rows; see kv_context
    cdef Py_ssize_t kept_codes         # for a table without blocks, see `block_bytes`: its future `kept_codes_of_cut`
    cdef list patched                  # and its future `patches`

    cdef Py_ssize_t codes_end(self, Py_ssize_t length) noexcept nogil
    cdef Py_ssize_t kept_codes_of_cut(self, Py_ssize_t longest) noexcept nogil
    cdef Py_ssize_t slots_with_codes(self, Py_ssize_t length, Py_ssize_t longest) noexcept nogil
    cdef bint is_cut(self, Py_ssize_t index) noexcept nogil
    cdef Py_ssize_t floats_begin_at(self, Py_ssize_t length) noexcept nogil
    cdef bint just_counts(self, Py_ssize_t length, Py_ssize_t n) noexcept nogil
    cdef int seal(self, Py_ssize_t length, Py_ssize_t n, Py_ssize_t gone) except -1
    cdef int release_float_rows(self, Py_ssize_t length) except -1
    cdef int settle(self, Py_ssize_t length) except -1
    cdef int _release(self, Py_ssize_t first, Py_ssize_t last) except -1
    cdef int reopen(self) except -1
    cdef int cut(self, Py_ssize_t length) except -1
    cdef void set_kept_codes(self, Py_ssize_t kept_codes) noexcept
    cdef list pieces(self, Py_ssize_t length, Py_ssize_t longest)
    cdef list patches(self, Py_ssize_t length, Py_ssize_t longest)
    cdef int set_patches(self, list patches) except -1
    cdef dict saved(self, Py_ssize_t length, Py_ssize_t longest)
    cdef dict check_saved(self, Py_ssize_t length, dict state)
