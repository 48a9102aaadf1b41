"""Rows and options of C, as those of attention and storage."""
from libc.stdint cimport int64_t

from kvfast.attention.options cimport Options
from kvfast.attention.request cimport kv_request
from kvfast.core.arrays cimport Rows, kv_rows
from kvfast.handles.header cimport kvfast_options, kvfast_rows


cdef Py_ssize_t itemsize_of(int dtype) noexcept nogil
cdef bint convert(const kvfast_rows *given, kv_rows *rows) noexcept nogil
cdef bint convert_output(const kvfast_rows *given, kv_rows *rows) noexcept nogil
cdef object unfit(const kvfast_rows *given, str name)
cdef bint request_of(const kvfast_options *options, const kv_rows *q, const kv_rows *rope_q, const kv_rows *out, int precision,
                     kv_request *request) noexcept nogil
cdef Options options_of(const kvfast_options *options, Rows out, Rows q, Rows rope_q, list spans, list parents)
cdef object ids_of(const int64_t *token_ids, Py_ssize_t n)
cdef list integers(const Py_ssize_t *given, Py_ssize_t count, int width, str name)
cdef list divided(list given, const Py_ssize_t *counts, Py_ssize_t num_sequences, str name)
cdef int code_of(object error, char *text, Py_ssize_t room) noexcept
