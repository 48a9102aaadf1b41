"""The life of a sequence's tokens."""
from libc.stdint cimport int32_t

from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.tables.block_map cimport BlockMap


cdef class TokenLife:
    cdef BlockPool pool
    cdef BlockMap map
    cdef const Py_ssize_t *lengths     # (num_layers,) tokens of each layer, of the table
    # (num_layers,) of layers that seal blocks, number of first tokens without float rows; see kv_context. What a layer reads depends on
    # its own format and tokens alone, so each layer has its own, and its own codes in a block that was cut.
    cdef Py_ssize_t *begins
    cdef Py_ssize_t floats_begin, cut_end  # the least and the most of them
    cdef list planned                  # for a table without blocks, see `block_bytes`: its future `layers`

    cdef void _sum_up(self) noexcept nogil
    cdef Py_ssize_t longest(self) noexcept nogil
    cdef Py_ssize_t _coded_at(self, Py_ssize_t layer, Py_ssize_t length) noexcept nogil
    cdef Py_ssize_t read_from(self, Py_ssize_t layer, Py_ssize_t length) noexcept nogil
    cdef Py_ssize_t shown_from(self, Py_ssize_t layer, Py_ssize_t length) noexcept nogil
    cdef Py_ssize_t codes_end(self, Py_ssize_t layer) noexcept nogil
    cdef Py_ssize_t kept_codes_of_cut(self, Py_ssize_t layer) except -1
    cdef Py_ssize_t slots_with_codes(self, Py_ssize_t layer) except -1
    cdef bint is_cut(self, Py_ssize_t layer, Py_ssize_t index) noexcept nogil
    cdef bint just_counts(self, Py_ssize_t length) noexcept nogil
    cdef bint fills(self, Py_ssize_t layer, Py_ssize_t before, Py_ssize_t after) noexcept nogil
    cdef int seal(self, Py_ssize_t layer, Py_ssize_t before, Py_ssize_t after) except -1
    cdef int release_float_rows(self, Py_ssize_t length) except -1
    cdef int settle(self, Py_ssize_t length) except -1
    cdef void raise_to(self, Py_ssize_t position) noexcept nogil
    cdef int _release(self, Py_ssize_t first, Py_ssize_t last) except -1
    cdef int reopen(self, Py_ssize_t layer) except -1
    cdef int cut(self, Py_ssize_t length) except -1
    cdef int take(self, const Py_ssize_t *begins) except -1
    cdef list listed(self)
    cdef int set_begins(self, list begins) except -1
    cdef list pieces(self)
    cdef list patches(self, Py_ssize_t layer)
    cdef list layers(self)
    cdef int set_codes(self, list layers) except -1
    cdef dict saved(self)
    cdef list saved_layers(self, dict state)
    cdef dict check_saved(self, Py_ssize_t length, dict state)
