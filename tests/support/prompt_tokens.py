"""Caches whose keys and values tell their tokens, also for processes of their own."""

import contextlib
import time
import warnings

import numpy as np
from cache_kinds import close

import kvfast


def rows_of(token):
    """Keys and values that tell their token."""
    return np.random.default_rng(token).standard_normal((2, 1, 2, 20)).astype(np.float32)


def extend(cache, token_ids):
    for token in token_ids:
        k, v = rows_of(token)
        for layer in range(cache.num_layers):
            cache.append(layer, k + layer, v)
        cache.advance(1)
    return cache


def filled(token_ids, dtype="int8-rotated"):
    return extend(kvfast.KVCache(2, 2, 20, dtype=dtype), token_ids)


def holds(cache, token_ids):
    """Whether a cache is what computing the tokens would make."""
    return cache.snapshot() == filled(token_ids, cache.format).snapshot()


def resembles(cache, token_ids):
    """Whether a cache holds the tokens, as well as its format can tell them."""
    return len(cache) == len(token_ids) and all(
        close(side(layer)[at], given + bias)
        for at, token in enumerate(token_ids)
        for layer in range(cache.num_layers)
        for side, given, bias in zip((cache.k, cache.v), rows_of(token)[:, 0], (layer, 0))
    )


def use_store(store, seed, seconds, seen):
    """Histories on a shared store until the time is over. Counts the prompts that were found."""
    rng, end = np.random.default_rng(seed), time.monotonic() + seconds
    dtype = "int4" if seed % 2 else "int8-rotated"
    warnings.simplefilter("ignore")
    with kvfast.PromptCache(store, max_bytes=None if "://" in store else 400_000, chunk_tokens=64, time_limit=2.0) as prompts:
        while time.monotonic() < end:
            tokens = [int(rng.integers(3))] * int(rng.integers(1, 300)) + [int(rng.integers(5))]
            cache = kvfast.KVCache(2, 2, 20, dtype=dtype)
            count = prompts.restore(cache, tokens)
            assert (resembles if dtype == "int4" else holds)(cache, tokens[:count])
            prompts.save(extend(cache, tokens[count:]), tokens)
            with seen.get_lock():
                seen.value += count > 0


@contextlib.contextmanager
def only_warnings(count=None):
    """What goes wrong is said by RuntimeWarning, once for each cause."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    texts = [str(one.message) for one in caught]
    assert len(texts) == len(set(texts)) and all(issubclass(one.category, RuntimeWarning) for one in caught)
    assert count is None or len(texts) == count, texts
