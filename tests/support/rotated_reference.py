"""A spliced cache and what it should hold: keys that are rotated again in float64."""

import numpy as np
from reference import attention, bound, relative_error

HEADS, DIM = 2, 20


def frequencies(rope, dim=DIM):
    if rope is None:
        return np.empty(0)
    if rope.frequencies is not None:
        return np.array(rope.frequencies)
    rotary_dim = rope.rotary_dim or dim // 2 * 2
    return rope.theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)


def turn(x, positions, rope):
    """Rows x, (tokens, heads, dim), rotated by the angles of some positions, in float64."""
    x = np.array(x, np.float64)
    if rope is None:
        return x
    angles = np.multiply.outer(np.broadcast_to(positions, len(x)), frequencies(rope, x.shape[2]))[:, None]
    pairs = angles.shape[2]
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if rope.interleaved else (slice(pairs), slice(pairs, 2 * pairs))
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first] = a * np.cos(angles) - b * np.sin(angles)
    x[..., second] = a * np.sin(angles) + b * np.cos(angles)
    return x


class Model:
    """A cache, and for each of its tokens the row that the tests decode, with the position it was rotated for."""

    def __init__(self, cache, rope, seed=0):
        self.cache, self.rope, self.random = cache, rope, np.random.default_rng(seed)
        self.k, self.v = (np.empty((0, cache.num_kv_heads, dim), np.float32) for dim in (cache.head_dim, cache.v_head_dim))

    def append(self, n):
        """Append tokens whose keys are rotated for their positions, as a model does."""
        at = len(self.cache) + np.arange(n)
        shapes = [(n, self.cache.num_kv_heads, dim) for dim in (self.cache.head_dim, self.cache.v_head_dim)]
        k, v = (self.random.standard_normal(shape) for shape in shapes)
        k, v = turn(k, at, self.rope).astype(np.float32), v.astype(np.float32)
        for layer in range(self.cache.num_layers):
            self.cache.append(layer, k, v)
        self.cache.advance(n)
        self.k, self.v = np.concatenate((self.k, k)), np.concatenate((self.v, v))
        return self

    def splice(self, *others, recomputed=0):
        """Splice chunks, and rotate what was given for them again."""
        offset = len(self.cache) - recomputed
        self.cache.splice(*(other.cache for other in others), rope=self.rope, recomputed=recomputed)
        for k, v in [(other.k, other.v) for other in others]:
            moved = turn(k, offset, self.rope).astype(np.float32)
            self.k, self.v = np.concatenate((self.k, moved[recomputed:])), np.concatenate((self.v, v[recomputed:]))
            offset += len(k)
        return self

    def drop(self, first, last):
        self.cache.drop(first, last, rope=self.rope)
        behind = turn(self.k[last:], first - last, self.rope).astype(np.float32)
        self.k, self.v = np.concatenate((self.k[:first], behind)), np.concatenate((self.v[:first], self.v[last:]))
        return self

    def truncate(self, n):
        self.cache.truncate(n)
        self.k, self.v = self.k[:n], self.v[:n]
        return self

    def queries(self, n, group=3):
        q = np.random.default_rng(n).standard_normal((n, group * self.cache.num_kv_heads, self.cache.head_dim))
        return turn(q, len(self.cache) - n + np.arange(n), self.rope).astype(np.float32)

    def check(self, n=1, layer=0, num_splits=0, **options):
        """Check `attend` for the last n tokens against float64 over the decoded tokens, and these against what was given."""
        cache, form = self.cache, self.cache.format
        k, v = cache.k(layer), cache.v(layer)
        assert len(cache) == len(self.k) == len(k) == len(v)
        tolerance = error_of(form)
        assert relative_error(k.reshape(len(k), -1), self.k.reshape(len(k), -1)) < tolerance
        assert relative_error(v.reshape(len(v), -1), self.v.reshape(len(v), -1)) < tolerance
        q = self.queries(n)
        (out, lse), (expected, expected_lse) = (
            cache.attend(layer, q, return_lse=True, num_splits=num_splits, **options),
            attention(q, k, v, **options),
        )
        assert relative_error(out, expected) < bound(form.k_dtype, form.v_dtype)
        assert abs(lse - expected_lse).max() < 1e-3
        return out


def error_of(form):
    """How far a decoded token may be from what was given, whatever the format: the tests' bound is loose, as only places and
    rotations are under test here; a key in the wrong place is off by its whole length."""
    bits = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 2e-2, "int8": 5e-2, "int7": 0.1, "int6": 0.15, "int5": 0.3, "int4": 0.6}
    return max(bits.get(name, 0.9) for name in (form.k_dtype, form.v_dtype))
