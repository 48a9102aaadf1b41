"""Rotary position embedding (arXiv 2104.09864): its parameters, and tables of cosines and sines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvfast.core.checks import check_flag, check_positive, check_size
from kvfast.core.interchange import as_array
from kvfast.core.text import shown


@dataclass(frozen=True)
class Rope:
    """How a model rotates its queries and keys, for `KVCache.splice`, `KVCache.drop` and `RingKVCache`.

    Parameters
    ----------
    theta : float
        Pair i is rotated by ``theta ** (-2 * i / rotary_dim)`` radians per position.
    rotary_dim : int, optional
        Number of first dimensions that are rotated, even; `head_dim` by default.
    frequencies : sequence of float, of length rotary_dim // 2, optional
        Radians per position for each pair, instead of `theta` and `rotary_dim`: for models that scale them.
    interleaved : bool
        Rotate dimension 2i with 2i + 1 (Llama in GGUF) instead of i with i + rotary_dim // 2 (Hugging Face).

    Raises
    ------
    ValueError
        For a number out of range.

    Examples
    --------
    >>> import kvfast
    >>> kvfast.Rope(theta=500000.0)
    Rope(theta=500000.0, rotary_dim=None, frequencies=None, interleaved=False)
    """

    theta: float = 10000.0
    rotary_dim: int | None = None
    frequencies: Sequence[float] | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        check_positive(self.theta, "theta", "number", finite=True)
        check_flag(self.interleaved, "interleaved")
        if self.rotary_dim is not None and check_size(self.rotary_dim, "rotary_dim", 2, 1 << 20) % 2:
            raise ValueError(f"rotary_dim must be even, got {self.rotary_dim}")
        if self.frequencies is not None:
            given = as_array(self.frequencies, "frequencies")
            if given.ndim != 1 or not given.size or given.dtype.kind not in "iuf" or not (abs(given) <= 1e6).all():
                raise ValueError(f"frequencies must be a sequence of numbers of at most 1e6, got {shown(self.frequencies)}")
            object.__setattr__(self, "frequencies", tuple(given.astype(float).tolist()))


def frequencies_of(rope, head_dim):
    """Radians per position of each rotated pair of a head, as a tuple; ValueError if they do not fit it."""
    frequencies = rope.frequencies
    if frequencies is None:
        rotary_dim = head_dim // 2 * 2 if rope.rotary_dim is None else rope.rotary_dim
        frequencies = tuple((float(rope.theta) ** (-np.arange(0, rotary_dim, 2) / rotary_dim)).tolist()) if rotary_dim else ()
    if not 1 <= len(frequencies) <= head_dim // 2:
        raise ValueError(f"rope must rotate 1 to {head_dim // 2} pairs of the head_dim {head_dim}, got {len(frequencies)}")
    return frequencies


class RotaryTables:
    """Cosines and sines of positions, cached for the layers that ask for the same ones one after the other. Pair i is rotated by
    ``frequencies[i]`` radians per position."""

    def __init__(self, frequencies):
        self.frequencies = np.asarray(frequencies, np.float64)
        self._recent = {}

    def __call__(self, first, count, most=None):
        """Cosines and sines of `count` positions from `first` on, each at most `most`: float32 of shape (count, len(frequencies))."""
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
