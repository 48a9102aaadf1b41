"""The storage dtypes by number, from the table in ``simd/dtypes.h``."""
from kvfast.core.kernels cimport kv_dtypes


cdef inline float dtype_limit(int dtype) noexcept nogil:
    """Largest magnitude that rounds to a finite value of the dtype."""
    return kv_dtypes[dtype].limit


cdef int parse_dtype(object dtype, str codebook=*) except -1
cdef str dtype_name(int dtype)
cdef str codes_name(int dtype)
