"""Many sequences in one pool of blocks, for any kind of contents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from kvfast.caches.paged_sequence import Sequence
from kvfast.caches.storage_properties import StorageProperties
from kvfast.core.checks import check_flag, check_positive, check_size, checked_lengths, checked_list, checked_salt, checked_token_ids
from kvfast.core.kernels import default_precision
from kvfast.core.limits import MAX_TOKENS
from kvfast.core.text import shown, size_text
from kvfast.storage.batches.prepared_batch import PreparedBatch
from kvfast.storage.kinds import pool_of
from kvfast.storage.sequences.checkpoints import Checkpoints, KnownCheckpoints
from kvfast.storage.settings import with_states

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Unpack

    from kvfast.attention.explained import AttendPlan
    from kvfast.attention.options import AttendOptions
    from kvfast.caches.snapshot import Snapshot


def batches_in(pool):
    """The `PagedBatches` of a pool, for packages above the caches."""
    return pool._batches


class Pool(StorageProperties):
    """A pool of blocks: its sequences, their tables and slots, batches over them, and known prefixes."""

    is_paged = True

    _sequence = Sequence  # class of its sequences

    def __init__(self, settings, num_blocks, block_size, secure, buffer, max_state_bytes):
        if buffer is not None and secure:
            raise ValueError("secure is for memory of kvfast's own; whoever owns a buffer overwrites it")
        self._settings = settings = with_states(settings, max_state_bytes)  # of each of its sequences
        self._batches = pool_of(settings, num_blocks, block_size, secure, buffer)
        self._prompts = None, "", False, None  # see `use_prompt_cache`
        self._known_states = None if max_state_bytes is None else KnownCheckpoints(max_state_bytes)
        self._no_checkpoints = None if max_state_bytes is None else Checkpoints(max_state_bytes)  # of a new sequence

    @property
    def precision(self) -> str:
        """As in `KVCache`: the precision of calls of batches that name none, and of new sequences."""
        return self._batches.precision or default_precision()

    @precision.setter
    def precision(self, name: str | None) -> None:
        self._batches.precision = name

    def new_sequence(self, *, salt: bytes = b"") -> Any:
        """An empty `Sequence`, or `MLASequence` for latent rows. `salt` is as in `match_prefix`, for the blocks that it will have."""
        return self._sequence(self, salt=checked_salt(salt))

    def restore(self, snapshot: Snapshot, convert: bool = False, *, salt: bytes = b"") -> Any:
        """A new sequence with the tokens of a snapshot. The snapshot may be of a sequence of this pool or of another cache.

        Parameters
        ----------
        snapshot, convert
            As in `KVCache.restore`.
        salt : bytes
            As in `new_sequence`. By default that of the sequence that the snapshot is of. A file does not tell it: without `salt`,
            `match_prefix` finds no token of a file that a sequence with a salt was saved to.
        """
        sequence = self.new_sequence(salt=salt)
        try:
            sequence.restore(snapshot, convert)
        except BaseException:
            sequence.free()
            raise
        return sequence

    def match_prefix(self, token_ids: Any, salt: bytes = b"", *, as_computed: bool = False) -> Any:
        """A new sequence that starts with the blocks of a prompt that the pool still has.

        Parameters
        ----------
        token_ids : sequence of int
            The prompt. Its last token is never part of the result, so at least one token remains to be computed.
        salt : bytes
            Separates users who must not learn about each other's prompts: blocks are found only with the salt that
            they were made with. At most 64 bytes.
        as_computed : bool
            Leave out blocks that a sequence which computes the whole prompt would still read as float rows, so that once the prompt
            is complete, attention has the bits of such a sequence. Makes no difference for formats without newest tokens as floats.

        Returns
        -------
        Sequence
            Its length is the number of tokens found, a multiple of `block_size`, perhaps 0.

        Notes
        -----
        In a pool for a model with recurrent layers, it ends with the last block after which a sequence had a checkpoint:
        ``states_at()`` of the result has the states.

        A format with float tokens (`int4`, `int8`, `k8v4` and others) reads the newest tokens of a text as floats, and a found block
        as codes. So the same request answered a second time, by found blocks, may differ in a few bits. `as_computed` avoids that for
        the price of one block of tokens more to compute, and of as many as the format reads as floats (for `int4` 64 and 16 tokens at
        most), and only where the prompt ends that soon after the found blocks. The queries of the prompt itself still read the found
        tokens before them as codes, where a prompt that is computed reads floats: to have these bits, too, use a format without float
        tokens (`int8-rotated`, `k8v4-rotated`), or do not search.
        """
        token_ids, salt = checked_token_ids(token_ids), checked_salt(salt)
        if check_flag(as_computed, "as_computed"):
            token_ids = token_ids[: self._batches.num_coded(len(token_ids)) + 1]
        digests = self._batches.index.digests(token_ids[:-1], self.block_size, salt)
        found = self._sequence(self, token_ids, digests, salt)
        prompts, model, _, tokens_per_second = self._prompts
        if prompts is None or prompts.is_closed or len(token_ids) < 2:
            return found
        try:
            found = prompts.extended(found, token_ids, model, salt=salt, tokens_per_second=tokens_per_second)
        except BaseException:
            found.free()
            raise
        found.num_cached_tokens = len(found)
        return found

    def use_prompt_cache(self, prompts: Any, model: str = "", *, save: bool = True, tokens_per_second: float | None = None) -> None:
        """Let `match_prefix` go on to a `PromptCache` after the blocks that the pool has.

        Parameters
        ----------
        prompts : PromptCache, or None to leave it
            One that is closed later is left, too.
        model : str
            As in `PromptCache.save`.
        save : bool
            Write the chunks of a sequence when it is freed, as the pool may evict its blocks from then on. Only tokens whose ids are
            known are written, see `Sequence.advance`. With ``PromptCache(background=True)`` this does not wait for the store.
        tokens_per_second : float, optional
            As in `PromptCache.restore`.

        Notes
        -----
        `match_prefix` then returns any number of tokens if the pool has a window, or blocks of another size than chunks have.
        """
        if prompts is not None and not hasattr(prompts, "extended"):
            raise TypeError(f"prompts must be a PromptCache, got {type(prompts).__name__}")
        if not isinstance(model, str):
            raise TypeError(f"model must be a str, got {shown(model)}")
        if tokens_per_second is not None:
            check_positive(tokens_per_second, "tokens_per_second")
        self._prompts = prompts, model, check_flag(save, "save"), tokens_per_second

    def block_table(self, sequences: Any) -> NDArray[np.int32]:
        """Block tables of some sequences: int32 of shape (num_sequences, max_blocks).

        Column i has the blocks of the positions from ``i * block_size``: -1 after the last block, and for blocks before a window.
        """
        sequences = self._own(sequences)
        for sequence in sequences:
            sequence._storage.check_plain()
        blocks = [table.map.block_row() for table in self._tables(sequences)]
        table = np.full((len(blocks), max([len(one) for one in blocks], default=0)), -1, np.int32)
        for row, one in zip(table, blocks):
            row[: len(one)] = one
        return table

    def seq_lens(self, sequences: Any) -> NDArray[np.int32]:
        """Complete tokens of some sequences: int32 of shape (num_sequences,)."""
        return checked_lengths([len(sequence) for sequence in self._own(sequences)], "seq_lens")

    def slot_mapping(self, sequences: Any, num_tokens: int | list[int] = 1) -> NDArray[np.int64]:
        """Slots of the next tokens of some sequences, for `append_batch`.

        Takes the blocks for these tokens and copies shared ones, for all of the sequences or, with a CacheFullError, for none. The
        slots are valid until the tokens are complete; after `Sequence.fork` or `truncate`, call this again.

        Parameters
        ----------
        sequences : list of Sequence
        num_tokens : int, or a list with one per sequence

        Returns
        -------
        ndarray of shape (sum of num_tokens,), int64
            ``block * block_size + offset``, sequence after sequence.
        """
        tables = self._tables(sequences)
        is_list = isinstance(num_tokens, Iterable) and getattr(num_tokens, "ndim", 1)
        counts = list(num_tokens) if is_list else [num_tokens] * len(tables)
        if len(counts) != len(tables):
            raise ValueError(f"num_tokens must be one number or {len(tables)}, one per sequence, got {len(counts)}")
        return self._batches.slot_mapping(tables, [check_size(n, "num_tokens", 0, MAX_TOKENS) for n in counts])

    def prepare_batch(
        self,
        block_table: ArrayLike,
        seq_lens: ArrayLike,
        cu_seqlens_q: ArrayLike | None = None,
        slot_mapping: ArrayLike | None = None,
        *,
        max_num_seqs: int | None = None,
    ) -> PreparedBatch:
        """Check the tables of another scheduler for one step, once for all layers.

        Parameters
        ----------
        block_table, seq_lens, cu_seqlens_q
            As in `attend_batch`, which takes the result in the place of `sequences`. In a pool with a window, the blocks of
            its whole window have to be present.
        slot_mapping : integers of shape (num_slots,), optional
            As in `append_batch`, which takes the result in the place of `slot_mapping`. A format with float rows needs it: the
            slots of all queries, in order, and -1 after them.
        max_num_seqs : int, optional
            With float rows: the most sequences that the scheduler goes on with, in this step or a later one. None for as many as
            the blocks have room for.

        Returns
        -------
        PreparedBatch
            Holds copies, and is valid for any number of calls of this pool; with float rows, until the next is prepared.

        Raises
        ------
        DimensionMismatchError, ValueError
            As the calls that take the arrays. With float rows also for tables with tokens that were not written, and for slots in
            a full block of codes alone that do not begin it anew.

        Notes
        -----
        In a pool with float rows every step of the scheduler needs a batch, which gives new tokens their float rows. A sequence
        keeps its newest float rows while it is left out of steps and while others share its blocks and run ahead, so that it has
        the bits of a `Sequence` whenever it goes on. Nobody says that it has ended, so its float rows stay until its blocks are
        written from their first token again: at worst, where all texts are short, those of every token of the pool.
        `max_num_seqs` bounds them: of sequences beyond that number, those left out for longest keep codes alone, and lose the
        tokens whose codes do not exist yet. A sequence that starts with known blocks reads what computing them would at the end of a prompt
        and after the last full block of a text, if this is among the newest such places: one for 64 blocks, and at least 16.
        Elsewhere it reads codes.
        """
        most = self.num_blocks if max_num_seqs is None else check_size(max_num_seqs, "max_num_seqs", 1)
        return self._batches.prepare(block_table, seq_lens, cu_seqlens_q, slot_mapping, most)

    def are_coded(self, block_ids: ArrayLike) -> NDArray[np.bool_]:
        """Whether blocks of another scheduler hold all of their tokens, so that their bytes can be copied elsewhere.

        A format that seals blocks keeps tokens as floats alone at first, outside of the blocks. `block_ids` are integers of shape
        (num_blocks,). The result, bool of this shape, is False for a block that is not full, or that was written again from its
        middle on with tokens that do not fit its scales. Blocks of other formats always hold their tokens.
        """
        return self._batches.are_coded(block_ids)

    def first_float_rows(self, block_id: int) -> NDArray[np.uint8]:
        """The floats that a sequence of another scheduler keeps of its first tokens; see `num_first_float_tokens` of `KVFormat`.

        They are uint8 of shape (first_float_rows_nbytes,). `block_id` is the first block of the sequence; ValueError for any other.
        """
        return self._batches.first_rows(block_id)

    @property
    def first_float_rows_nbytes(self) -> int:
        """Bytes of `first_float_rows`; 0 for a format without them."""
        return self._batches.first_rows_nbytes()

    def take_blocks(self, block_ids: ArrayLike, first_float_rows: NDArray[np.uint8] | None = None) -> None:
        """Take blocks of another scheduler, whose bytes it has copied from elsewhere, as full and written. ValueError in a pool with
        sequences of its own.

        Parameters
        ----------
        block_ids : integers of shape (num_blocks,)
        first_float_rows : ndarray of shape (first_float_rows_nbytes,), uint8, optional
            Those of a sequence that begins with the first of the blocks.
        """
        self._batches.take_blocks(block_ids, first_float_rows)

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
            the sink tokens and of those that the queries see have to be present.
        cu_seqlens_q : integers of shape (num_sequences + 1,), optional
            Sequence i has the queries ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]``; by default one query each.
        cascade : bool
            Read blocks that several sequences share only once (from 256 shared tokens on, and not with a sliding
            window or chunks). The result differs by rounding. With a multiple of 16 query heads, latent rows gain nothing from it, and
            each sequence is read separately.
        **options
            As in `KVCache.attend`. `indices` has the positions of all queries of `q`, each within its own sequence. In a pool with a
            window, the window and sink tokens of the pool are the defaults and the largest values allowed.
        spans, tree_parents : list with one entry per sequence, optional
            As in `KVCache.attend`, or None for a sequence without them.

        Returns
        -------
        ndarray of shape (num_tokens, num_q_heads, v_head_dim), float32, or `out`
            With `return_lse` a tuple of it and float32 of shape (num_tokens, num_q_heads). Without shared
            blocks, the result has the same bits as `Sequence.attend` of each sequence alone.
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
        """Plan of the `attend_batch` call without running it. `q`, `num_q_heads` and `dtype` are as in `KVCache.explain`, all others as
        in `attend_batch`."""
        batch = self._batch(sequences, block_table, seq_lens, cu_seqlens_q)
        return self._batches.explain_batch(layer, q, num_q_heads, dtype, *batch, options, cascade)

    def _batch(self, sequences, block_table, seq_lens, cu_seqlens_q):
        """Block tables of sequences, or the given tables and lengths of another scheduler, or a PreparedBatch."""
        if type(sequences) is PreparedBatch:
            if block_table is not None or seq_lens is not None or cu_seqlens_q is not None:
                raise ValueError("a PreparedBatch has its own block_table, seq_lens and cu_seqlens_q")
            return None, sequences, None, None
        if (sequences is None) == (block_table is None) or (block_table is None) != (seq_lens is None):
            raise ValueError("a batch needs either sequences, or block_table and seq_lens")
        return None if sequences is None else [one._storage for one in self._own(sequences)], block_table, seq_lens, cu_seqlens_q

    def can_append(self, n: int) -> bool:
        """Whether the pool has enough blocks for a new sequence of `n` tokens, all of them appended before the next `advance`."""
        return -(-check_size(n, "n", 0) // self.block_size) <= self.num_free_blocks

    def clear(self) -> None:
        """Forget all known prefixes and the slots of another scheduler. ValueError if a sequence or snapshot is left."""
        self._batches.clear()
        if self._known_states is not None:
            self._known_states.clear()

    def _save_freed(self, sequence, token_ids, salt):
        """Write the chunks of a sequence that is about to be freed."""
        prompts, model, save, _ = self._prompts
        is_known = token_ids is not None and salt is not None and len(token_ids) == len(sequence) > 0
        if save and prompts is not None and not prompts.is_closed and is_known:
            prompts.save_chunks(sequence, token_ids, model, salt=salt, uncounted="drop")  # a step that broke off

    def _own(self, sequences):
        if isinstance(sequences, Sequence):
            raise TypeError(f"sequences must be a list, got one {type(sequences).__name__}")
        sequences = checked_list(sequences, "sequences", "sequences of this pool")
        for sequence in sequences:
            if not isinstance(sequence, Sequence) or sequence._pool is not self:
                raise ValueError(f"{shown(sequence)} is not a sequence of this pool")
            sequence._check_open()
        return sequences

    def _tables(self, sequences):
        return [sequence._table for sequence in self._own(sequences)]

    @property
    def num_blocks(self) -> int:
        return self._batches.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner, including those of known prefixes."""
        return self._batches.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Full blocks that `match_prefix` can find, with an owner or without."""
        return len(self._batches.index)

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are not freed."""
        return self._batches.num_sequences

    @property
    def usage(self) -> float:
        """Share of the blocks that have an owner, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks

    def capacity(self) -> int:
        """Tokens that the pool has room for."""
        return self.num_blocks * self.block_size

    @property
    def _storage(self):
        return self._batches.pool

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied; save its sequences to files that are safe to load")

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._shape()}, "
            f"{self.num_blocks - self.num_free_blocks}/{self.num_blocks} blocks of {self.block_size} in use, "
            f"{size_text(self.nbytes)})"
        )
