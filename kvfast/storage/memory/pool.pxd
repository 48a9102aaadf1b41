"""The blocks of one cache, or of several that share them.

A thread that changes a pool or its contents must be alone in it, from `enter` to `leave`. Threads that read can be in it
together, from `enter_reading` to `leave_reading`. Some of these calls do not hold the GIL. Read-only queries of a pool's figures
do not enter: they take a critical section on the pool, and so must any code that moves the arrays of a pool or a sequence.
"""
from libc.stdint cimport int32_t

from kvfast.attention.workspace cimport Workspace
from kvfast.storage.memory.block_memory cimport BlockMemory
from kvfast.storage.memory.float_rows cimport FloatRows
from kvfast.storage.memory.prefix_index cimport PrefixIndex


cdef class BlockPool(BlockMemory):
    cdef bint seals                    # whether some layers seal blocks
    cdef bint keeps_newest             # whether some layers keep newest tokens as floats
    cdef tuple rules                   # the (`kept_tokens`, `border`) that these layers have, each once, the least first
    cdef bint has_sinks                # whether some layers keep the first tokens of a sequence as floats
    cdef FloatRows floats              # float rows of tokens, or None
    cdef readonly Py_ssize_t num_sequences  # sequences of a shared pool
    cdef PrefixIndex index             # known blocks, or None
    cdef Workspace workspace
    cdef int busy                      # flag of `enter` and `enter_reading`
    cdef unsigned long tidier          # thread that releases pending tables, or 0
    cdef list to_release               # tables to be released when the pool is next entered

    cdef bint try_enter(self) noexcept nogil
    cdef int enter(self) except -1
    cdef void leave(self) noexcept nogil
    cdef bint try_enter_reading(self) noexcept nogil
    cdef int enter_reading(self) except -1
    cdef void leave_reading(self) noexcept nogil
    cdef bint _waits_for(self, int holder) noexcept
    cdef bint _start_tidying(self) noexcept
    cdef void _stop_tidying(self) noexcept
    cdef int _release_pending(self) except -1
    cdef int retain(self, int32_t block) except -1
    cdef bint is_frozen(self, int32_t block) noexcept nogil
    cdef int copy_block(self, int32_t source, int32_t target) except -1
    cdef int32_t move_down(self, int32_t block) except -1
    cdef BlockPool clone(self)
    cdef BlockPool exact(self, Py_ssize_t num_blocks)
    cdef int trim_surplus(self) except -1
