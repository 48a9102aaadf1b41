# cython: language_level=3, boundscheck=False, cdivision=True
"""Memory that calls of attention work in."""
from libc.string cimport memset

from kvfast.core.flags cimport kv_drop, kv_take
from kvfast.core.system cimport kv_free_lines, kv_take_lines
from kvfast.core.wipe cimport kv_wipe


cdef class Workspace:
    def __dealloc__(self):
        _release_all(&self.c)

    cdef void wipe(self) noexcept nogil:
        """Overwrite what calls have left, if there were any since the last time. No call may be using it."""
        cdef int i
        for i in range(NUM_WORKSPACES if self.c.used else 0):
            if self.c.data[i] != NULL:
                kv_wipe(self.c.data[i], self.c.sizes[i])
        self.c.used = False


cdef kv_workspace *lend(kv_workspace *workspace, kv_workspace *other) noexcept nogil:
    """`workspace`, or an empty `other` while a call of another thread has it. `give_back` ends the loan."""
    if kv_take(&workspace.lent, 1) == 0:
        workspace.used = True
        return workspace
    memset(other, 0, sizeof(kv_workspace))
    other.secure = workspace.secure
    return other


cdef void give_back(kv_workspace *workspace, kv_workspace *other) noexcept nogil:
    """End the loan of `workspace`, which is `other` where `lend` has made that."""
    if workspace == other:
        _release_all(other)
    else:
        kv_drop(&workspace.lent)


cdef void release(kv_workspace *workspace, int which) noexcept nogil:
    if workspace.secure and workspace.data[which] != NULL:
        kv_wipe(workspace.data[which], workspace.sizes[which])
    kv_free_lines(workspace.data[which])
    workspace.data[which], workspace.sizes[which] = NULL, 0


cdef void _release_all(kv_workspace *workspace) noexcept nogil:
    cdef int i
    for i in range(NUM_WORKSPACES):
        release(workspace, i)


cdef void *reserve(kv_workspace *workspace, int which, Py_ssize_t nbytes) noexcept nogil:
    if nbytes < 0:  # more than can be counted
        return NULL
    if nbytes > workspace.sizes[which] or workspace.data[which] == NULL:
        release(workspace, which)
        workspace.data[which] = kv_take_lines(nbytes)
        if workspace.data[which] != NULL:
            workspace.sizes[which] = nbytes
    return workspace.data[which]
