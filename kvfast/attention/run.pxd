"""The third step of attention: the tasks of a plan are run, or counted."""
from kvfast.attention.plan cimport Plan
from kvfast.attention.request cimport Request


cdef bint LOGS                 # whether calls log slow paths
cdef object run_plan(Request request, Plan plan)
cdef object explain_plan(Request request, Plan plan, str storage)
