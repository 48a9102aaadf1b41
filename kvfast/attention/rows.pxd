"""The query rows of a task of attention."""
from kvfast.attention.tiles cimport kv_task
from kvfast.core.arrays cimport kv_rows


cdef void load(kv_task *task, const kv_rows *q) noexcept nogil
cdef void begin_rows(kv_task *task) noexcept nogil
cdef bint begin_refined(kv_task *task) noexcept nogil
