from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t


ctypedef struct DLTensor:
    void *data
    int32_t device_type
    int32_t device_id
    int32_t ndim
    uint8_t code
    uint8_t bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides           # elements; NULL: C-contiguous
    uint64_t byte_offset


cdef bint read_tensor(object array, DLTensor *tensor, bint writable) except -1
