"""Principal directions of the vectors of each head."""

import numpy as np

from kvfast.core.limits import FEW_QUERIES
from kvfast.errors import CorruptFileError


class Basis:
    """A mean and directions for each head; its vectors are ``x = mean + coordinates @ lift``.

    `mean` is (heads, head_dim), float32. `lift` holds the directions as they are stored, nearly orthonormal: (heads, rank,
    head_dim), float16 or float32. Coordinates are fitted to the stored directions by least squares, so storing them as float16
    costs almost no accuracy.
    """

    def __init__(self, mean, lift):
        self.mean, self.lift = mean, lift
        self._lift = lift.astype(np.float32, copy=False)
        self._project = None

    @classmethod
    def fit(cls, x, rank, centred=True, dtype=np.float16):
        """Find the best directions for vectors (heads, tokens, head_dim), float32; `centred` subtracts the mean first."""
        mean = x.mean(axis=1, dtype=np.float64) if centred else np.zeros(x.shape[::2])
        directions = np.empty((len(x), rank, x.shape[2]), dtype)
        for head, row, target in zip(x, mean, directions):
            target[...] = eigen(head, row)[1][:rank]
        return cls(mean.astype(np.float32), directions)

    def coordinates(self, x):
        """Coordinates of vectors (heads, tokens, head_dim): float32 of shape (heads, tokens, rank)."""
        if self._project is None:
            self._project = np.linalg.pinv(self.lift.astype(np.float64)).astype(np.float32)
        return np.matmul(x - self.mean[:, None], self._project)

    def vectors(self, coordinates):
        """Vectors of coordinates (heads, tokens, rank): float32 of shape (heads, tokens, head_dim)."""
        return np.matmul(coordinates, self._lift) + self.mean[:, None]

    def of_queries(self, q, group):
        """Transform queries (num_tokens, heads * group, head_dim) so that they can be multiplied by coordinates of keys.

        Returns the coordinates (num_tokens, heads, group, rank), and the products of the queries with the mean.
        """
        q = q.reshape(len(q), len(self.mean), group, -1)
        return by_token(q, self._lift.swapaxes(1, 2)), by_token(q, self.mean[..., None])[..., 0]

    def of_outputs(self, out, group):
        """Transform outputs in coordinates, (num_tokens, heads * group, rank), to vectors."""
        out = by_token(out.reshape(len(out), len(self.mean), group, -1), self._lift)
        return (out + self.mean[:, None]).reshape(len(out), -1, self.mean.shape[1])

    @property
    def rank(self):
        return self.lift.shape[1]

    @property
    def nbytes(self):
        return self.mean.nbytes + self.lift.nbytes

    def arrays(self):
        return {"mean": self.mean, "lift": self.lift}

    @classmethod
    def open(cls, arrays, heads, rank, head_dim, dtype=np.float16):
        """Read a basis from `arrays`, whose ``take`` checks each array."""
        mean = arrays.take("mean", np.float32, (heads, head_dim))
        lift = arrays.take("lift", dtype, (heads, rank, head_dim))
        if not (np.isfinite(mean).all() and np.isfinite(lift).all()):
            raise CorruptFileError("a basis must be finite")
        return cls(mean, lift)


def by_token(x, matrices):
    """``x @ matrices`` for (num_tokens, heads, group, n) and (heads, n, m). Up to `FEW_QUERIES` tokens get the same bits
    as each token alone."""
    if len(x) > FEW_QUERIES:
        return np.matmul(x, matrices)
    return np.stack([np.matmul(one, matrices) for one in x])


def eigen(x, mean=0.0):
    """Principal directions of vectors (tokens, head_dim), in float64.

    Returns mean squares along the directions, the largest first, and the directions, one per row.
    """
    x = x.astype(np.float64) - mean
    moments, directions = np.linalg.eigh(x.T @ x / len(x))
    return np.maximum(moments[::-1], 0.0), directions.T[::-1]


def rank_of_energy(moments, energy):
    """Smallest n for which the n largest moments hold this share of the sum of all moments; at least 1."""
    held = np.cumsum(moments)
    if not held[-1] > 0:
        return 1
    return int(np.searchsorted(held, energy * held[-1] * (1 - 1e-12))) + 1
