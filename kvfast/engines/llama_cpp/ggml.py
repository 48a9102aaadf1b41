"""Keys and values as rows of ggml's types, as llama.cpp stores them (extra ``llama``, for the ``gguf`` package)."""

import numpy as np

from kvfast import CorruptFileError, DimensionMismatchError
from kvfast.engine import aligned, as_array, as_float32, needed_for, shown, storage_in

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")


def row_bytes(kind, num_elements):
    """Bytes of a row with this many elements. ValueError for an unknown type, or if the row is not a whole number of its blocks."""
    block, size = _gguf().GGML_QUANT_SIZES[_type(kind)]
    if num_elements % block:
        raise ValueError(f"rows of {kind} must be whole blocks of {block} elements, got {num_elements}")
    return num_elements // block * size


def to_ggml(rows, kind):
    """Convert keys or values to the bytes of a ggml type, with the ``gguf`` package.

    Parameters
    ----------
    rows : array of shape (num_tokens, num_kv_heads, head_dim), float32, float16 or bfloat16
    kind : {"f32", "f16", "bf16", "q8_0", "q4_0"}

    Returns
    -------
    ndarray of shape (num_tokens, bytes of a row), uint8
        A row holds the heads of a token, one after the other.

    Raises
    ------
    DimensionMismatchError, ValueError
    ModuleNotFoundError
        Without the packages of ``kvfast[llama]``.
    """
    rows = as_float32(rows, "rows")
    if rows.ndim != 3 or rows.size == 0:
        raise DimensionMismatchError(f"rows must have shape (num_tokens, num_kv_heads, head_dim), each at least 1, got {rows.shape}")
    size = row_bytes(kind, rows[0].size)
    flat = aligned(rows.reshape(len(rows), -1))
    return _gguf().quants.quantize(flat, _type(kind)).view(np.uint8).reshape(len(rows), size)


def from_ggml(blocks, kind, num_kv_heads, head_dim):
    """Decode the result of `to_ggml`.

    Returns
    -------
    ndarray of shape (num_tokens, num_kv_heads, head_dim), float32

    Raises
    ------
    CorruptFileError
        If the bytes are not whole rows.
    ValueError, ModuleNotFoundError
        As `to_ggml`.
    """
    blocks, size = as_array(blocks, "blocks"), row_bytes(kind, num_kv_heads * head_dim)
    if blocks.dtype != np.uint8 or blocks.ndim != 2 or blocks.shape[1] != size:
        raise CorruptFileError(
            f"blocks of {num_kv_heads} heads of {head_dim} in {kind} must be uint8 of shape (num_tokens, {size}), "
            f"got {blocks.dtype} of shape {blocks.shape}"
        )
    kind, dtypes = _type(kind), {"F32": np.float32, "F16": np.float16}
    blocks = np.ascontiguousarray(blocks)
    if kind.name in dtypes:
        return blocks.view(dtypes[kind.name]).astype(np.float32).reshape(-1, num_kv_heads, head_dim)
    with np.errstate(all="ignore"):  # damaged scales; the cache refuses numbers that are not finite
        return _gguf().quants.dequantize(blocks, kind).reshape(-1, num_kv_heads, head_dim)


def export_layer(cache, layer, k_type="q8_0", v_type=None):
    """Convert the keys and values of a layer to rows of ggml's types.

    Parameters
    ----------
    cache : KVCache, RingKVCache or Sequence
    layer : int
    k_type, v_type : str
        See `to_ggml`; `v_type` is `k_type` by default.

    Returns
    -------
    k, v : ndarrays of shape (num_tokens, bytes of a row), uint8
    """
    return to_ggml(cache.k(layer), k_type), to_ggml(cache.v(layer), v_type or k_type)


def import_layer(cache, layer, k, v, k_type="q8_0", v_type=None):
    """Append rows of ggml's types to a layer. Call ``cache.advance`` afterwards, as after `append`.

    Parameters
    ----------
    cache : KVCache, RingKVCache or Sequence
    layer : int
    k, v : arrays of shape (num_tokens, bytes of a row), uint8
    k_type, v_type : str
        As in `export_layer`.
    """
    heads, dim, v_dim = storage_in(cache).shape(layer)
    cache.append(layer, from_ggml(k, k_type, heads, dim), from_ggml(v, v_type or k_type, heads, v_dim))


def _type(kind):
    if kind not in TYPES:
        raise ValueError(f"unknown ggml type {shown(kind)}; choose one of {', '.join(TYPES)}")
    return _gguf().GGMLQuantizationType[kind.upper()]


def _gguf():
    with needed_for("ggml rows need", "llama"):
        import gguf
    return gguf
