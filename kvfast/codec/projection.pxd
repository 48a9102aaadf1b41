"""Normalises and rotates Q and K on their way into a cache."""
from kvfast.codec.encode cimport kv_rotary
from kvfast.core.arrays cimport Rows


cdef class Transform:
    cdef kv_rotary c
    cdef object arrays                 # arrays that c points into
    cdef Py_ssize_t made_for           # layer length at which the tokens must begin, or -1: any
    cdef Py_ssize_t needs              # number of tokens that the positions are for, or -1: any
    cdef Py_ssize_t table_rows

    cdef int fit(self, Py_ssize_t num_tokens, Py_ssize_t first) except -1


cdef class Projection:
    """The parts of a fused projection, as views."""
    cdef object array
    cdef Rows heads, q, k, v  # heads: of queries and keys, and of values that are as wide


cdef Projection open_projection(object qkv, object num_q_heads, Py_ssize_t num_kv_heads, Py_ssize_t head_dim,
                                Py_ssize_t v_head_dim)
cdef object write_queries(Projection parts, Transform transform, object out, object num_threads)
