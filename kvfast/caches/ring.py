"""The ring: a cache of a sliding window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvfast.caches.layer_groups import buffer_of, per_layer, shapes_of
from kvfast.caches.sequence_cache import SequenceCache
from kvfast.caches.stored_sequence import BLOCK_SIZE, GROW_BLOCKS
from kvfast.codec.formats import block_size_of, formats_of
from kvfast.codec.projection import Transform, rotated
from kvfast.codec.rope import RotaryTables
from kvfast.core.checks import check_block_size, check_size
from kvfast.core.limits import MAX_HEAD_DIM, MAX_LAYERS, MAX_TOKENS
from kvfast.core.text import same_or_tuple, shown, size_text
from kvfast.storage.tables.block_table import BlockTable
from kvfast.storage.memory.pool import BlockPool
from kvfast.storage.tables.ring_table import RingTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

__all__ = ["RingKVCache"]

ROLLBACK = 64


class RingKVCache(SequenceCache):
    """Key/value cache of a sliding window: constant memory for endless generation.

    Keeps the last `window` tokens, the first `num_sink_tokens` permanently (attention sinks, StreamingLLM, arXiv
    2309.17453), and `rollback` tokens behind the window, so that `truncate` can go back exactly. Positions stay
    absolute: ``len(cache)`` counts all tokens that were ever complete, minus those that `truncate` removed.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        As in `KVCache`.
    window : int, or a list with one per layer
        Tokens that a query sees, itself included. None in a list stands for a layer that keeps everything, for models
        that mix local and global layers.
    num_sink_tokens : int
        Number of first tokens that layers with a window always keep and see, at most the smallest window.
    dtype, k_dtype, v_dtype
        As in `KVCache`.
    rollback : int
        How far `truncate` can go back from the longest the cache has been.
    rope : {None, "cache"}
        ``"cache"``: pass keys and queries without rotary embedding, and the cache rotates them. It uses positions among
        the tokens that it holds, so the sinks stay directly before the window, however far the window has moved.
    rope_theta, rotary_dim, rope_frequencies, rope_interleaved
        For ``rope="cache"``: base of the angles; number of dimensions to rotate (all of head_dim by default); radians
        per position for each pair, instead of `rope_theta`; and whether element 2i forms a pair with 2i + 1, instead of
        i with i + rotary_dim // 2.
    secure, block_size
        As in `KVCache`.
    v_head_dim : int, or a list with one per layer, optional
        As in `KVCache`.

    Raises
    ------
    ValueError
        For a window of 0, more sinks than the window holds, or a size out of range.

    Notes
    -----
    A query sees its own window whatever was appended since, so a prompt may come in chunks of any size. The memory
    grows by a chunk while it is in progress; `advance` gives that memory back.

    With ``rope="cache"``, keys are stored rotated for their absolute position, which preserves all distances inside
    the window. The sinks are read with a second set of queries, rotated for the position inside the cache. Scores
    depend on distances only, so the result equals that of rotating every key again, without the work.

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> cache = kvfast.RingKVCache(1, 2, 64, window=16, num_sink_tokens=4)
    >>> k = v = np.ones((100, 2, 64), np.float32)
    >>> cache.append(0, k, v)
    >>> cache.attend(0, np.ones((100, 8, 64), np.float32)).shape
    (100, 8, 64)
    >>> cache.advance(100)
    >>> cache.positions(0)
    array([ 0,  1,  2,  3, 84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94, 95, 96,
           97, 98, 99])
    """

    __slots__ = ("_interleaved", "_num_sink_tokens", "_rollback", "_rope", "_windows")

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        window: int | None | Sequence[int | None],
        num_sink_tokens: int = 0,
        dtype: Any = "int4",
        k_dtype: Any = None,
        v_dtype: Any = None,
        rollback: int = ROLLBACK,
        rope: Literal["cache"] | None = None,
        rope_theta: float = 10000.0,
        rotary_dim: int | None = None,
        rope_frequencies: ArrayLike | None = None,
        rope_interleaved: bool = False,
        secure: bool = False,
        block_size: int | None = None,
        v_head_dim: int | None | Sequence[int | None] = None,
    ) -> None:
        num_layers = check_size(num_layers, "num_layers", 1, MAX_LAYERS)
        shapes = shapes_of(num_kv_heads, head_dim, v_head_dim, num_layers)
        dims = [check_size(one, "head_dim", 1, MAX_HEAD_DIM) for _, one, _ in shapes]
        windows = per_layer(window, "window", num_layers)
        windows = [one if one is None else check_size(one, "window", 1, MAX_TOKENS) for one in windows]
        local = [one for one in windows if one is not None]
        if not local:
            raise ValueError("window must be a number for at least one layer, got None for all; a KVCache keeps everything")
        num_sink_tokens = check_size(num_sink_tokens, "num_sink_tokens", 0, MAX_TOKENS)
        if num_sink_tokens > min(local):
            raise ValueError(f"num_sink_tokens must be at most the window of {min(local)}, got {num_sink_tokens}")
        rollback = check_size(rollback, "rollback", 0, MAX_TOKENS)
        if rope not in (None, "cache"):
            raise ValueError(f'rope must be None or "cache", got {shown(rope)}')
        self._rope = None
        if rope:
            head_dim = dims[0]
            if dims != [head_dim] * num_layers:
                raise ValueError(f'rope="cache" rotates all layers alike and needs the same head_dim in all of them, got {shown(dims)}')
            rotary_dim = head_dim if rotary_dim is None else check_size(rotary_dim, "rotary_dim", 2, head_dim)
            if rope_frequencies is None and rotary_dim % 2:
                raise ValueError(f"rotary_dim must be even, got {rotary_dim}")
            self._rope = RotaryTables(rotary_dim, rope_theta, rope_frequencies)
            frequencies = self._rope.frequencies
            if frequencies.ndim != 1 or not 1 <= frequencies.size <= head_dim // 2 or not (abs(frequencies) <= 1e6).all():
                raise ValueError(f"rope_frequencies must be 1 to {head_dim // 2} numbers of at most 1e6, got {shown(frequencies)}")
        self._interleaved = bool(rope_interleaved)
        self._windows, self._num_sink_tokens, self._rollback = windows, num_sink_tokens, rollback

        formats = formats_of(dtype, k_dtype, v_dtype, num_layers)
        block_size = check_block_size(block_size_of(formats, block_size, BLOCK_SIZE))

        def new_table(kind, layers):
            one, *shape, v_dim = kind
            held = GROW_BLOCKS if one is None else ring_blocks(one + rollback, num_sink_tokens, block_size)
            pool = BlockPool(len(layers), *shape, block_size, [formats[i] for i in layers], held, True, secure=secure, v_head_dim=v_dim)
            return BlockTable(pool) if one is None else RingTable(pool, one, num_sink_tokens, rollback)

        self._buffer = buffer_of([(one, *shape) for one, shape in zip(windows, shapes)], new_table)

    def _transform(self, layer, array, norm, eps):
        if self._rope is None:
            return None
        num_tokens, length = _num_tokens(array), self.layer_length(layer)
        cos, sin = self._rope(length, num_tokens)
        return Transform(
            self._head_dim(layer), norm, eps, cos, sin, np.arange(num_tokens), self._interleaved, "k_norm", made_for=length
        )

    def _rotated(self, layer, q, options):
        if self._rope is None:
            return q, None
        if options.attention_chunk_size:
            raise ValueError('attention_chunk_size must be None with rope="cache", whose windows move with the queries')
        n, length = _num_tokens(q), self.layer_length(layer)
        options.made_for = length
        first = max(0, length - n)
        at_window = rotated(q, *self._rope(first, n), self._interleaved)
        window, num_sink_tokens = options.window_or(self._windows[layer]), options.sinks_or(self._num_sink_tokens)
        if window is None or not num_sink_tokens or length <= window:
            return at_window, None
        # The last position in a cache that holds the sinks and the window up to the query.
        return at_window, rotated(q, *self._rope(first, n, num_sink_tokens + window - 1), self._interleaved)

    def _unrotated(self, k, positions):
        if self._rope is None or not len(k):
            return k
        cos, sin = self._rope.at(positions)
        return rotated(k, cos, -sin, self._interleaved)

    def _settings(self):
        rope = self._rope and {"frequencies": self._rope.frequencies.tolist(), "interleaved": self._interleaved}
        return self._shape_settings("ring") | {
            "windows": list(self._windows),
            "num_sink_tokens": self._num_sink_tokens,
            "rollback": self._rollback,
            "rope": rope,
        }

    @classmethod
    def _from_settings(cls, settings, block_size, max_seq_len):
        settings = dict(settings)
        rope, window = settings.pop("rope"), settings.pop("windows")
        if max_seq_len is not None:
            raise ValueError(f"a ring has no max_seq_len, got {max_seq_len}")
        if rope is not None:
            settings |= {"rope": "cache", "rope_frequencies": rope["frequencies"], "rope_interleaved": rope["interleaved"]}
        return cls(window=window, block_size=block_size, **settings)

    def positions(self, layer: int = 0) -> NDArray[np.int64]:
        """Absolute positions of the visible tokens of a layer, in the order of `k` and `v`.

        Returns
        -------
        ndarray of shape (num_tokens,), int64
            The sinks, then the window. Tokens that `rollback` keeps behind the window are not included.
        """
        return self._buffer.positions(layer)

    @property
    def window(self) -> int | tuple[int | None, ...]:
        """Window in tokens: one number, or a tuple with one per layer (None for a layer without a window)."""
        return same_or_tuple(self._windows)

    @property
    def num_sink_tokens(self) -> int:
        """Number of first tokens that are always kept."""
        return self._num_sink_tokens

    @property
    def rollback(self) -> int:
        """Number of tokens that `truncate` can go back from the longest the cache has been."""
        return self._rollback

    def __repr__(self) -> str:
        window = self.window if not isinstance(self.window, tuple) else "mixed"
        sinks = f" + {self._num_sink_tokens} sinks" if self._num_sink_tokens else ""
        return f"RingKVCache({self._shape()}, window {window}{sinks}, {self._tokens_text()} seen, {size_text(self.nbytes)})"


def _num_tokens(array):
    """Rows of an array, at least 1: arrays without rows are refused later, in `open_rows`."""
    shape = np.shape(array)
    return max(1, shape[0]) if shape else 1


def ring_blocks(held, num_sink_tokens, block_size):
    """Blocks of a ring in steady state, with room for chunks of a prompt: a multiple of 8."""
    blocks = -(-held // block_size) - (-num_sink_tokens // block_size) + 2
    return -(-(blocks + min(blocks // 4, 8)) // 8) * 8
