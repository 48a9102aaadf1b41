from libc.stdint cimport int32_t


cpdef object as_integer(object value, str name)
cpdef float check_number(object value, str name, bint positive) except? -1
cdef Py_ssize_t check_count(object value, str name, Py_ssize_t least, Py_ssize_t most=*) except -1
cpdef bint check_flag(object value, str name) except? -1
cpdef Py_ssize_t check_index(object value, Py_ssize_t count, str name) except -1
cdef Py_ssize_t check_layer(object index, Py_ssize_t num_layers) except -1
cdef object check_vector(object values, str name, Py_ssize_t count, str what=*)
cdef object check_integers(object values, str name, object dtype, int ndim)
cdef bint rises(const int32_t[::1] values) noexcept
