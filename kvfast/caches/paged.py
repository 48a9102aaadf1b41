"""Many sequences in one pool of blocks: names and documentation over the compiled storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfast.caches.pool import Pool
from kvfast.codec.projection import Transform
from kvfast.core.checks import check_size
from kvfast.core.limits import MAX_TOKENS
from kvfast.core.text import shown
from kvfast.storage.kinds import ROLLBACK
from kvfast.storage.settings import full, ring

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


class PagedKVCache(Pool):
    """Key/value cache of many sequences in one pool of blocks (PagedAttention, arXiv 2309.06180).

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim, dtype, k_dtype, v_dtype, v_head_dim
        As in `KVCache`.
    num_blocks : int
        Blocks of the pool. A block has all layers.
    block_size : int
        Tokens of a block: 16, 32, 64, 128 or 256; by default 64, or what the format requires.
    secure : bool
        As in `KVCache`: a block is overwritten before another sequence or the system gets it.
    sliding_window : int, optional
        Tokens that a query sees, itself included; blocks before the window go back to the pool. None for all tokens.
    num_sink_tokens : int
        Number of first tokens that a sequence always keeps and sees, at most `sliding_window`.
    rollback : int
        With a window: how far `Sequence.truncate` can go back from the longest the sequence has been.
    buffer : buffer of bytes, or one array per layer, optional
        Memory of the caller that the blocks lie in, as `buffer_layout` describes it: one piece of memory, layer after layer and
        block after block; or for each layer an array of shape (num_blocks, ...). The distance of its blocks may be any multiple
        of the alignment. Its first contents do not matter. kvfast keeps a reference to it, and never frees it or makes it larger.
        Without it the pool has memory of its own.
    max_state_bytes : int, optional
        As in `KVCache`, for each sequence; and once more for the checkpoints that `match_prefix` finds.

    Raises
    ------
    ValueError
        For a size out of range; for a `buffer` that is read-only, too small, not aligned or that overlaps itself, and for
        one with `secure`.
    DimensionMismatchError
        For a `buffer` of another shape.
    TypeError
        For a list with a shape or window per layer. A block has all layers, so layers that differ need one pool per
        kind, and a model's sequence needs one sequence in each pool.

    Notes
    -----
    The owners of a block are the sequences and forks that share it. A block goes back to the pool when its last owner
    releases it. A full block whose token ids are known (see `Sequence.advance`) can still be found until the pool needs
    it; the least recently used block is reused first.

    A scheduler with its own tables passes its own slots and block tables to `append_batch`, `write_batch` and `attend_batch`, and
    makes no sequences. A pool has either sequences or such a scheduler, not both. With a format of float rows, the scheduler
    calls `prepare_batch` in each step.

    With a window, a sequence behaves like a `RingKVCache`. Its block table has -1 where blocks have gone back to the pool. A
    scheduler's own table may have any number there: blocks that no query sees are not read. A prefix can be found while the pool
    has all of its blocks that a sequence of that length would hold.

    In a `buffer`, the bytes of a block of a layer hold its codes and scales. Float rows lie in memory of the pool's own. So with
    a format without float rows, the owner of the memory may copy the bytes of a block to another block, which then has the same
    tokens.

    Any number of threads may read a pool and its sequences at once; a thread that changes them must be its only user.

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> pool = kvfast.PagedKVCache(num_layers=1, num_kv_heads=2, head_dim=64, num_blocks=64)
    >>> a, b = pool.new_sequence(), pool.new_sequence()
    >>> k = v = np.ones((2, 2, 64), np.float32)
    >>> pool.append_batch(0, k, v, pool.slot_mapping([a, b]))
    >>> pool.attend_batch(0, np.ones((2, 8, 64), np.float32), [a, b]).shape
    (2, 8, 64)
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int | None = None,
        dtype: Any = "int4",
        k_dtype: Any = None,
        v_dtype: Any = None,
        secure: bool = False,
        sliding_window: int | None = None,
        num_sink_tokens: int = 0,
        rollback: int = ROLLBACK,
        v_head_dim: int | None = None,
        buffer: Any = None,
        max_state_bytes: int | None = None,
    ) -> None:
        for name, value in (
            ("num_kv_heads", num_kv_heads),
            ("head_dim", head_dim),
            ("v_head_dim", v_head_dim),
            ("sliding_window", sliding_window),
        ):
            if isinstance(value, (list, tuple)):
                raise TypeError(
                    f"{name} must be one number for all layers of a pool, got {shown(value)}: for layers that differ make "
                    f"a PagedKVCache for each kind, and a sequence in each of them"
                )
        settings = full(num_layers, num_kv_heads, head_dim, dtype, k_dtype, v_dtype, v_head_dim)
        num_sink_tokens = check_size(num_sink_tokens, "num_sink_tokens", 0, MAX_TOKENS)
        rollback = check_size(rollback, "rollback", 0, MAX_TOKENS)
        if sliding_window is not None:
            settings = ring(settings, check_size(sliding_window, "sliding_window", 1, MAX_TOKENS), num_sink_tokens, rollback)
        elif num_sink_tokens:
            raise ValueError(f"num_sink_tokens needs a sliding_window, as all tokens are kept without one, got {num_sink_tokens}")
        super().__init__(settings, num_blocks, block_size, secure, buffer, max_state_bytes)

    def append_batch(self, layer: int, k: ArrayLike, v: ArrayLike, slot_mapping: ArrayLike, *, zero_nonfinite: bool = False) -> None:
        """Store tokens of several sequences; raises as `KVCache.append`, too.

        Parameters
        ----------
        layer, k, v
            As in `KVCache.append`.
        slot_mapping : integers of shape (num_tokens,)
            From `slot_mapping`, the same for every layer, with -1 for a token to leave out; or, in a pool without
            sequences, the slots of another scheduler, or a PreparedBatch that has them.
        zero_nonfinite : bool
            Store zeros for a row (one head of a token) that has NaN, infinity or numbers too large for the format, instead of
            raising: for a server, in which one bad text must not end the others.

        Raises
        ------
        ValueError
            For slots that are out of range, given twice, or not the next slots of their sequence.
        """
        self._batches.append_batch(layer, k, v, slot_mapping, zero_nonfinite)

    def write_batch(
        self,
        layer: int,
        qkv: ArrayLike,
        slot_mapping: ArrayLike,
        *,
        num_q_heads: int | None = None,
        cos: ArrayLike | None = None,
        sin: ArrayLike | None = None,
        positions: ArrayLike | None = None,
        q_norm: ArrayLike | None = None,
        k_norm: ArrayLike | None = None,
        eps: float = 1e-6,
        interleaved: bool = False,
        out: NDArray[Any] | None = None,
        num_threads: int | None = None,
    ) -> NDArray[Any]:
        """Split a fused projection of the tokens of several sequences, and store their keys and values.

        Parameters
        ----------
        layer, qkv, num_q_heads, cos, sin, q_norm, k_norm, eps, interleaved, out, num_threads
            As in `KVCache.write`.
        slot_mapping
            As in `append_batch`.
        positions : integers of shape (num_tokens,), optional
            Row of `cos` and `sin` for each token; 0, 1, ... by default.

        Returns
        -------
        ndarray of shape (num_tokens, num_q_heads, head_dim), float32, or `out`
        """
        of_q = Transform(self.head_dim, q_norm, eps, cos, sin, positions, interleaved, "q_norm")
        of_k = Transform(self.head_dim, k_norm, eps, name="k_norm", rotation=of_q)
        return self._batches.write_batch(layer, qkv, slot_mapping, num_q_heads, of_q, of_k, out, num_threads)
