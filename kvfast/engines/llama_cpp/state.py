"""Reads the state of a llama.cpp sequence into a cache, and writes it from one (extra ``llama``).

This is the format of ``llama_state_seq_get_data`` and ``llama_state_seq_save_file`` for models with one KV cache (no sliding
windows, no recurrent layers)::

    file    u32 "ggsq", u32 version 3, u32 number of tokens, i32 of each token; then the cache
    data    u32 0xaf143cd8, i32 sequence; then the cache

`kvfast.engines.llama_cpp.form` describes the cache. These numbers are the only sign of the llama.cpp version that wrote a state. Other
numbers are refused, and the error names them. Files of version 2 (llama-cpp-python 0.3.30) differ in this number alone for the models
that kvfast reads, and are read as well.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

import numpy as np

from kvfast import CorruptFileError, IncompatibleSnapshotError
from kvfast.engine import check_flag, checked_token_ids, each, one_of, shown
from kvfast.engines.llama_cpp.form import Form, Part, Reader
from kvfast.engines.llama_cpp.ggml import TYPES, _type, from_ggml, row_bytes, to_ggml

FILE_MAGIC, FILE_VERSION, READ_VERSIONS = 0x67677371, 3, (2, 3)
DATA_MAGIC = 0xAF143CD8


@dataclass(frozen=True)
class LlamaCppState:
    """The cells of one sequence, in the order of their positions; see `read_state`.

    `k_types` and `v_types` are the ggml types of the layers, `k` and `v` their rows: uint8 of shape (num_tokens, bytes of a row). A file
    has `token_ids`, data does not. Values were stored `transposed` without flash attention.
    """

    num_tokens: int
    token_ids: np.ndarray | None
    k_types: tuple[str, ...]
    v_types: tuple[str, ...]
    k: tuple[np.ndarray, ...]
    v: tuple[np.ndarray, ...]
    transposed: bool

    def append_to(self, cache, *, rope_dims=0, rotated=None):
        """Append all tokens to an empty cache.

        Parameters
        ----------
        cache : KVCache, RingKVCache or Sequence
            Must have the layers, heads and head_dim of the model.
        rope_dims : int
            Number of key dimensions with rotary embedding in pairs (0, 1), (2, 3), ... in llama.cpp, but in halves in the
            runtime of the cache. Models of the architecture ``llama`` need this for `kvfast.llama`. 0 leaves keys as they
            are.
        rotated : bool, optional
            Whether llama.cpp has multiplied keys and values by a Hadamard matrix. The default follows llama-cpp-python
            0.3.36: yes if they are quantised and head_dim is a multiple of 64.

        Raises
        ------
        IncompatibleSnapshotError
            If the cache is not empty, or has other layers or rows.
        CorruptFileError, NonFiniteInputError, CacheFullError
            The cache stays empty.
        """
        if len(cache) or cache.num_layers != len(self.k):
            raise IncompatibleSnapshotError(
                f"the state has {len(self.k)} layers and needs an empty cache of as many, got one of "
                f"{cache.num_layers} with {len(cache)} tokens"
            )
        heads, dim = _one_shape(cache)
        _check_rope(rope_dims, dim)
        for layer, (k_type, v_type) in enumerate(zip(self.k_types, self.v_types)):
            try:
                wanted = row_bytes(k_type, heads * dim), row_bytes(v_type, heads * dim)
            except ValueError as error:
                raise IncompatibleSnapshotError(f"layer {layer} of the state: {error}") from None
            found = self.k[layer].shape[1], self.v[layer].shape[1]
            if wanted != found:
                raise IncompatibleSnapshotError(
                    f"layer {layer} of the state has rows of {found} bytes in {k_type} and {v_type}; "
                    f"{heads} heads of {dim} make {wanted}"
                )
        try:
            for layer, (k_type, v_type) in enumerate(zip(self.k_types, self.v_types)):
                k = _rotated(from_ggml(self.k[layer], k_type, heads, dim), k_type, rotated, _largest_rotation(dim))
                v = _rotated(from_ggml(self.v[layer], v_type, heads, dim), v_type, rotated, 64)
                cache.append(layer, k[:, :, _by_halves(dim, rope_dims)], v)
            cache.advance(self.num_tokens)
        except BaseException:
            cache.truncate(0)
            raise


def read_state(source):
    """Read a sequence of llama.cpp.

    Parameters
    ----------
    source : path-like or bytes
        A file of ``llama_state_seq_save_file``, or the bytes of ``llama_state_seq_get_data`` (or of such a file).

    Returns
    -------
    LlamaCppState
        Its arrays are views of the bytes if the cells are in the order of their positions.

    Raises
    ------
    CorruptFileError
        If the bytes are not a state of llama.cpp, or end too early.
    IncompatibleSnapshotError
        For another version, a ggml type that kvfast does not know, or a model with several caches (more bytes follow).
    OSError
    """
    if isinstance(source, (str, os.PathLike)):
        with open(source, "rb") as file:
            source = file.read()
    reader = Reader(source)
    token_ids = _token_ids(reader)
    form, cells, parts = reader.only_cache()
    count = len(cells)
    order = np.argsort(cells[:, 0], kind="stable")
    if not np.array_equal(cells[order, 0], np.arange(count)):
        raise IncompatibleSnapshotError(
            "the cells of the state are not the positions 0, 1, ... of one sequence: context was dropped or shifted"
        )
    in_order = np.array_equal(order, np.arange(count))
    sides = ("keys", form.keys, parts), ("values", form.values, parts[len(form.keys) :])
    types, rows = [], []
    for side, of, arrays in sides:
        types.append(tuple(_kind(part, f"the {side} of layer {layer}") for layer, part in enumerate(of)))
        tokens = [np.ascontiguousarray(array.transpose(1, 0, 2)).reshape(count, -1) for array in arrays[: len(of)]]
        rows.append(tuple(one if in_order else one[order] for one in tokens))
    return LlamaCppState(count, token_ids, *types, *rows, form.transposed)


def _token_ids(reader):
    """The token ids of a file, or None for data, whose head is read."""
    magic, number = reader.numbers("II", "its head")
    if magic == FILE_MAGIC:
        if number not in READ_VERSIONS:
            raise IncompatibleSnapshotError(
                f"a state file of llama.cpp must have version {one_of(READ_VERSIONS)}, got version {number}"
            )
        (count,) = reader.numbers("I", "the number of tokens")
        return np.frombuffer(reader.take(4 * count, "the tokens"), "<i4").copy()
    if magic != DATA_MAGIC:
        raise CorruptFileError(f"a state of llama.cpp must begin with {FILE_MAGIC:#x} or {DATA_MAGIC:#x}, got {magic:#x}")
    return None


def _kind(part, what):
    """The name of the ggml type of a part."""
    for kind in TYPES:
        if _type(kind) == part.kind:
            if part.width > 1 and (kind[0] == "q" or part.size != row_bytes(kind, 1)):
                raise CorruptFileError(f"{what}, transposed, are {part.width:,} elements of {part.size} bytes in {kind}")
            return kind
    raise IncompatibleSnapshotError(f"{what} are of ggml type {part.kind}; known are {', '.join(TYPES)}")


def write_state(cache, k_type="f16", v_type=None, *, token_ids=None, rope_dims=0, rotated=None, transposed=False):
    """Write the complete tokens of a cache as a state of llama.cpp.

    Parameters
    ----------
    cache : KVCache or Sequence
    k_type, v_type : str
        ggml types of the llama.cpp context that will read the state; `v_type` is `k_type` by default.
    token_ids : integers of shape (len(cache),), optional
        With token ids, the result is the contents of a file for ``llama_state_seq_load_file``. Without them, it is for
        ``llama_state_seq_set_data``.
    rope_dims, rotated
        As in `LlamaCppState.append_to`.
    transposed : bool
        Whether that context stores values transposed, which it does without flash attention.

    Returns
    -------
    bytes

    Raises
    ------
    ValueError
        If the cache is empty or has dropped tokens, or for options that exclude each other.
    """
    count, (heads, dim) = len(cache), _one_shape(cache)
    v_type = v_type or k_type
    _check_rope(rope_dims, dim)
    transposed = check_flag(transposed, "transposed")
    if transposed and v_type[0] == "q":
        raise ValueError(f"transposed values cannot be {v_type}: llama.cpp quantises values with flash attention only")
    order = np.argsort(_by_halves(dim, rope_dims))
    if not count:
        raise ValueError("the cache holds no tokens to write")
    if token_ids is None:
        head = struct.pack("<Ii", DATA_MAGIC, 0)
    else:
        token_ids = checked_token_ids(token_ids, count)
        head = struct.pack("<III", FILE_MAGIC, FILE_VERSION, count) + token_ids.astype("<i4").tobytes()
    keys = Part(_type(k_type), 1, row_bytes(k_type, heads * dim))
    width = heads * dim if transposed else 1
    values = Part(_type(v_type), width, row_bytes(v_type, heads * dim // width))
    layers = cache.num_layers
    data, parts = Form(head, (keys,) * layers, (values,) * layers, transposed).new(count)
    for kind, of, rotation, places in ((k_type, cache.k, _largest_rotation(dim), order), (v_type, cache.v, 64, slice(None))):
        for layer in range(layers):
            rows = of(layer)[:, :, places]
            if len(rows) < count:
                raise ValueError(f"layer {layer} has dropped tokens: it holds {len(rows)} of {count}")
            part = parts.pop(0)
            blocks = to_ggml(_rotated(rows[:count], kind, rotated, rotation), kind)
            part[...] = blocks.reshape(count, part.shape[0], part.shape[2]).transpose(1, 0, 2)
    return bytes(data)


def _one_shape(cache):
    """KV heads and head_dim of all layers; ValueError if layers differ, or keys and values."""
    heads, dim = cache.num_kv_heads, cache.head_dim
    if tuple in (type(heads), type(dim)):
        raise ValueError(f"a state of llama.cpp needs layers of the same shape, got {each(heads)} heads of {each(dim)}")
    if cache.v_head_dim != dim:
        raise ValueError(
            f"a state of llama.cpp needs keys and values of the same width, got keys of {dim} "
            f"and values of {each(cache.v_head_dim)} elements"
        )
    return heads, dim


def _check_rope(rope_dims, dim):
    if isinstance(rope_dims, bool) or not isinstance(rope_dims, int) or not 0 <= rope_dims <= dim or rope_dims % 2:
        raise ValueError(f"rope_dims must be an even number from 0 to the head_dim of {dim}, got {shown(rope_dims)}")


def _by_halves(dim, rope_dims):
    """For each dimension of the cache, the dimension in llama.cpp."""
    return np.r_[0:rope_dims:2, 1:rope_dims:2, rope_dims:dim]


def _largest_rotation(dim):
    """Size of the Hadamard matrix that llama.cpp rotates keys by: the largest power of two that divides dim, at least 64."""
    return max(64, dim & -dim)


def _rotated(rows, kind, rotated, size):
    """Rows multiplied by llama.cpp's Hadamard matrix, which is its own inverse; unchanged if they are not rotated."""
    dim = rows.shape[2]
    if rotated is None:
        rotated = kind[0] == "q" and dim % 64 == 0
    if not check_flag(rotated, "rotated"):
        return rows
    if dim % 64:
        raise ValueError(f"llama.cpp rotates only heads whose width is a multiple of 64 elements, got {dim}")
    rotation = np.ones((1, 1), np.float32)
    while len(rotation) < size:
        rotation = np.block([[rotation, rotation], [rotation, -rotation]])
    return (rows.reshape(-1, size) @ (rotation / np.float32(np.sqrt(size)))).reshape(rows.shape)
