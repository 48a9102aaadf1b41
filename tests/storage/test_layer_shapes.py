"""Layers of one cache that differ in their KV heads and head_dim."""

import json

import numpy as np
import pytest
from cache_kinds import filled
from reference import attention, relative_error

import kvfast
from kvfast.planning import LayerShape, ModelShape

HEADS, DIMS, WINDOWS = [4, 2, 4, 2, 1], [32, 64, 32, 64, 20], [16, None, 16, None, None]
DTYPES = ["float32", "int8", "int4", "k8v4"]


def full(dtype="float32", **others):
    return kvfast.KVCache(5, HEADS, DIMS, dtype=dtype, **others)


def ring(dtype="float32", **others):
    return kvfast.RingKVCache(5, HEADS, DIMS, WINDOWS, dtype=dtype, rollback=20, **others)


CACHES = [full, ring]


def tokens(layer, n, seed=0):
    rng = np.random.default_rng(100 * layer + seed)
    return rng.standard_normal((2, n, HEADS[layer], DIMS[layer])).astype(np.float32)


def fill(cache, *counts):
    for step, n in enumerate(counts):
        filled(cache, each=[tokens(layer, n, step) for layer in range(5)])
    return cache


def queries(layer, n=3):
    return np.random.default_rng(layer).standard_normal((n, 4, DIMS[layer])).astype(np.float32)


def outputs(cache):
    return [cache.attend(layer, queries(layer)) for layer in range(5)]


def same(a, b):
    return all(np.array_equal(one, other) for one, other in zip(outputs(a), outputs(b)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("new", CACHES)
def test_each_layer_is_as_in_a_cache_of_its_own(new, dtype):
    cache = fill(new(dtype), 70, 1, 30)
    for layer, (heads, dim, window) in enumerate(zip(HEADS, DIMS, WINDOWS)):
        if new is ring and window:
            alone = kvfast.RingKVCache(1, heads, dim, window, dtype=dtype, rollback=20)
        else:
            alone = kvfast.KVCache(1, heads, dim, dtype=dtype)
        for step, n in enumerate((70, 1, 30)):
            filled(alone, *tokens(layer, n, step))
        assert np.array_equal(cache.attend(layer, queries(layer)), alone.attend(0, queries(layer)))
        assert np.array_equal(cache.k(layer), alone.k(0)) and np.array_equal(cache.v(layer), alone.v(0))
        plan = cache.explain(layer, (1, 4, dim))
        assert (plan.num_kv_heads, plan.q_shape) == (heads, (1, 4, dim))


def test_against_the_oracle():
    k = [tokens(layer, 50) for layer in range(5)]
    cache = fill(ring(), 50)
    for layer, window in enumerate(WINDOWS):
        expected, _ = attention(queries(layer), *k[layer], sliding_window=window)
        assert relative_error(cache.attend(layer, queries(layer)), expected) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("new", CACHES)
def test_going_back_and_copies(new, dtype):
    cache = fill(new(dtype), 70, 1)
    snapshot, copy = cache.snapshot(), cache.copy()
    fill(cache, 10)
    cache.truncate(71)
    other = new(dtype)
    other.restore(snapshot)
    for one in (copy, kvfast.load(snapshot), other, kvfast.load(kvfast.Snapshot.from_state_dict(snapshot.state_dict()))):
        assert same(one, cache if dtype in ("float32", "int8") else copy) and len(one) == 71
    fill(cache, 10)
    cache.restore(snapshot)
    assert same(cache, copy)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("new", CACHES)
def test_files(new, dtype, mmap, tmp_path):
    pytest.importorskip("safetensors")
    cache = fill(new(dtype), 300, 1)
    cache.save(tmp_path / "cache.safetensors")
    found = kvfast.load(tmp_path / "cache.safetensors", mmap=mmap)
    assert found.num_kv_heads == tuple(HEADS) and found.head_dim == tuple(DIMS)
    assert same(found, cache)
    assert kvfast.Snapshot.load(tmp_path / "cache.safetensors") == cache.snapshot()


def test_sizes():
    cache = full("float16", max_seq_len=64)
    assert cache.num_kv_heads == tuple(HEADS) and cache.head_dim == tuple(DIMS) and cache.entry_size == (128, 128, 128, 128, 20)
    alone = [kvfast.KVCache(*shape, 64, "float16") for shape in ((2, 4, 32), (2, 2, 64), (1, 1, 20))]
    assert cache.bytes_per_token == 2 * 2 * (128 * 4 + 32) and cache.nbytes == sum(one.nbytes for one in alone)
    assert repr(cache).startswith("KVCache(float16, 5 layers x 4/2/1 heads x 32/64/20, 0/64 tokens")
    uniform = kvfast.KVCache(2, [3, 3], [16, 16])
    assert (uniform.num_kv_heads, uniform.head_dim, uniform.entry_size) == (3, 16, 48)


def test_formats_and_fused_writes():
    cache = kvfast.KVCache(2, [2, 1], [16, 32], dtype=["int8", "float32"])
    qkv = np.random.default_rng(0).standard_normal((5, (4 + 2) * 32)).astype(np.float32)
    q = cache.write(1, qkv, num_q_heads=4)
    expected, k, v = kvfast.split_qkv_norm_rope(qkv, num_q_heads=4, num_kv_heads=1, head_dim=32)
    assert np.array_equal(q, expected) and np.array_equal(cache.k(1), k) and np.array_equal(cache.v(1), v)
    assert cache.dtype == ("int8", "float32")


def test_layers_are_compressed():
    compressor = kvfast.KVCacheCompressor(kvfast.Quantize("int8"))
    cache, other = fill(full(), 70), full()
    for layer in range(5):
        compressor.decompress_to_cache(compressor.compress_cache(cache, layer), other, layer)
        assert relative_error(other.k(layer), cache.k(layer)) < 0.02
    with pytest.raises(kvfast.DimensionMismatchError, match="2 heads of 64 like the cache, got 4 of 32"):
        compressor.decompress_to_cache(compressor.compress_cache(cache, 0), other, 1)


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("num_kv_heads", [4, 2, 4, 2]),
        ("num_kv_heads", [4, 2, 4, 2, 1 << 40]),
        ("head_dim", [32] * 5),
        ("num_kv_heads", [4, 2, 4, 2, "1"]),
        ("head_dim", [32, 64, 32, 64, [20]]),
        ("head_dim", 0),
        ("num_kv_heads", [[4, 2, 4, 2, 1]]),
        ("head_dim", [32, 64, 32, 64, 0]),
    ],
)
def test_headers_that_are_wrong(name, wrong):
    state = fill(full(), 70).snapshot().state_dict()
    header = json.loads(state["header"].tobytes())
    assert header["settings"][name] == list({"num_kv_heads": HEADS, "head_dim": DIMS}[name])
    header["settings"][name] = wrong
    state["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with pytest.raises(kvfast.CorruptFileError):
        kvfast.Snapshot.from_state_dict(state)


def test_what_does_not_fit_is_refused():
    cache = full()
    with pytest.raises(kvfast.DimensionMismatchError, match=r"\(num_tokens, 2, 64\)"):
        cache.append(1, *tokens(0, 3))
    with pytest.raises(kvfast.DimensionMismatchError, match="head_dim 20"):
        cache.append(4, *tokens(4, 3))
        cache.attend(4, queries(0))
    for heads, dims, name in (([1, 2], 16, "num_kv_heads"), (2, [16] * 4, "head_dim")):
        with pytest.raises(kvfast.DimensionMismatchError, match=f"{name} must be one number or a list of 5, one per layer"):
            kvfast.KVCache(5, heads, dims)
    with pytest.raises(ValueError, match="head_dim"):
        kvfast.KVCache(2, 2, [16, 600])
    with pytest.raises(ValueError, match="the same head_dim in all"):
        kvfast.RingKVCache(2, 2, [16, 32], 8, rope=kvfast.Rope())
    with pytest.raises(kvfast.IncompatibleSnapshotError, match="num_kv_heads"):
        kvfast.KVCache(5, 2, DIMS, dtype="float32").restore(full().snapshot())
    with pytest.raises(TypeError, match="num_kv_heads"):
        kvfast.PagedKVCache(5, HEADS, DIMS, 8)


def test_plan_is_what_the_caches_take():
    layers = tuple(LayerShape(*shape) for shape in zip(HEADS, DIMS))
    windows = tuple(LayerShape(*shape) for shape in zip(HEADS, DIMS, WINDOWS))
    for dtype in DTYPES:
        told = {"context": 640, "dtype": dtype, "memory": 1 << 30, "bandwidth": 1e9}
        one = kvfast.plan(ModelShape("five", layers), **told)[dtype]
        alone = [kvfast.plan(ModelShape("one", tuple(group)), **told)[dtype] for group in (layers[:3:2], layers[1:4:2], layers[4:])]
        assert one.cache == "KVCache" and one.bytes_per_token == full(dtype).bytes_per_token
        assert one.nbytes == sum(each.nbytes for each in alone) and one.bytes_read == sum(each.bytes_read for each in alone)
        one = kvfast.plan(ModelShape("five", windows), **told)[dtype]
        assert one.cache == "RingKVCache" and one.bytes_per_token == ring(dtype).bytes_per_token


def test_shapes_that_configurations_tell():
    def shapes(**keys):
        sizes = {
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "hidden_size": 128,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        }
        return [(one.num_kv_heads, one.head_dim) for one in kvfast.plan(sizes | keys, memory=1 << 30, bandwidth=1e9).model.layers]

    assert shapes() == [(4, 16)] * 3
    assert shapes(per_layer_config={"2": {"head_dim": 32, "num_key_value_heads": 2}}) == [(4, 16), (4, 16), (2, 32)]
    assert shapes(model_type="gemma4_text") == [(4, 16), (4, 16), (4, 512)]
    assert shapes(global_head_dim=32, num_global_key_value_heads=1) == [(4, 16), (4, 16), (4, 32)]
    assert shapes(global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True) == [(4, 16), (4, 16), (1, 32)]
    assert shapes(swa_num_key_value_heads=8, swa_head_dim=32) == [(8, 32), (8, 32), (4, 16)]
    assert shapes(model_type="mimo_v2_flash", v_head_dim=8) == [(8, 16), (8, 16), (4, 16)]
    mimo = {"model_type": "mimo_v2_flash", "v_head_dim": 8, "per_layer_config": {"1": {"v_head_dim": 20}, "2": {"v_head_dim": 16}}}
    plan = kvfast.plan(
        {"num_hidden_layers": 3, "num_attention_heads": 8, "head_dim": 16, "hidden_size": 128} | mimo, memory=1 << 30, bandwidth=1e9
    )
    assert [(one.head_dim, one.v_head_dim) for one in plan.model.layers] == [(16, 8), (16, 20), (16, None)]
    with pytest.raises(ValueError, match="per_layer_config must map layers"):
        shapes(per_layer_config=[1, 2, 3])
    chunks = kvfast.plan(
        {
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "hidden_size": 16,
            "layer_types": ["chunked_attention"],
            "attention_chunk_size": 64,
        },
        memory=1 << 30,
        bandwidth=1e9,
    )
    assert chunks.model.layers[0].sliding_window == 64 and not chunks.notes
