# cython: language_level=3, boundscheck=False, cdivision=True
"""Splits a fused QKV projection; applies RMS norm per head and rotary position embedding (arXiv 2104.09864)."""
import numpy as np

from libc.stdint cimport int64_t
from libc.string cimport memset

from kvfast.codec.dtypes cimport dtype_limit, dtype_name
from kvfast.codec.encode cimport kv_rotary, load_rows
from kvfast.core.arrays cimport Rows, check_finite, kv_rows, open_rows
from kvfast.core.checks cimport check_count, check_flag, check_integers, check_number, check_vector
from kvfast.core.interrupt cimport kv_watch
from kvfast.core.kernels cimport KV_FLOAT32, active, kv_kernels
from kvfast.core.limits cimport KV_MAX_FLOAT32, KV_MAX_HEAD_DIM, KV_MAX_KV_HEADS, KV_MAX_Q_HEADS
from kvfast.core.threads cimport STATIC, for_each, gather, kv_team

from kvfast.core.text import shown
from kvfast.errors import DimensionMismatchError, NonFiniteInputError
from kvfast.core.interchange import as_array, as_numbers


cdef class Transform:
    """RMS norm by `norm`, then rotation by `cos` and `sin`; each may be None. `rotation` is another Transform whose checked
    rotation is used again."""

    def __init__(self, Py_ssize_t head_dim, norm=None, eps=1e-6, cos=None, sin=None, positions=None,
                 interleaved=False, str name="norm", Transform rotation=None, Py_ssize_t made_for=-1):
        """`made_for`: the layer length at which the tokens must begin, as the rotation was made for it; -1: any."""
        cdef const float[::1] norm_view
        cdef const float[:, ::1] cos_view, sin_view
        cdef const int64_t[::1] positions_view
        memset(&self.c, 0, sizeof(self.c))
        self.needs, self.made_for = -1, made_for
        self.c.row.interleaved = check_flag(interleaved, "interleaved")
        cdef float epsilon = check_number(eps, "eps", False)
        if epsilon < 0:
            raise ValueError(f"eps must be at least 0, got {shown(eps)}")
        if rotation is not None:
            self.c, self.needs, self.table_rows = rotation.c, rotation.needs, rotation.table_rows
            self.c.row.norm = NULL
        if norm is not None:
            norm = norm_view = check_vector(norm, name, head_dim)
            self.c.row.norm, self.c.row.eps = &norm_view[0], epsilon
        if (cos is None) != (sin is None):
            raise ValueError("cos and sin must be given together, got only one of them")
        if positions is not None and cos is None:
            raise ValueError("positions need cos and sin, whose rows they choose, got neither")
        if cos is not None:
            cos, sin = as_numbers(cos, "cos"), as_numbers(sin, "sin")
            if cos.ndim != 2 or cos.shape != sin.shape:
                raise DimensionMismatchError(f"cos and sin must have the same shape (positions, rotary_dim // 2), got "
                                             f"{cos.shape} and {sin.shape}")
            if not 1 <= cos.shape[1] <= head_dim // 2:
                raise DimensionMismatchError(f"cos and sin must rotate 1 to {head_dim // 2} pairs of the head_dim "
                                             f"{head_dim}, got shape {cos.shape}")
            cos_view, sin_view = cos, sin
            self.table_rows = cos.shape[0]
            self.c.row.pairs = cos.shape[1]
            if self.table_rows:
                self.c.row.cos, self.c.row.sin = &cos_view[0, 0], &sin_view[0, 0]
            else:
                raise DimensionMismatchError(f"cos and sin must hold at least one position, got shape {cos.shape}")
        if positions is not None:
            positions = check_integers(positions, "positions", np.int64, 1)
            self.needs = positions.shape[0]
            if self.needs:
                if positions.min() < 0 or positions.max() >= self.table_rows:
                    raise ValueError(f"positions must lie between 0 and {self.table_rows - 1}, the rows of cos and "
                                     f"sin, got {positions.min()} to {positions.max()}")
                positions_view = positions
                self.c.positions = &positions_view[0]
        self.arrays = norm, cos, sin, positions, rotation

    cdef int fit(self, Py_ssize_t num_tokens, Py_ssize_t first) except -1:
        """Check the tables for `num_tokens` tokens. Without positions the tokens use the rows from `first` on."""
        if self.made_for >= 0 and self.made_for != first:
            raise RuntimeError(f"another thread has changed the layer: it held {self.made_for} tokens, and holds {first} now")
        if self.needs >= 0 and self.needs != num_tokens:
            raise DimensionMismatchError(f"positions must have shape ({num_tokens},), one per token, got "
                                         f"({self.needs},)")
        if self.c.row.cos != NULL and self.needs < 0 and first + num_tokens > self.table_rows:
            raise DimensionMismatchError(f"cos and sin must hold the positions {first} to {first + num_tokens - 1}, "
                                         f"got {self.table_rows} rows")
        self.c.first = first
        return 0


cdef Rows _part(Rows whole, Py_ssize_t first, Py_ssize_t count):
    cdef Rows part = Rows.__new__(Rows)
    part.rows = whole.rows
    part.rows.data += first * whole.rows.head_stride
    part.rows.heads = count
    return part


cdef str _shape_of(object num_q_heads, Py_ssize_t num_kv_heads, Py_ssize_t head_dim, Py_ssize_t v_head_dim):
    if head_dim == v_head_dim:
        return f"(num_tokens, ({num_q_heads} + 2 * {num_kv_heads}) * {head_dim})"
    return f"(num_tokens, ({num_q_heads} + {num_kv_heads}) * {head_dim} + {num_kv_heads} * {v_head_dim})"


cdef Projection open_projection(object qkv, object num_q_heads, Py_ssize_t num_kv_heads, Py_ssize_t head_dim,
                                Py_ssize_t v_head_dim):
    """Open (num_tokens, (num_q_heads + num_kv_heads) * head_dim + num_kv_heads * v_head_dim). With num_q_heads None it follows from
    the shape."""
    cdef Projection self = Projection.__new__(Projection)
    cdef Py_ssize_t heads, keys_end   # elements of a token before its values
    array = as_array(qkv, "qkv")
    keys_end = array.shape[1] - num_kv_heads * v_head_dim if array.ndim == 2 and array.shape[0] else -1
    heads = keys_end // head_dim - num_kv_heads
    if keys_end < 0 or keys_end % head_dim or heads < 1:
        raise DimensionMismatchError(f"qkv must have shape {_shape_of('num_q_heads', num_kv_heads, head_dim, v_head_dim)}, "
                                     f"got {array.shape}")
    if num_q_heads is not None and check_count(num_q_heads, "num_q_heads", 1, KV_MAX_Q_HEADS) != heads:
        raise DimensionMismatchError(f"qkv must have shape {_shape_of(num_q_heads, num_kv_heads, head_dim, v_head_dim)}, "
                                     f"got {array.shape}")
    if heads % num_kv_heads:
        raise DimensionMismatchError(f"the query heads of qkv must be a multiple of the {num_kv_heads} KV heads, "
                                     f"got {heads}")
    self.array = array
    if v_head_dim == head_dim:  # one array to open
        self.heads = open_rows(array.reshape(array.shape[0], heads + 2 * num_kv_heads, head_dim), "qkv")
        self.v = _part(self.heads, heads + num_kv_heads, num_kv_heads)
    else:
        self.heads = open_rows(array[:, :keys_end].reshape(array.shape[0], heads + num_kv_heads, head_dim), "qkv")
        self.v = open_rows(array[:, keys_end:].reshape(array.shape[0], num_kv_heads, v_head_dim), "qkv")
    self.q = _part(self.heads, 0, heads)
    self.k = _part(self.heads, heads, num_kv_heads)
    return self


ctypedef struct kv_transform_call:
    const kv_kernels *kernels
    const kv_rows *rows
    const kv_rotary *rotary
    const kv_rows *out


cdef int _transform_token(void *shared, Py_ssize_t token, int thread, kv_watch *watch) noexcept nogil:
    """Normalise and rotate the heads of a token; 1 if a result is not finite."""
    cdef const kv_transform_call *call = <const kv_transform_call *>shared
    cdef const kv_kernels *kernels = call.kernels
    cdef const kv_rows *rows = call.rows
    cdef const kv_rotary *rotary = call.rotary
    cdef const kv_rows *out = call.out
    cdef float row[KV_MAX_HEAD_DIM]
    cdef Py_ssize_t head
    cdef char *target = out.data + token * out.token_stride
    cdef bint good = True
    if out.dtype == KV_FLOAT32:
        load_rows(kernels, rows, token, 0, rows.heads, rotary, <float *>target,
                  out.head_stride // <Py_ssize_t>sizeof(float))
        if out.head_stride == rows.dim * <Py_ssize_t>sizeof(float):  # all heads at once
            return kernels.find_unstorable(<float *>target, rows.heads * rows.dim, KV_MAX_FLOAT32) >= 0
        for head in range(rows.heads):
            good &= kernels.find_unstorable(<float *>(target + head * out.head_stride), rows.dim, KV_MAX_FLOAT32) < 0
        return not good
    for head in range(rows.heads):
        load_rows(kernels, rows, token, head, 1, rotary, row, rows.dim)
        good &= kernels.find_unstorable(row, rows.dim, dtype_limit(out.dtype)) < 0
        kernels.from_float[out.dtype](row, rows.dim, target + head * out.head_stride)
    return not good


cdef object write_queries(Projection parts, Transform transform, object out, object num_threads):
    """The queries of a projection, normalised and rotated, as a new array or into `out`, which must be apart from all that is read."""
    if isinstance(out, np.ndarray) and any([np.may_share_memory(out, array) for array in (parts.array, *transform.arrays)]):
        raise ValueError("out must not share memory with qkv, q_norm, k_norm, cos, sin or positions")
    return _transform_rows(parts.q, transform, out, num_threads)


cdef object _transform_rows(Rows rows, Transform transform, object out, object num_threads):
    """Rows of Q or K, normalised and rotated, as a new array or into `out`."""
    cdef Rows target
    cdef Py_ssize_t n = rows.rows.tokens
    cdef kv_team team
    cdef kv_transform_call call
    gather(&team, num_threads, <double>n * rows.rows.heads * rows.rows.dim * 8)
    if out is None:
        out = np.empty((n, rows.rows.heads, rows.rows.dim), np.float32)
    elif not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, got {type(out).__name__}")
    target = open_rows(out, "out", True)
    if (target.rows.tokens != n or target.rows.heads != rows.rows.heads or target.rows.dim != rows.rows.dim):
        raise DimensionMismatchError(f"out must have shape ({n}, {rows.rows.heads}, {rows.rows.dim}), got {out.shape}")
    call.kernels, call.rows, call.rotary, call.out = active(), &rows.rows, &transform.c, &target.rows
    if for_each(&team, _transform_token, &call, n, STATIC):
        check_finite(rows, "the projection", KV_MAX_FLOAT32, "float32")
        raise NonFiniteInputError(f"queries or keys are beyond the range of {dtype_name(target.rows.dtype)} "
                                  f"(+-{dtype_limit(target.rows.dtype):g}) once they are normalised and rotated")
    return out


def split_qkv_norm_rope(qkv, num_q_heads, num_kv_heads, head_dim, *, cos=None, sin=None, positions=None, q_norm=None,
                        k_norm=None, eps=1e-6, interleaved=False, num_threads=None, v_head_dim=None):
    """Split a fused projection; normalise and rotate its queries and keys.

    Parameters
    ----------
    qkv : array of shape (num_tokens, (num_q_heads + num_kv_heads) * head_dim + num_kv_heads * v_head_dim)
        float32, float16 or bfloat16: all query heads of a token, then its key heads, then its value heads.
    num_q_heads, num_kv_heads, head_dim : int
    cos, sin : arrays of shape (num_positions, rotary_dim // 2), float32, optional
        Cosines and sines of the rotary angles (arXiv 2104.09864); None leaves Q and K as they are. With fewer than
        ``head_dim // 2`` columns only the first `rotary_dim` dimensions are rotated.
    positions : integers of shape (num_tokens,), optional
        Row of `cos` and `sin` for each token; 0, 1, ... by default.
    q_norm, k_norm : arrays of shape (head_dim,), optional
        Weights of an RMS norm per head before the rotation (Qwen3); None for none.
    eps : float
        Added to the mean square in the norm.
    interleaved : bool
        Rotate dimension 2i with 2i + 1 (Llama in GGUF) instead of i with i + rotary_dim // 2 (Hugging Face).
    num_threads : int, optional
    v_head_dim : int, optional
        Width of the values, if it differs from that of the keys.

    Returns
    -------
    q : ndarray of shape (num_tokens, num_q_heads, head_dim), float32
    k : ndarray of shape (num_tokens, num_kv_heads, head_dim), float32
    v : ndarray of shape (num_tokens, num_kv_heads, v_head_dim), float32

    Raises
    ------
    DimensionMismatchError, TypeError, ValueError, NonFiniteInputError
        If shapes or positions do not fit, or if a weight or a result of the norm and the rotation is not finite.
    """
    num_q_heads = check_count(num_q_heads, "num_q_heads", 1, KV_MAX_Q_HEADS)
    cdef Py_ssize_t heads = check_count(num_kv_heads, "num_kv_heads", 1, KV_MAX_KV_HEADS)
    cdef Py_ssize_t dim = check_count(head_dim, "head_dim", 1, KV_MAX_HEAD_DIM)
    cdef Py_ssize_t v_dim = dim if v_head_dim is None else check_count(v_head_dim, "v_head_dim", 1, KV_MAX_HEAD_DIM)
    cdef Projection parts = open_projection(qkv, num_q_heads, heads, dim, v_dim)
    cdef Transform of_q = Transform(dim, q_norm, eps, cos, sin, positions, interleaved, "q_norm")
    cdef Transform of_k = Transform(dim, k_norm, eps, name="k_norm", rotation=of_q)
    of_q.fit(parts.heads.rows.tokens, 0)
    of_k.fit(parts.heads.rows.tokens, 0)
    return (_transform_rows(parts.q, of_q, None, num_threads), _transform_rows(parts.k, of_k, None, num_threads),
            _transform_rows(parts.v, Transform(v_dim), None, num_threads))


def rotated(x, cos, sin, interleaved=False):
    """`x`, (num_tokens, num_heads, head_dim), as float32, with token t rotated by row t of cos and sin."""
    cdef Rows rows = open_rows(x, "q")
    cdef Transform transform = Transform(rows.rows.dim, cos=cos, sin=sin, interleaved=interleaved)
    transform.fit(rows.rows.tokens, 0)
    return _transform_rows(rows, transform, None, None)
