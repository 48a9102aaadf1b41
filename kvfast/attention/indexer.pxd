"""The positions that an indexer finds best."""
from kvfast.codec.blocks cimport kv_context, kv_layout


cdef object best_positions(const kv_layout *layout, const kv_context *context, object q, object weights, object k, object num_threads)
