"""Blocks of some layers, and the number of their owners.

A block has all layers. Owners take blocks, retain those that they share, and release them.
"""
from libc.stdint cimport int32_t, uint8_t

from kvfast.codec.blocks cimport Arena, kv_layout


cdef class BlockMemory:
    cdef readonly Py_ssize_t num_layers
    cdef readonly Py_ssize_t num_kv_heads
    cdef readonly Py_ssize_t head_dim
    cdef readonly Py_ssize_t v_head_dim  # width of values, or of latents
    cdef readonly object rope_dim      # width of the rotary part of latent rows, else None
    cdef readonly int block_size
    cdef readonly Py_ssize_t num_blocks  # block numbers; `num_gaps` of them have no block
    cdef readonly Py_ssize_t num_gaps
    cdef dict settings                 # the arguments of the constructor
    cdef readonly list formats         # KVFormat of each layer
    cdef list bases                    # what the `bases` of the layouts point into
    cdef readonly Py_ssize_t first_blocks  # blocks of the first slab, or of the first two
    cdef Py_ssize_t start_blocks           # blocks of the first slab for whoever needs no more; `first_blocks` come with the second
    cdef readonly bint secure          # wipe blocks when they are released
    cdef char *zeros                   # if secure, zeros as large as the largest side of a block
    cdef bint grows
    cdef bint is_shared
    cdef kv_layout *layouts            # (num_layers,)
    cdef uint8_t *slab_of              # as in kv_layout
    cdef list arenas                   # Arena of each slab, perhaps followed by None
    cdef list layers                   # Arena of each layer, if the memory is a caller's, else None
    cdef list sizes                    # bytes of each slab, perhaps followed by 0
    cdef Py_ssize_t num_slabs
    cdef int32_t *owners               # (num_blocks,) number of owners
    cdef int32_t *next_free            # (num_blocks + 1,) ring of free blocks: entry 0 is its head, entry b + 1 block b;
    cdef int32_t *prev_free            # -1 for a block that is not in the ring
    cdef Py_ssize_t num_free
    cdef Py_ssize_t group              # where the next search for a free group starts

    cdef Py_ssize_t available(self) except -1
    cdef int ensure(self, Py_ssize_t num_blocks) except -1
    cdef int ensure_apart(self, Py_ssize_t num_blocks) except -1
    cdef void start_small(self) noexcept
    cdef int32_t take(self, int32_t after) except -1
    cdef int release(self, int32_t block) except -1
    cdef int put_free(self, int32_t block) except -1
    cdef void copy(self, int32_t source, int32_t target) noexcept
    cdef void wipe_block(self, int32_t block) noexcept
    cdef void zero_block(self, int32_t block) noexcept
    cdef void wipe_tokens(self, int32_t block, Py_ssize_t layer, Py_ssize_t first, Py_ssize_t last) noexcept
    cdef int trim(self) except -1
    cdef bint has_surplus(self) noexcept
    cdef bint has_room_below(self, int32_t block) noexcept
    cdef int32_t _free_group(self) noexcept
    cdef void _insert(self, int32_t block, int32_t behind) noexcept
    cdef void _remove(self, int32_t block) noexcept
    cdef int _grow_tables(self, Py_ssize_t total) except -1
    cdef int _add_slab(self, Py_ssize_t blocks, Arena arena=*, object offsets=*) except -1
    cdef int _use_layers(self, list layers, list strides) except -1


cdef void *grown(void *memory, Py_ssize_t nbytes) except NULL
