"""Caches whose keys and values tell their tokens, also for processes of their own."""

import numpy as np

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


def filled(token_ids, **settings):
    return extend(kvfast.KVCache(2, 2, 20, **settings), token_ids)


def holds(cache, token_ids):
    """Whether a cache is what computing the tokens would make."""
    return cache.snapshot() == filled(token_ids, k_dtype=cache.k_dtype, v_dtype=cache.v_dtype).snapshot()


def work(folder, seed):
    rng, prompts, found = np.random.default_rng(seed), kvfast.PromptCache(folder, max_bytes=100_000), 0
    for _ in range(40):
        token_ids = [int(rng.integers(3))] * int(rng.integers(1, 120)) + [int(rng.integers(5))]
        cache = kvfast.KVCache(2, 2, 20)
        count = prompts.restore(cache, token_ids)
        assert holds(cache, token_ids[:count])
        found += count > 0
        prompts.save(extend(cache, token_ids[count:]), token_ids)
    return found
