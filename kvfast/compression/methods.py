"""The methods that can compress keys and values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from numbers import Integral, Real

from kvfast.codec.formats import KVFormat
from kvfast.core.checks import check_size
from kvfast.core.limits import MAX_CENTROIDS, MAX_HEAD_DIM
from kvfast.core.text import shown


@dataclass(frozen=True)
class LowRank:
    """The best basis of a few directions for the keys of each head, and for its values.

    The discarded singular values give the error. No other basis of this rank has a smaller error.

    Parameters
    ----------
    rank : int, optional
        Number of directions, at most head_dim. A multiple of 16 is stored without padding.
    energy : float, optional
        Instead of `rank`: each head keeps as many directions as it needs to hold this share of the sum of squares.
    dtype : str, dtype or KVFormat
        Storage format of the coordinates, as in a `KVCache`.
    """

    rank: int | None = None
    energy: float | None = None
    dtype: str = "float16"

    def __post_init__(self) -> None:
        if (self.rank is None) == (self.energy is None):
            raise ValueError("LowRank needs either rank or energy")
        if self.rank is not None:
            _set(self, rank=check_size(self.rank, "rank", 1, MAX_HEAD_DIM))
        elif isinstance(self.energy, bool) or not isinstance(self.energy, Real) or not 0 < self.energy <= 1:
            raise ValueError(f"energy must be above 0 and at most 1, got {shown(self.energy)}")
        else:
            _set(self, energy=float(self.energy))
        _set(self, dtype=str(KVFormat.of(self.dtype)))


@dataclass(frozen=True)
class Hybrid:
    """Quantised low-rank coordinates, and exact tokens where quantisation would have large errors.

    Keys and values are stored relative to their means, at no cost for attention.

    Parameters
    ----------
    rank : int, optional
        Number of directions; by default head_dim, so that nothing is left out.
    quant_bits : {8, 4}, optional
        By default the `quant_bits` of the compressor.
    """

    rank: int | None = None
    quant_bits: int | None = None

    def __post_init__(self) -> None:
        if self.rank is not None:
            _set(self, rank=check_size(self.rank, "rank", 1, MAX_HEAD_DIM))
        _set(self, quant_bits=check_bits(self.quant_bits))


@dataclass(frozen=True)
class VectorQuantization:
    """Product quantisation: the principal coordinates of a head are cut into subvectors of about equal variance, and
    each subvector is stored as the index of its nearest centroid.

    Parameters
    ----------
    codebook_size : int
        Centroids of a subvector, 2 to 256, and no more than there are tokens. An index takes 4 bits for up to 16 centroids,
        otherwise 8.
    num_subvectors : int, optional
        By default a quarter of head_dim, which takes 2 bits per element with more than 16 centroids.
    seed : int
        Seed for the random choice of the first centroids. The same seed gives the same bytes.
    """

    codebook_size: int = 256
    num_subvectors: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _set(self, codebook_size=check_size(self.codebook_size, "codebook_size", 2, MAX_CENTROIDS))
        if self.num_subvectors is not None:
            _set(self, num_subvectors=check_size(self.num_subvectors, "num_subvectors", 1, MAX_HEAD_DIM))
        _set(self, seed=check_size(self.seed, "seed", 0, 1 << 62))


@dataclass(frozen=True)
class Quantize:
    """Quantisation without a basis, in a format of `KVCache`.

    Parameters
    ----------
    bits : {8, 4} or str, optional
        8 or 4 for ``"int8"`` or ``"int4"``, or the name of any format; by default the `quant_bits` of the compressor.
    """

    bits: int | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.bits, (str, KVFormat)):
            _set(self, bits=str(KVFormat.of(self.bits)))
        else:
            _set(self, bits=check_bits(self.bits))


METHODS = {one.__name__: one for one in (LowRank, VectorQuantization, Hybrid, Quantize)}


def check_bits(bits):
    """None, or 8 or 4 as an int."""
    if bits is None:
        return None
    if isinstance(bits, bool) or not isinstance(bits, Integral) or bits not in (8, 4):
        raise ValueError(f"bits must be 8 or 4, got {shown(bits)}")
    return int(bits)


def _set(method, **fields):
    """Set fields to plain numbers, which JSON can store."""
    for name, value in fields.items():
        object.__setattr__(method, name, value)


def method_to_dict(method):
    """A method as a dict for JSON."""
    return {"name": type(method).__name__} | asdict(method)


def method_from_dict(fields):
    """The method from the result of `method_to_dict`."""
    fields = dict(fields)
    return METHODS[fields.pop("name")](**fields)
