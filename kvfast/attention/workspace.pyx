# cython: language_level=3, boundscheck=False, cdivision=True
"""Memory that calls of attention work in."""
from kvfast.core.flags cimport kv_take
from kvfast.core.system cimport kv_free_lines, kv_take_lines
from kvfast.core.wipe cimport kv_wipe


cdef class Workspace:
    def __dealloc__(self):
        cdef int i
        for i in range(NUM_WORKSPACES):
            self.release(i)

    cdef void release(self, int which) noexcept nogil:
        if self.secure:
            kv_wipe(self.data[which], self.sizes[which])
        kv_free_lines(self.data[which])

    cdef Workspace lend(self):
        """This workspace, until its `lent` is dropped; a new one while a call of another thread has this one."""
        cdef Workspace other
        if kv_take(&self.lent, 1) == 0:
            self.used = True
            return self
        other = Workspace()
        other.secure = self.secure
        return other

    cdef void wipe(self) noexcept nogil:
        """Overwrite what calls have left, if there were any since the last time. No call may be using it."""
        cdef int i
        for i in range(NUM_WORKSPACES if self.used else 0):
            if self.data[i] != NULL:
                kv_wipe(self.data[i], self.sizes[i])
        self.used = False

    cdef void *reserve(self, int which, Py_ssize_t nbytes) noexcept nogil:
        if nbytes > self.sizes[which] or self.data[which] == NULL:
            self.release(which)
            self.sizes[which] = 0
            self.data[which] = kv_take_lines(nbytes)
            if self.data[which] != NULL:
                self.sizes[which] = nbytes
        return self.data[which]
