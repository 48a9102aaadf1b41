"""Float rows of tokens, next to the blocks with their codes."""
from libc.stdint cimport int16_t, int32_t

from kvfast.codec.blocks cimport kv_layout
from kvfast.storage.memory.block_memory cimport BlockMemory


cdef class FloatRows:
    cdef BlockMemory pieces            # blocks of KV_PIECE tokens
    cdef int per_block                 # pieces of a block
    cdef bint keeps_newest             # whether some layers keep newest tokens as floats
    cdef bint has_sinks                # whether some layers keep their first tokens as floats
    cdef Py_ssize_t num_layers
    cdef kv_layout *layouts            # (num_layers,) of the blocks; their memory owns these rows
    cdef int32_t *float_of             # as in kv_layout
    # For each layer that seals (num_blocks,), else NULL: number of first tokens of a block with float rows whose codes are valid,
    # too. Below 0 for a patched block: minus this number of its codes are read, then its float rows.
    cdef int16_t **kept_codes
    cdef int32_t *num_kept             # (num_blocks,) number of layers whose `kept_codes` of a block is not 0

    cdef int grow(self, Py_ssize_t num_blocks, Py_ssize_t total) except -1
    cdef bint is_open(self, Py_ssize_t layer, int32_t block, Py_ssize_t index, Py_ssize_t first, Py_ssize_t last) noexcept nogil
    cdef Py_ssize_t needed(self, int32_t block, int32_t source, Py_ssize_t index, Py_ssize_t first, Py_ssize_t last) noexcept
    cdef int open(self, Py_ssize_t layer, int32_t block, Py_ssize_t index, Py_ssize_t first, Py_ssize_t last) except -1
    cdef int restore(self, Py_ssize_t layer, int32_t block, Py_ssize_t index, Py_ssize_t num_tokens) except -1
    cdef int add(self, int32_t block, Py_ssize_t first, Py_ssize_t last) except -1
    cdef void set_kept_codes(self, Py_ssize_t layer, int32_t block, Py_ssize_t kept_codes) noexcept
    cdef list kept_of(self, int32_t block)
    cdef void _keep_as(self, int32_t source, int32_t block) noexcept
    cdef int set_kept(self, int32_t block, list kept) except -1
    cdef Py_ssize_t first_patch(self, int32_t block) noexcept nogil
    cdef int forget(self, int32_t block) except -1
    cdef int release(self, int32_t block, int first) except -1
    cdef int release_coded(self, int32_t block, bint is_first, Py_ssize_t last) except -1
    cdef int seal(self, Py_ssize_t layer, list blocks, int num_starts) except -1
    cdef int _release_range(self, int32_t block, Py_ssize_t first, Py_ssize_t last) except -1
    cdef int move_down(self, int32_t block) except -1
    cdef int copy(self, int32_t source, int32_t target) except -1
    cdef list pieces_of(self, int32_t block)
    cdef int keep_pieces(self, int32_t block, list pieces) except -1
    cdef void give(self, int32_t source, int32_t target) noexcept
    cdef void wipe_tokens(self, int32_t block, Py_ssize_t layer, Py_ssize_t first, Py_ssize_t last) noexcept
    cdef list first_rows(self, int32_t block, Py_ssize_t layer, bint copies)
    cdef Py_ssize_t first_nbytes(self) noexcept
    cdef Py_ssize_t num_pieces(self, int32_t block) noexcept


cdef FloatRows float_rows_of(BlockMemory blocks)
