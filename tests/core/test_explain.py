"""`explain`: what it tells is what a call does, counted here from the layout of a block."""

import numpy as np
import pytest
from cache_kinds import DTYPES, HEADS, KINDS, LAYERS, fill, make, same
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfast

BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
ROWS = 16  # query rows of a pass
PANELS = {"attend_words16", "attend_tiles8", "attend_tiles_bf16"}


def lanes(tokens):
    """Codes are read in whole groups of 16 tokens."""
    return -(-tokens // 16) * 16


def cache_with(length, heads=2, dim=64, dtype="int8-plain"):
    return fill(kvfast.KVCache(1, heads, dim, dtype=dtype), np.random.default_rng(0), length)


def told(plan):
    return plan.code_bytes, plan.scale_bytes, plan.float_bytes


def ranges(plan, heads, group, length, n):
    """(first position, position after the last) of each pass that reads one KV head: causal, no window."""
    for item in plan.items:
        panels = -(-item.num_queries * group // ROWS)
        rows = ROWS * -(-panels // item.row_blocks)
        for row in range(0, item.num_queries * group, rows):
            last = (min(row + rows, item.num_queries * group) - 1) // group
            end = item.end - (item.num_queries - 1 - last)
            for begin, stop in zip(item.splits, (*item.splits[1:], item.end), strict=True):
                if begin < end:
                    yield begin, min(end, stop)


@pytest.mark.parametrize("dim", [64, 20, 80])
@pytest.mark.parametrize("length", [1, 64, 1000, 5000])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8-plain", "int4-plain", "int8/int4"])
def test_bytes_of_one_query(dtype, length, dim):
    cache = cache_with(length, dim=dim, dtype=dtype)
    padded, codes, scales, floats = lanes(dim), 0, 0, 0
    for side in (cache.k_dtype, cache.v_dtype):
        if side.startswith("int"):
            codes += 2 * lanes(length) * padded * BITS[side] // 8
            scales += 2 * lanes(length) * 4
        else:
            floats += 2 * length * padded * BITS[side] // 8
    plan = cache.explain(0, (1, 6, dim), num_splits=1)
    assert told(plan) == (codes, scales, floats)
    assert plan.bytes_read == codes + scales + floats
    read = lanes(length) if codes else length
    assert plan.operations == 4 * 6 * read * padded


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bytes_of_many_queries(data):
    length, heads, group = data.draw(st.integers(1, 3000)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    n = data.draw(st.integers(1, min(length, 60)))
    cache = cache_with(length, heads, 32)
    plan = cache.explain(0, (n, heads * group, 32), num_splits=data.draw(st.integers(0, 9)))
    passes = list(ranges(plan, heads, group, length, n))
    tokens = heads * sum(lanes(end - begin) for begin, end in passes)
    assert told(plan) == (tokens * 2 * 32, tokens * 2 * 4, 0)
    assert plan.num_tasks == heads * sum(item.num_runs * item.row_blocks for item in plan.items)
    assert sum(item.num_queries for item in plan.items) == n
    assert plan.items[-1].end == length and (plan.rows <= ROWS or plan.kernels[-1] in PANELS)


@pytest.mark.parametrize("window", [1, 100, 700])
def test_bytes_of_a_window(window):
    length, cache = 2000, cache_with(2000)
    plan = cache.explain(0, (1, 4, 64), sliding_window=window)
    step = min(plan.tile, cache.block_size)  # what lies before the block or tile with the first token is not read
    tokens = length - (length - window) // step * step
    assert told(plan) == (2 * lanes(tokens) * 2 * 64, 2 * lanes(tokens) * 8, 0)
    plan = cache_with(length).explain(0, (1, 4, 64), sliding_window=window, num_sink_tokens=5)
    tokens = lanes(tokens) + 16
    assert told(plan) == (2 * tokens * 2 * 64, 2 * tokens * 8, 0)


@pytest.mark.parametrize("length", [3, 60, 1000, 1030, 5000])
def test_bytes_of_float_rows(length):
    """For int4: the first 16 tokens, and all tokens after the last full block that 48 tokens follow."""
    dim, heads = 64, 2
    plan = cache_with(length, dtype="int4").explain(0, (1, 8, dim), num_splits=1)
    coded = max(0, length - 1 - 48) // 64 * 64
    first = min(16, length)
    newest = length - coded if length > first else 0
    assert plan.float_bytes == heads * 2 * 2 * dim * (newest + first)
    assert plan.code_bytes == heads * coded * dim  # 4 bits of keys and of values
    statistics = 2 * 2 * dim  # of a block of keys, 16 bits of scale and of offset per channel
    assert plan.scale_bytes == heads * (coded // 64 * statistics + coded * 2)


def test_splits_and_threads():
    cache = cache_with(20000, dtype="int8")
    for num_splits in (1, 2, 5):
        plan = cache.explain(0, (1, 4, 64), num_splits=num_splits)
        assert plan.num_splits == num_splits and plan.num_tasks == 2 * num_splits
        assert plan.items[0].num_runs == num_splits
    single, many = (cache.explain(0, (1, 4, 64), num_threads=num_threads) for num_threads in (1, 16))
    assert single.num_tasks == 2 and single.items[0].splits == many.items[0].splits
    assert many.num_tasks == 2 * many.items[0].num_runs == 40
    assert cache.explain(0, (1, 4, 64), num_threads=1).num_threads == 1
    assert cache.explain(0, (1, 4, 64), num_threads=7).num_threads == 7
    assert cache_with(10).explain(0, (1, 4, 64), num_threads=7).num_threads == 1  # not worth a second thread
    with kvfast.use_isa("scalar"):
        wide = cache.explain(0, (40, 16, 64))
    assert wide.rows == 16 and wide.items[0].row_blocks == 40 * 8 // 16


@pytest.mark.skipif("amx" not in kvfast.available_isas(), reason="this CPU has no matrix unit")
def test_the_matrix_unit_takes_many_rows():
    with kvfast.use_isa("amx"):
        plan = cache_with(20000, dtype="int8").explain(0, (400, 16, 64), num_threads=1)
        assert plan.rows == 256 and plan.items[0].row_blocks == 13 and plan.kernels[-1] == "attend_tiles8"
        assert cache_with(500, dtype="bfloat16").explain(0, (400, 16, 64)).kernels[-1] == "attend_tiles_bf16"
        assert cache_with(500, dtype="int8").explain(0, (3, 16, 64)).kernels[-1] == "attend_tiles8"  # 24 rows of a KV head
        for dtype, n in (("float32", 400), ("int8", 2), ("float16", 16)):
            assert cache_with(500, dtype=dtype).explain(0, (n, 16, 64)).rows == 16


def test_what_q_may_be():
    cache = cache_with(500, dtype="int8/int4")
    plan = cache.explain(0, (2, 2, 64))
    assert cache.explain(0, 2) == plan == cache.explain(0, np.ones((2, 2, 64), np.float32)) == cache.explain(0, [2, 2, 64])
    assert cache.explain(0, np.int64(2), num_q_heads=6).q_shape == (2, 6, 64)
    half = cache.explain(0, np.ones((2, 8, 64), np.float16)[:, ::2])
    assert half.q_dtype == "float16" and half == cache.explain(0, (2, 4, 64), dtype=np.float16)
    assert cache.explain(0, 1, dtype="bf16").q_dtype == "bfloat16"
    assert plan.kernels == ("scores_int8", "accumulate_int4") and plan.float_kernels == ()
    with pytest.raises(AttributeError):
        plan.tile = 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels(dtype):
    plan = cache_with(300, dtype=dtype).explain(0)
    assert plan.isa == kvfast.active_isa()
    form = kvfast.KVFormat.of(dtype)
    assert plan.storage == str(form)
    codes = {"uniform": "int4", "gaussian": "gauss4"}[form.codebook]
    k, v = (codes if dtype == "int4" else dtype for dtype in (form.k_dtype, form.v_dtype))
    assert plan.kernels == (f"scores_{form.k_dtype if form.per_channel else k}", f"accumulate_{v}")
    assert bool(plan.float_kernels) == bool(plan.float_tile) == (form.seals or form.num_first_float_tokens > 0)


@pytest.mark.parametrize("dtype", ["int4", "int8", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_cache(rng, kind, dtype):
    """Explaining changes nothing, whatever the cache."""
    cache = fill(make(kind, dtype), rng, 150)
    before = cache.copy()
    for layer in range(LAYERS):
        plan = cache.explain(layer, (1, 4, 20), num_threads=1)
        assert plan.context == 150 and plan.num_kv_heads == HEADS and plan.bytes_read > 0
        assert all(item.begin >= 0 and item.end == plan.context for item in plan.items)
        assert plan.storage in str(plan) and plan.isa in str(plan)
    assert same(cache, before)


def test_ring_reads_its_window(rng):
    ring = fill(kvfast.RingKVCache(1, 2, 64, sliding_window=100, num_sink_tokens=4, dtype="int8-plain"), rng, 1000)
    tokens = lanes(1000 - 900 // 64 * 64) + 16
    assert told(ring.explain(0, (1, 4, 64))) == (2 * tokens * 2 * 64, 2 * tokens * 8, 0)


def test_batch(rng):
    pool = kvfast.PagedKVCache(1, 2, 64, num_blocks=400, dtype="int8-plain")
    root = fill(pool.new_sequence(), rng, 1024)
    branches = [root.fork() for _ in range(4)]
    for branch in branches:
        fill(branch, rng, 10)
    alone = branches[0].explain(0, (1, 8, 64))
    apart = pool.explain_batch(0, (4, 8, 64), branches, cascade=False)
    assert apart.bytes_read == 4 * alone.bytes_read and len(apart.items) == 4 and apart.context == 4 * 1034
    shared = pool.explain_batch(0, (4, 8, 64), branches)
    tokens = 2 * (1024 + 4 * 16)
    assert told(shared) == (tokens * 2 * 64, tokens * 8, 0)
    assert shared.items[0].num_queries == 4 and shared.items[0].end == 1024
    ragged = pool.explain_batch(0, 5, branches, cu_seqlens_q=[0, 2, 3, 4, 5], num_q_heads=8)
    assert ragged.q_shape == (5, 8, 64)
    blocks, lens = pool.block_table(branches), pool.seq_lens(branches)
    assert pool.explain_batch(0, (4, 8, 64), block_table=blocks, seq_lens=lens) == shared
    with pytest.raises(ValueError, match="either sequences"):
        pool.explain_batch(0, 1)


def test_what_is_refused():
    cache = cache_with(50)
    for bad, error, words in (
        ((1, 3, 64), kvfast.DimensionMismatchError, "multiple of the 2 KV heads"),
        ((1, 2, 32), kvfast.DimensionMismatchError, "head_dim 64"),
        ((1, 64), kvfast.DimensionMismatchError, "3 dimensions"),
        ((0, 2, 64), ValueError, "tokens of q"),
        ((51, 2, 64), ValueError, "at most the 50 tokens of layer 0"),
        (1.5, TypeError, "tokens of q"),
    ):
        with pytest.raises(error, match=words):
            cache.explain(0, bad)
    for dtype in ("int8", "float64"):
        with pytest.raises(ValueError, match=f"of queries, float32, float16 or bfloat16, got '{dtype}'"):
            cache.explain(0, 1, dtype=dtype)
    with pytest.raises(IndexError):
        cache.explain(1, 1)
    with pytest.raises(ValueError, match="no tokens"):
        kvfast.KVCache(1, 2, 64).explain(0)


def notes(dim, dtype="int8", **options):
    """The plan is for the best tier of this machine, which may not be the best that there is."""
    return [note for note in cache_with(64, dim=dim, dtype=dtype).explain(0, **options).notes if "tier" not in note]


def test_notes():
    assert notes(64) == notes(80) == notes(96) == notes(128) == notes(104, "int8-plain") == []
    assert len(notes(20, "float16")) == 1 and "stored as 32" in notes(20, "float16")[0]
    assert len(notes(100)) == 2 and "100 is 4 x 25" in notes(100)[0] and "12% more bytes" in notes(100)[1]
    with kvfast.use_isa("scalar"):
        assert "scalar" in cache_with(64).explain(0).notes[0]
    with kvfast.use_isa(kvfast.available_isas()[0]):
        best = cache_with(64).explain(0).notes
    assert not best or kvfast.active_isa() in ("avx512", "avx_vnni", "avx2", "sse2", "neon_dotprod", "neon", "scalar")
    idle = cache_with(20000, 1).explain(0, 1, num_splits=1, num_threads=3)
    assert idle.num_tasks == 1 and "3 threads share 1 task" in idle.notes[-1] and "note" in str(idle)


def test_packed_codes_go_without_the_matrix_unit():
    """Which many queries are told, where there is one."""
    for form, packed in (("int8", False), ("int5", True), ("int8/int3", True)):
        cache = kvfast.KVCache(1, 2, 32, dtype=kvfast.KVFormat(form))
        cache.append(0, *np.ones((2, 500, 2, 32), np.float32))
        plan = cache.explain(0, (100, 4, 32))
        told = any("without the matrix unit" in note for note in plan.notes)
        assert told == (packed and kvfast.active_isa() == "amx")
        words = kvfast.active_isa() in ("avx512_vbmi", "avx512_vnni")
        assert (plan.kernels[-1] in PANELS) == (words or (not packed and kvfast.active_isa() == "amx"))
        assert not any("matrix unit" in note for note in cache.explain(0, (1, 4, 32)).notes)
