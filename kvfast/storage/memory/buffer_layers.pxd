from libc.stdint cimport int64_t

from kvfast.codec.blocks cimport kv_layout


cdef void clean_slots(const kv_layout *layout, const int64_t *slots, Py_ssize_t n) noexcept nogil
