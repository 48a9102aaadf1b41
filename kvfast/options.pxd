"""Arguments that are numbers, and the keyword arguments of every `attend`."""


cdef class Options:
    """The keyword arguments that every `attend` takes."""
    cdef object out, scale, softcap, sliding_window, sinks, alibi_slopes, num_splits, num_threads
    cdef Py_ssize_t num_sink_tokens
    cdef readonly Py_ssize_t attention_chunk_size
    cdef public Py_ssize_t made_for    # tokens that the layer must hold, as the queries were rotated by it; -1: any
    cdef bint causal, return_lse


cdef float check_number(object value, str name, bint positive) except? -1
cdef Py_ssize_t check_count(object value, str name, Py_ssize_t least, Py_ssize_t most) except -1
cdef Py_ssize_t check_layer(object index, Py_ssize_t num_layers) except -1
cdef object check_per_head(object values, str name, Py_ssize_t num_q_heads)
