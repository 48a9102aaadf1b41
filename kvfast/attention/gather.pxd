from kvfast.attention.tasks cimport kv_task

cdef void read_chosen(kv_task *task) noexcept nogil
