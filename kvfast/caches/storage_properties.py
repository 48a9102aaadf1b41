"""Properties for sizes and dtypes, shared by every kind of cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from kvfast.core.text import each, same_or_tuple
from kvfast.storage.kinds import decoded

if TYPE_CHECKING:
    from kvfast.codec.formats import KVFormat


class StorageProperties:
    """Sizes and dtypes of ``_storage``, of a sequence or of a pool."""

    __slots__ = ()

    @property
    def num_layers(self) -> int:
        return self._storage.num_layers

    @property
    def num_kv_heads(self) -> int | tuple[int, ...]:
        """A number, or a tuple of one per layer where layers differ."""
        return self._storage.num_kv_heads

    @property
    def head_dim(self) -> int | tuple[int, ...]:
        """A number, or a tuple of one per layer where layers differ; latent_dim + rope_dim for latent rows."""
        return self._storage.head_dim + self._storage.rope_dim if self._storage.rope_dim else self._storage.head_dim

    @property
    def v_head_dim(self) -> int | tuple[int, ...]:
        """head_dim of the values: a number, or a tuple of one per layer where layers differ."""
        return self._storage.v_head_dim

    @property
    def entry_size(self) -> int | tuple[int, ...]:
        """Elements of one token's keys in one layer: num_kv_heads * head_dim; a tuple of one per layer where layers differ."""
        heads, dims = (one if isinstance(one, tuple) else (one,) * self.num_layers for one in (self.num_kv_heads, self.head_dim))
        return same_or_tuple([number * dim for number, dim in zip(heads, dims)])

    @property
    def sliding_window(self) -> int | None | tuple[int | None, ...]:
        """Tokens that a query sees, itself included, or None for all; a tuple with one per layer where layers differ."""
        return same_or_tuple(self._settings.get("windows", [None]))

    @property
    def num_sink_tokens(self) -> int:
        """Number of first tokens that layers with a window always keep."""
        return self._settings.get("num_sink_tokens", 0)

    @property
    def rollback(self) -> int | None:
        """Number of tokens that `truncate` can go back from the longest that a sequence has been; None for any number."""
        return self._settings.get("rollback")

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._storage.block_size

    @property
    def secure(self) -> bool:
        """Whether memory is overwritten before it is given back."""
        return self._storage.secure

    @property
    def nbytes(self) -> int:
        """Bytes reserved for keys and values, scales and padding included, and for the states of checkpoints."""
        return self._storage.nbytes

    @property
    def nbytes_used(self) -> int:
        """Bytes of the blocks that hold tokens, with all that is stored for these tokens."""
        return self._storage.nbytes_used

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers, including scales, padding and its share of a block's statistics. Tokens that
        are float rows take more; see `KVFormat`."""
        return self._storage.bytes_per_token

    @property
    def k_dtype(self) -> str | tuple[str, ...]:
        """Storage dtype of the keys: a name, or a tuple of one per layer where layers differ."""
        return same_or_tuple([one.k_dtype for one in self._storage.formats])

    @property
    def v_dtype(self) -> str | tuple[str, ...]:
        """Storage dtype of the values; see `k_dtype`."""
        return same_or_tuple([one.v_dtype for one in self._storage.formats])

    @property
    def dtype(self) -> str | tuple[str, ...]:
        """Name of the storage format, ``"int4"`` or ``"int8/int4"`` for example, or a tuple of one per layer."""
        return same_or_tuple([str(one) for one in self._storage.formats])

    @property
    def format(self) -> KVFormat | tuple[KVFormat, ...]:
        """The `KVFormat`, or a tuple of one per layer where layers differ."""
        return same_or_tuple(self._storage.formats)

    @property
    def dtype_name(self) -> str:
        """`dtype` as one word, for logs: ``"mixed"`` where layers differ."""
        return self.dtype if isinstance(self.dtype, str) else "mixed"

    def _decoded(self, layer):
        """The two sides of a layer's tokens, float32 of shape (tokens, heads, dim)."""
        return decoded(self._settings, self._storage, layer)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be pickled; save() writes it to a file that is safe to load")

    def _shape(self):
        if self._storage.rope_dim is not None:
            return f"{self.dtype_name}, {self.num_layers} layers x ({self._storage.head_dim} + {self._storage.rope_dim})"
        dims = each(self.head_dim) if self.v_head_dim == self.head_dim else f"{each(self.head_dim)} and {each(self.v_head_dim)}"
        return f"{self.dtype_name}, {self.num_layers} layers x {each(self.num_kv_heads)} heads x {dims}"
