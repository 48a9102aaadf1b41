"""RingKVCache: windows, sinks, chunks, going back, rotation inside the cache."""

import numpy as np
import pytest
from cache_kinds import DTYPES, filled
from reference import attention, bound, relative_error
from selection import on_tiers

import kvfast


def tokens(rng, n, heads=2, dim=64):
    return rng.standard_normal((2, n, heads, dim)).astype(np.float32)


@on_tiers("dtype", DTYPES, ("float16", "int8-rotated", "int4"))
def test_same_bits_as_contiguous_on_every_tier(isa, rng, dtype):
    ring = kvfast.RingKVCache(1, 2, 64, sliding_window=100, num_sink_tokens=4, dtype=dtype)
    whole = kvfast.KVCache(1, 2, 64, dtype=dtype)
    for n in [1, 30, 300, 1, 64, 1, 1, 500, 1]:  # chunks below and above the window
        k, v = tokens(rng, n)
        q = rng.standard_normal((n, 6, 64)).astype(np.float32)
        for cache in (ring, whole):
            cache.append(0, k, v)
        out, lse = ring.attend(0, q, return_lse=True)
        expected = whole.attend(0, q, sliding_window=100, num_sink_tokens=4, return_lse=True)
        assert np.array_equal(out, expected[0]) and np.array_equal(lse, expected[1])
        ring.advance(n), whole.advance(n)
    positions = ring.positions(0)
    assert positions.tolist() == [0, 1, 2, 3, *range(len(ring) - 100, len(ring))]
    assert np.array_equal(ring.k(0), whole.k(0)[positions])
    assert np.array_equal(ring.v(0), whole.v(0)[positions])


@pytest.mark.parametrize("num_sink_tokens", [0, 5])
@pytest.mark.parametrize("dtype", ["float32", "int8-rotated", "int4"])
def test_against_oracle(rng, dtype, num_sink_tokens):
    """Sinks in the float64 oracle, for a contiguous cache: the bits of the ring are the same."""
    cache = kvfast.KVCache(1, 2, 64, dtype=dtype)
    k, v = tokens(rng, 333)
    filled(cache, k, v)
    q = rng.standard_normal((7, 4, 64)).astype(np.float32)
    out = cache.attend(0, q, sliding_window=50, num_sink_tokens=num_sink_tokens, softcap=20.0)
    expected, _ = attention(q, cache.k(0), cache.v(0), sliding_window=50, num_sink_tokens=num_sink_tokens, softcap=20.0)
    assert relative_error(out, expected) < bound(dtype)


@pytest.mark.parametrize("dtype", ["int8-rotated", "int4"])
def test_memory_stays_constant_and_prompts_give_theirs_back(rng, dtype):
    ring = kvfast.RingKVCache(2, 2, 64, sliding_window=256, num_sink_tokens=4, rollback=32, dtype=dtype)
    k, v = tokens(rng, 4000)

    def run(n):
        filled(ring, k[:n], v[:n])

    run(256)
    for _ in range(100):  # until the prompt's tokens are codes
        run(1)
    steady = ring.nbytes
    run(4000)
    for _ in range(500):
        run(1)
    assert ring.nbytes == steady
    again = kvfast.RingKVCache(2, 2, 64, sliding_window=256, num_sink_tokens=4, rollback=32, dtype=dtype)
    for layer in (0, 1):  # one that starts with a long prompt
        again.append(layer, k, v)
    again.advance(4000)
    ring = again
    for _ in range(856):
        run(1)
    assert ring.nbytes == steady
    assert len(ring) == 4856 and len(ring.positions(0)) == 260
    assert len(ring.block_indices(0)) <= -(-(256 + 32) // 64) + 2


def test_layers_with_and_without_window(rng):
    ring = kvfast.RingKVCache(3, 2, 64, sliding_window=[32, None, 100], num_sink_tokens=2, dtype="float32")
    k, v = tokens(rng, 400)
    for start in range(0, 400, 40):
        filled(ring, k[start : start + 40], v[start : start + 40])
    assert ring.sliding_window == (32, None, 100)
    assert [len(ring.positions(layer)) for layer in range(3)] == [34, 400, 102]
    q = rng.standard_normal((1, 4, 64)).astype(np.float32)
    for layer, window in enumerate((32, None, 100)):
        expected = kvfast.attention(q, k, v, sliding_window=window, num_sink_tokens=2 if window else None)
        assert np.allclose(ring.attend(layer, q), expected, atol=1e-6)
    assert np.allclose(ring.attend(2, q, sliding_window=10, num_sink_tokens=0), kvfast.attention(q, k, v, sliding_window=10))


@pytest.mark.parametrize("dtype", ["int8-rotated", "int4"])
def test_going_back_after_the_ring_has_wrapped(rng, dtype):
    k, v = tokens(rng, 2000)
    q = rng.standard_normal((1, 4, 64)).astype(np.float32)
    ring = kvfast.RingKVCache(1, 2, 64, sliding_window=100, num_sink_tokens=3, rollback=40, dtype=dtype)
    expected = kvfast.KVCache(1, 2, 64, dtype=dtype)
    for cache in (ring, expected):
        filled(cache, k[:1900], v[:1900])
    before = ring.attend(0, q)
    with pytest.raises(ValueError, match="cannot go back to 1859 tokens.*down to 1860"):
        ring.truncate(1859)
    assert len(ring) == 1900
    ring.truncate(1860)
    filled(ring, k[1860:1900], v[1860:1900])
    assert np.array_equal(ring.attend(0, q), before)
    for cache in (ring, expected):
        cache.truncate(1860)
        cache.append(0, k[1900:1950], v[1900:1950])
    assert np.array_equal(ring.attend(0, q), expected.attend(0, q, sliding_window=100, num_sink_tokens=3))
    ring.clear()
    assert len(ring) == 0 and ring.positions(0).size == 0
    ring.append(0, k[:10], v[:10])
    assert np.array_equal(ring.positions(0), np.arange(10))


def test_copies_are_independent(rng):
    k, v = tokens(rng, 300)
    ring = filled(kvfast.RingKVCache(1, 2, 64, sliding_window=64, num_sink_tokens=1), k, v)
    other = ring.copy()
    before = ring.k(0)
    other.append(0, k[:5], v[:5])
    assert np.array_equal(ring.k(0), before) and len(other.positions(0)) == 65


def rotated(x, positions, pairs, interleaved):
    """Float64 rotation of (n, heads, dim) by the positions of n tokens."""
    angles = np.multiply.outer(positions, 10000.0 ** (-np.arange(pairs) / pairs))[:, None]
    x, out = x.astype(np.float64), x.astype(np.float64)
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(0, pairs), slice(pairs, 2 * pairs))
    out[..., first] = x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles)
    out[..., second] = x[..., second] * np.cos(angles) + x[..., first] * np.sin(angles)
    return out


@pytest.mark.parametrize("rotary_dim, interleaved", [(64, False), (64, True), (32, False)])
def test_rotation_by_the_place_in_the_cache(rng, rotary_dim, interleaved):
    """Every query sees its keys turned as StreamingLLM turns them: by their place among what is held."""
    ring = kvfast.RingKVCache(
        1,
        2,
        64,
        sliding_window=50,
        num_sink_tokens=4,
        dtype="float32",
        rope=kvfast.Rope(rotary_dim=rotary_dim, interleaved=interleaved),
    )
    k, v = tokens(rng, 400)
    q = rng.standard_normal((400, 4, 64)).astype(np.float32)
    at = 0
    for n in (20, 1, 100, 3, 200, 1):
        ring.append(0, k[at : at + n], v[at : at + n])
        out = ring.attend(0, q[at : at + n])
        for i in range(n):
            p = at + i
            held = np.r_[np.arange(min(4, max(0, p - 49))), np.arange(max(0, p - 49), p + 1)]
            keys = rotated(k[held], np.arange(len(held)), rotary_dim // 2, interleaved)
            query = rotated(q[p : p + 1], [len(held) - 1], rotary_dim // 2, interleaved)
            expected, _ = attention(query, keys, v[held])
            assert relative_error(out[i : i + 1], expected) < 2e-5
        at += n
        ring.advance(n)
        assert np.allclose(ring.k(0), k[ring.positions(0)], atol=1e-5)


def test_rotation_in_write(rng):
    ring, other = (
        kvfast.RingKVCache(1, 2, 64, sliding_window=20, num_sink_tokens=2, rope=kvfast.Rope(), dtype="float32") for _ in "ab"
    )
    qkv = rng.standard_normal((70, 8, 64)).astype(np.float32)
    q = ring.write(0, qkv.reshape(70, -1))
    other.append(0, qkv[:, 4:6], qkv[:, 6:])
    assert np.array_equal(q, qkv[:, :4])
    assert np.array_equal(ring.attend(0, q), other.attend(0, q))
    for call in (ring.append, ring.write):
        with pytest.raises(kvfast.DimensionMismatchError):
            call(0, *[np.ones((0, 2, 64), np.float32)] * (1 + (call == ring.append)))
    with pytest.raises(ValueError, match="leave out cos, sin and interleaved"):
        ring.write(0, qkv.reshape(70, -1), cos=np.ones((99, 32)), sin=np.ones((99, 32)))


def test_bad_input(rng):
    for arguments, message in [
        ({"sliding_window": 0}, "sliding_window must be between 1 and .*, got 0"),
        ({"sliding_window": 4, "num_sink_tokens": 5}, "num_sink_tokens must be at most the sliding_window of 4, got 5"),
        ({"sliding_window": None}, "sliding_window must be a number for at least one layer"),
        ({"sliding_window": [3]}, "list of 2"),
        ({"sliding_window": 4, "rollback": -1}, "rollback must be between 0 and .*, got -1"),
        ({"sliding_window": 4, "rope": kvfast.Rope(rotary_dim=66)}, "rope must rotate 1 to 32 pairs"),
    ]:
        with pytest.raises(ValueError, match=message):
            kvfast.RingKVCache(2, 2, 64, **arguments)
    with pytest.raises(TypeError, match="rope must be a Rope or None, got 'cache'"):
        kvfast.RingKVCache(2, 2, 64, 4, rope="cache")
    ring = kvfast.RingKVCache(1, 2, 64, sliding_window=10, num_sink_tokens=2, rollback=0)
    k, v = tokens(rng, 300)
    filled(ring, k, v)
    q = np.ones((1, 2, 64), np.float32)
    for options, message in [
        ({"sliding_window": 11}, "at most the 10 tokens"),
        ({"num_sink_tokens": 3}, "at most the 2 that the ring keeps"),
    ]:
        with pytest.raises(ValueError, match=message):
            ring.attend(0, q, **options)
    with pytest.raises(ValueError, match="the ring has dropped"):
        ring.attend(0, np.ones((200, 2, 64), np.float32))
    assert ring.attend(0, q).shape == q.shape


@pytest.mark.parametrize("way", ["snapshot", "state", "file"])
@pytest.mark.parametrize("more", [0, 200])  # with which the context has several splits
def test_a_ring_without_its_first_tokens_needs_no_float_rows(isa, rng, tmp_path, way, more):
    """The float rows of the first tokens went with their block; another pool never had them."""
    form = kvfast.KVFormat("int4/int6", num_first_float_tokens=15)
    ring = kvfast.RingKVCache(1, 3, 15, sliding_window=16, rollback=1, dtype=form)
    k, v = rng.standard_normal((2, more + 82, 3, 15), np.float32)
    for first, last in [(0, more + 65), (more + 65, more + 81)]:
        filled(ring, k[first:last], v[first:last])
    if way == "snapshot":
        other = kvfast.load(ring.snapshot())
    elif way == "state":
        other = kvfast.RingKVCache.from_state_dict(ring.state_dict())
    else:
        ring.save(tmp_path / "ring.kv")
        other = kvfast.load(tmp_path / "ring.kv")
    q = rng.standard_normal((1, 6, 15), np.float32)
    for one in (ring, other):
        one.append(0, k[more + 81 :], v[more + 81 :])
    for num_splits in (1, 4):
        assert np.array_equal(ring.attend(0, q, num_splits=num_splits), other.attend(0, q, num_splits=num_splits))


@pytest.mark.parametrize("dtype", ["float32", "int8-rotated", "int4"])
def test_chunks(dtype):
    """A ring whose window is a chunk keeps all that attention to chunks sees; prompts come in pieces across their edges."""
    ring, whole = kvfast.RingKVCache(1, 2, 32, sliding_window=48, dtype=dtype, num_sink_tokens=2), kvfast.KVCache(1, 2, 32, dtype=dtype)
    rng = np.random.default_rng(0)
    for n in (1, 46, 1, 1, 60, 100, 3, 100):
        k, v, q = rng.standard_normal((3, n, 2, 32)).astype(np.float32)
        for cache in (ring, whole):
            cache.append(0, k, v)
        for sinks in (0, 2):
            found = ring.attend(0, q, attention_chunk_size=48, num_sink_tokens=sinks)
            expected, _ = attention(q, whole.k(0), whole.v(0), attention_chunk_size=48, num_sink_tokens=sinks)
            assert relative_error(found, expected) < (1e-5 if dtype == "float32" else 2e-2)
            assert relative_error(whole.attend(0, q, attention_chunk_size=48, num_sink_tokens=sinks), expected) < 2e-2
        for cache in (ring, whole):
            cache.advance(n)
    assert whole.explain(0, 1, attention_chunk_size=48).items[0].begin == 256  # the tile with position 288, where the chunk begins
    with pytest.raises(ValueError, match="attention_chunk_size needs causal=True, got causal=False"):
        ring.attend(0, q, attention_chunk_size=48, causal=False)
    with pytest.raises(ValueError, match="attention_chunk_size must be"):
        whole.attend(0, q, attention_chunk_size=0)
    turned = kvfast.RingKVCache(1, 2, 32, sliding_window=48, rope=kvfast.Rope())
    turned.append(0, k, v)
    with pytest.raises(ValueError, match="attention_chunk_size must be None"):
        turned.attend(0, q, attention_chunk_size=48)


def test_batches_keep_to_chunks():
    pool = kvfast.PagedKVCache(1, 2, 32, 64, dtype="float32")
    k, v, q = np.random.default_rng(0).standard_normal((3, 400, 2, 32)).astype(np.float32)
    first = filled(pool.new_sequence(), k, v)
    sequences = [first, first.fork()]
    found = pool.attend_batch(0, q[:2], sequences, attention_chunk_size=300)
    expected, _ = attention(q[:1], k, v, attention_chunk_size=300)
    assert relative_error(found[:1], expected) < 1e-5
    assert relative_error(kvfast.attention(q[:1], k, v, attention_chunk_size=300), expected) < 1e-5
