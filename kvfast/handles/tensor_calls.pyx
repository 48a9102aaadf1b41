# cython: language_level=3, boundscheck=False, cdivision=True
"""Calls of a pool with rows, tables and slots in tensors of other libraries, as operators make them: many small ones."""
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from kvfast.core.arrays cimport Rows, open_output, open_rows
from kvfast.core.dlpack cimport DLTensor, read_tensor
from kvfast.handles.header cimport KVFAST_OK, kvfast_batch, kvfast_options, kvfast_rows
from kvfast.handles.pool_handle cimport PoolHandle

cdef enum:
    INTEGERS = 0           # codes of types in DLPack
    FLOATS = 2
    QUICK_SEQUENCES = 128  # the most whose starts lie on the stack


cdef class TensorCalls:
    """A pool of one layer whose blocks its caller gives out.

    What takes no memory and is right runs without the interpreter, as for `kvfast.h`. The pool's own methods do the rest, errors
    included.
    """
    cdef readonly object pool
    cdef PoolHandle handle

    def __init__(self, pool):
        self.pool, self.handle = pool, PoolHandle(pool)

    def append(self, k, v, slots):
        """As `append_batch`. `slots`: a tensor of int64."""
        cdef Rows keys = open_rows(k, "k"), values = open_rows(v, "v")
        cdef kvfast_rows of_keys = _given(keys), of_values = _given(values)
        cdef kvfast_batch batch
        cdef Py_ssize_t shape[2]
        cdef bint done = False
        memset(&batch, 0, sizeof(batch))
        batch.slots = <const int64_t *>_memory(slots, INTEGERS, 64, 1, shape)
        if batch.slots != NULL and shape[0] == keys.rows.tokens:
            with nogil:
                done = self.handle.append(0, &batch, &of_keys, &of_values) == KVFAST_OK
        if not done:
            self.pool.append_batch(0, keys, values, slots)

    def attend(self, q, block_table, seq_lens, cu_seqlens_q, out, scale, float softcap, Py_ssize_t sliding_window, sinks, bint causal):
        """As `attend_batch` with `out`. Tables, lengths and starts: tensors of int32; 0 for no cap and no window."""
        cdef Rows queries = open_rows(q, "q"), target = open_output(out, "out")
        cdef kvfast_rows of_queries = _given(queries), of_target = _given(target)
        cdef kvfast_options options
        cdef kvfast_batch batch
        cdef Py_ssize_t starts[QUICK_SEQUENCES + 1]
        cdef Py_ssize_t shape[2]
        cdef Py_ssize_t count, i
        cdef const int32_t *given = NULL
        cdef bint fits, done = False
        memset(&batch, 0, sizeof(batch))
        memset(&options, 0, sizeof(options))
        batch.block_table = <const int32_t *>_memory(block_table, INTEGERS, 32, 2, shape)
        batch.num_sequences, batch.max_blocks = shape[0], shape[1]
        batch.seq_lens = <const int32_t *>_memory(seq_lens, INTEGERS, 32, 1, shape)
        fits = batch.block_table != NULL and batch.seq_lens != NULL and shape[0] == batch.num_sequences
        if fits and cu_seqlens_q is not None:
            given, count = <const int32_t *>_memory(cu_seqlens_q, INTEGERS, 32, 1, shape), batch.num_sequences + 1
            fits = given != NULL and shape[0] == count and count <= QUICK_SEQUENCES + 1
            for i in range(count if fits else 0):
                starts[i] = given[i]
            batch.starts = starts
        if fits and sinks is not None:
            options.sinks = <const float *>_memory(sinks, FLOATS, 32, 1, shape)
            fits = options.sinks != NULL and shape[0] == queries.rows.heads
        if fits:
            options.scale, options.softcap = 0 if scale is None else scale, softcap
            options.sliding_window, options.not_causal = sliding_window, not causal
            # A scale of 0 asks for the default there, and a negative cap or window is an error.
            fits = (scale is None or options.scale != 0) and softcap >= 0 and sliding_window >= 0
        if fits:
            with nogil:
                done = self.handle.attend(0, &batch, &of_queries, &options, &of_target) == KVFAST_OK
        if not done:
            self.pool.attend_batch(
                0, queries, block_table=block_table, seq_lens=seq_lens, out=target, scale=scale, causal=causal,
                cu_seqlens_q=cu_seqlens_q, softcap=softcap or None,
                sliding_window=sliding_window or None, sinks=sinks)


cdef kvfast_rows _given(Rows rows) noexcept:
    """Rows as a caller in C has them."""
    return kvfast_rows(data=rows.rows.data, num_tokens=rows.rows.tokens, num_heads=rows.rows.heads, dim=rows.rows.dim,
                       token_stride=rows.rows.token_stride, head_stride=rows.rows.head_stride, dtype=rows.rows.dtype)


cdef const void *_memory(object tensor, int code, int bits, int ndim, Py_ssize_t *shape) except? NULL:
    """Where a C-contiguous tensor of such elements lies, and its shape; NULL for any other."""
    cdef DLTensor given
    cdef Py_ssize_t i, step = 1
    if not read_tensor(tensor, &given, False) or given.code != code or given.bits != bits or given.lanes != 1 or given.ndim != ndim:
        return NULL
    for i in range(ndim - 1, -1, -1):
        if given.strides != NULL and given.strides[i] != step and given.shape[i] != 1:
            return NULL
        shape[i] = given.shape[i]
        step *= given.shape[i]
    return <const char *>given.data + given.byte_offset
