"""Blocks of some layers, counted by their owners.

A block spans all layers of its pool. Owners take blocks, retain those they share and release them; a
pool and what lies in it serve one thread at a time (`enter`, `leave`).
"""
from libc.stdint cimport int32_t

from kvfast.blocks cimport kv_store
from kvfast.plan cimport Workspace


cdef class BlockPool:
    cdef readonly Py_ssize_t num_layers
    cdef readonly Py_ssize_t num_kv_heads
    cdef readonly Py_ssize_t head_dim
    cdef readonly int block_size
    cdef readonly Py_ssize_t num_blocks
    cdef object settings               # arguments of this pool
    cdef bint grows
    cdef bint interleaved
    cdef kv_store *stores              # (num_layers,)
    cdef Py_ssize_t chunk_blocks
    cdef Py_ssize_t chunk_bytes
    cdef Py_ssize_t *chunks            # (num_chunks,) as in kv_store
    cdef list arenas                   # of Arena, one per chunk
    cdef int32_t *owners               # (num_blocks,) number of owners
    cdef int32_t *free                 # (num_free,) stack of free blocks, the next one last
    cdef Py_ssize_t num_free
    cdef object index                  # PrefixIndex of contents worth keeping, or None
    cdef Workspace workspace
    cdef bint busy

    cdef int enter(self) except -1
    cdef Py_ssize_t available(self) except -1
    cdef int ensure(self, Py_ssize_t count) except -1
    cdef int32_t take(self) except -1
    cdef int retain(self, int32_t block) except -1
    cdef int give_back(self, int32_t block) except -1
    cdef int release(self, int32_t block) except -1
    cdef bint is_frozen(self, int32_t block) except -1
    cdef void copy(self, BlockPool other, int32_t source, int32_t target) noexcept
    cdef BlockPool clone(self)
    cdef int trim(self) except -1
    cdef int _add_chunk(self, Py_ssize_t blocks) except -1
