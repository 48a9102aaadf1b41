"""What all caches of one sequence share: names and documentation over the compiled storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from kvfast.caches.ring_rope import RingRope
from kvfast.caches.snapshot import Snapshot, checked_metadata
from kvfast.caches.storage_properties import StorageProperties
from kvfast.codec.projection import Transform
from kvfast.codec.rope import Rope, frequencies_of
from kvfast.core.checks import check_size, checked_lengths, checked_path, checked_token_ids
from kvfast.core.kernels import default_precision
from kvfast.core.limits import MAX_TOKENS
from kvfast.core.text import shown, size_text
from kvfast.errors import IncompatibleSnapshotError
from kvfast.files.state import from_arrays
from kvfast.storage.kinds import keys_of
from kvfast.storage.sequences.branches import keep_branch
from kvfast.storage.sequences.sequence import SequenceStorage
from kvfast.storage.sequences.splicing import check_splice, drop, splice
from kvfast.storage.settings import NAMES

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self, Unpack

    from kvfast.attention.explained import AttendPlan
    from kvfast.attention.options import AttendOptions
    from kvfast.codec.calibration import Calibration, LayerCalibration


def storage_in(cache):
    """The `SequenceStorage` of a cache or a snapshot, for packages above the caches."""
    return cache._storage


def settings_of(cache):
    """Kind, shape and formats of a cache, for the header of a file."""
    return cache._settings


def salt_of(cache):
    """The salt of a sequence's tokens, empty for other caches; None for a sequence from a file, which does not store the salt."""
    return b"" if cache._ids is None else cache._ids.salt


def know_tokens(cache, token_ids, salt):
    """Let the pool of a sequence find its blocks by their token ids, under its salt, or without one, under `salt`. Does nothing for a
    cache without a pool."""
    if cache._ids is not None:
        cache._storage.alone(lambda: cache._ids.set(token_ids, salt))


class SequenceCache(StorageProperties):
    """A cache of one sequence. Kinds of caches say what is in it, and what else they can do.

    A sequence of a pool also keeps the ids of its tokens, and a ring with a rope rotates queries and keys itself: each is a part, or
    None.
    """

    __slots__ = ("__weakref__", "_ids", "_rope", "_settings", "_storage")

    _storage: SequenceStorage
    is_paged = False

    @classmethod
    def _over(cls, settings, storage):
        """A cache over a storage with these settings."""
        cache = cls.__new__(cls)
        cache._open(settings, storage)
        return cache

    def _open(self, settings, storage, ids=None):
        self._settings, self._storage, self._ids = settings, storage, ids
        self._rope = None if settings.get("rope") is None else RingRope(settings)

    @property
    def precision(self) -> str:
        """The precision of calls that name none, ``"exact"``, ``"fast"`` or ``"invariant"``; see [precision](../concepts/precision.md).

        Set it for all later calls; None returns to that of the process. It says how stored bytes are read, so files, snapshots and
        prompt stores know nothing of it. Forks and copies inherit it.
        """
        return self._storage.precision or default_precision()

    @precision.setter
    def precision(self, name: str | None) -> None:
        self._storage.precision = name

    def append(self, layer: int, k: ArrayLike, v: ArrayLike) -> None:
        """Append the keys and values of one or more tokens to a layer.

        Parameters
        ----------
        layer : int
        k : array of shape (num_tokens, num_kv_heads, head_dim), float32, float16 or bfloat16
        v : array of shape (num_tokens, num_kv_heads, v_head_dim), float32, float16 or bfloat16
            Any strides; bfloat16 as ml_dtypes or as its bits in uint16.

        Raises
        ------
        NonFiniteInputError
            Also for a value beyond the range of a float16 or bfloat16 cache.
        CacheFullError
            If the layer would hold more than `max_seq_len` tokens.
        """
        self._storage.append(layer, k, v, None if self._rope is None else self._rope.of_keys(self._storage, layer, k))

    def write(
        self,
        layer: int,
        qkv: ArrayLike,
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
        """Split a fused projection, normalise and rotate its queries and keys, and store keys and values.

        The same as `kvfast.split_qkv_norm_rope` followed by `append`, without intermediate arrays.

        Parameters
        ----------
        layer : int
        qkv, cos, sin, q_norm, k_norm, eps, interleaved
            As in `kvfast.split_qkv_norm_rope`.
        num_q_heads : int, optional
            Computed from the width of `qkv`; if given, it is checked against it.
        positions : integers of shape (num_tokens,), optional
            Row of `cos` and `sin` for each token; by default its position in the layer.
        out : array of shape (num_tokens, num_q_heads, head_dim), float32, float16 or bfloat16, optional
            Where to write the queries.
        num_threads : int, optional
            Largest number of threads for the split.

        Returns
        -------
        ndarray of shape (num_tokens, num_q_heads, head_dim), float32, or `out`
            The queries, for `attend`.
        """
        if self._settings["kind"] == "latent":
            raise ValueError("write is for keys and values: latent rows come whole, pass them to append")
        head_dim = self._storage.shape(layer)[1]
        of_q = Transform(head_dim, q_norm, eps, cos, sin, positions, interleaved, "q_norm")
        if self._rope is None:
            of_k = Transform(head_dim, k_norm, eps, name="k_norm", rotation=of_q)
        else:
            of_k = self._rope.of_keys(self._storage, layer, qkv, k_norm, eps)
            if cos is not None or sin is not None or interleaved:
                raise ValueError("a ring with a rope rotates queries and keys itself: leave out cos, sin and interleaved")
        return self._storage.write(layer, qkv, num_q_heads, of_q, of_k, out, num_threads)

    def attend(self, layer: int, q: ArrayLike, **options: Unpack[AttendOptions]) -> Any:
        """Attention of the last tokens to all tokens of a layer, computed on the stored bytes.

        Parameters
        ----------
        layer : int
        q : array of shape (num_tokens, num_q_heads, head_dim), float32, float16 or bfloat16
            Queries of the last `num_tokens` tokens of the layer (append them first), at most all of them. Query head h reads KV
            head ``h // (num_q_heads // num_kv_heads)``. For latent rows, head_dim is latent_dim + rope_dim; see `MLAKVCache`.
        out : array of shape (num_tokens, num_q_heads, v_head_dim), float32, float16 or bfloat16, optional
            Where to write the output, which of latent rows is as wide as latents.
        scale : float, optional
            Factor of the scores; ``head_dim ** -0.5`` by default.
        causal : bool
            If True, a query at position p sees the keys up to p; otherwise it sees all keys.
        softcap : float, optional
            Scores become ``softcap * tanh(score / softcap)``.
        sliding_window : int, optional
            A query at position p sees no key before ``p - sliding_window + 1``, except the sinks.
        num_sink_tokens : int, optional
            With a sliding window or chunks: number of first tokens that stay visible (StreamingLLM, arXiv 2309.17453).
        sinks : array of shape (num_q_heads,), optional
            Logits that are added to the denominator of the softmax only.
        alibi_slopes : array of shape (num_q_heads,), optional
            ``slope * (key position - query position)`` is added to the scores (arXiv 2108.12409).
        return_lse : bool
            Also return the log-sum-exp of the scores, for `kvfast.merge_states`.
        num_splits : int
            Number of equal parts of the context, or more where they would have over 32,768 tokens. With 0 kvfast chooses, by position.
        num_threads : int, optional
            Largest number of threads for this call. The result has the same bits for every number.
        attention_chunk_size : int, optional
            Positions are cut into chunks of this size. A query sees no key of the chunks before its own, except the sinks. Needs
            ``causal=True``.
        spans : integers of shape (num_spans, 2), optional
            Starts and stops of positions whose tokens see each other, such as the tokens of an image (Gemma 3, PaliGemma) or of a
            prefix. All tokens of a span must be appended before its queries attend. Such a query also sees all that it sees
            without spans.
        clamp_spans : bool
            If True, the tokens of a span see no key before their own window or chunk, as Gemma 4 has it. It matters for spans that are
            longer than these.
        tree_parents : integers of shape (num_drafts,), optional
            The last tokens are a tree of drafts, at most 64, each with a query in `q`: the parent of each is an earlier draft, or -1
            for the last token before the tree. A draft sees the tokens before the tree, its own ancestors and itself. Its position is
            its depth in the tree: windows, chunks and `alibi_slopes` go by it, and the keys must have been rotated for it.
        indices : integers of shape (num_tokens, k) or (num_tokens, num_kv_heads, k), optional
            The positions that each query reads, of all that it would see, in any order: those that an indexer has found best
            (DeepSeek-V3.2). Rows that have fewer end in -1. No other key is read. With one row for each query, all KV heads read the
            same. Goes without `tree_parents` and `alibi_slopes`.
        index_block : int
            1, or 16: each position in `indices` is then a multiple of 16, and stands for 16 tokens, of which a query reads those that
            it sees. Whole runs are read at the speed of memory. A single token touches as many bytes of keys as its run does.
        precision : str, optional
            ``"exact"``; ``"fast"``: queries and softmax weights are rounded to 8 bits where this saves time; or ``"invariant"``: exact,
            with the same bits for any number of queries in a call. See [precision](../concepts/precision.md). By default that of the cache.

        Returns
        -------
        ndarray of shape (num_tokens, num_q_heads, v_head_dim), float32, or `out`
            With `return_lse` a tuple of it and float32 of shape (num_tokens, num_q_heads).
        """
        if self._rope is None:
            return self._storage.attend(layer, q, options)
        q, sink_q, made_for = self._rope.of_queries(self._storage, layer, q, options)
        return self._storage.attend(layer, q, options, sink_q, made_for)

    def explain(
        self, layer: int, q: Any = 1, *, num_q_heads: int | None = None, dtype: Any = "float32", **options: Unpack[AttendOptions]
    ) -> AttendPlan:
        """Plan of the `attend` call without running it: kernels, tasks, threads, bytes to read, and slow paths, to print or to read.

        Parameters
        ----------
        layer : int
        q : array, tuple of int, or int
            As in `attend`, or its shape, (num_tokens, num_q_heads, head_dim), or the number of its tokens.
        num_q_heads : int, optional
            Query heads, if `q` is a number of tokens; one for each KV head by default.
        dtype : str or dtype
            dtype of the queries, if `q` is not an array.
        **options
            As in `attend`. `out` is not looked at.

        Examples
        --------
        >>> import kvfast, numpy as np
        >>> cache = kvfast.KVCache(num_layers=1, num_kv_heads=8, head_dim=128, dtype="int8")
        >>> cache.append(0, *np.ones((2, 4096, 8, 128), np.float32))
        >>> plan = cache.explain(0, (1, 32, 128), num_threads=1)
        >>> plan.kernels, plan.num_tasks, plan.bytes_read
        (('scores_int8', 'accumulate_int8'), 8, 8650752)
        """
        if self._rope is not None and self._storage.layer_length(layer):
            self._rope.checked_window(layer, options)
        return self._storage.explain(layer, q, num_q_heads, dtype, options)

    def k(self, layer: int) -> NDArray[np.float32]:
        """Keys of a layer, including tokens that are not yet advanced. In a spliced cache they are rotated for their positions there.

        These are the keys that `attend` reads for the last token. Tokens that it reads as floats, such as the newest of formats that keep
        these, give their floats; all other tokens give decoded codes. Before `advance`, earlier queries may read as floats what the last
        one reads as codes.

        Returns
        -------
        ndarray of shape (layer_length(layer), num_kv_heads, head_dim), float32
            A read-only view for float32 storage with `max_seq_len`; otherwise a decoded copy. A view shows the current
            contents: truncating and appending again changes it.
        """
        return keys_of(self._settings, self._storage, layer)

    def v(self, layer: int) -> NDArray[np.float32]:
        """Values of a layer, of shape (layer_length(layer), num_kv_heads, v_head_dim); see `k`."""
        return self._storage.rows(layer, True)[0]

    def splice(self, *parts: Any, rope: Rope | None | Sequence[Rope | None], recomputed: int = 0) -> None:
        """Append parts that were computed apart, one after another, to the tokens of this cache.

        Each part was computed from position 0, by itself. Its keys stay as they are stored, and `attend` rotates the
        queries back by the distance that the part was moved: rotary scores depend on distances alone. Tokens of a part
        did not see the tokens that now precede the part, which changes a model's answers. Computing the part's first
        tokens again reduces the change.

        Parameters
        ----------
        *parts : Snapshot, KVCache or Sequence
            With the shape and formats of this cache; otherwise an IncompatibleSnapshotError. Their complete tokens are taken: shared
            if they are in the same pool, else copied.
        rope : Rope or None, or a list with one per layer
            The rotation that the model applies to keys and queries; None for layers without rotation (ALiBi, NoPE). All calls
            for a cache need the same `rope`.
        recomputed : int
            For a single part: number of its first tokens that were computed again, in their new place, as the last tokens of
            this cache. They replace the part's first tokens, and the rest of the part follows.

        Raises
        ------
        CacheFullError
            If the tokens do not fit `max_seq_len` or the blocks of the pool.
        ValueError
            For a ring or a pool with a window, if layers hold tokens that are not complete, for a rope that does not fit the heads
            or is not that of earlier calls, and for `recomputed` with several parts or more tokens than there are.
            The cache stays as it was.

        Notes
        -----
        Everything goes on as before: `append`, `attend` (positions are those in the whole cache), `truncate`, `snapshot`, `fork`.
        Only files, `state_dict` and prompt caches refuse a spliced cache. Each part has blocks of its own, so its last block may be
        partly empty. Another thread must not use a part's cache meanwhile.

        Examples
        --------
        >>> import kvfast, numpy as np
        >>> def computed(num_tokens):
        ...     cache = kvfast.KVCache(1, 2, 64)
        ...     cache.append(0, *np.ones((2, num_tokens, 2, 64), np.float32))
        ...     cache.advance(num_tokens)
        ...     return cache
        >>> documents = [computed(n).snapshot() for n in (100, 300)]
        >>> cache = computed(20)
        >>> cache.splice(*documents, rope=kvfast.Rope())
        >>> len(cache)
        420
        """
        recomputed = check_size(recomputed, "recomputed", 0, MAX_TOKENS)
        ropes = self._rotations(rope)
        snapshots = [self._checked_part(part) for part in parts]
        if recomputed and (len(snapshots) != 1 or recomputed > len(snapshots[0])):
            raise ValueError(
                f"recomputed needs one part of at least as many tokens, got {recomputed} with parts of "
                f"{shown([len(one) for one in snapshots])} tokens"
            )
        snapshots = [one for one in snapshots if len(one)]
        storages = [one._storage for one in snapshots]
        check_splice(self._storage, storages, ropes, recomputed)
        if len(self) == 0 and len(snapshots) == 1:
            self.restore(snapshots[0])
        elif snapshots:
            splice(self._storage, storages, ropes, recomputed, self._ids and self._ids.forget)

    def drop(self, first: int, last: int, *, rope: Rope | None | Sequence[Rope | None]) -> None:
        """Take the tokens from position `first` to `last` out; later tokens move up (context shift).

        Later keys stay as they are stored, and `attend` rotates the queries instead. This works for every format, and any
        number of times. Blocks without tokens are given back, so that a conversation without end fits a cache of a fixed size.

        Parameters
        ----------
        first, last : int
            ``0 <= first <= last <= len(cache)``; the token at `last` stays.
        rope : Rope or None, or a list with one per layer
            As in `splice`.

        Raises
        ------
        ValueError, TypeError
            As in `splice`, and for positions out of range. The cache stays as it was.
        CacheFullError
            If a secure pool has no blocks for copies of those that are cut and shared with others.

        Notes
        -----
        Drop many tokens at a time: each call adds a segment, which attention reads apart from the others.

        Examples
        --------
        >>> import kvfast, numpy as np
        >>> cache = kvfast.KVCache(1, 2, 64, max_seq_len=512)
        >>> cache.append(0, *np.ones((2, 512, 2, 64), np.float32))
        >>> cache.advance(512)
        >>> cache.drop(16, 272, rope=kvfast.Rope())
        >>> len(cache)
        256
        """
        drop(self._storage, first, last, self._rotations(rope), self.truncate, self._ids and self._ids.forget)

    @property
    def is_spliced(self) -> bool:
        """Whether the cache holds tokens that were moved by `splice` or `drop`."""
        return self._storage.is_spliced

    def _rotations(self, rope):
        """The rotation of each layer as `storage.splicing` takes it."""
        if self._settings["kind"] == "latent":
            raise ValueError(
                "latent rows cannot be spliced or dropped: truncate to the tokens before them, and append later rows again"
            )
        if self._settings.get("has_states"):
            raise ValueError("a cache with recurrent states cannot be spliced: they depend on every token before them")
        if self._settings.get("rope") is not None:
            raise ValueError("a ring with a rope cannot be spliced: it rotates queries and keys itself")
        ropes = list(rope) if isinstance(rope, (list, tuple)) else [rope] * self.num_layers
        if len(ropes) != self.num_layers:
            raise ValueError(f"rope must be one Rope or {self.num_layers}, one per layer, got {len(ropes)}")
        for one in ropes:
            if one is not None and not isinstance(one, Rope):
                raise TypeError(f"rope must be a Rope or None, got {type(one).__name__}")
        return tuple(
            None if one is None else (frequencies_of(one, self._storage.shape(layer)[1]), bool(one.interleaved))
            for layer, one in enumerate(ropes)
        )

    def _checked_part(self, part):
        """A part as a Snapshot that fits this cache, apart from its number of tokens."""
        if isinstance(part, SequenceCache) and part._settings["kind"] != "latent":
            part = part.snapshot()
        if not isinstance(part, Snapshot):
            raise TypeError(f"splice needs snapshots and caches, got {type(part).__name__}")
        part._check_settings(self)
        return part

    def advance(self, n: int = 1) -> None:
        """Count `n` tokens as complete. ValueError unless every layer holds exactly that many new ones."""
        self._storage.advance(n)

    def layer_length(self, layer: int) -> int:
        """Tokens that a layer holds, advanced or not."""
        return self._storage.layer_length(layer)

    def truncate(self, n: int, keep: ArrayLike | None = None) -> None:
        """Keep the first `n` complete tokens. Tokens that were never counted with `advance` are dropped too.

        So ``truncate(len(cache))`` undoes a step that failed half way. The bytes of the kept tokens do not change.

        Parameters
        ----------
        n : int
        keep : integers of shape (num_kept,), optional
            Also keep these of the later tokens, whether they were counted or not: rising numbers, 0 for the token at position
            `n`, as in the `tree_parents` of `attend`. They follow directly on the first `n` tokens, and no bit of them changes. So
            one call keeps the right branch of a tree of drafts. Call it before `advance`: tokens that were not counted before
            are not counted afterwards, either, and all of them have their float rows.

        Raises
        ------
        MissingCheckpointError
            If the cache is of a model with recurrent states, and there is no checkpoint after `n` tokens. The attribute `nearest` of the
            error is the last position before with one.
        ValueError
            For an `n` beyond the complete tokens, if a ring has dropped tokens that it would need, for numbers that do not rise,
            or beyond the tokens of a layer. Where tokens would have to move that cannot: into a block that was counted as full,
            to the first tokens that a format keeps as floats, in a spliced cache, or in a ring with a `rope`. The message says
            what to do instead, and the cache stays as it was.
        CacheFullError
            If a pool has no block for a copy of one that others share.
        """
        if keep is None:
            self._storage.truncate(n, self._ids and self._ids.cut)
        else:
            keep_branch(self._storage, n, keep, self._ids and self._ids.move, self._rope and RingRope.UNMOVABLE)

    def add_checkpoint(self, states: Mapping[str, ArrayLike]) -> None:
        """Keep the recurrent states of a model after all complete tokens, for `truncate`, snapshots and files.

        Keys and values of a token can be dropped, a recurrent state cannot go back. So whoever computes gives the states at some
        positions: after each piece of a prompt, before tokens that may be rejected, at the end of an answer.

        Parameters
        ----------
        states : mapping of str to array
            The states of all layers, under names of your choice: any numbers and shapes, bfloat16 as that of ml_dtypes. Copied. All
            checkpoints of a cache have the same names, shapes and dtypes. States may be infinite; nothing looks at their values.

        Raises
        ------
        ValueError
            If the cache was made without `max_state_bytes`, if one checkpoint needs more, if there are no tokens, or tokens that were
            never counted with `advance`.

        Examples
        --------
        >>> import kvfast, numpy as np
        >>> cache = kvfast.KVCache(1, 2, 64, max_state_bytes=1 << 20)
        >>> for state in range(3):
        ...     cache.append(0, *np.ones((2, 100, 2, 64), np.float32))
        ...     cache.advance(100)
        ...     cache.add_checkpoint({"recurrent": np.full((16, 64), state, np.float32)})
        >>> cache.checkpoints
        (100, 200, 300)
        >>> cache.truncate(200)
        >>> int(cache.states_at()["recurrent"][0, 0])
        1
        """
        self._storage.add_checkpoint(states, self._ids and self._ids.know_states)

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The numbers of first tokens after which there is a checkpoint, in ascending order."""
        return () if self._storage.checkpoints is None else self._storage.checkpoints.positions

    def states_at(self, n: int | None = None) -> dict[str, NDArray[Any]]:
        """The recurrent states of a checkpoint.

        Parameters
        ----------
        n : int, optional
            After how many tokens; by default after all that are complete.

        Returns
        -------
        dict of str to ndarray
            What `KVCache.add_checkpoint` got: read-only views, which stay valid. bfloat16 comes as that of ml_dtypes, or as its bits in
            uint16 if the package is missing.

        Raises
        ------
        MissingCheckpointError
            Its attribute `nearest` is the last position before `n` with a checkpoint.
        """
        return self._storage.states_at(n)

    @property
    def max_state_bytes(self) -> int | None:
        """The most bytes that checkpoints take; None for any number, or if there are no states."""
        return None if self._storage.checkpoints is None else self._storage.checkpoints.max_bytes

    def clear(self) -> None:
        """Drop all tokens. Their memory is kept for new ones, except what a prompt took in a ring; a sequence gives its blocks back."""
        self.truncate(0)

    def copy(self) -> Self:
        """An independent deep copy, with all tokens, counted or not."""
        return self._over(self._settings, self._storage.copy())

    def fork(self) -> Self:
        """Another cache with the same tokens, counted or not, in the same blocks.

        A block is copied when one of the two writes to it. The two share memory, and for threads they count as one cache.
        """
        return self._over(self._settings, self._storage.share())

    def snapshot(
        self,
        token_ids: ArrayLike | None = None,
        metadata: Mapping[str, str] | None = None,
        *,
        uncounted: Literal["raise", "drop"] = "raise",
    ) -> Snapshot:
        """Snapshot of the current complete tokens.

        Copies the block table only. Blocks are shared, and copied when this cache writes to them.

        Parameters
        ----------
        token_ids : integers of shape (len(cache),), optional
            The token ids, to store with the tokens.
        metadata : dict of str to str, optional
            Anything else to store, for example the name of the model.
        uncounted : {"raise", "drop"}
            What to do if layers hold tokens that were never counted with `advance`: refuse the call, or leave them out.
        """
        if token_ids is not None:
            checked_token_ids(token_ids, len(self))
        checked_metadata(metadata)  # what cannot be stored is refused before blocks are shared
        known = [(token_ids, b"")]
        storage = self._storage.share(True, uncounted, self._ids and (lambda: known.append(self._ids.told(token_ids))))
        ids, salt = known[-1]
        return Snapshot(self._settings, storage, ids, metadata, salt)

    def restore(self, snapshot: Snapshot, convert: bool = False) -> None:
        """Return to the state of a snapshot of this cache, or of another with the same settings.

        A snapshot of this cache is restored by sharing its blocks. The bytes of a snapshot of another cache are copied. A
        snapshot of a `KVCache` can be restored into a `Sequence`, and the reverse.

        Parameters
        ----------
        snapshot : Snapshot
        convert : bool
            Also accept a snapshot with other storage formats: its tokens are decoded, and encoded in the formats of this
            cache. They do not become more exact if these have more bits.

        Raises
        ------
        IncompatibleSnapshotError
            If layers, heads, head_dim or windows differ, or the dtypes without `convert`; if a ring has dropped tokens that
            are to be converted; or if there is no room for the tokens. The cache stays as it was.
        NonFiniteInputError
            For converted values beyond the range of a dtype.
        CacheFullError
            If the pool of a `Sequence` has too few blocks.
        """
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"restore needs a Snapshot, got {type(snapshot).__name__}")
        storage, ids = snapshot._fitted(self, convert), self._ids
        self._storage.restore(storage, ids and ids.forget, ids and (lambda: ids.set(snapshot.token_ids, snapshot._salt)))

    def save(
        self,
        path: str | os.PathLike[str],
        token_ids: ArrayLike | None = None,
        metadata: Mapping[str, str] | None = None,
        *,
        uncounted: Literal["raise", "drop"] = "raise",
        key: bytes | Sequence[bytes] | None = None,
    ) -> None:
        """Write the stored bytes of the complete tokens to a file: safetensors, with checksums.

        If the process dies meanwhile, the file is either the old one or the new one; the next `save` to this path removes the
        unfinished file. A new file gets its mode from the umask, and a replaced file keeps its mode.

        Parameters
        ----------
        path : path-like
        token_ids, metadata, uncounted
            As in `snapshot`.
        key : bytes or sequence of bytes, optional
            Encrypt the file with AES-256-GCM: 32 bytes, or several keys, of which the first one is used. Needs ``kvfast[encrypted]``.

        Raises
        ------
        OSError
            Also if `path` is a folder, a device, a pipe or a socket: only files are replaced.
        ModuleNotFoundError
            Without the packages of ``kvfast[files]``.
        """
        path = checked_path(path, "path")  # anything else is refused before the snapshot shares blocks
        self.snapshot(token_ids, metadata, uncounted=uncounted).save(path, key)

    def state_dict(self, *, uncounted: Literal["raise", "drop"] = "raise") -> dict[str, NDArray[Any]]:
        """The stored bytes as plain arrays; see `Snapshot.state_dict`, and `snapshot` for `uncounted`."""
        return self.snapshot(uncounted=uncounted).state_dict()

    @classmethod
    def from_state_dict(cls, arrays: Mapping[str, NDArray[Any]], calibration: Calibration | LayerCalibration | None = None) -> Self:
        """A cache from the result of `state_dict`; `calibration` and errors as in `kvfast.load`.

        IncompatibleSnapshotError also for the arrays of another kind of cache. A sequence is made by its pool: restore
        ``kvfast.Snapshot.from_state_dict(arrays)`` into a new one.
        """
        settings, storage, *_ = from_arrays(arrays, calibration)
        name = NAMES[settings["kind"]]
        if name != cls.__name__:
            way = ": pool.new_sequence().restore(kvfast.Snapshot.from_state_dict(arrays))" if cls.is_paged else ""
            raise IncompatibleSnapshotError(f"this is the state of a {name}, not of a {cls.__name__}{way}")
        return cls._over(settings, storage)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def __len__(self) -> int:
        return self._storage.length

    def __bool__(self) -> bool:
        return self._storage.length > 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shape()}, {self._tokens_text()}, {size_text(self.nbytes)})"

    def _tokens_text(self):
        """The number of tokens, for `__repr__`, with the number of uncounted tokens."""
        uncounted, most = self._storage.num_uncounted, "" if self.max_seq_len is None else f"/{self.max_seq_len}"
        checkpoints = "" if self._storage.checkpoints is None else f" with {len(self._storage.checkpoints.held)} checkpoints"
        return f"{len(self)}{most} tokens" + (f" + {uncounted} not counted" if uncounted else "") + checkpoints

    @property
    def max_seq_len(self) -> int | None:
        """Largest number of tokens, or None for a cache that grows."""
        return self._storage.max_seq_len

    @property
    def context_lens(self) -> NDArray[np.int32]:
        """Tokens that each layer holds, advanced or not: int32 of shape (num_layers,). ValueError from 2**31 tokens on."""
        return checked_lengths([self._storage.layer_length(layer) for layer in range(self.num_layers)], "context_lens")

    def capacity(self, layer: int = 0) -> int:
        """Tokens that the memory reserved for a layer has room for."""
        return self._storage.capacity(layer)

    def block_indices(self, layer: int = 0) -> NDArray[np.int32]:
        """Blocks that hold a layer's tokens, in their order: int32 of shape (num_blocks,)."""
        return self._storage.block_ids(layer)

    def positions(self, layer: int = 0) -> NDArray[np.int64]:
        """Absolute positions of the visible tokens of a layer, in the order of `k` and `v`: int64 of shape (num_tokens,).

        With a window: the sink tokens, then the window. Tokens that `rollback` keeps before the window are not included.
        """
        return self._storage.positions(layer)
