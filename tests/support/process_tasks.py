"""What children of tests do: in a module that they find by its name, however pytest was started."""

import numpy as np
from cache_kinds import fill

import kvfast

CACHES = {}  # of the parent, for the children that are forked


def filled(seed, dtype="int4", tokens=3000):
    return fill(kvfast.KVCache(1, 4, 64, dtype=dtype), np.random.default_rng(seed), tokens)


def queries(seed=0):
    return np.random.default_rng(seed).standard_normal((8, 16, 64), np.float32)


def attend(i, seed=0):
    """In a child: attention on a cache that the parent has made, or where it is not there on one like it."""
    cache = CACHES[i] if i in CACHES else filled(i)
    return cache.attend(0, queries(seed), num_threads=2)
