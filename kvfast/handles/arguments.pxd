"""Rows of C, as those of attention and storage; and errors of Python, as codes of C."""
from libc.stdint cimport int64_t

from kvfast.core.arrays cimport kv_rows
from kvfast.handles.header cimport kvfast_rows


cdef bint convert(const kvfast_rows *given, kv_rows *rows) noexcept nogil
cdef object unfit(const kvfast_rows *given, str name)
cdef object ids_of(const int64_t *token_ids, Py_ssize_t n)
cdef int code_of(object error, char *text, Py_ssize_t room) noexcept
