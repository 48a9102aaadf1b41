"""The query rows of a task of attention."""
from kvfast.attention.tiles cimport kv_task
from kvfast.core.arrays cimport kv_rows
from kvfast.core.kernels cimport kv_panel


cdef void load(kv_task *task, const kv_rows *q) noexcept nogil
cdef void begin_rows(kv_task *task, unsigned refined) noexcept nogil
cdef unsigned rows_to_refine(const kv_task *task, const kv_panel *panel) noexcept nogil
