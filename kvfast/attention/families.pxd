"""Which family of kernels attends: vectors, which every tier has for a few query rows, or panels of many rows."""
from kvfast.codec.blocks cimport kv_layout
from kvfast.core.kernels cimport kv_kernels

cdef enum:
    NO_PANELS = -1             # vectors take all rows, up to KV_ROWS at a time
    NO_PACKED_PANELS = -2      # the same, as a matrix unit takes no packed codes


cdef int panels_of(const kv_kernels *kernels, const kv_layout *layout) noexcept nogil
