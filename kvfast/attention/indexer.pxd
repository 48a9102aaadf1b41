from kvfast.attention.sight cimport kv_member
from kvfast.codec.blocks cimport kv_layout
from kvfast.core.arrays cimport Rows


cdef object best_positions(const kv_layout *layout, const kv_member *members, Py_ssize_t count, Rows rows, object weights, object k,
                           object num_threads)
