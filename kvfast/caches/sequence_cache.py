"""Methods that all caches of keys and values of one sequence share: names and documentation over the compiled storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfast.codec.projection import Transform
from kvfast.storage.kinds import keys_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Unpack

    from kvfast.attention.explained import AttendPlan
    from kvfast.attention.options import AttendOptions


class SequenceCache:
    """Methods that all caches of keys and values of one sequence share."""

    __slots__ = ()

    # Overridden by a cache that rotates queries and keys itself.

    def _transform(self, layer, array, norm, eps):
        """The Transform of the new keys of `array`, or None to store them as they are."""

    def _rotated(self, layer, q, options):
        """Queries for the window, queries for the sinks, or None if they are the same, and the layer length that they were made for."""
        return q, None, -1

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
        DimensionMismatchError, TypeError, IndexError
            For a wrong shape, dtype or layer.
        NonFiniteInputError
            For NaN, infinity, or a value beyond the range of a float16 or bfloat16 cache.
        CacheFullError
            If the layer would hold more than `max_seq_len` tokens.
        """
        self._storage.append(layer, k, v, self._transform(layer, k, None, 0.0))

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
        qkv : array of shape (num_tokens, (num_q_heads + num_kv_heads) * head_dim + num_kv_heads * v_head_dim)
            float32, float16 or bfloat16: all query heads of a token, then its key heads, then its value heads.
        num_q_heads : int, optional
            Computed from the width of `qkv`; if given, it is checked against it.
        cos, sin : arrays of shape (num_positions, rotary_dim // 2), float32, optional
            Cosines and sines of the rotary angles; None for no rotation.
        positions : integers of shape (num_tokens,), optional
            Row of `cos` and `sin` for each token; by default its position in the layer.
        q_norm, k_norm, eps, interleaved
            As in `kvfast.split_qkv_norm_rope`.
        out : array of shape (num_tokens, num_q_heads, head_dim), float32, float16 or bfloat16, optional
            Where to write the queries.
        num_threads : int, optional
            Largest number of threads for the split.

        Returns
        -------
        ndarray of shape (num_tokens, num_q_heads, head_dim), float32, or `out`
            The queries, for `attend`.

        Raises
        ------
        DimensionMismatchError, TypeError, IndexError, ValueError, NonFiniteInputError, CacheFullError
        """
        head_dim = self._head_dim(layer)
        of_q = Transform(head_dim, q_norm, eps, cos, sin, positions, interleaved, "q_norm")
        of_k = self._transform(layer, qkv, k_norm, eps)
        if of_k is None:
            of_k = Transform(head_dim, k_norm, eps, name="k_norm", rotation=of_q)
        elif cos is not None or sin is not None or interleaved:
            raise ValueError("a ring with a rope rotates queries and keys itself: leave out cos, sin and interleaved")
        return self._storage.write(layer, qkv, num_q_heads, of_q, of_k, out, num_threads)

    def attend(self, layer: int, q: ArrayLike, **options: Unpack[AttendOptions]) -> Any:
        """Attention of the last tokens to all tokens of a layer, computed on the stored bytes.

        Parameters
        ----------
        layer : int
        q : array of shape (num_tokens, num_q_heads, head_dim), float32, float16 or bfloat16
            Queries of the last `num_tokens` tokens of the layer (append them first), at most all of them. Query head h reads KV
            head ``h // (num_q_heads // num_kv_heads)``.
        out : array of shape (num_tokens, num_q_heads, v_head_dim), float32, float16 or bfloat16, optional
            Where to write the output.
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
        parents : integers of shape (num_drafts,), optional
            The last tokens are a tree of drafts, at most 64, each with a query in `q`: the parent of each is an earlier draft, or -1
            for the last token before the tree. A draft sees the tokens before the tree, its own ancestors and itself. Its position is
            its depth in the tree: windows, chunks and `alibi_slopes` go by it, and the keys must have been rotated for it.
        chosen : integers of shape (num_tokens, k) or (num_tokens, num_kv_heads, k), optional
            The positions that each query reads, of all that it would see, in any order: those that an indexer has found best
            (DeepSeek-V3.2). Rows that have fewer end in -1. No other key is read. With one row for each query, all KV heads read the
            same. Goes without `parents` and `alibi_slopes`.
        chosen_run : int
            1, or 16: each position in `chosen` is then a multiple of 16, and stands for 16 tokens, of which a query reads those that
            it sees. Whole runs are read at the speed of memory. A single token touches as many bytes of keys as its run does.
        precision : str, optional
            ``"exact"``, or ``"fast"``: queries and softmax weights are then rounded to 8 bits where this saves time, see
            [precision](../concepts/precision.md). By default that of the cache.

        Returns
        -------
        ndarray of shape (num_tokens, num_q_heads, v_head_dim), float32, or `out`
            With `return_lse` a tuple of it and float32 of shape (num_tokens, num_q_heads).

        Raises
        ------
        DimensionMismatchError, TypeError, IndexError, NonFiniteInputError, ValueError
        """
        q, sink_q, made_for = self._rotated(layer, q, options)
        return self._storage.attend(layer, q, options, sink_q, made_for)

    def explain(
        self, layer: int, q: Any = 1, *, num_q_heads: int | None = None, dtype: Any = "float32", **options: Unpack[AttendOptions]
    ) -> AttendPlan:
        """Plan of the `attend` call without running it: kernels, tasks, threads, bytes to read, and slow paths.

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
            As in `attend`.

        Returns
        -------
        AttendPlan
            Print it, or read its fields.

        Raises
        ------
        DimensionMismatchError, TypeError, IndexError, ValueError
            As `attend`.

        Examples
        --------
        >>> import kvfast, numpy as np
        >>> cache = kvfast.KVCache(num_layers=1, num_kv_heads=8, head_dim=128, dtype="int8")
        >>> cache.append(0, *np.ones((2, 4096, 8, 128), np.float32))
        >>> plan = cache.explain(0, (1, 32, 128), num_threads=1)
        >>> plan.kernels, plan.num_tasks, plan.bytes_read
        (('scores_int8', 'accumulate_int8'), 8, 8650752)
        """
        return self._storage.explain(layer, q, num_q_heads, dtype, options)

    def k(self, layer: int) -> NDArray[np.float32]:
        """Keys of a layer, including tokens that are not yet advanced. In a spliced cache they are rotated for their positions there.

        These are the keys that `attend` reads. Tokens with float rows, such as the newest of a format that seals blocks, give
        their floats; all other tokens give decoded codes. Until `advance` seals their block, all of its tokens give float16; of the
        queries before that `advance`, later ones may read it as codes already.

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

    def _head_dim(self, layer):
        return self._storage.shape(layer)[1]
