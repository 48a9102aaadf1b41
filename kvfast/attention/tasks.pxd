"""Fused attention over blocks, wherever they come from."""
from kvfast.attention.tiles cimport kv_call, kv_traffic
from kvfast.core.threads cimport kv_team


cdef bint run_tasks(kv_call *call, kv_team *team) noexcept nogil                 # False: out of memory, and nothing has run
cdef bint measure_tasks(kv_call *call, kv_traffic *traffic) noexcept nogil
