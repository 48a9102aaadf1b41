"""The floats in blocks that come from outside the process."""
from kvfast.core.kernels cimport kv_side


cdef bint are_storable(const kv_side *side, const char *blocks, Py_ssize_t count) noexcept nogil


cdef class StoredFloats:
    cdef const kv_side *side
    cdef object owner  # of the side
