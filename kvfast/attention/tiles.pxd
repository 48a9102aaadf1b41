"""How one task of attention loads its query rows, and reads keys and values."""
from kvfast.attention.tasks cimport kv_task
from kvfast.codec.blocks cimport kv_layout
from kvfast.core.arrays cimport kv_rows


# Positions begin to end of a sequence, which are read from one layout tile by tile.
ctypedef struct kv_range:
    const kv_layout *layout
    int tile
    Py_ssize_t begin, end


cdef void load(kv_task *task, const kv_rows *q) noexcept nogil
cdef void begin_at_first(kv_task *task) noexcept nogil
cdef int step_of(const kv_task *task) noexcept nogil
cdef void touch(const kv_task *task, Py_ssize_t position, Py_ssize_t tokens) noexcept nogil
cdef void touch_first_floats(const kv_task *task) noexcept nogil
cdef void touch_sinks(const kv_task *task, Py_ssize_t tokens) noexcept nogil
cdef void attend_range(kv_task *task, const kv_range *range_, const Py_ssize_t *starts, const Py_ssize_t *stops,
                       const kv_range *following) noexcept nogil
cdef void add_scores(kv_task *task, Py_ssize_t begin, Py_ssize_t end, const float *weights, float *sums) noexcept nogil
