"""Compressed keys and values."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from kvfast.attention.dense import merge_states
from kvfast.compression.fields import VERSION, check_header
from kvfast.compression.methods import method_from_dict, method_to_dict
from kvfast.compression.product import ProductStore
from kvfast.compression.stores import CacheStore, RankStore
from kvfast.core.arrays import check_writable
from kvfast.core.checks import check_flag, check_number, check_size
from kvfast.core.interchange import as_float32, as_floats
from kvfast.core.text import size_text
from kvfast.errors import CorruptFileError, DimensionMismatchError, IncompatibleSnapshotError, NonFiniteInputError
from kvfast.files import cache_file
from kvfast.files.fields import parsed
from kvfast.files.state import checked_arrays

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self

STORES = {"LowRank": RankStore, "Hybrid": RankStore, "VectorQuantization": ProductStore, "Quantize": CacheStore}


@dataclass(frozen=True)
class CompressedShape:
    """Shape of the compressed arrays: (batch, num_heads, seq_len, head_dim), without `batch` if that is None."""

    num_heads: int
    seq_len: int
    head_dim: int
    batch: int | None = None

    @property
    def is_batched(self) -> bool:
        return self.batch is not None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = (self.num_heads, self.seq_len, self.head_dim)
        return (self.batch, *shape) if self.is_batched else shape


class ReconstructionError(NamedTuple):
    """``norm(decoded - given) / norm(given)`` for all keys and for all values."""

    k: float
    v: float


class Part:
    """One sequence: a store of most tokens (see ``stores.py``), and the exact tokens in a `CacheStore` or None, with their
    positions, ascending."""

    def __init__(self, store, positions, exact):
        self.store, self.positions, self.exact = store, positions, exact

    @property
    def nbytes(self):
        return self.store.nbytes + self.positions.nbytes + (self.exact.nbytes if self.exact else 0)

    @property
    def seq_len(self):
        return self.store.num_tokens + len(self.positions)

    def decode(self):
        pair = self.store.decode()
        if not self.exact:
            return pair
        others = np.delete(np.arange(self.seq_len), self.positions)
        whole = []
        for bulk, exact in zip(pair, self.exact.decode()):
            target = np.empty((len(bulk), self.seq_len, bulk.shape[2]), np.float32)
            target[:, others], target[:, self.positions] = bulk, exact
            whole.append(target)
        return tuple(whole)

    def attend(self, q, scale, causal, num_threads):
        n = len(q)
        visible = np.arange(self.seq_len - n, self.seq_len) + 1 if causal else np.full(n, self.seq_len)
        exact = np.searchsorted(self.positions, visible)
        result = self.store.attend(q, (visible - exact).astype(np.intp), scale, num_threads)
        if self.exact:
            result = merge_states(*result, *self.exact.attend(q, exact, scale, num_threads))
        return result

    def arrays(self):
        parts = {f"store.{name}": array for name, array in self.store.arrays().items()}
        if self.exact:
            parts |= {"positions": self.positions} | {f"exact.{name}": one for name, one in self.exact.arrays().items()}
        return parts

    def settings(self):
        return {"num_exact": len(self.positions), "store": self.store.settings()}

    @classmethod
    def open(cls, arrays, settings, layout, kind):
        num_exact, exact = settings["num_exact"], None
        if num_exact >= layout.seq_len:
            raise CorruptFileError(f"fewer than {layout.seq_len} tokens can be exact, got {num_exact}")
        positions = np.empty(0, np.int64)
        if num_exact:
            positions = arrays.take("positions", np.int64, (num_exact,))
            if positions[0] < 0 or positions[-1] >= layout.seq_len or (positions[1:] <= positions[:-1]).any():
                raise CorruptFileError(f"the positions of exact tokens must ascend below {layout.seq_len}")
            exact = CacheStore.open(arrays.part("exact."), {}, layout, num_exact)
        store = STORES[kind].open(arrays.part("store."), settings["store"], layout, layout.seq_len - num_exact)
        return cls(store, positions, exact)


class CompressedKV:
    """Compressed keys and values of one layer: the result of `KVCacheCompressor`.

    The contents never change. `attend` computes on the compressed form; `decode` decodes it. One
    thread at a time may call these methods: a second thread gets a RuntimeError. Use `copy` to make one for another thread.
    """

    __slots__ = ("_error", "_layout", "_method", "_parts")

    def __init__(self, layout: CompressedShape, method: Any, parts: Any, error: Any) -> None:
        self._layout, self._method, self._parts, self._error = layout, method, parts, error

    @property
    def layout(self) -> CompressedShape:
        """The `CompressedShape`."""
        return self._layout

    @property
    def method(self) -> Any:
        """The compression method, with the bits that were used."""
        return self._method

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored: codes, scales, bases, codebooks, exact tokens and their positions."""
        return sum(part.nbytes for part in self._parts)

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element of a key or value."""
        return 8 * self.nbytes / (2 * math.prod(self._layout.shape))

    @property
    def compression_ratio(self) -> float:
        """Size in float32 divided by the stored size."""
        return 32 / self.bits_per_element

    @property
    def reconstruction_error(self) -> ReconstructionError:
        """The `ReconstructionError`, measured during compression."""
        return self._error

    def decode(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Decoded keys and values, float32 with the shape of `layout`."""
        pairs = [part.decode() for part in self._parts]
        if not self._layout.is_batched:
            return pairs[0]
        return tuple(np.stack(one) for one in zip(*pairs))

    def attend(
        self, q: ArrayLike, *, scale: float | None = None, causal: bool = True, return_lse: bool = False, num_threads: int | None = None
    ) -> Any:
        """Attention to the compressed tokens, without decompressing them.

        With low rank, queries are projected to the stored directions, and outputs are transformed back. With codebooks, the
        codes of a tile become float16 rows in the processor's cache, and attention reads these like the rows of a cache.

        Parameters
        ----------
        q : array of shape (num_tokens, num_q_heads, head_dim), or with a batch (batch, num_tokens, num_q_heads, head_dim)
            float32, float16 or bfloat16. Query head h reads head ``h // (num_q_heads // num_heads)``.
        scale, return_lse, num_threads
            As in `kvfast.KVCache.attend`.
        causal : bool
            If True, the queries are those of the last tokens, and see no later token; otherwise they see all tokens.

        Returns
        -------
        ndarray of q's shape, float32
            With `return_lse` a tuple: this array, and the log-sum-exp, float32 of the same shape without the last axis.
        """
        layout = self._layout
        array = _checked_queries(q, layout)
        check_flag(return_lse, "return_lse")
        if check_flag(causal, "causal") and array.shape[-3] > layout.seq_len:
            raise ValueError(f"q must hold at most the {layout.seq_len} compressed tokens, got {array.shape[-3]}")
        scale = layout.head_dim**-0.5 if scale is None else check_number(scale, "scale", False)
        if num_threads is not None:
            check_size(num_threads, "num_threads", 1, 1024)
        rows = array if layout.is_batched else array[None]
        results = [part.attend(one, scale, causal, num_threads) for part, one in zip(self._parts, rows)]
        if layout.is_batched:
            out, lse = (np.stack(one) for one in zip(*results))
        else:
            ((out, lse),) = results
        return (out, lse) if return_lse else out

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Everything that is stored, as plain arrays by name: ``"header"`` is JSON in uint8, and the names of the others say what
        they hold, for example ``"0.store.k.codes"``."""
        return {"header": np.frombuffer(self._header().encode(), np.uint8)} | {name: one.copy() for name, one in self._arrays().items()}

    @classmethod
    def from_state_dict(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Compressed keys and values from the result of `state_dict`; raises as `load`."""
        arrays = checked_arrays(arrays)
        header = arrays.pop("header", np.empty(0, np.uint8))
        return cls._open(header.tobytes().decode(errors="replace"), _Arrays(arrays))

    def save(self, path: str | os.PathLike[str], key: bytes | Sequence[bytes] | None = None) -> None:
        """Write to a file: safetensors with checksums, as `KVCache.save`."""
        arrays = {}
        for name, array in self._arrays().items():
            array = np.ascontiguousarray(array)
            arrays[name] = array.view(np.uint8).reshape(-1) if array.dtype != np.uint8 else array
        cache_file.write_tensors(arrays, self._header(), path, key)

    @classmethod
    def load(cls, path: str | os.PathLike[str], key: bytes | Sequence[bytes] | None = None) -> Self:
        """Read a file that `save` wrote; raises as `kvfast.load`."""
        header, arrays = cache_file.read_tensors(path, key)
        try:
            return cls._open(header, _Arrays(arrays))
        except (CorruptFileError, IncompatibleSnapshotError) as error:
            raise type(error)(f"{path}: {error}") from None

    def _arrays(self):
        return {f"{i}.{name}": array for i, part in enumerate(self._parts) for name, array in part.arrays().items()}

    def _header(self):
        fields = {
            "compressed": VERSION,
            "layout": asdict(self._layout),
            "method": method_to_dict(self._method),
            "error": list(self._error),
            "parts": [part.settings() for part in self._parts],
        }
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def _open(cls, header, arrays):
        try:
            fields = parsed(header)
            version = fields.get("compressed")
        except (ValueError, AttributeError, RecursionError):
            raise CorruptFileError("the header does not describe compressed keys and values") from None
        if type(version) is not int or version != VERSION:
            kind = f"the format has version {version}" if type(version) is int else "this is not a CompressedKV"
            raise IncompatibleSnapshotError(f"{kind}; this kvfast reads compressed keys and values of version {VERSION}")
        check_header(fields)
        try:
            layout, method = CompressedShape(**fields["layout"]), method_from_dict(fields["method"])
            error, kind, of_one = ReconstructionError(*fields["error"]), type(method).__name__, replace(layout, batch=None)
            if len(fields["parts"]) != (layout.batch or 1):
                raise ValueError(f"{len(fields['parts'])} parts for a layout of {layout}")
            parts = [Part.open(arrays.part(f"{i}."), one, of_one, kind) for i, one in enumerate(fields["parts"])]
        except (TypeError, KeyError, AttributeError, OverflowError, RecursionError, IndexError) as error:
            raise CorruptFileError(f"the header describes no compressed keys and values: {error!r}") from None
        except ValueError as error:
            known = isinstance(error, (CorruptFileError, IncompatibleSnapshotError))
            raise error if known else CorruptFileError(str(error)) from None
        if rest := arrays.rest():
            raise CorruptFileError(f"unexpected array {rest[0]}")
        return cls(layout, method, parts, error)

    def copy(self) -> Self:
        """An independent deep copy, for example for another thread."""
        return self._open(self._header(), _Arrays(self._arrays()))

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a CompressedKV cannot be pickled; save() writes it to a file that is safe to load")

    def __repr__(self) -> str:
        sizes = f"{size_text(self.nbytes)}, {self.bits_per_element:.2f} bits per element"
        return f"CompressedKV({self._method}, {self._layout.shape}, {sizes})"


class _Arrays:
    """Arrays by name. Each array is taken once, and its dtype and shape are checked."""

    def __init__(self, arrays, prefix="", left=None):
        self._all, self._prefix = arrays, prefix
        self._left = set(arrays) if left is None else left

    def part(self, prefix):
        return _Arrays(self._all, self._prefix + prefix, self._left)

    def rest(self):
        return sorted(self._left)

    def take(self, name, dtype, shape):
        """Take an array of this dtype and shape, or one of its bytes."""
        name = self._prefix + name
        if name not in self._left:
            raise CorruptFileError(f"{name} is missing")
        self._left.remove(name)
        # A copy: it must not change between check and use, and must not share memory with the caller's array.
        array, dtype = np.array(self._all[name], order="C"), np.dtype(dtype)
        if array.dtype == np.uint8 and dtype != np.uint8 and array.shape == (math.prod(shape) * dtype.itemsize,):
            array = array.view(dtype).reshape(shape)
        if array.dtype != dtype or array.shape != tuple(shape):
            raise CorruptFileError(f"{name} must be {dtype} of shape {tuple(shape)}, got {array.dtype} of shape {array.shape}")
        return array

    def take_all(self):
        """All remaining arrays below the prefix, by name without the prefix."""
        names = [name for name in sorted(self._left) if name.startswith(self._prefix)]
        self._left.difference_update(names)
        return {name[len(self._prefix) :]: self._all[name] for name in names}


def checked(array, name, rank, shape):
    """An array as float32. It must have `rank` dimensions, each at least 1, and finite elements."""
    array = as_floats(array, name)
    if array.ndim != rank or 0 in array.shape:
        raise DimensionMismatchError(f"{name} must have shape {shape} and hold at least one of each, got shape {array.shape}")
    array = as_float32(array, name)
    if not np.isfinite(array).all():
        where = np.argwhere(~np.isfinite(array))[0].tolist()
        raise NonFiniteInputError(f"{name} must be finite, got {array[tuple(where)]} at {where}")
    return array


def check_out(out, shape):
    """Check that results of a shape can be written to `out`."""
    if not isinstance(out, np.ndarray) or out.dtype.name not in ("float32", "float16", "bfloat16") or not out.flags.writeable:
        raise TypeError(
            f"out must be a writable array of float32, float16 or bfloat16, got {getattr(out, 'dtype', type(out).__name__)}"
        )
    if out.shape != tuple(shape):
        raise DimensionMismatchError(f"out must have shape {tuple(shape)}, got {out.shape}")
    check_writable(out, "out")


def _checked_queries(q, layout):
    shape = "num_tokens, num_q_heads, head_dim"
    array = checked(q, "q", 4, f"(batch, {shape})") if layout.is_batched else checked(q, "q", 3, f"({shape})")
    if layout.is_batched and len(array) != layout.batch:
        raise DimensionMismatchError(f"q must have a batch of {layout.batch}, got {len(array)}")
    if array.shape[-1] != layout.head_dim:
        raise DimensionMismatchError(f"q must have head_dim {layout.head_dim}, got {array.shape[-1]}")
    if array.shape[-2] % layout.num_heads:
        raise DimensionMismatchError(f"the heads of q must be a multiple of the {layout.num_heads} heads, got {array.shape[-2]}")
    return array
