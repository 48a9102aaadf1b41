from kvfast.attention.plan cimport kv_plan, kv_prefix
from kvfast.attention.request cimport Request
from kvfast.attention.sight cimport kv_member
from kvfast.attention.workspace cimport Workspace
from kvfast.codec.blocks cimport kv_layout


cdef bint LOGS                 # whether calls log slow paths
cdef bint run(kv_plan *plan, bint is_watched) noexcept nogil
cdef int end_run(kv_plan *plan) except -1
cdef object answer(Request request, const kv_layout *layout, Workspace workspace, kv_member *members, Py_ssize_t count,
                   const kv_prefix *prefixes=*, Py_ssize_t num_prefixes=*, str storage=*)
