"""The storage of one layer, accessed head by head."""
from kvfast.codec.blocks cimport kv_chunk, kv_store
from kvfast.storage.tables.ring_table cimport RingTable


cdef class HeadsTable(RingTable):
    cdef int evict(self, Py_ssize_t window) except -1
    cdef Py_ssize_t num_held(self) noexcept nogil


# A store with some of the KV heads of another store.
cdef class Heads:
    cdef kv_store store
    cdef kv_chunk *chunks
