"""How the heads of a `MultiHeadKVCache` store their vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvfast.codec.dtypes import CODEBOOKS, DTYPE_TABLE, dtype_row
from kvfast.codec.formats import KVFormat
from kvfast.core.checks import check_choice, check_flag, check_size
from kvfast.core.limits import MAX_HEAD_DIM, MAX_Q_HEADS
from kvfast.core.text import shown

_BITS = [row.bits for row in DTYPE_TABLE if row.name.startswith("int")]


@dataclass(frozen=True)
class MultiHeadConfig:
    """How each head of a `MultiHeadKVCache` stores its vectors.

    Parameters
    ----------
    head_dim : int
        1 to 512; a multiple of 16 is stored without padding.
    bits : int or (int, int)
        Bits per element, 2 to 8: one number for keys and values, or one for each.
    rotation : bool
        Rotate vectors by a randomised Hadamard transform before encoding, so that their elements are close to Gaussian and
        have no outliers (QuaRot, arXiv 2404.00456; TurboQuant, arXiv 2504.19874).
    codebook : {"gaussian", "uniform"}
        Levels for 2 to 5 bits: those with the least squared error for a Gaussian (Lloyd-Max), or evenly spaced. With 6 bits
        or more, both are evenly spaced over the vector's own range, which is as good.
    num_q_heads : int, optional
        A multiple of the cache's heads; by default the same number. Query head i reads head
        ``i // (num_q_heads // num_heads)``.
    seed : int
        Seed of the signs of the transform, which differ between heads; below 2**64.

    Raises
    ------
    ValueError, TypeError
    """

    head_dim: int
    bits: int | tuple[int, int] = 4
    rotation: bool = True
    codebook: str = "gaussian"
    num_q_heads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_size(self.head_dim, "head_dim", 1, MAX_HEAD_DIM)
        if isinstance(self.bits, (tuple, list)):
            if len(self.bits) != 2:
                raise ValueError(f"bits must be one number, or two for keys and values, got {shown(self.bits)}")
            object.__setattr__(self, "bits", tuple(self.bits))
        for bits in self.bits if isinstance(self.bits, tuple) else (self.bits,):
            check_size(bits, "bits", min(_BITS), max(_BITS))
        object.__setattr__(self, "rotation", check_flag(self.rotation, "rotation"))
        check_choice(self.codebook, "codebook", CODEBOOKS, '"gaussian" or "uniform"')
        if self.num_q_heads is not None:
            check_size(self.num_q_heads, "num_q_heads", 1, MAX_Q_HEADS)
        if isinstance(self.seed, bool) or not isinstance(self.seed, (int, np.integer)) or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be an integer between 0 and 2**64 - 1, got {shown(self.seed)}")

    @property
    def format(self) -> KVFormat | tuple[KVFormat, ...]:
        """The `KVFormat` of the vectors."""
        k, v = self.bits if isinstance(self.bits, tuple) else (self.bits, self.bits)
        rows = [dtype_row(f"int{bits}", self.codebook) for bits in (k, v)]
        return KVFormat(
            f"int{k}/int{v}",
            rotation="kv" if self.rotation else "",
            codebook=self.codebook if any(self.codebook in row.codebooks for row in rows) else "uniform",
            clip_search=any("clip_search" in row.options for row in rows),
        )


def signs_of(seed: Any, num_heads: int, head_dim: int) -> Any:
    """Signs -1 and 1 of shape (num_heads, head_dim): a pseudo-random function of seed, head and element (SplitMix64)."""
    with np.errstate(over="ignore"):
        step = np.uint64(0x9E3779B97F4A7C15)
        heads = _mixed(np.uint64(seed) + step * np.arange(1, num_heads + 1, dtype=np.uint64))
        bits = _mixed(heads[:, None] + step * np.arange(1, head_dim + 1, dtype=np.uint64))
    return np.where(bits >> np.uint64(63), np.float32(-1), np.float32(1))


def _mixed(x):
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
