"""The storage of a cache follows from its settings."""

import json

import cache_kinds
import numpy as np
import pytest

import kvfast
from kvfast.caches.buffer_layout import buffer_layout
from kvfast.caches.multi_head import MultiHeadConfig
from kvfast.caches.sequence_cache import settings_of, storage_in
from kvfast.files.state import json_of
from kvfast.storage.kinds import BLOCK_SIZE, decoded, storage_of
from kvfast.storage.settings import checked_settings

RING = {"num_sink_tokens": 4, "rollback": 16}
CACHES = {
    "full": lambda: kvfast.KVCache(3, [2, 4, 2], 32, dtype=["int8", "int4", "float16"], v_head_dim=[None, 16, None]),
    "ring": lambda: kvfast.RingKVCache(2, 2, 32, [48, None], **RING, dtype="int8"),
    "ring that rotates": lambda: kvfast.RingKVCache(2, 2, 32, 48, **RING, rope=kvfast.Rope(rotary_dim=16, interleaved=True)),
    "latent": lambda: kvfast.MLAKVCache(2, 64, 16),
    "heads": lambda: kvfast.MultiHeadKVCache(4, MultiHeadConfig(32, bits=(5, 4), num_q_heads=8)),
}


def fill(cache, seed, n=100):
    rng = np.random.default_rng(seed)
    if not isinstance(cache, kvfast.MultiHeadKVCache):
        return cache_kinds.fill(cache, rng, n)
    cache.push_tokens(*rng.standard_normal((2, n, cache.num_heads, cache.head_dim), np.float32))
    return cache


@pytest.mark.parametrize("kind", CACHES)
def test_settings_are_all_that_a_storage_needs(kind):
    cache = fill(CACHES[kind](), 1)
    settings = settings_of(cache)
    again = checked_settings(settings)
    assert again == settings and json.loads(json_of(again)) == json.loads(json_of(settings))
    mine, other = storage_in(cache), storage_of(settings)
    for name in ("num_layers", "num_kv_heads", "head_dim", "v_head_dim", "rope_dim", "formats", "block_size", "max_seq_len"):
        assert getattr(other, name) == getattr(mine, name), name
    assert type(other) is type(mine) and [type(one) for one in other.tables] == [type(one) for one in mine.tables]
    other.restore(mine)
    assert other.resume_states() == mine.resume_states()
    for layer in range(other.num_layers):
        given = (cache.k(), cache.v()) if kind == "heads" else decoded(settings, mine, layer)
        assert all(map(np.array_equal, decoded(settings, other, layer), given))
        assert kind in ("heads", "latent") or all(map(np.array_equal, (cache.k(layer), cache.v(layer)), given))


def test_blocks_of_caches_and_pools_have_one_size():
    assert kvfast.KVCache(1, 2, 32, dtype="int8").block_size == BLOCK_SIZE
    pools = kvfast.PagedKVCache(1, 2, 32, num_blocks=4, dtype="int8"), kvfast.PagedMLAKVCache(1, 32, 16, num_blocks=4)
    layout = buffer_layout(1, 2, 32, 4)
    assert {one.block_size for one in (*pools, layout)} == {BLOCK_SIZE}
