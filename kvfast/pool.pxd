"""Blocks of some layers, counted by their owners.

A block spans all layers of its pool. Owners take blocks, retain those they share and release them; a
pool and what lies in it serve one thread at a time, from `enter` to `leave`; not all of these need have the GIL.
"""
from libc.stdint cimport int16_t, int32_t, uint8_t

from kvfast.attend_call cimport Workspace
from kvfast.blocks cimport Arena, kv_store
from kvfast.prefix cimport PrefixIndex


cdef class BlockPool:
    cdef readonly Py_ssize_t num_layers
    cdef readonly Py_ssize_t num_kv_heads
    cdef readonly Py_ssize_t head_dim
    cdef readonly object rope_dim      # of latent rows, else None
    cdef readonly int block_size
    cdef readonly Py_ssize_t num_blocks  # of all blocks, `num_gaps` of which do not exist
    cdef readonly Py_ssize_t num_gaps
    cdef tuple settings                # arguments of this pool
    cdef readonly list formats         # KVFormat of each layer
    cdef bint finishes                 # some layers encode blocks as a whole
    cdef bint has_sinks                # some keep the first tokens of a sequence as floats
    cdef BlockPool floats              # float rows of tokens, in pieces, or None; with it also:
    cdef int32_t *float_of             # as in kv_store
    cdef int16_t *kept                 # (num_blocks,) first tokens of a block with float rows whose codes are good, too
    cdef Py_ssize_t first_blocks
    cdef readonly bint secure          # see `wipe_block`
    cdef char *zeros                   # of a secure pool, a block of the largest side
    cdef bint grows
    cdef bint is_shared
    cdef kv_store *stores              # (num_layers,)
    cdef uint8_t *chunk_of             # as in kv_store
    cdef list arenas                   # of Arena, one per chunk, and perhaps None behind them
    cdef list sizes                    # bytes of the chunks, or 0
    cdef Py_ssize_t num_chunks
    cdef int32_t *owners               # (num_blocks,) number of owners
    cdef int32_t *next_free            # (num_blocks + 1,) ring of free blocks; entry 0 is its head,
    cdef int32_t *prev_free            # entry b + 1 that of block b, -1 for one that is not in it
    cdef Py_ssize_t num_free
    cdef Py_ssize_t group              # where the search for free groups goes on
    cdef PrefixIndex index             # of contents worth keeping, or None
    cdef Workspace workspace
    cdef int busy                      # for `enter` and `leave` alone
    cdef list abandoned                # tables to be released when the pool is next entered

    cdef bint try_enter(self) noexcept nogil
    cdef int enter(self) except -1
    cdef void leave(self) noexcept nogil
    cdef int _release_abandoned(self) except -1
    cdef Py_ssize_t available(self) except -1
    cdef int ensure(self, Py_ssize_t count) except -1
    cdef int ensure_apart(self, Py_ssize_t count) except -1
    cdef int32_t take(self, int32_t after) except -1
    cdef int retain(self, int32_t block) except -1
    cdef int release(self, int32_t block) except -1
    cdef int give_back(self, int32_t block) except -1
    cdef bint is_frozen(self, int32_t block) noexcept
    cdef void copy(self, int32_t source, int32_t target) noexcept
    cdef int copy_block(self, int32_t source, int32_t target) except -1
    cdef Py_ssize_t floats_needed(self, int32_t block, int32_t source, Py_ssize_t first, Py_ssize_t last) noexcept
    cdef int add_floats(self, int32_t block, Py_ssize_t first, Py_ssize_t last) except -1
    cdef void wipe_block(self, int32_t block) noexcept
    cdef void wipe_places(self, int32_t block, Py_ssize_t layer, Py_ssize_t first) noexcept
    cdef int drop_floats(self, int32_t block, int first) except -1
    cdef BlockPool clone(self)
    cdef BlockPool exact(self, Py_ssize_t num_blocks)
    cdef int trim(self) except -1
    cdef int drop_surplus(self) except -1
    cdef int32_t _free_group(self) noexcept
    cdef void _aim_stores(self) noexcept
    cdef void _insert(self, int32_t block, int32_t behind) noexcept
    cdef void _remove(self, int32_t block) noexcept
    cdef int _add_chunk(self, Py_ssize_t blocks, Arena arena=*, object offsets=*) except -1
