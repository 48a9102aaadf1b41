"""The storage of one layer, accessed head by head."""
from kvfast.codec.blocks cimport kv_chunk, kv_store


# A store with some of the KV heads of another store.
cdef class Heads:
    cdef kv_store store
    cdef kv_chunk *chunks
