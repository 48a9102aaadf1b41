"""Many sequences in one pool of blocks: names and documentation over the compiled storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfast.caches.paged_sequence import Sequence
from kvfast.caches.paged_storage import PagedStorage
from kvfast.caches.storage_properties import StorageProperties
from kvfast.codec.projection import Transform
from kvfast.core.checks import check_size
from kvfast.core.limits import MAX_TOKENS
from kvfast.core.text import shown
from kvfast.storage.kinds import ROLLBACK
from kvfast.storage.settings import full, ring

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Unpack

    from kvfast.attention.explained import AttendPlan
    from kvfast.attention.options import AttendOptions

__all__ = ["PagedKVCache"]


class PagedKVCache(PagedStorage, StorageProperties):
    """Key/value cache of many sequences in one pool of blocks (PagedAttention, arXiv 2309.06180).

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        As in `KVCache`.
    num_blocks : int
        Blocks of the pool. A block spans all layers.
    block_size : int
        Tokens of a block: 16, 32, 64, 128 or 256; by default 64, or what the format requires.
    dtype, k_dtype, v_dtype
        As in `KVCache`.
    secure : bool
        As in `KVCache`: a block is overwritten before another sequence or the system gets it.
    sliding_window : int, optional
        Tokens that a query sees, itself included; blocks before the window go back to the pool. None for all tokens.
    num_sink_tokens : int
        Number of first tokens that a sequence always keeps and sees, at most `sliding_window`.
    rollback : int
        With a window: how far `Sequence.truncate` can go back from the longest the sequence has been.
    v_head_dim : int, optional
        As in `KVCache`.
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
        For a list with a shape or window per layer. A block spans all layers, so layers that differ need one pool per
        kind, and a model's sequence needs one sequence in each pool.
    MemoryError

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

    _sequence = Sequence

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

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a query sees, or None for all."""
        return self._settings.get("windows", [None])[0]

    @property
    def num_sink_tokens(self) -> int:
        """Number of first tokens that sequences with a window always keep."""
        return self._settings.get("num_sink_tokens", 0)

    @property
    def rollback(self) -> int | None:
        """Number of tokens that `Sequence.truncate` can go back from the longest a sequence has been; None for any number."""
        return self._settings.get("rollback")

    def append_batch(self, layer: int, k: ArrayLike, v: ArrayLike, slot_mapping: ArrayLike, *, zero_nonfinite: bool = False) -> None:
        """Store tokens of several sequences.

        Parameters
        ----------
        layer : int
        k : array of shape (num_tokens, num_kv_heads, head_dim), float32, float16 or bfloat16
        v : array of shape (num_tokens, num_kv_heads, v_head_dim), float32, float16 or bfloat16
        slot_mapping : integers of shape (num_tokens,)
            From `slot_mapping`, the same for every layer, with -1 for a token to leave out; or, in a pool without
            sequences, the slots of another scheduler, or a PreparedBatch that has them.
        zero_nonfinite : bool
            Store zeros for a row (one head of a token) that has NaN, infinity or numbers too large for the format, instead of
            raising: for a server, in which one bad text must not end the others.

        Raises
        ------
        DimensionMismatchError, TypeError, IndexError, NonFiniteInputError
            As `KVCache.append`.
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

    def attend_batch(
        self,
        layer: int,
        q: ArrayLike,
        sequences: Any = None,
        *,
        block_table: ArrayLike | None = None,
        seq_lens: ArrayLike | None = None,
        cu_seqlens_q: ArrayLike | None = None,
        cascade: bool = True,
        **options: Unpack[AttendOptions],
    ) -> Any:
        """Attention of a ragged batch, prompts and single tokens mixed.

        Parameters
        ----------
        layer : int
        q : array of shape (num_tokens, num_q_heads, head_dim), float32, float16 or bfloat16
            Queries of the last tokens of each sequence, sequence after sequence.
        sequences : list of Sequence, or PreparedBatch
            Each is read with the tokens that this layer holds. Instead, pass `block_table` and `seq_lens`, or what
            `prepare_batch` has made of them.
        block_table : integers of shape (num_sequences, max_blocks)
        seq_lens : integers of shape (num_sequences,)
            Plain block tables, and the tokens in them including those of `q`. In a pool with a window, only the blocks of
            the sinks and of the tokens that the queries see have to be present.
        cu_seqlens_q : integers of shape (num_sequences + 1,), optional
            Sequence i has the queries ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]``; by default one query each.
        cascade : bool
            Read blocks that several sequences share only once (from 256 shared tokens on, and not with a sliding
            window or chunks). The result differs by rounding.
        **options
            As in `KVCache.attend`. `chosen` has the positions of all queries of `q`, each within its own sequence. In a pool with a
            window, the window and sinks of the pool are the defaults and the largest values allowed.
        spans, parents : list with one entry per sequence, optional
            As in `KVCache.attend`, or None for a sequence without them.

        Returns
        -------
        ndarray of shape (num_tokens, num_q_heads, v_head_dim), float32, or `out`
            With `return_lse` a tuple of it and float32 of shape (num_tokens, num_q_heads). Without shared
            blocks, the result has the same bits as `Sequence.attend` of each sequence alone.

        Raises
        ------
        DimensionMismatchError, TypeError, IndexError, NonFiniteInputError, ValueError
        """
        batch = self._batch(sequences, block_table, seq_lens, cu_seqlens_q)
        return self._batches.attend_batch(layer, q, *batch, options, cascade)

    def explain_batch(
        self,
        layer: int,
        q: Any,
        sequences: Any = None,
        *,
        block_table: ArrayLike | None = None,
        seq_lens: ArrayLike | None = None,
        cu_seqlens_q: ArrayLike | None = None,
        cascade: bool = True,
        num_q_heads: int | None = None,
        dtype: Any = "float32",
        **options: Unpack[AttendOptions],
    ) -> AttendPlan:
        """Plan of the `attend_batch` call without running it; see `KVCache.explain`.

        Parameters
        ----------
        layer, q, num_q_heads, dtype
            As in `KVCache.explain`.
        sequences, block_table, seq_lens, cu_seqlens_q, cascade, **options
            As in `attend_batch`.

        Returns
        -------
        AttendPlan
        """
        batch = self._batch(sequences, block_table, seq_lens, cu_seqlens_q)
        return self._batches.explain_batch(layer, q, num_q_heads, dtype, *batch, options, cascade)
