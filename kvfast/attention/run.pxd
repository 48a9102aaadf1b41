"""The third step of attention: the tasks of a plan are run, or counted."""
from kvfast.attention.plan cimport Plan
from kvfast.attention.request cimport Request
from kvfast.attention.tasks cimport kv_call
from kvfast.core.threads cimport kv_team


cdef bint LOGS                 # whether calls log slow paths
cdef object run_plan(Request request, Plan plan)
cdef object explain_plan(Request request, Plan plan, str storage)
cdef bint run_tasks(kv_call *call, kv_team *team) noexcept nogil                 # False: out of memory, and nothing has run
