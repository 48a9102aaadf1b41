"""Caches put together from chunks that were computed apart, and cut in the middle."""

from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from cache_kinds import DTYPES, FORMATS, SEALING, filled
from reference import attention, bound, relative_error
from rotated_reference import DIM, HEADS, Model, frequencies, turn

import kvfast

ROPES = {
    "halves": kvfast.Rope(),
    "interleaved": kvfast.Rope(theta=500.0, interleaved=True),
    "part": kvfast.Rope(rotary_dim=8),
    "frequencies": kvfast.Rope(frequencies=[1.0, 0.3, 0.05]),
    "none": None,
}
ALL = {str(dtype): dtype for dtype in DTYPES} | FORMATS


def cache_of(dtype="int8", dim=DIM, **settings):
    return kvfast.KVCache(1, HEADS, dim, dtype=dtype, **settings)


def chunks(dtype, lengths, rope, **settings):
    return [Model(cache_of(dtype, **settings), rope, seed).append(n) for seed, n in enumerate(lengths, 1)]


@pytest.mark.parametrize("dtype", ALL.values(), ids=ALL)
def test_a_spliced_and_shifted_cache_agrees_with_float64(dtype):
    rope = ROPES["halves"]
    model = Model(cache_of(dtype), rope).append(150)
    model.splice(*chunks(dtype, (300, 7, 130), rope))
    model.check(1)
    model.append(70).check(1)
    model.check(40)
    model.drop(20, 200).check(1)
    model.append(300).check(5)
    model.drop(100, 101).drop(10, 390).check(1)
    model.append(9).check(9)
    model.truncate(60).check(3)
    model.append(1).check(1)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("dtype", ["float32", "int4"])
@pytest.mark.parametrize("dim", [64, 33, 7])
def test_rotations(rope, dtype, dim):
    if rope is not None and len(frequencies(rope, dim)) > dim // 2:
        pytest.skip("more pairs than the head has")
    model = Model(cache_of(dtype, dim), rope).append(65).splice(*chunks(dtype, (64, 100), rope, dim=dim))
    model.append(20).drop(10, 120).append(3).check(3)
    model.check(1)


@pytest.mark.parametrize("dtype", ALL.values(), ids=ALL)
def test_all_tokens_computed_again(rng, dtype):
    """Nothing follows them: the cache stays what it was, and several queries have the bits of each alone."""
    for n in (20, 70, 130):
        k, v = rng.standard_normal((2, n + 9, HEADS, DIM)).astype(np.float32)
        caches = [cache_of(dtype) for _ in range(3)]
        for cache in caches:
            filled(cache, k[:n], v[:n])
        caches[1].splice(caches[2].snapshot(), rope=kvfast.Rope(), recomputed=n)
        assert not caches[1].is_spliced
        for _ in range(2):
            assert np.array_equal(caches[0].attend(0, k[:9]), caches[1].attend(0, k[:9]))
            for cache in caches[:2]:
                filled(cache, k[n:], v[n:])


def test_options_work_on_positions_in_the_whole_cache():
    rope = ROPES["halves"]
    model = Model(cache_of("int8"), rope).append(40).splice(*chunks("int8", (90, 200), rope)).append(30).drop(50, 70)
    slopes = np.linspace(0.01, 0.2, 3 * HEADS).astype(np.float32)
    for n in (1, 6, 60, 250):
        model.check(n, sliding_window=35)
        model.check(n, sliding_window=35, num_sink_tokens=5)
        model.check(n, sliding_window=100, num_sink_tokens=70)
        model.check(n, alibi_slopes=slopes)
        model.check(n, softcap=5.0, scale=0.7)
        model.check(n, sinks=slopes)
        model.check(n, causal=False)
        model.check(n, attention_chunk_size=64)
        model.check(n, attention_chunk_size=64, num_sink_tokens=4)
        model.check(n, num_splits=5)


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4", "bfloat16"])
def test_the_bits_do_not_depend_on_threads_and_neighbours(dtype):
    rope = ROPES["halves"]
    model = Model(cache_of(dtype), rope).append(40).splice(*chunks(dtype, (2500, 1300), rope)).append(30).drop(50, 70)
    for n in (1, 4, 200):
        q = model.queries(n)
        out = model.cache.attend(0, q, num_threads=1)
        assert all(np.array_equal(out, model.cache.attend(0, q, num_threads=threads)) for threads in (2, 3, 8))
    q = model.queries(4)
    together = model.cache.attend(0, q, sliding_window=3000)
    for _ in range(3):
        model.truncate(len(model.cache) - 1)
    assert np.array_equal(model.cache.attend(0, q[:1], sliding_window=3000), together[:1])


@pytest.mark.parametrize("dtype", ["float32", "int8-rotated", "int8-plain"])
def test_queries_that_see_the_first_part_alone_have_its_bits(rng, dtype):
    """With a window and sink tokens, among others that see what was spliced."""
    for length, n, window, num_sink_tokens in ((70, 16, 28, 5), (65, 16, 6, 1), (70, 16, 66, 3), (300, 9, 5, 40), (90, 16, 60, 0)):
        cache, other = cache_of(dtype), cache_of(dtype)
        for one, count in ((cache, length), (other, 3)):
            filled(one, *rng.standard_normal((2, count, HEADS, DIM), np.float32))
        alone, options = cache.fork(), {"sliding_window": window, "num_sink_tokens": num_sink_tokens}
        cache.splice(other, rope=None)
        q = rng.standard_normal((n, 2 * HEADS, DIM), np.float32)
        got = cache.attend(0, q, **options)
        for at in range(n - 4, -1, -1):
            alone.truncate(length + 3 - n + 1 + at)
            assert np.array_equal(alone.attend(0, q[at : at + 1], **options)[0], got[at])


@pytest.mark.parametrize("isa", kvfast.available_isas())
def test_every_tier(isa):
    rope, before = ROPES["interleaved"], kvfast.active_isa()
    kvfast.use_isa(isa)
    try:
        for dtype in DTYPES:
            model = Model(cache_of(dtype), rope).append(33).splice(*chunks(dtype, (130, 300), rope)).append(20)
            model.drop(100, 200).check(1)
            model.check(100)
    finally:
        kvfast.use_isa(before)


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
def test_tokens_computed_again_take_the_place_of_a_chunks_own(dtype):
    rope = ROPES["halves"]
    model, (chunk,) = Model(cache_of(dtype), rope).append(100), chunks(dtype, (200,), rope)
    for recomputed in (16, 64, 65, 0, 200):
        model.append(recomputed) if recomputed else None
        model.splice(chunk, recomputed=recomputed).check(1)
    assert len(model.cache) == 100 + 5 * 200
    model.append(4).check(4)


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4", *SEALING.values()], ids=str)
def test_a_conversation_without_end_fits_a_bounded_cache(dtype):
    rope, cache = ROPES["halves"], cache_of(dtype, max_seq_len=512)
    model, most = Model(cache, rope), 0
    before, sizes = model.append(500).cache.nbytes, []
    for turn_ in range(30):
        model.drop(20, 20 + 200 + turn_)
        model.append(200 + turn_ + turn_ % 3)
        if len(cache) > 500:
            model.truncate(500)
        most = max(most, len(cache.block_indices()) * cache.block_size)
        sizes.append(cache.nbytes)
        if turn_ % 7 == 0:
            model.check(2)
    model.check(64)
    # The first segment and the last both end in a block that is not full.
    assert most <= 512 + 3 * cache.block_size
    assert max(sizes[10:]) <= max(sizes[:10]) < 2.2 * before
    assert len(cache._storage.segment_list()) <= 5


@pytest.mark.parametrize("dtype", ["float32", "int8-rotated", "int4"])
def test_truncate_to_the_first_segment_ends_the_splice(dtype, tmp_path):
    rope = ROPES["halves"]
    model = Model(cache_of(dtype), rope).append(100)
    before, q = model.cache.snapshot(), model.queries(1)
    out = model.cache.attend(0, q)
    model.splice(*chunks(dtype, (100,), rope)).append(3)
    assert model.cache.is_spliced
    model.truncate(100)
    assert not model.cache.is_spliced
    model.check(5)
    if dtype != "int4":  # whose newest full block is read by its codes once others followed
        assert np.array_equal(model.cache.attend(0, q), out)
        assert model.cache.snapshot() == before
    model.append(40).check(40)
    model.cache.save(tmp_path / "cache")
    model.truncate(0)
    assert not model.cache
    model.append(5).check(1)


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_snapshots_forks_and_copies_are_spliced_too(dtype):
    rope = ROPES["halves"]
    model = Model(cache_of(dtype), rope).append(100).splice(*chunks(dtype, (100, 30), rope)).append(20).drop(30, 50).append(7)
    cache, q = model.cache, model.queries(3)
    out, snapshot = cache.attend(0, q), cache.snapshot()
    others = [cache.copy(), cache.fork(), kvfast.load(snapshot), cache_of(dtype, max_seq_len=400)]
    others[-1].restore(snapshot)
    model.drop(10, 120).append(50).check(4)
    for other in others:
        assert np.array_equal(other.attend(0, q), out)
        assert other.snapshot() == snapshot
        same = Model(other, rope, 5)
        same.k, same.v = other.k(0), other.v(0)
        same.append(100).drop(5, 40).check(2)
    assert cache.snapshot() != snapshot
    cache.restore(snapshot)
    assert np.array_equal(cache.attend(0, q), out)
    converted = kvfast.KVCache(1, HEADS, DIM, dtype="float32")
    converted.restore(snapshot, convert=True)
    assert converted.is_spliced == (dtype == "float32")
    assert np.array_equal(converted.k(0), cache.k(0))
    assert relative_error(converted.attend(0, q), out) < 2e-3


def test_a_spliced_cache_is_a_chunk_too():
    rope = ROPES["halves"]
    inner = Model(cache_of(), rope, 3).append(50).splice(*chunks("int8", (70,), rope)).append(10)
    model = Model(cache_of(), rope).append(20).splice(inner).append(5)
    model.check(2)
    model.splice(inner, model).check(1)  # itself, too


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_paged_sequences(dtype):
    rope = ROPES["halves"]
    pool = kvfast.PagedKVCache(1, HEADS, DIM, num_blocks=60, dtype=dtype)
    documents = [Model(pool.new_sequence(), rope, seed).append(n) for seed, n in ((1, 300), (2, 100))]
    used = pool.num_blocks - pool.num_free_blocks
    one = Model(pool.new_sequence(), rope, 5).append(30).splice(*documents)
    assert pool.num_blocks - pool.num_free_blocks == used + 1  # the blocks of chunks of the pool are shared
    other = Model(pool.new_sequence(), rope, 6).append(65).splice(documents[1], documents[0])
    plain = Model(pool.new_sequence(), rope, 7).append(200)
    one.append(20).drop(10, 50)
    sequences, models = [one.cache, other.cache, plain.cache], [one, other, plain]
    for counts in ((1, 1, 1), (3, 0, 2), (1, 40, 9), (380, 3, 1)):
        q = [model.queries(n) for model, n in zip(models, counts)]
        out = pool.attend_batch(0, np.concatenate(q), sequences, cu_seqlens_q=np.cumsum([0, *counts]))
        alone = [model.cache.attend(0, rows) for model, rows in zip(models, q) if len(rows)]
        assert np.array_equal(out, np.concatenate(alone))
        assert pool.explain_batch(0, (sum(counts), 6, DIM), sequences, cu_seqlens_q=np.cumsum([0, *counts])).num_tasks
    for model in models:
        model.check(3)
    slots = pool.slot_mapping(sequences, 2)
    k = np.random.default_rng(0).standard_normal((6, HEADS, DIM)).astype(np.float32)
    pool.append_batch(0, k, k, slots)
    for model in models:
        model.cache.advance(2, token_ids=[1, 2])
    assert np.allclose(one.cache.k(0)[-2:], k[:2], atol=1 if dtype == "int4" else 0.1)
    with pytest.raises(ValueError, match="spliced"):
        pool.block_table(sequences)
    fork = one.cache.fork()
    assert np.array_equal(fork.k(0), one.cache.k(0))
    snapshot = one.cache.snapshot()
    alone = kvfast.load(snapshot)
    assert np.array_equal(alone.k(0), fork.k(0))
    del snapshot
    for model in [*models, *documents]:
        model.cache.free()
    assert fork.attend(0, one.queries(1)[:1]).shape == (1, 6, DIM)
    fork.free()
    assert pool.num_free_blocks == pool.num_blocks


def test_a_full_pool_refuses_and_leaves_the_sequence_as_it_was():
    rope = ROPES["none"]
    pool = kvfast.PagedKVCache(1, HEADS, DIM, num_blocks=12, block_size=32, dtype="int8")
    model = Model(pool.new_sequence(), rope).append(100)
    before = model.cache.k(0)
    with pytest.raises(kvfast.CacheFullError):
        model.cache.splice(chunks("int8", (200,), rope)[0].cache, chunks("int8", (200,), rope)[0].cache, rope=rope)
    assert np.array_equal(model.cache.k(0), before)
    assert not model.cache.is_spliced
    assert pool.num_free_blocks == 8
    model.splice(*chunks("int8", (200,), rope)).check(1)


def test_layers_of_other_shapes_and_rotations():
    cache = kvfast.KVCache(3, [2, 2, 1], [32, 16, 32], dtype=["int8", "int4", "float16"])
    ropes = [kvfast.Rope(), None, kvfast.Rope(theta=100.0, interleaved=True)]
    random = np.random.default_rng(0)
    rows = [random.standard_normal((150, *shape)).astype(np.float32) for shape in ((2, 32), (2, 16), (1, 32))]
    for layer, one in enumerate(rows):
        cache.append(layer, one, one)
    cache.advance(150)
    decoded = [cache.k(layer) for layer in range(3)]
    cache.drop(10, 100, rope=ropes)
    for layer, (rope, k) in enumerate(zip(ropes, decoded)):
        expected = np.concatenate((k[:10], turn(k[100:], -90, rope)))
        assert relative_error(cache.k(layer), expected) < 1e-5
        q = turn(random.standard_normal((2, 2, k.shape[2])), [58, 59], rope).astype(np.float32)
        assert relative_error(cache.attend(layer, q), attention(q, expected, cache.v(layer))[0]) < 1e-3


def test_what_does_not_fit_is_refused_and_nothing_changes():
    rope = ROPES["halves"]
    model, (chunk,) = Model(cache_of(max_seq_len=150), rope).append(100), chunks("int8", (40,), rope)
    cache, before = model.cache, model.cache.snapshot()
    ring = kvfast.RingKVCache(1, HEADS, DIM, sliding_window=50)
    turning = kvfast.RingKVCache(1, HEADS, DIM, sliding_window=50, rope=kvfast.Rope())
    windowed = kvfast.PagedKVCache(1, HEADS, DIM, num_blocks=4, sliding_window=50).new_sequence()
    wrong = [
        (lambda: cache.splice(chunk.cache), TypeError, "rope"),
        (lambda: cache.splice(chunk.cache, rope="halves"), TypeError, "rope must be a Rope"),
        (lambda: cache.splice(chunk.cache, rope=[rope, rope]), ValueError, "one per layer, got 2"),
        (lambda: cache.splice(chunk.cache, rope=kvfast.Rope(rotary_dim=22)), ValueError, "1 to 10 pairs"),
        (lambda: cache.splice(chunk.cache, chunk.cache, rope=rope), kvfast.CacheFullError, "room for 50 of 150 tokens, got 80"),
        (lambda: cache.splice(chunk.cache, chunk.cache, rope=rope, recomputed=5), ValueError, "one part"),
        (lambda: cache.splice(chunk.cache, rope=rope, recomputed=41), ValueError, "at least as many tokens, got 41"),
        (lambda: cache.splice(chunk.cache, rope=rope, recomputed=-1), ValueError, "recomputed"),
        (lambda: cache.splice(7, rope=rope), TypeError, "snapshots and caches, got int"),
        (lambda: cache.splice(ring, rope=rope), kvfast.IncompatibleSnapshotError, "kind"),
        (lambda: cache.splice(cache_of("int4"), rope=rope), kvfast.IncompatibleSnapshotError, "dtype"),
        (lambda: cache.splice(cache_of(dim=16), rope=rope), kvfast.IncompatibleSnapshotError, "head_dim"),
        (lambda: cache.splice(kvfast.MLAKVCache(1, 64, 16), rope=rope), TypeError, "got MLAKVCache"),
        (lambda: cache.drop(-1, 5, rope=rope), ValueError, "first must be"),
        (lambda: cache.drop(5, 101, rope=rope), ValueError, "last must be"),
        (lambda: cache.drop(6, 5, rope=rope), ValueError, "first must be at most last"),
        (lambda: cache.drop(1.5, 5, rope=rope), TypeError, "first"),
        (lambda: ring.drop(0, 0, rope=rope), ValueError, "a ring"),
        (lambda: ring.splice(ring, rope=rope), ValueError, "a ring"),
        (lambda: turning.drop(0, 0, rope=rope), ValueError, "a ring with a rope"),
        (lambda: windowed.drop(0, 0, rope=rope), ValueError, "a ring or a pool with a window"),
    ]
    for call, error, text in wrong:
        with pytest.raises(error, match=text):
            call()
        assert cache.snapshot() == before
    cache.append(0, chunk.k[:2], chunk.v[:2])
    for call in (lambda: cache.splice(chunk.cache, rope=rope), lambda: cache.drop(0, 5, rope=rope)):
        with pytest.raises(ValueError, match="2 tokens that are not complete"):
            call()
    cache.truncate(100)
    cache.drop(0, 0, rope=rope)
    cache.splice(rope=rope)
    assert not cache.is_spliced
    cache.drop(0, 10, rope=rope)
    with pytest.raises(ValueError, match="rope must be the one"):
        cache.drop(0, 10, rope=kvfast.Rope(theta=5.0))
    for others in ([chunk.cache, cache], [cache]):
        with pytest.raises(ValueError, match="rope must be the one that the part"):
            cache_of().splice(*others, rope=None)
    with pytest.raises(kvfast.CacheFullError, match="room for 30 of 30 tokens, got 40"):
        cache_of(max_seq_len=30).splice(chunk.cache, rope=rope)
    for call in (lambda: cache.save("nowhere"), cache.state_dict, cache.snapshot().to_bytes):
        with pytest.raises(ValueError, match="spliced cache cannot be written"):
            call()


def test_a_rope_checks_its_numbers():
    for settings, error in (
        ({"theta": 0}, ValueError),
        ({"theta": "x"}, ValueError),
        ({"rotary_dim": 7}, ValueError),
        ({"frequencies": []}, ValueError),
        ({"frequencies": [np.inf]}, ValueError),
        ({"interleaved": 1}, TypeError),
    ):
        with pytest.raises(error):
            kvfast.Rope(**settings)
    assert kvfast.Rope(frequencies=np.array([1.0, 0.5])) == kvfast.Rope(frequencies=[1.0, 0.5])


def test_the_plan_of_a_spliced_cache_has_an_item_for_each_segment():
    rope = ROPES["halves"]
    model = Model(cache_of(), rope).append(100).splice(*chunks("int8", (200, 300), rope)).append(1)
    plan = model.cache.explain(0, (1, 6, DIM))
    assert [(item.begin, item.end) for item in plan.items] == [(0, 100), (0, 200), (0, 300), (0, 1)]
    assert plan.context == 601
    assert str(plan)


def test_a_task_of_many_queries_reads_all_segments():
    rope = ROPES["halves"]
    spliced = Model(cache_of(), rope).append(300).splice(*chunks("int8", (200, 300), rope)).append(250)
    whole = Model(cache_of(), rope).append(1050)
    assert spliced.cache.explain(0, (250, 6, DIM)).num_tasks == whole.cache.explain(0, (250, 6, DIM)).num_tasks
    assert spliced.cache.explain(0, (16, 6, DIM)).num_tasks > whole.cache.explain(0, (16, 6, DIM)).num_tasks


def test_queries_in_bfloat16_are_floats_once_rotated():
    rope = ROPES["halves"]
    model = Model(cache_of("bfloat16"), rope).append(40).splice(*chunks("bfloat16", (300, 200), rope)).append(100)
    q = model.queries(90).astype(ml_dtypes.bfloat16)
    assert np.array_equal(model.cache.attend(0, q), model.cache.attend(0, q.astype(np.float32)))


@pytest.mark.parametrize("isa", kvfast.available_isas())
@pytest.mark.parametrize("dtype", ["int8-plain", "int4-plain"])
def test_rows_that_need_exact_weights_are_read_again_in_all_segments(isa, dtype):
    """A loud element of the values leaves few bits to the weights of other tokens, in another segment, too."""
    with kvfast.use_isa(isa):
        values = np.random.default_rng(1).choice([-1.0, 1.0], (2, 160, 1, 512)).astype(np.float32)
        values[1, 100], values[1, 100, 0, 5] = 0, 300
        cache = kvfast.KVCache(1, 1, 512, dtype=dtype)
        for v in values:
            chunk = kvfast.KVCache(1, 1, 512, dtype=dtype)
            filled(chunk, np.random.default_rng(2).standard_normal((160, 1, 512), np.float32), v)
            cache.splice(chunk, rope=ROPES["halves"])
        assert len(cache.explain(0, (64, 4, 512)).items) == 2
        q = np.random.default_rng(3).standard_normal((64, 4, 512), np.float32)
        expected, _ = attention(q, cache.k(0), cache.v(0))
        assert relative_error(cache.attend(0, q), expected) < bound(dtype)


def test_write_rotates_for_the_position_in_the_whole_cache():
    rope = kvfast.Rope()
    cache, other = cache_of("float32"), cache_of("float32")
    random = np.random.default_rng(0)
    qkv = random.standard_normal((60, 4 * HEADS * DIM)).astype(np.float32)
    angles = np.multiply.outer(np.arange(100), frequencies(rope))
    tables = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    for one in (cache, other):
        one.write(0, qkv, **tables)
        one.advance(60)
    cache.drop(10, 40, rope=rope)
    other.truncate(30)
    q, expected = (one.write(0, qkv[:5], **tables) for one in (cache, other))
    assert np.array_equal(q, expected)
    assert cache.layer_length(0) == 35
    assert np.array_equal(cache.k(0)[-5:], other.k(0)[-5:])
    cache.advance(5)


@pytest.mark.parametrize("dtype", ["int8", "k8v4", "float32", "int4-plain"])
@pytest.mark.parametrize(("size", "other_size"), [(16, 64), (64, 16), (32, 256)])
def test_chunks_with_blocks_of_another_size(dtype, size, other_size):
    """A chunk, also a spliced one, and a snapshot of a spliced cache, copied to blocks of another size: the same tokens."""
    rope = ROPES["halves"]
    small = Model(kvfast.KVCache(1, HEADS, DIM, dtype=dtype, block_size=size), rope, 3).append(300)
    model = Model(kvfast.KVCache(1, HEADS, DIM, dtype=dtype, block_size=other_size), rope).append(10).splice(small).append(3)
    model.check(3)
    model.splice(small, recomputed=3).check(1)
    small.drop(10, 150).append(70).drop(90, 110)
    model.splice(small).append(5).check(3)
    snapshot = small.cache.snapshot()
    for cache in (
        kvfast.KVCache(1, HEADS, DIM, dtype=dtype, block_size=other_size),
        kvfast.PagedKVCache(1, HEADS, DIM, num_blocks=200, dtype=dtype, block_size=other_size).new_sequence(),
    ):
        for convert in (False, True):
            cache.restore(snapshot, convert)
            assert cache.snapshot() == snapshot and cache.is_spliced
        again = kvfast.KVCache(1, HEADS, DIM, dtype=dtype, block_size=size)
        again.restore(cache.snapshot())
        assert again.snapshot() == snapshot
        for one in (cache, small.cache):
            filled(one, *np.ones((2, 7, HEADS, DIM), np.float32))
        assert np.array_equal(cache.k(0), small.cache.k(0)) and np.array_equal(cache.v(0), small.cache.v(0))
        for one in (cache, small.cache):
            one.truncate(len(one) - 7)
            one.truncate(95)
        assert cache.snapshot() == small.cache.snapshot()
        small.cache.restore(snapshot)


def test_prompt_caches_refuse_a_spliced_cache(tmp_path):
    model = Model(cache_of(), None).append(600).drop(10, 20)
    prompts = kvfast.PromptCache(tmp_path)
    with pytest.raises(ValueError, match="spliced cache cannot be written"):
        prompts.save(model.cache, np.arange(590))
    pool = kvfast.PagedKVCache(1, HEADS, DIM, num_blocks=60, dtype="int8")
    pool.use_prompt_cache(prompts)
    sequence = pool.new_sequence()
    k = np.ones((600, HEADS, DIM), np.float32)
    filled(sequence, k, k, token_ids=np.arange(600))
    sequence.drop(100, 200, rope=None)
    filled(sequence, k[:300], k[:300], token_ids=np.arange(300))
    sequence.free()
    assert pool.num_free_blocks == pool.num_blocks
    found = pool.match_prefix(np.arange(600))
    np.testing.assert_allclose(found.k(0), k[: len(found)], rtol=0.02)


def test_a_prefix_is_not_found_in_what_was_dropped():
    pool = kvfast.PagedKVCache(1, HEADS, DIM, num_blocks=60, dtype="float32")
    sequence, k = pool.new_sequence(), np.arange(300, dtype=np.float32)[:, None, None] + np.zeros((300, HEADS, DIM), np.float32)
    filled(sequence, k, k, token_ids=np.arange(300))
    sequence.drop(32, 96, rope=None)
    filled(sequence, k[:100], k[:100], token_ids=np.arange(100))
    for tokens in (np.arange(300), np.concatenate((np.arange(32), np.arange(96, 300)))):
        with pool.match_prefix(tokens) as found:
            assert np.array_equal(found.k(0)[:, 0, 0], tokens[: len(found)])
    sequence.drop(0, len(sequence), rope=None)
    filled(sequence, k[:64] + 1000, k[:64], token_ids=np.arange(1000, 1064))
    with pool.match_prefix(np.arange(1000, 1100)) as found:
        assert np.array_equal(found.k(0)[:, 0, 0], np.arange(1000, 1064))


def test_the_ids_of_a_spliced_snapshot_make_no_block_known():
    """Its blocks do not follow from the tokens before them."""
    model = Model(cache_of(block_size=16), None).append(100).drop(10, 30)
    pool = kvfast.PagedKVCache(1, HEADS, DIM, num_blocks=60, block_size=16, dtype="int8")
    sequence = pool.restore(model.cache.snapshot(token_ids=np.arange(80)))
    assert np.array_equal(sequence.k(0), model.cache.k(0))
    assert pool.num_cached_blocks == 0
    again = pool.restore(sequence.snapshot(token_ids=np.arange(80)))
    k = np.ones((40, HEADS, DIM), np.float32)
    filled(again, k, k, token_ids=np.arange(40))
    assert pool.num_cached_blocks == 0
    assert len(pool.match_prefix(np.arange(80))) == 0


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_threads_read_a_spliced_cache_together(dtype):
    rope = ROPES["halves"]
    model = Model(cache_of(dtype), rope).append(100).splice(*chunks(dtype, (900, 700), rope)).append(20)
    q = model.queries(2)
    expected = model.cache.attend(0, q)
    with ThreadPoolExecutor(4) as threads:
        outs = list(threads.map(lambda _: model.cache.attend(0, q), range(40)))
    assert all(np.array_equal(out, expected) for out in outs)


def test_a_secure_cache_overwrites_the_blocks_of_dropped_tokens():
    cache = kvfast.KVCache(1, HEADS, 32, 256, "float32", secure=True)
    k = np.full((256, HEADS, 32), 7.0, np.float32)
    filled(cache, k, k)
    seen = cache.k(0)[64:128]
    assert (seen == 7).all()
    cache.drop(64, 128, rope=None)
    cache.snapshot()  # enters the pool, which releases what was dropped meanwhile
    assert (seen == 0).all()
    assert (cache.k(0) == 7).all()


def test_values_of_another_width():
    rope = ROPES["part"]
    model = Model(kvfast.KVCache(1, HEADS, 32, dtype="int4", v_head_dim=48), rope).append(90)
    model.splice(Model(kvfast.KVCache(1, HEADS, 32, dtype="int4", v_head_dim=48), rope, 4).append(150)).append(10).drop(5, 100).check(3)


def test_a_refused_drop_of_a_secure_pool_takes_no_block():
    """Two blocks are cut, one is free: a known one, which stays to be found."""
    rows = lambda n: np.ones((2, n, 1, 16), np.float32)
    pool = kvfast.PagedKVCache(1, 1, 16, num_blocks=4, block_size=16, dtype="int8", secure=True)
    sequence = filled(pool.new_sequence(), *rows(48))
    fork = sequence.fork()
    known = filled(pool.new_sequence(), *rows(16), token_ids=range(16))
    known.free()
    with pytest.raises(kvfast.CacheFullError) as told:
        sequence.drop(5, 20, rope=None)
    assert (told.value.needed, told.value.free) == (2, 1)
    assert (pool.num_free_blocks, pool.num_cached_blocks, len(sequence)) == (1, 1, 48)
    assert fork.is_spliced is sequence.is_spliced is False
