"""The blocks that caches share, or have for themselves.

Whoever changes a pool and what lies in it is alone there, from `enter` to `leave`; those who read go together, from
`enter_reading` to `leave_reading`. Not all of these need have the GIL. What only tells of a pool need not enter: it holds a
critical section of it, and so does who moves the lists of a pool or sequence.
"""
from libc.stdint cimport int32_t

from kvfast.attention.workspace cimport Workspace
from kvfast.storage.block_memory cimport BlockMemory
from kvfast.storage.float_rows cimport FloatRows
from kvfast.storage.prefix_index cimport PrefixIndex


cdef class BlockPool(BlockMemory):
    cdef bint seals                    # some layers encode blocks as a whole
    cdef bint has_sinks                # some keep the first tokens of a sequence as floats
    cdef FloatRows floats              # of tokens, or None
    cdef readonly Py_ssize_t num_sequences  # where it is shared
    cdef PrefixIndex index             # of contents worth keeping, or None
    cdef Workspace workspace
    cdef int busy                      # for those who enter and leave alone
    cdef unsigned long tidier          # thread that tidies up, or 0
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
    cdef bint is_frozen(self, int32_t block) noexcept
    cdef int copy_block(self, int32_t source, int32_t target) except -1
    cdef BlockPool clone(self)
    cdef BlockPool exact(self, Py_ssize_t num_blocks)
    cdef int trim_surplus(self) except -1
