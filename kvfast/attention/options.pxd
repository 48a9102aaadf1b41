"""The options of a call, declared once: `kvfast.h` has and documents them, and a `kv_request` begins with them. `AttendOptions` names
the same ones for Python."""
from libc.stdint cimport int64_t


cdef extern from "kvfast.h" nogil:
    enum:
        KVFAST_EXACT
        KVFAST_FAST
        KVFAST_INVARIANT

    ctypedef struct kvfast_options:
        float scale
        float softcap
        Py_ssize_t sliding_window
        Py_ssize_t num_sink_tokens
        const float *sinks
        const float *alibi_slopes
        float *lse
        int not_causal
        int num_splits
        int num_threads
        Py_ssize_t attention_chunk_size
        const Py_ssize_t *spans
        Py_ssize_t num_spans
        int clamp_spans
        const Py_ssize_t *tree_parents
        Py_ssize_t num_parents
        const int64_t *indices
        Py_ssize_t num_indices
        int index_heads
        int index_block
        int precision
