"""Product quantisation of the principal coordinates of each head."""

import numpy as np

from kvfast.compression import pq_training as codebook
from kvfast.compression.basis import Basis
from kvfast.compression.pq_attention import PQCodes
from kvfast.compression.pq_attention import attend as attend_codes
from kvfast.core.limits import LANES, MAX_FLOAT16
from kvfast.errors import CorruptFileError, NonFiniteInputError

# Largest number of tokens that codebooks are trained on, evenly spaced among all tokens.
TRAINED_TOKENS = 16384


class ProductStore:
    """Codes of keys and values, and the codebooks of each head."""

    def __init__(self, keys, values, subvectors):
        self.sides, self.subvectors = (keys, values), subvectors

    @classmethod
    def of(cls, k, v, method):
        """k, v: (heads, tokens, dim), float32. Random choices depend on the seed only."""
        sides = [_learned(x, method.num_subvectors, method.codebook_size, method.seed + i) for i, x in enumerate((k, v))]
        return cls(*sides, method.num_subvectors)

    @property
    def num_heads(self):
        return len(self.sides[0][0].mean)

    @property
    def num_tokens(self):
        return self.sides[0][1].codes.shape[1]

    @property
    def nbytes(self):
        return sum(array.nbytes for array in self.arrays().values())

    def attend(self, q, visible, scale, num_threads=None):
        """Like `CacheStore.attend`, but each count in `visible` may have any value."""
        (key_basis, keys), (value_basis, values) = self.sides
        group = q.shape[1] // self.num_heads
        out, lse = np.zeros(q.shape, np.float32), np.full(q.shape[:2], -np.inf, np.float32)
        first = int(np.searchsorted(visible, 1))  # the first query that sees a token
        if first < len(q):
            rotated, offsets = key_basis.of_queries(q[first:], group)
            inner, inner_lse = attend_codes(rotated.reshape(q[first:].shape), visible[first:], keys, values, scale, num_threads)
            out[first:] = value_basis.of_outputs(inner, group)
            lse[first:] = inner_lse + np.float32(scale) * offsets.reshape(inner_lse.shape)
        return out, lse

    def decode(self):
        return tuple(basis.vectors(codes_of_side.decode()) for basis, codes_of_side in self.sides)

    def settings(self):
        return {"subvectors": self.subvectors, "count": self.sides[0][1].count}

    def arrays(self):
        parts = {}
        for side, (basis, codes_of_side) in zip("kv", self.sides):
            parts |= {f"{side}.{name}": array for name, array in basis.arrays().items()}
            parts |= {
                f"{side}.centroids": codes_of_side.centroids,
                f"{side}.bounds": codes_of_side.bounds,
                f"{side}.codes": codes_of_side.codes,
            }
        return parts

    @classmethod
    def open(cls, arrays, settings, layout, num_tokens):
        subvectors, count, dim, heads = settings["subvectors"], settings["count"], layout.head_dim, layout.num_heads
        if subvectors > dim:
            raise CorruptFileError(f"a codebook of {dim} elements has at most as many subvectors, got {subvectors}")
        stride = subvectors if count > 16 else -(-subvectors // 2)
        sides = []
        for side in "kv":
            part = arrays.part(f"{side}.")
            basis = Basis.open(part, heads, dim, dim)
            centroids = part.take("centroids", np.float16, (heads, dim * count))
            bounds = part.take("bounds", np.int32, (heads, subvectors + 1))
            codes = part.take("codes", np.uint8, (heads, num_tokens, stride))
            sound = (bounds[:, 0] == 0).all() and (bounds[:, -1] == dim).all() and (bounds[:, 1:] > bounds[:, :-1]).all()
            if not sound or not np.isfinite(centroids).all() or unpacked(codes, subvectors, count).max() >= count:
                raise CorruptFileError(f"the codebooks of side {side} are invalid")
            sides.append((basis, PQCodes(centroids, bounds, codes, count)))
        return cls(*sides, subvectors)


def balanced(moments, subvectors):
    """Cut coordinates with these variances into subvectors of nearly equal sizes and about the same product of variances. For a
    Gaussian, this is the best cut if all subvectors have the same number of centroids (Ge et al., Optimized product
    quantization, 2013)."""
    dim = len(moments)
    rooms = [dim // subvectors + (i < dim % subvectors) for i in range(subvectors)]
    groups, totals = [[] for _ in rooms], np.zeros(subvectors)
    logs = np.log(np.maximum(moments, 1e-12 * max(moments.max(), 1e-30)))
    logs -= logs.min() - 1
    for i in np.argsort(-moments, kind="stable"):
        open_groups = [g for g, room in enumerate(rooms) if len(groups[g]) < room]
        g = min(open_groups, key=lambda g: totals[g] / rooms[g])
        groups[g].append(int(i))
        totals[g] += logs[i]
    return groups


def _learned(x, subvectors, count, seed):
    """Basis and codebooks of vectors (heads, tokens, dim)."""
    heads, tokens, dim = x.shape
    basis = Basis.fit(x, dim)
    coordinates = basis.coordinates(x)
    if abs(coordinates).max() > MAX_FLOAT16:
        most = abs(coordinates).max()
        raise NonFiniteInputError(f"vectors must be within the range of float16 codebooks (+-{MAX_FLOAT16:g}), got up to {most:g}")
    moments = coordinates.var(axis=1)
    bounds, order = np.zeros((heads, subvectors + 1), np.int32), np.empty((heads, dim), np.intp)
    for head in range(heads):
        groups = balanced(moments[head], subvectors)
        order[head] = np.concatenate(groups)
        bounds[head, 1:] = np.cumsum([len(group) for group in groups])
    basis = Basis(basis.mean, np.take_along_axis(basis.lift, order[..., None], axis=1))
    points = _padded(np.take_along_axis(coordinates, order[:, None], axis=2).swapaxes(1, 2))
    step = -(-tokens // TRAINED_TOKENS)
    some = points if step == 1 else _padded(points[:, :, :tokens:step])
    centroids = codebook.train(some, -(-tokens // step), bounds, count, seed)
    centroids = centroids.astype(np.float16)  # as they are stored, so that codes name the nearest stored centroids
    codes = codebook.encode(points, tokens, bounds, count, centroids.astype(np.float32))
    return basis, PQCodes(centroids, bounds, packed(codes, count), count)


def _padded(points):
    """A contiguous copy whose last axis is padded with zeros to whole vectors of the kernels."""
    filled = np.zeros((*points.shape[:2], -(-points.shape[2] // LANES) * LANES), np.float32)
    filled[:, :, : points.shape[2]] = points
    return filled


def packed(codes, count):
    """Codes (heads, tokens, subvectors) as they are stored."""
    if count > 16:
        return codes
    low, high = codes[..., ::2], codes[..., 1::2]
    stored = low.copy()
    stored[..., : high.shape[2]] |= high << 4
    return stored


def unpacked(stored, subvectors, count):
    if count > 16:
        return stored
    codes = np.empty((*stored.shape[:2], subvectors), np.uint8)
    codes[..., ::2] = stored & 15
    codes[..., 1::2] = stored[..., : subvectors // 2] >> 4
    return codes
