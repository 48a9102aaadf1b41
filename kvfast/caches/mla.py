"""The cache of latent rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvfast.caches.sequence_cache import SequenceCache
from kvfast.core.interchange import as_float32, as_floats
from kvfast.errors import DimensionMismatchError, NonFiniteInputError
from kvfast.storage.kinds import storage_of
from kvfast.storage.settings import latent as latent_settings
from kvfast.storage.settings import with_states

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def check_indexer(rope_dim):
    """Refuse rows with a rotary part: an indexer has keys without one."""
    if rope_dim:
        raise ValueError(f"top_k needs rows without a rotary part, made with rope_dim=0, got rope_dim {rope_dim}")


class MLAKVCache(SequenceCache):
    """Contiguous cache of one sequence of a model with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Each layer stores one row per token, shared by all heads: a latent, from which the model computes keys and values,
    and the rotary part of the keys. Attention runs on these rows, with the projections absorbed into queries and outputs.

    Parameters
    ----------
    num_layers : int
    latent_dim : int
        1 to 512.
    rope_dim : int
        Elements of the rotary part, 0 to 128; 0 for none.
    dtype : str, dtype or KVFormat, or a list of them with one per layer
        As in `KVCache`, with the latent in place of the keys and the rotary part in place of the values: with
        ``"int8/bfloat16"`` the latent is INT8 and the rotary part bfloat16. ``"int8"`` and ``"int4"`` rotate both by a
        Hadamard transform; ``"int4"`` then has a Gaussian codebook and a scale per token. Formats that seal blocks
        (`centring`, `per_channel`) or keep first tokens as floats are refused.
    max_seq_len, block_size, secure, max_state_bytes
        As in `KVCache`.

    Notes
    -----
    Queries of `attend` have latent_dim + rope_dim elements, with the projection absorbed, and outputs are latents. Scores are
    ``scale * (q . row)`` over the whole row; the output is the weighted sum of latents. With a model's projections `up_k` and `up_v`,
    as in `get_kv`, the queries of head h are ``concatenate(up_k[:, h] @ q_nope, q_rope)``, and the output of head h is
    ``out[:, h] @ up_v[:, h]``. The default of `scale` is ``(latent_dim + rope_dim) ** -0.5``. Models are trained with the scale of their
    own heads: ``192 ** -0.5`` for DeepSeek, whose heads have 128 + 64 elements. Sizes in the plan of `explain` leave out the rotary
    part.

    The latent and the rotary part each have a scale if they are stored as integers. `truncate`, `snapshot`, `save` and the other
    methods of a `KVCache` work here in the same way, with the same guarantees; `k` has the latents, and `v` the rotary parts. `write`, `splice` and `drop` are for keys and values alone.

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> cache = kvfast.MLAKVCache(num_layers=1, latent_dim=512, rope_dim=64)
    >>> cache.append(0, np.ones((3, 576), np.float32))
    >>> cache.attend(0, np.ones((1, 128, 576), np.float32), scale=192**-0.5).shape
    (1, 128, 512)
    >>> cache.advance(3)
    >>> len(cache), cache.bytes_per_token
    (3, 584)
    """

    __slots__ = ()

    def __init__(
        self,
        num_layers: int,
        latent_dim: int,
        rope_dim: int,
        max_seq_len: int | None = None,
        dtype: Any = "int8",
        block_size: int | None = None,
        secure: bool = False,
        max_state_bytes: int | None = None,
    ) -> None:
        settings = with_states(latent_settings(num_layers, latent_dim, rope_dim, dtype), max_state_bytes)
        self._open(settings, storage_of(settings, block_size, max_seq_len, secure, max_state_bytes))

    # One array has both sides of a row, so this takes one less than for keys and values.
    def append(self, layer: int, latent: ArrayLike) -> None:  # type: ignore[override]
        """Append the rows of one or more tokens to a layer; raises as `KVCache.append`.

        Parameters
        ----------
        layer : int
        latent : array of shape (num_tokens, latent_dim + rope_dim), float32, float16 or bfloat16
            For each token the latent, normalised as in the model, then the rotary part, rotated for its position.
        """
        self._storage.append(layer, latent, None)

    def append_kv(self, layer: int, k: ArrayLike, v: ArrayLike, down_k: ArrayLike, down_v: ArrayLike) -> None:
        """Store tokens given as keys and values of all heads, through down-projections.

        The latent is the sum of the projected keys and the projected values. `get_kv` does the reverse.

        Parameters
        ----------
        layer : int
        k : array of shape (num_tokens, num_heads, k_dim + rope_dim)
            The last `rope_dim` elements are the rotary part, the same in all heads; otherwise a ValueError.
        v : array of shape (num_tokens, num_heads, v_dim)
        down_k : array of shape (num_heads, k_dim, latent_dim)
        down_v : array of shape (num_heads, v_dim, latent_dim)
            All arrays are float32, float16 or bfloat16.
        """
        k, v, down_k, down_v = _floats(k, "k"), _floats(v, "v"), _floats(down_k, "down_k"), _floats(down_v, "down_v")
        tokens, heads, width = k.shape
        k_dim, v_dim = width - self.rope_dim, v.shape[2]
        expected = {"v": (tokens, heads, v_dim), "down_k": (heads, k_dim, self.latent_dim), "down_v": (heads, v_dim, self.latent_dim)}
        for (name, shape), array in zip(expected.items(), (v, down_k, down_v)):
            if array.shape != shape:
                raise DimensionMismatchError(
                    f"{name} must have shape {shape}, as k has {k.shape} and rows have {self.latent_dim} "
                    f"+ {self.rope_dim} elements, got {array.shape}"
                )
        rope = k[:, :1, k_dim:]
        if not np.array_equal(np.broadcast_to(rope, (tokens, heads, self.rope_dim)), k[:, :, k_dim:], equal_nan=True):
            raise ValueError(f"the last {self.rope_dim} elements of k must be the same in all heads: they are one rotary part")
        latent = k[:, :, :k_dim].reshape(tokens, -1) @ down_k.reshape(-1, self.latent_dim)
        latent += v.reshape(tokens, -1) @ down_v.reshape(-1, self.latent_dim)
        self.append(layer, np.concatenate((latent, rope[:, 0]), axis=1))

    def get_latent(self, layer: int) -> NDArray[np.float32]:
        """The decoded rows of a layer, including tokens that are not yet advanced: a copy of shape (layer_length(layer), latent_dim +
        rope_dim), float32."""
        return np.concatenate([one[:, 0] for one in self._decoded(layer)], axis=1)

    def get_kv(self, layer: int, up_k: ArrayLike, up_v: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Decode a layer to the keys and values of all heads, through up-projections.

        Parameters
        ----------
        layer : int
        up_k : array of shape (latent_dim, num_heads, k_dim)
        up_v : array of shape (latent_dim, num_heads, v_dim)

        Returns
        -------
        k : ndarray of shape (layer_length(layer), num_heads, k_dim + rope_dim), float32
            The rotary part comes last, and is the same in all heads.
        v : ndarray of shape (layer_length(layer), num_heads, v_dim), float32
        """
        up_k, up_v = _floats(up_k, "up_k"), _floats(up_v, "up_v")
        for name, array in (("up_k", up_k), ("up_v", up_v)):
            if array.shape[:2] != (self.latent_dim, up_k.shape[1]):
                raise DimensionMismatchError(f"{name} must have shape ({self.latent_dim}, {up_k.shape[1]}, dim), got {array.shape}")
        latent, rope = self._decoded(layer)
        with np.errstate(over="ignore", invalid="ignore"):  # which is found below
            k, v = (np.tensordot(latent[:, 0], up, 1) for up in (up_k, up_v))
        if not (np.isfinite(k).all() and np.isfinite(v).all()):
            raise NonFiniteInputError(
                "latents and up-projections are not finite, or too large together: keys or values are beyond float32"
            )
        return np.concatenate((k, np.broadcast_to(rope, (*k.shape[:2], self.rope_dim))), axis=2), v

    def top_k(self, layer: int, q: ArrayLike, weights: ArrayLike, k: int, *, num_threads: int | None = None) -> NDArray[np.int64]:
        """The best positions for the last tokens by an indexer, whose keys are the rows of a layer, for the `indices` of `attend`.

        The score of a position is ``sum over heads h of weights[h] * max(q[h] . row, 0)``, the lightning indexer of DeepSeek-V3.2
        (arXiv 2512.02556). A positive factor in it changes nothing. The cache of an indexer has no rotary part: make it with
        ``rope_dim=0``.

        Parameters
        ----------
        layer : int
        q : array of shape (num_tokens, num_heads, latent_dim), float32, float16 or bfloat16
            Queries of the indexer for the last `num_tokens` tokens of the layer (append their keys first). Each sees the keys up to
            its own.
        weights : array of shape (num_tokens, num_heads), float32, float16 or bfloat16
        k : int
        num_threads : int, optional
            As in `KVCache.attend`.

        Returns
        -------
        ndarray of shape (num_tokens, k), int64
            Positions in ascending order, then -1 where a query sees fewer than `k`. Where scores are the same, lower positions come in.

        Examples
        --------
        >>> import kvfast, numpy as np
        >>> keys = kvfast.MLAKVCache(num_layers=1, latent_dim=4, rope_dim=0, dtype="float32")
        >>> keys.append(0, np.float32([[3, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [3, 0, 0, 0], [2, 0, 0, 0]]))
        >>> keys.top_k(0, np.float32([[[1, 0, 0, 0]]]), np.float32([[1]]), 3)
        array([[0, 3, 4]])
        """
        check_indexer(self.rope_dim)
        return self._storage.top_k(layer, q, weights, k, num_threads)

    @property
    def latent_dim(self) -> int:
        return self._storage.head_dim

    @property
    def rope_dim(self) -> int:
        return self._storage.rope_dim


def _floats(array, name):
    """An array of three dimensions as float32."""
    array = as_floats(array, name)
    if array.ndim != 3 or array.size == 0:
        raise DimensionMismatchError(f"{name} must have 3 dimensions, each at least 1, got shape {array.shape}")
    return as_float32(array, name)
