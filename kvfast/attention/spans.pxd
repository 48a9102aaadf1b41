"""What a task reads from codes, and what from float rows."""
from kvfast.attention.tiles cimport kv_range, kv_task
from kvfast.codec.blocks cimport kv_context, kv_store

cdef Py_ssize_t floats_from(const kv_store *store, const kv_context *context, Py_ssize_t position) noexcept nogil
cdef void attend_span(kv_task *task, Py_ssize_t begin, Py_ssize_t end, const Py_ssize_t *starts, const Py_ssize_t *stops,
                      const kv_range *following) noexcept nogil
