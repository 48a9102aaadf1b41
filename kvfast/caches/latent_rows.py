"""Latent rows, each a latent followed by a rotary part: properties that all their caches share."""

from kvfast.core.interchange import as_array
from kvfast.errors import DimensionMismatchError


class LatentRows:
    """Shapes and sizes of latent rows."""

    __slots__ = ()

    def _check_indexer(self):
        """Refuse rows with a rotary part: an indexer has keys without one."""
        if self.rope_dim:
            raise ValueError(f"top_k needs rows without a rotary part, made with rope_dim=0, got rope_dim {self.rope_dim}")

    def _row_parts(self, latent):
        """Latents and rotary parts of tokens, (num_tokens, 1, dim). The second is None if rope_dim is 0."""
        rows = as_array(latent, "latent")
        if rows.ndim != 2 or rows.shape[1] != self.head_dim or len(rows) == 0:
            raise DimensionMismatchError(
                f"latent must have shape (num_tokens, {self.latent_dim} + {self.rope_dim}) and at least one token, got {rows.shape}"
            )
        return self._parts(rows[:, None])

    def _parts(self, rows):
        return rows[..., : self.latent_dim], rows[..., self.latent_dim :] if self.rope_dim else None

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

    def _shape(self):
        return f"{self.dtype_name}, {self.num_layers} layers x ({self.latent_dim} + {self.rope_dim})"
