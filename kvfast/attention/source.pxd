"""What a task reads of an item: from codes, and from float rows."""
from kvfast.attention.tasks cimport kv_task
from kvfast.codec.blocks cimport kv_context, kv_layout

cdef Py_ssize_t floats_from(const kv_layout *layout, const kv_context *context, Py_ssize_t position) noexcept nogil
cdef void open_rows(kv_task *task) noexcept nogil
cdef void read(kv_task *task) noexcept nogil
