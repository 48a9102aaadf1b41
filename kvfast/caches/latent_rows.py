"""Rows of latents with a rotary part behind them: what all caches of them check and tell."""


from kvfast.caches.storage_properties import StorageProperties
from kvfast.codec.formats import PRESETS, KVFormat, formats_of
from kvfast.core.checks import check_size
from kvfast.core.interchange import as_array
from kvfast.errors import DimensionMismatchError

MOST_LATENT_DIM, MOST_ROPE_DIM = 512, 128

# A preset of keys and values as one of latent rows, where they cannot be the same: a row that is read as values cannot
# have a scale for each channel, nor tokens that are floats beside their codes.
_PRESETS = {PRESETS["int4"]: KVFormat("int4", rotation="kv", codebook="gaussian", clip_search=True)}


def checked_sizes(num_layers, latent_dim, rope_dim, dtype):
    """The sizes and the KVFormat of each layer; ValueError for what latent rows cannot be."""
    num_layers = check_size(num_layers, "num_layers", 1, 1 << 16)
    latent_dim = check_size(latent_dim, "latent_dim", 1, MOST_LATENT_DIM)
    rope_dim = check_size(rope_dim, "rope_dim", 0, MOST_ROPE_DIM)
    return num_layers, latent_dim, rope_dim, [latent_format(one) for one in formats_of(dtype, None, None, num_layers)]


def latent_format(fmt):
    """What a format is of latent rows; ValueError if it cannot be."""
    fmt = _PRESETS.get(fmt, fmt)
    if fmt.seals or fmt.num_float_tokens:
        raise ValueError(f"{fmt} is a format of keys and values apart: latent rows, which are both, have a scale per token, and "
                         "no tokens that stay floats")  # fmt: skip
    return fmt


class LatentRows(StorageProperties):
    """Shapes and sizes of latent rows."""

    __slots__ = ()

    def _row_parts(self, latent):
        """Latents and rotary parts of tokens, (num_tokens, 1, dim); the second None if there are none."""
        rows = as_array(latent, "latent")
        if rows.ndim != 2 or rows.shape[1] != self.head_dim or len(rows) == 0:
            raise DimensionMismatchError(f"latent must have shape (num_tokens, {self.latent_dim} + {self.rope_dim}) and at least "
                                         f"one token, got {rows.shape}")  # fmt: skip
        return self._parts(rows[:, None])

    def _query_parts(self, q):
        """The same of queries, (num_tokens, num_q_heads, dim)."""
        rows = as_array(q, "q")
        self._check_query_shape(rows.shape)
        return self._parts(rows)

    def _latent_shape(self, q_shape, num_q_heads):
        """Of queries, or what tells of them, their shape or their number, the same without the rotary part."""
        if getattr(q_shape, "ndim", 0):
            return self._query_parts(q_shape)[0]
        shape = q_shape if isinstance(q_shape, (tuple, list)) else (q_shape, num_q_heads, self.head_dim)
        self._check_query_shape(shape)
        return *shape[:2], self.latent_dim

    def _check_query_shape(self, shape):
        if len(shape) != 3 or shape[2] != self.head_dim:
            raise DimensionMismatchError(f"q must have shape (num_tokens, num_q_heads, {self.latent_dim} + {self.rope_dim}), "
                                         f"got {tuple(shape)}")  # fmt: skip

    def _parts(self, rows):
        return rows[..., : self.latent_dim], rows[..., self.latent_dim :] if self.rope_dim else None

    def _scale_or(self, scale):
        return self.head_dim**-0.5 if scale is None else scale

    @property
    def latent_dim(self) -> int:
        return self._storage.head_dim

    @property
    def rope_dim(self) -> int:
        return self._storage.rope_dim

    @property
    def head_dim(self) -> int:
        """Elements of a row, and of a query: latent_dim + rope_dim."""
        return self.latent_dim + self.rope_dim

    @property
    def entry_size(self) -> int:
        """Elements of one token in one layer: latent_dim + rope_dim."""
        return self.head_dim

    @property
    def bytes_per_element(self) -> float:
        """Bytes that one number of a row takes, scales and padding included."""
        return self.bytes_per_token / (self.num_layers * self.head_dim)

    def _shape(self):
        return f"{self.dtype_name}, {self.num_layers} layers x ({self.latent_dim} + {self.rope_dim})"
