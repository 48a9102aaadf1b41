"""Bases in which the keys of a model are stored, measured on the model's own queries and keys."""

from __future__ import annotations

import math
import os
from functools import cached_property
from typing import Any

import numpy as np

from kvfast.core.checks import check_size, checked_list, checked_path
from kvfast.core.interchange import as_floats, as_numbers
from kvfast.core.limits import MAX_HEAD_DIM, MAX_KV_HEADS, MAX_LAYERS
from kvfast.core.replacing import replacing
from kvfast.core.text import shown
from kvfast.errors import CorruptFileError, DimensionMismatchError, NonFiniteInputError

BLOCK = 64  # tokens that share a mean
_RIDGE = 1e-3  # of the mean variance: what every direction has at least
_CONDITION = 1e4  # of a matrix: beyond it, what is decoded is far from what was given
_KINDS = ("rows", "channels")


class LayerCalibration:
    """The part of a `Calibration` for one layer, ``calibration[layer]``: the `KVFormat.calibration` of this layer.

    Its `digest` is SHA-256 of its matrices, 32 hexadecimal digits. Two are equal if their digests are.
    """

    def __init__(self, matrices: np.ndarray) -> None:
        """`matrices`: (2, num_kv_heads, head_dim, head_dim), checked; see `Calibration`."""
        self._given = matrices
        self._pairs: dict[int, np.ndarray] = {}
        self.num_kv_heads, self.head_dim = matrices.shape[1:3]
        self.digest = _digest_of(repr(matrices.shape).encode() + matrices.astype("<f4").tobytes())

    def matrices(self, of_channels: bool, num_kv_heads: int, head_dim: int) -> np.ndarray:
        """The matrices that keys and queries are multiplied by: float32 of shape (num_kv_heads, 2, head_dim, head_dim).

        `of_channels`: for keys with a scale per channel, else for keys with a scale per token. DimensionMismatchError for another
        shape.
        """
        if (num_kv_heads, head_dim) != (self.num_kv_heads, self.head_dim):
            raise DimensionMismatchError(
                f"the calibration is for {self.num_kv_heads} KV heads of {self.head_dim} elements, and the "
                f"cache has {num_kv_heads} of {head_dim}"
            )
        if of_channels not in self._pairs:
            keys = self._given[int(of_channels)]
            queries = np.linalg.inv(keys.astype(np.float64)).swapaxes(1, 2).astype(np.float32)
            self._pairs[of_channels] = np.stack([keys, queries], axis=1)
        return self._pairs[of_channels]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerCalibration) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<calibration {self.digest[:8]} of {self.num_kv_heads} KV heads x {self.head_dim}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerCalibration, (self._given,)


class Calibration:
    """For each layer and KV head of a model, the basis in which its keys are stored. `calibrate` makes one.

    A cache multiplies keys by a matrix M when they come, and queries by the transpose of M's inverse when they look: their
    products stay what they were. M is such that an error of the same size in each stored element weighs the same for the
    model's queries. There is one M for keys with a scale per token, and one for keys with a scale and offset per channel.

    Parameters
    ----------
    rows, channels : array of shape (num_layers, num_kv_heads, head_dim, head_dim)
        The matrices M for both kinds of keys. They are rounded to float32.

    Raises
    ------
    DimensionMismatchError, NonFiniteInputError
    ValueError
        If a matrix has no inverse that is good enough.

    See Also
    --------
    KVFormat : takes a calibration as `calibration`.
    """

    def __init__(self, rows: Any, channels: Any) -> None:
        both = [_checked(array, name) for array, name in zip((rows, channels), _KINDS)]
        if both[0].shape != both[1].shape:
            raise DimensionMismatchError(f"rows and channels must have the same shape, got {both[0].shape} and {both[1].shape}")
        self._layers = [LayerCalibration(np.stack(pair)) for pair in zip(*both)]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def num_kv_heads(self) -> int:
        return self._layers[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        return self._layers[0].head_dim

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the digests of the layers, 32 hexadecimal digits."""
        return _digest_of(" ".join(layer.digest for layer in self._layers).encode())

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer: int) -> LayerCalibration:
        return self._layers[layer]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Calibration) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return Calibration, tuple(np.stack([layer._given for layer in self._layers], axis=1))

    def __repr__(self) -> str:
        return f"Calibration({self.digest[:8]}, {self.num_layers} layers, {self.num_kv_heads} KV heads x {self.head_dim})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the matrices to a file of NumPy arrays (``.npz``), `rows` and `channels`.

        Parameters
        ----------
        path : path-like
        """
        stacked = np.stack([layer._given for layer in self._layers], axis=1)
        with replacing(os.path.realpath(checked_path(path, "path"))) as new, open(new, "wb") as file:
            np.savez(file, **dict(zip(_KINDS, stacked)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read what `save` has written.

        Parameters
        ----------
        path : path-like

        Raises
        ------
        CorruptFileError
            If the file is not a calibration.
        """
        from zipfile import BadZipFile  # `import kvfast` loads neither
        from zlib import error as zlib_error

        path = checked_path(path, "path")
        try:
            with open(path, "rb") as file:
                if file.read(2) != b"PK":  # of which NumPy would say that it can be loaded unsafely
                    raise CorruptFileError(f"{path} holds no calibration: it is not a .npz file")
            with open(path, "rb") as file, np.load(file) as arrays:
                if sorted(arrays) != sorted(_KINDS):
                    raise CorruptFileError(f"{path} must hold the arrays rows and channels, got {', '.join(arrays) or 'none'}")
                for one in arrays.zip.infolist():
                    _check_member(arrays.zip, one, os.fstat(file.fileno()).st_size)
                return cls(*(arrays[name] for name in _KINDS))
        except CorruptFileError:
            raise
        except (
            BadZipFile,
            zlib_error,
            ValueError,
            EOFError,
            TypeError,
            AttributeError,
            LookupError,
            ArithmeticError,
            RuntimeError,
        ) as error:
            raise CorruptFileError(f"{path} holds no calibration: {error}") from None


class Moments:
    """Sums over the queries and keys of one layer, from which its basis follows. Takes them run by run."""

    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        self._sums = np.zeros((3, num_kv_heads, head_dim, head_dim))  # of queries, of keys, of keys about the mean of their block
        self._counts = np.zeros(3, int)

    def add(self, q: np.ndarray, k: np.ndarray) -> None:
        """Count queries and keys of whole blocks of tokens, of shape (num_tokens, heads, head_dim)."""
        heads, dim = k.shape[1:]
        q = q.astype(np.float64).reshape(len(q), heads, -1, dim).transpose(1, 0, 2, 3).reshape(heads, -1, dim)
        k = k.astype(np.float64).transpose(1, 0, 2)
        blocks = k.reshape(heads, -1, BLOCK, dim)
        for i, one in enumerate((q, k, (blocks - blocks.mean(2, keepdims=True)).reshape(k.shape))):
            self._sums[i] += one.swapaxes(1, 2) @ one
            self._counts[i] += one.shape[1]

    def bases(self) -> np.ndarray:
        """The matrices M of `Calibration`, for both kinds of keys: float64 of shape (2, num_kv_heads, head_dim, head_dim)."""
        q, *keys = self._sums / self._counts[:, None, None, None]
        return np.stack([[_balanced(_ridged(a), _ridged(b)) for a, b in zip(q, k)] for k in keys])


def calibrate(q: Any, k: Any) -> Calibration:
    """Find a basis for the keys of each layer and KV head, from queries and keys of a text.

    Parameters
    ----------
    q : sequence of arrays of shape (num_tokens, num_q_heads, head_dim)
        For each layer the queries of a text, as in `KVCache.attend`: after the rotary embedding.
    k : sequence of arrays of shape (num_tokens, num_kv_heads, head_dim)
        Its keys, as in `KVCache.append`. The first 64 tokens, which are unlike the others, and a last run of less than 64 do not
        count. A few thousand tokens are enough.

    Returns
    -------
    Calibration

    Raises
    ------
    DimensionMismatchError, NonFiniteInputError, TypeError
    ValueError
        For fewer than 128 tokens.

    Notes
    -----
    With the second moments Q of the queries and K of the keys, M makes both M^T K M and M^-1 Q M^-T the same diagonal matrix:
    the errors of a stored element weigh as much as the element varies. OSCAR (arXiv 2605.17757) rotates keys by the covariance of queries, too.

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k = rng.standard_normal((2, 512, 8, 64), np.float32), rng.standard_normal((2, 512, 2, 64), np.float32)
    >>> calibration = kvfast.calibrate(q, k)
    >>> calibration                                                                          # doctest: +ELLIPSIS
    Calibration(..., 2 layers, 2 KV heads x 64)
    >>> cache = kvfast.KVCache(2, 2, 64, dtype=kvfast.KVFormat("int8", rotation="kv", calibration=calibration))
    """
    q, k = (checked_list(side, name, "arrays, one for each layer") for name, side in (("q", q), ("k", k)))
    if len(q) != len(k) or not len(k):
        raise DimensionMismatchError(f"q and k must hold arrays for the same layers, at least one, got {len(q)} and {len(k)}")
    bases = []
    for layer, pair in enumerate(zip(q, k)):
        queries, keys = (as_floats(one, f"{name}[{layer}]") for one, name in zip(pair, "qk"))
        _check_layer(queries, keys, layer)
        end = len(keys) // BLOCK * BLOCK
        moments = Moments(*keys.shape[1:])
        moments.add(queries[BLOCK:end], keys[BLOCK:end])
        bases.append(moments.bases())
    return calibration_of(bases)


def calibration_of(bases) -> Calibration:
    """The calibration of layers with these `Moments.bases`."""
    if len({one.shape for one in bases}) > 1:
        raise DimensionMismatchError("all layers must have the same KV heads and head_dim")
    return Calibration(*np.stack(bases, axis=1))


def layers_by_digest(calibration: Any) -> dict[str, LayerCalibration]:
    """The layers of a calibration, a layer alone, or nothing for None, by their digests."""
    if calibration is None:
        return {}
    if isinstance(calibration, LayerCalibration):
        return {calibration.digest: calibration}
    if not isinstance(calibration, Calibration):
        raise TypeError(f"calibration must be a Calibration or one of its layers, got {shown(calibration)}")
    return {layer.digest: layer for layer in calibration}


def _check_member(archive, member, nbytes):
    """Check the size of an array of a file against the file, before it is read."""
    with archive.open(member) as data:
        version = np.lib.format.read_magic(data)
        if version != (1, 0):
            raise ValueError(f"an array must have NumPy's version (1, 0), got {version}")
        shape, is_transposed, dtype = np.lib.format.read_array_header_1_0(data)
        size = data.tell() + 4 * math.prod(shape)
    if (
        dtype != np.dtype("<f4")
        or is_transposed
        or member.compress_size != member.file_size
        or size != member.file_size
        or size > nbytes
    ):
        raise ValueError(
            f"an array must be float32, rows first and not compressed, and have the bytes of its shape {shape}, got {dtype} "
            f"of {member.file_size:,} bytes in a file of {nbytes:,}"
        )


def _digest_of(data):
    from hashlib import sha256  # `import kvfast` does not load it

    return sha256(data).hexdigest()[:32]


def _check_layer(q, k, layer):
    if (
        q.ndim != 3
        or k.ndim != 3
        or len(q) != len(k)
        or q.shape[2] != k.shape[2]
        or 0 in q.shape[1:] + k.shape[1:]
        or q.shape[1] % k.shape[1]
    ):
        raise DimensionMismatchError(
            f"q[{layer}] and k[{layer}] must have shapes (num_tokens, num_q_heads, head_dim) and (num_tokens, "
            f"num_kv_heads, head_dim), with a multiple of KV heads, got {q.shape} and {k.shape}"
        )
    if len(k) < 2 * BLOCK:
        raise ValueError(f"a calibration needs at least {2 * BLOCK} tokens, got {len(k)}")
    for name, array in (("q", q), ("k", k)):
        if not np.isfinite(array).all():
            raise NonFiniteInputError(f"{name}[{layer}] must be finite")


def _ridged(moment):
    size = np.trace(moment) / len(moment)
    return moment + np.eye(len(moment)) * (_RIDGE * size or 1.0)


def _balanced(q, k):
    """M for the second moments of queries and keys, so that the stored keys have the mean square of the given ones."""
    root = np.linalg.cholesky(q)
    values, vectors = np.linalg.eigh(root.T @ k @ root)
    values, vectors = np.sqrt(values[::-1]), vectors[:, ::-1]  # the largest first: classes of channels are of adjacent ones
    return root @ (vectors / np.sqrt(values)) * np.sqrt(np.trace(k) / values.sum())


def _checked(array, name):
    array = as_numbers(array, name)
    if array.ndim != 4 or array.shape[2] != array.shape[3]:
        raise DimensionMismatchError(f"{name} must have shape (num_layers, num_kv_heads, head_dim, head_dim), got {array.shape}")
    for size, label, most in zip(array.shape, ("num_layers", "num_kv_heads", "head_dim"), (MAX_LAYERS, MAX_KV_HEADS, MAX_HEAD_DIM)):
        check_size(size, label, 1, most)
    if not np.isfinite(array).all():
        raise NonFiniteInputError(f"{name} must be finite")
    sizes = np.linalg.svd(array.astype(np.float64), compute_uv=False)
    if not (sizes[..., 0] <= sizes[..., -1] * _CONDITION).all() or not sizes[..., -1].all():
        raise ValueError(f"a matrix of {name} has no inverse that is good enough")
    return array
