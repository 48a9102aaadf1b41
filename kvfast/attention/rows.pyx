# cython: language_level=3, boundscheck=False, cdivision=True
"""The query rows of a task of attention: loaded, begun, and found where their weights need more than 16 bits."""
from libc.math cimport INFINITY
from libc.string cimport memset

from kvfast.attention.tiles cimport kv_task, num_panels
from kvfast.codec.blocks cimport KV_TO_QUERIES, change_key_basis, kv_store, values_of
from kvfast.core.arrays cimport kv_rows
from kvfast.core.kernels cimport KV_FLOAT32, KV_FLOAT_ROWS, kv_kernels, kv_panel, kv_side, kv_softmax
from kvfast.core.limits cimport KV_LANES, KV_MAX_HEAD_DIM, KV_ROWS


cdef void load(kv_task *task, const kv_rows *q) noexcept nogil:
    """Load the queries of the task's rows, in the basis of the keys."""
    cdef const kv_store *store = task.call.store
    cdef const kv_side *rope = &store.v if task.rope != NULL else NULL
    # Whether the words of all keys are codes; see simd/panels_vnni/codes.inc.h.
    cdef bint exact = store.floats == NULL and _is_exact(&store.k) and (rope == NULL or _is_exact(rope))
    cdef int i
    if task.call.traffic != NULL:
        return
    if task.wide == NULL:
        _load_rows(task, q, &store.k, 0, task.rows, task.scratch.rows)
        if rope != NULL:
            _load_rows(task, &task.call.request.rope_q, rope, 0, task.rows, task.rope.rows)
        return
    for i in range(num_panels(task)):
        _load_rows(task, q, &store.k, i * KV_ROWS, KV_ROWS, task.wide.rows)
        if rope != NULL:
            _load_rows(task, &task.call.request.rope_q, rope, i * KV_ROWS, KV_ROWS, task.wide.rope_rows)
        task.call.kernels.prepare_panel[task.call.wide_kind](&store.k, task.wide.rows, rope, task.wide.rope_rows,
                                                             task.call.request.scale, exact, task.wide.panels + i)


cdef bint _is_exact(const kv_side *k) noexcept nogil:
    return k.family != KV_FLOAT_ROWS and k.channels == 0


cdef void _load_rows(const kv_task *task, const kv_rows *q, const kv_side *k, int first, int count,
                     float *rows) noexcept nogil:
    """Load `count` rows as floats; rows beyond those of the task are 0."""
    cdef const kv_kernels *kernels = task.call.kernels
    cdef int r, given = min(count, task.rows - first)
    cdef Py_ssize_t token
    cdef float *row = rows
    for r in range(first, first + given):
        token = task.call.queries[task.tokens[r]].token
        kernels.to_float[q.dtype](q.data + token * q.token_stride + task.q_heads[r] * q.head_stride, k.head_dim, row)
        if task.item.rotation.cos != NULL:
            kernels.transform(row, k.head_dim, 1, k.head_dim, &task.item.rotation, row, k.head_dim)
        memset(row + k.head_dim, 0, (k.padded_dim - k.head_dim) * sizeof(float))
        row += k.padded_dim
    if k == &task.call.store.k:
        change_key_basis(kernels, task.call.store, task.head, KV_TO_QUERIES, rows, k.padded_dim, given, rows, k.padded_dim)
    elif k.rotated:
        kernels.rotate(rows, k.padded_dim, given, k.head_dim, rows, k.padded_dim)
    memset(row, 0, (count - given) * k.padded_dim * sizeof(float))


cdef void begin_rows(kv_task *task, unsigned refined) noexcept nogil:
    """Reset the state of all rows: they have seen no token yet. `refined` marks those of few rows whose weights need more bits."""
    cdef kv_softmax *state = &task.scratch.softmax
    cdef Py_ssize_t padded = values_of(task.call.store).padded_dim
    cdef kv_panel *panel
    cdef int r, i
    state.refined = refined
    if task.wide == NULL:
        memset(task.scratch.acc, 0, task.rows * padded * sizeof(float))
        state.rest = task.rest if values_of(task.call.store).dtype == KV_FLOAT32 else NULL
        if state.rest != NULL:
            memset(task.rest, 0, task.rows * padded * sizeof(float))
            memset(task.rest + KV_ROWS * KV_MAX_HEAD_DIM, 0, task.rows * padded * sizeof(float))
        for r in range(task.rows):
            state.m[r], state.l[r], state.rescale[r], state.noise[r] = -INFINITY, 0.0, 1.0, 0.0
    for i in range(num_panels(task)):
        panel = task.wide.panels + i
        panel.rows = min(<int>KV_ROWS, task.rows - i * KV_ROWS)
        panel.options = task.options
        panel.options.query_at += i * KV_ROWS
        if task.options.slopes != NULL:
            panel.options.slopes += i * KV_ROWS
        memset(panel.acc, 0, KV_ROWS * padded * sizeof(float))
        for r in range(KV_ROWS):
            panel.m[r], panel.l[r], panel.noise[r] = -INFINITY, 0.0, 0.0


cdef unsigned rows_to_refine(const kv_task *task, const kv_panel *panel) noexcept nogil:
    """Find the rows of a panel, or of a task without panels, whose rounding of weights is large next to their sums: a bit for each."""
    cdef const kv_kernels *kernels = task.call.kernels
    cdef Py_ssize_t padded = values_of(task.call.store).padded_dim
    if panel != NULL:
        return kernels.rows_to_refine(panel.acc, KV_LANES, KV_ROWS * KV_LANES, padded, panel.noise, panel.rows)
    return kernels.rows_to_refine(task.scratch.acc, padded, KV_LANES, padded, task.scratch.softmax.noise, task.rows)
