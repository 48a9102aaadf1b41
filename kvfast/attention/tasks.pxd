"""Fused attention over blocks, wherever they come from."""
from kvfast.attention.tiles cimport kv_call, kv_traffic


cdef void run(const kv_call *call, int threads) noexcept nogil
cdef void measure(kv_call *call, kv_traffic *traffic) noexcept nogil
