"""Tables of rotary position embedding (arXiv 2104.09864)."""

import numpy as np


class RotaryTables:
    """Cosines and sines of positions, cached for the layers that ask for the same ones one after the other.

    Parameters
    ----------
    rotary_dim : int
        Number of dimensions that are rotated, even.
    theta : float
        Pair i is rotated by ``theta ** (-2 * i / rotary_dim)`` radians per position.
    frequencies : array of shape (rotary_dim // 2,), optional
        Radians per position for each pair, instead of `theta`.
    """

    def __init__(self, rotary_dim, theta=10000.0, frequencies=None):
        if frequencies is None:
            frequencies = float(theta) ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
        self.frequencies = np.asarray(frequencies, np.float64)
        self._recent = {}

    def __call__(self, first, count, most=None):
        """Tables of `count` positions from `first` on, each at most `most`.

        Returns
        -------
        cos, sin : ndarrays of shape (count, rotary_dim // 2), float32
        """
        key = first, count, most
        tables = self._recent.get(key)
        if tables is None:
            if len(self._recent) > 8:
                self._recent.clear()  # by another thread, too, which must not find its own gone
            positions = np.arange(first, first + count)
            tables = self._recent[key] = self.at(positions if most is None else np.minimum(positions, most))
        return tables

    def at(self, positions):
        """Tables of any positions, as of a call."""
        # float64 angles: at position 8000 a float32 angle is already off by 5e-4 radians.
        angles = np.multiply.outer(positions, self.frequencies)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
