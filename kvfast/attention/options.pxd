"""The keyword arguments of every `attend`."""


cdef class Options:
    """The keyword arguments that every `attend` takes."""
    cdef object out, scale, softcap, sliding_window, sinks, alibi_slopes, num_splits, num_threads
    cdef readonly object spans, parents, chosen
    cdef Py_ssize_t num_sink_tokens
    cdef readonly Py_ssize_t attention_chunk_size, chosen_run
    cdef public Py_ssize_t made_for    # layer length that the queries were rotated for; the call fails if it changed. -1: any
    cdef public int precision          # a kv_precision
    cdef bint causal, return_lse
    cdef readonly bint clamp_spans

    cdef void read_as(self, int precision) noexcept
