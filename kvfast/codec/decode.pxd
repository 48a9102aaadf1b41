from libc.stdint cimport int32_t, int64_t

from kvfast.codec.blocks cimport kv_layout


cdef void restore_floats(const kv_layout *layout, int32_t block, bint at_start, Py_ssize_t num_tokens) noexcept nogil
cdef object decode_tokens(const kv_layout *layout, const int64_t[::1] positions, const int64_t[::1] slots, Py_ssize_t floats_begin,
                          bint values)
