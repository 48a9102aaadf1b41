# cython: language_level=3
"""Memory of threads for what is too large for their stacks: musl gives a thread 128 KB, and Python needs some of these.

Blocks of one size are lent, for a call or for a task. The process keeps returned blocks in a last-in-first-out list, so the next call
gets blocks that are still in a cache.
"""
import os


from kvfast.core.flags cimport kv_drop, kv_take
from kvfast.core.system cimport kv_take_lines

ctypedef struct kv_free:
    void *next

cdef kv_free *_free = NULL
cdef int _busy = 0             # a thread changes the list: for some instructions


cdef bint take_scratch(void **blocks, Py_ssize_t count) noexcept nogil:
    """Take blocks of SCRATCH_BYTES, aligned to 64 bytes."""
    global _free
    cdef Py_ssize_t taken = 0, i
    while kv_take(&_busy, 1):
        pass
    while taken < count and _free != NULL:
        blocks[taken] = _free
        _free = <kv_free *>_free.next
        taken += 1
    kv_drop(&_busy)
    for i in range(taken, count):
        blocks[i] = kv_take_lines(SCRATCH_BYTES)
        if blocks[i] == NULL:
            give_scratch(blocks, i)
            return False
    return True


cdef void give_scratch(void **blocks, Py_ssize_t count) noexcept nogil:
    """Give them back, wiped if they held what must not stay."""
    global _free
    cdef Py_ssize_t i
    while kv_take(&_busy, 1):
        pass
    for i in range(count - 1, -1, -1):
        (<kv_free *>blocks[i]).next = _free
        _free = <kv_free *>blocks[i]
    kv_drop(&_busy)


def _after_fork_in_child():
    # Another thread may have been at the list.
    global _free, _busy
    _free, _busy = NULL, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
