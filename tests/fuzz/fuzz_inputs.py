"""What `fuzz_caches` gives to caches: random formats, rows, and queries, in any dtype and layout."""

import contextlib
import copy
from dataclasses import replace

import ml_dtypes
import numpy as np

from kvfast import KVFormat

DIMS = [1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 20, 24, 31, 32, 33, 40, 48, 63, 64, 64, 64, 65, 80]
LARGE_DIMS = [96, 100, 112, 128, 128, 128, 192, 255, 256, 320, 511, 512]
NAMES = ["int4", "k8v4", "int8", "int8-plain", "int4-plain", "float32", "float16", "bfloat16"]
NAMES += ["int2-plain", "int3-plain", "int5", "int6", "int7"]
OFTEN = ["int4", "int4", "k8v4", "int8", "float32"]
FLAVOURS = ["plain", "plain", "loud", "loud", "peaked", "constant", "zeros", "denormal", "tiny", "large"]


def one_of(rng, values):
    return values[rng.integers(len(values))]


def often(rng, share):
    return rng.random() < share


def random_dim(rng):
    return int(one_of(rng, LARGE_DIMS if often(rng, 0.05) else DIMS))


def random_dims(case):
    """Widths of keys and of values, mostly the same."""
    dim = random_dim(case.rng)
    return dim, random_dim(case.widths) if often(case.widths, 0.3) else dim


def random_format(rng, latent=False):
    """A preset, a storage dtype or two, or a KVFormat of random parts."""
    if often(rng, 0.4):
        return KVFormat.of(one_of(rng, OFTEN if often(rng, 0.6) else NAMES))
    for _ in range(1000):
        k, v = one_of(rng, NAMES[4:]), one_of(rng, NAMES[4:])
        k, v = ("int8" if often(rng, 0.3) else one.removesuffix("-plain") for one in (k, v))
        parts = {
            "rotation": one_of(rng, ["", "k", "v", "kv"]),
            "codebook": one_of(rng, ["uniform", "gaussian"]),
            "clip_search": often(rng, 0.2),
        }
        if not latent:
            finishing = int(rng.integers(4))
            parts |= {"centring": finishing == 1, "per_channel": finishing == 2}
            parts["num_first_float_tokens"] = int(one_of(rng, [0, 0, 1, 3, 4, 5, 15, 16]))
        with contextlib.suppress(ValueError):
            return KVFormat(f"{k}/{v}", **parts)
    raise RuntimeError("no format was good")


def random_formats(rng, layers, latent=False):
    """A format for each layer; those that finish have blocks of one size."""
    first, block = random_format(rng, latent), int(one_of(rng, [32, 32, 64, 64, 128, 256]))
    formats = [first if often(rng, 0.6) else random_format(rng, latent) for _ in range(layers)]
    if latent:  # what the preset is of rows that are keys and values at once
        return [KVFormat("int4", rotation="kv", codebook="gaussian", clip_search=True) if one.open_tokens else one for one in formats]
    # From a copy, so that the cases that found something stay what they were.
    later = copy.deepcopy(rng)
    recent = int(one_of(later, [16, 0, 32, 0, 64, 128, 0, 0, 0, 0, 0]))
    if recent:
        own = [int(one_of(later, [recent, 16, 96])) for _ in formats] if often(later, 0.5) else [recent] * layers
        formats = [replace(one, num_recent_float_tokens=n) if "int" in one.dtype else one for n, one in zip(own, formats)]
    return [replace(one, block_size=block) if one.seals else one for one in formats]


def told(form):
    """A format without what makes no difference in kind."""
    kinds = ["float32" if one == "float32" else "halves" if "float" in one else "int" for one in (form.k_dtype, form.v_dtype)]
    parts = ["/".join(kinds), *(name for name in ("per_channel", "centring") if getattr(form, name))]
    return " ".join(parts + ["float tokens"] * bool(form.num_first_float_tokens))


class Rows:
    """Where keys, values and queries of one sequence come from."""

    def __init__(self, rng, formats, layers, heads, k_dim, v_dim):
        self.rng, self.layers, self.heads, self.dims = rng, layers, heads, (k_dim, v_dim)
        # Processors take long with denormals, which a long row is not needed for.
        self.flavour = str(one_of(rng, [one for one in FLAVOURS if one != "denormal" or k_dim <= 64]))
        half = any(one.open_tokens or one.num_first_float_tokens or "float16" in one.dtype for one in formats)
        self.size = {"tiny": 1e-18, "large": 3e3 if half else 1e12, "denormal": 1e-41}.get(
            self.flavour, float(one_of(rng, [1, 1, 1, 0.1, 8]))
        )
        self.loud = float(one_of(rng, [1.5, 3, 5, 10, 20, 40]))
        self.channel = int(rng.integers(k_dim))
        self.constant = float(rng.integers(1, 2000))
        self.hot = rng.standard_normal(k_dim).astype(np.float32)
        self.of_hot = float(one_of(rng, [0, 1e-3, 1]))

    def take(self, n):
        """Keys and values of n tokens: a list with a pair of (n, heads, dim) for each layer."""
        return [self._layer(n) for _ in range(self.layers)]

    def _layer(self, n):
        k, v = (self.rng.standard_normal((n, self.heads, dim), np.float32) for dim in self.dims)
        if self.flavour == "loud":
            k[:, :, self.channel] *= self.loud
            if often(self.rng, 0.3):
                k[:, :, self.channel] += 2 * self.loud
        elif self.flavour == "constant":
            k[...], v[...] = k * 0.01 + 1, self.constant
        elif self.flavour == "zeros":
            k *= self.rng.random((n, self.heads, 1)) < 0.5
            v *= self.rng.random((n, self.heads, 1)) < 0.5
        elif self.flavour == "peaked" and n:
            for at in self.rng.integers(n, size=1 + n // 100):
                k[at] = self.hot * (10 / max(np.linalg.norm(self.hot), 1))
                v[at] *= self.of_hot
        if self.flavour != "constant":
            k, v = k * np.float32(self.size), v * np.float32(self.size)
        return k, v

    def queries(self, n, num_q_heads, rows):
        """Queries whose scores with keys and values as these are neither huge nor nothing."""
        q = self.rng.standard_normal((n, num_q_heads, self.dims[0]), np.float32)
        if self.flavour == "peaked" and often(self.rng, 0.7):
            q = self.hot + 0.2 * q
        return q * fitting(rows[0]) * np.float32(one_of(self.rng, [1, 1, 0.3, 3]))


def fitting(k):
    """What queries are to be multiplied by for keys that are larger or smaller than usual."""
    size = float(np.abs(k).max(initial=0))
    return np.float32(1 if 1e-2 < size < 100 else 1 / min(max(size, 1e-18), 1e18))


def as_given(rng, rows, dtypes=True):
    """The same rows in one of the dtypes and layouts that a caller may have, and what they are then."""
    way = int(rng.integers(12))
    if way < 2 and not dtypes:
        pass
    elif way == 0 and np.abs(rows).max(initial=0) < 6e4:
        rows = rows.astype(np.float16)
    elif way == 1:
        rows = rows.astype(ml_dtypes.bfloat16)
    given = rows
    if way == 2:
        given = np.ascontiguousarray(rows[::-1])[::-1]
    elif way == 3 and rows.ndim == 3:
        given = np.ascontiguousarray(rows.swapaxes(0, 1)).swapaxes(0, 1)
    elif way == 4:
        given = np.asfortranarray(rows)
    elif way == 5 and rows.ndim == 3:
        given = np.concatenate([rows, rows], axis=2)[:, :, : rows.shape[2]]
    elif way == 6:
        given = rows.copy()
        given.flags.writeable = False
    return given, np.asarray(rows, np.float32)


def random_choice(rng, length, n, heads, sliding_window=None, num_sink_tokens=0, attention_chunk_size=None, causal=True, **others):
    """Options of `attend`: some of the positions that each of the last `n` queries sees, or some of their runs."""
    run, heads, held = int(one_of(rng, [1, 16])), int(one_of(rng, [1, heads])), np.arange(length)
    choices = np.full((n, heads, int(one_of(rng, [1, 5, 40, 300]))), -1)
    for i, at in enumerate(range(length - n, length)):
        first = max(at + 1 - sliding_window if sliding_window else 0, 0)
        if attention_chunk_size:
            first = max(first, at // attention_chunk_size * attention_chunk_size)
        seen = (held >= first) | (held < (num_sink_tokens or 0))
        runs = np.unique(held[seen & (held <= at) if causal else seen] // run * run)
        for head in range(heads):
            some = rng.choice(runs, min(len(runs), choices.shape[2], int(rng.integers(1, 400))), replace=False)
            choices[i, head, rng.permutation(choices.shape[2])[: len(some)]] = some
    return {"indices": choices[:, 0] if heads == 1 else choices, "index_block": run}
