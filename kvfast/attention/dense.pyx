# cython: language_level=3, boundscheck=False, cdivision=True
"""Attention on arrays without a cache, and merging of results."""
import numpy as np

from libc.stdint cimport intptr_t
from libc.string cimport memset

from kvfast.attention.request cimport Request, open_request
from kvfast.attention.run cimport answer
from kvfast.attention.sight cimport kv_member
from kvfast.attention.workspace cimport Workspace
from kvfast.codec.blocks cimport init_rows, kv_layout, kv_slab
from kvfast.core.arrays cimport Rows, check_apart, check_finite, kv_rows, open_rows, width_of
from kvfast.core.limits cimport KV_LANES, KV_MAX_FLOAT32, KV_TILE

from kvfast.errors import DimensionMismatchError, NonFiniteInputError
from kvfast.core.interchange import aligned, as_array, as_float32

cdef Py_ssize_t _MOST_STEP = 1 << 20  # bytes between tokens: prefetching, which covers the gaps, does not pay beyond


cdef bint _is_like_a_block(const kv_rows *rows) noexcept nogil:
    """Whether the kernels can read the rows where they lie: each after the one before, as in a block."""
    return rows.dim % KV_LANES == 0 and width_of(rows) <= rows.token_stride <= _MOST_STEP


cdef object _padded(object array):
    """A copy with head_dim padded to a multiple of what the kernels read at once."""
    array = as_array(array)
    padded = np.zeros(array.shape[:2] + (array.shape[2] + -array.shape[2] % KV_LANES,), array.dtype)
    padded[:, :, :array.shape[2]] = array
    return padded


def attention(q, k, v, **options):
    """Fused attention on arrays, without a cache.

    Parameters
    ----------
    q : array of shape (num_tokens, num_q_heads, head_dim), float32, float16 or bfloat16
        Queries of the last `num_tokens` tokens of the context: at most one for each of its tokens, unless ``causal=False``.
    k : array of shape (context, num_kv_heads, head_dim), float32, float16 or bfloat16
    v : array of shape (context, num_kv_heads, v_head_dim), float32, float16 or bfloat16
        Keys and values. They are read in place if their width is a multiple of 16 and the tokens lie one after the other, at
        most 1 MiB apart; otherwise they are copied first.
    **options
        As in `kvfast.KVCache.attend`.

    Returns
    -------
    ndarray of shape (num_tokens, num_q_heads, v_head_dim), float32
        And with `return_lse` the log-sum-exp, float32 of shape (num_tokens, num_q_heads).

    Raises
    ------
    ValueError
        For more queries than `k` has tokens, unless ``causal=False``; and as `kvfast.KVCache.attend`.
    """
    cdef Rows keys = open_rows(k, "k"), values = open_rows(v, "v")
    cdef kv_layout layout
    cdef kv_member member
    cdef Request request
    cdef kv_slab slab
    cdef Rows given_keys = keys, given_values = values
    cdef Py_ssize_t head_dim = keys.rows.dim, v_head_dim = values.rows.dim
    if keys.rows.tokens != values.rows.tokens or keys.rows.heads != values.rows.heads:
        raise DimensionMismatchError(
            f"k and v must have the same shape except for head_dim, got ({keys.rows.tokens}, {keys.rows.heads}, {keys.rows.dim}) and "
            f"({values.rows.tokens}, {values.rows.heads}, {values.rows.dim})")
    check_finite(keys, "k", KV_MAX_FLOAT32, "float32")
    check_finite(values, "v", KV_MAX_FLOAT32, "float32")
    if not _is_like_a_block(&keys.rows):
        keys = open_rows(_padded(k), "k")
    if not _is_like_a_block(&values.rows):
        values = open_rows(_padded(v), "v")
    memset(&member, 0, sizeof(member))
    init_rows(&layout, &slab, keys.rows.heads, keys.rows.dtype, head_dim, values.rows.dtype, v_head_dim)
    layout.k.row_stride, layout.v.row_stride = keys.rows.token_stride, values.rows.token_stride
    slab.k_block_stride, slab.v_block_stride = KV_TILE * layout.k.row_stride, KV_TILE * layout.v.row_stride
    slab.v = <intptr_t>values.rows.data - <intptr_t>keys.rows.data
    slab.k_head_stride, slab.v_head_stride = keys.rows.head_stride, values.rows.head_stride
    layout.base = keys.rows.data
    request = open_request(&layout, q, options, "k and v")
    check_apart(&request.c.out, &given_keys.rows, "k")
    check_apart(&request.c.out, &given_values.rows, "v")
    member.context.length = member.length = keys.rows.tokens
    member.num_queries, member.is_foreign = request.c.q.tokens, request.c.options.not_causal
    return answer(request, &layout, Workspace(), &member, 1)


def merge_states(out_a, lse_a, out_b, lse_b):
    """Join attention over two disjoint sets of keys (FlashInfer's recursive attention, arXiv 2501.01005).

    Parameters
    ----------
    out_a, out_b : arrays of shape (num_tokens, num_q_heads, head_dim), float32, float16 or bfloat16
        Outputs of `attend` or `attention` over each set.
    lse_a, lse_b : arrays of shape (num_tokens, num_q_heads)
        Their log-sum-exps; -inf for a set that holds no key.

    Returns
    -------
    out : ndarray of shape (num_tokens, num_q_heads, head_dim), float32
    lse : ndarray of shape (num_tokens, num_q_heads), float32

    Raises
    ------
    NonFiniteInputError
        For NaN or infinity, with its position; -inf is a log-sum-exp.
    """
    # Contiguous copies, as NumPy rounds differently otherwise.
    out_a, lse_a, out_b, lse_b = [aligned(as_float32(one, name)) for name, one in (
        ("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b))]
    if out_a.ndim != 3 or out_a.shape != out_b.shape:
        raise DimensionMismatchError("out_a and out_b must have the same shape (num_tokens, num_q_heads, head_dim), "
                                     f"got {out_a.shape} and {out_b.shape}")
    if lse_a.shape != out_a.shape[:2] or lse_b.shape != out_a.shape[:2]:
        raise DimensionMismatchError(f"lse_a and lse_b must have shape {out_a.shape[:2]}, "
                                     f"got {lse_a.shape} and {lse_b.shape}")
    for name, one, bad in (("out_a", out_a, ~np.isfinite(out_a)), ("lse_a", lse_a, ~(lse_a < np.inf)),
                           ("out_b", out_b, ~np.isfinite(out_b)), ("lse_b", lse_b, ~(lse_b < np.inf))):
        if bad.any():
            at = np.argwhere(bad)[0].tolist()
            raise NonFiniteInputError(f"{name} must be finite{', or -inf' if one.ndim == 2 else ''}, got {one[tuple(at)]} at {at}")
    top = np.maximum(lse_a, lse_b)
    base = np.where(np.isneginf(top), np.float32(0), top)
    with np.errstate(over="ignore"):  # a difference beyond float32 is a weight of 0
        weight_a, weight_b = np.exp(lse_a - base), np.exp(lse_b - base)
    total = weight_a + weight_b
    safe = np.where(total > 0, total, np.float32(1))
    out = out_a * (weight_a / safe)[..., None] + out_b * (weight_b / safe)[..., None]
    with np.errstate(divide="ignore"):
        return out, base + np.log(total)
