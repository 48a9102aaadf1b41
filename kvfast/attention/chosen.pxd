from libc.stdint cimport int64_t

from kvfast.attention.refusals cimport kv_refusal
from kvfast.attention.tasks cimport kv_call, kv_chosen
from kvfast.attention.workspace cimport kv_workspace


cdef bint open_chosen(kv_chosen *chosen, const kv_call *call, kv_workspace *workspace, kv_refusal *refusal) noexcept nogil
cdef bint split_chosen(const kv_chosen *chosen, Py_ssize_t query, Py_ssize_t row, Py_ssize_t end, Py_ssize_t base) noexcept nogil
cdef Py_ssize_t most_chosen(const kv_chosen *chosen, Py_ssize_t query) noexcept nogil
