"""The storage of one layer, accessed head by head."""
from kvfast.codec.blocks cimport kv_slab, kv_layout


# A layout with some of the KV heads of another layout.
cdef class Heads:
    cdef kv_layout layout
    cdef kv_slab *slabs
