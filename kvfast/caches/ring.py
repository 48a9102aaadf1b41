"""The ring: a cache of a sliding window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfast.caches.sequence_cache import SequenceCache
from kvfast.core.text import size_text
from kvfast.storage.kinds import ROLLBACK, storage_of
from kvfast.storage.settings import full, ring, with_states

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfast.codec.rope import Rope


class RingKVCache(SequenceCache):
    """Key/value cache of a sliding window: constant memory for endless generation.

    Keeps the last `sliding_window` tokens, the first `num_sink_tokens` tokens permanently (StreamingLLM, arXiv
    2309.17453), and `rollback` tokens before the window, so that `truncate` finds a whole window again. Positions stay absolute:
    ``len(cache)`` counts all tokens that were ever complete, minus those that `truncate` removed.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim, dtype, k_dtype, v_dtype, secure, block_size, v_head_dim, max_state_bytes
        As in `KVCache`.
    sliding_window : int, or a list with one per layer
        Tokens that a query sees, itself included. None in a list stands for a layer that keeps everything, for models
        that mix local and global layers.
    num_sink_tokens : int
        Number of first tokens that layers with a window always keep and see, at most the smallest window.
    rollback : int
        How far `truncate` can go back from the longest the cache has been.
    rope : Rope, optional
        The rotation of the model: pass keys and queries without rotary embedding, and the cache rotates them. It uses positions
        among the tokens that it holds, so the sink tokens stay directly before the window, however far the window has moved.

    Notes
    -----
    A query sees its own window whatever was appended since, so a prompt may come in chunks of any size. The memory
    grows by a chunk while it is in progress; `advance` gives that memory back.

    With a `rope`, keys are stored rotated for their absolute position, which preserves all distances inside
    the window. The sink tokens are read with a second set of queries, rotated for the position inside the cache. Scores
    depend on distances only, so the result equals that of rotating every key again, without the work.

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> cache = kvfast.RingKVCache(1, 2, 64, sliding_window=16, num_sink_tokens=4)
    >>> k = v = np.ones((100, 2, 64), np.float32)
    >>> cache.append(0, k, v)
    >>> cache.attend(0, np.ones((100, 8, 64), np.float32)).shape
    (100, 8, 64)
    >>> cache.advance(100)
    >>> cache.positions(0)
    array([ 0,  1,  2,  3, 84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94, 95, 96,
           97, 98, 99])
    """

    __slots__ = ()

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        sliding_window: int | None | Sequence[int | None],
        num_sink_tokens: int = 0,
        dtype: Any = "int4",
        k_dtype: Any = None,
        v_dtype: Any = None,
        rollback: int = ROLLBACK,
        rope: Rope | None = None,
        secure: bool = False,
        block_size: int | None = None,
        v_head_dim: int | None | Sequence[int | None] = None,
        max_state_bytes: int | None = None,
    ) -> None:
        layers = full(num_layers, num_kv_heads, head_dim, dtype, k_dtype, v_dtype, v_head_dim)
        settings = with_states(ring(layers, sliding_window, num_sink_tokens, rollback, rope), max_state_bytes)
        self._open(settings, storage_of(settings, block_size, None, secure, max_state_bytes))

    def __repr__(self) -> str:
        window = self.sliding_window if not isinstance(self.sliding_window, tuple) else "mixed"
        first = f" + {self.num_sink_tokens} sinks" if self.num_sink_tokens else ""
        return f"RingKVCache({self._shape()}, window {window}{first}, {self._tokens_text()} seen, {size_text(self.nbytes)})"
