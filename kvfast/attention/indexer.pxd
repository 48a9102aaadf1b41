"""The positions that an indexer finds best."""
from libc.stdint cimport int32_t

from kvfast.codec.blocks cimport kv_context, kv_layout
from kvfast.core.arrays cimport Rows


cdef object best_positions(const kv_layout *layout, const kv_context *contexts, const int32_t[::1] starts, Rows rows, object weights,
                           object k, object num_threads)
