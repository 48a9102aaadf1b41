"""What is stored of a sequence depends on its tokens, not on how they came; nor does attention on who reads it."""

import functools
import itertools
import json

import cache_kinds
import numpy as np
import pytest
from cache_kinds import FORMATS, HEADS, LONG_KINDS, MIXED, SEALING, Stream, filled, relative_rms, told
from reference import attention, bound, relative_error, ways_agree
from selection import TIERS, cases_of, exhaustive, pairwise, parametrize

import kvfast
from kvfast import KVFormat

make = functools.partial(cache_kinds.make, long=True)

DIM = 20
MIXED_SINKS = [KVFormat("int8", num_first_float_tokens=2), "int4", KVFormat("int8", centring=True, num_first_float_tokens=9)]
SETS = FORMATS | {"mixed": MIXED, "mixed, with sinks": MIXED_SINKS}
MIXED_RECENT = [KVFormat("int8/int4", num_recent_float_tokens=80), "int4", KVFormat("int3", num_first_float_tokens=9)]
SETS["mixed, with recent"] = MIXED_RECENT
FINISHING_SETS = SEALING | {"mixed": MIXED, "mixed, with sinks": MIXED_SINKS, "mixed, with recent": MIXED_RECENT}
# Past the border of every block by more than the 16 tokens for which it is open.
LENGTH = 333
ODD = [1, 2, 5, 17, 63, 1, 65, 33, 100, 3]


def one_by_one(cache, stream, path):
    return stream.feed(cache, LENGTH, 1)


def odd_chunks(cache, stream, path):
    for n in ODD * 2:
        stream.feed(cache, min(len(cache) + n, LENGTH))
    return cache


def a_little_back(cache, stream, path):
    """As when drafted tokens are refused, over the borders of blocks."""
    for n in range(20, LENGTH, 9):
        stream.feed(cache, n, 7)
        cache.truncate(n - 1 - n % 16 if n > 16 else 3)
    return stream.feed(cache, LENGTH)


def far_back(cache, stream, path):
    """To tokens that only have their codes, once more while their block is open, and over many blocks."""
    for longest, n in ((320, 250), (262, 240), (300, 241), (333, 250), (333, 260)):
        stream.feed(cache, longest, 50)
        cache.truncate(n)
    if getattr(cache, "rollback", None) is None:
        for n in (100, 0, 200, 40, 128, 13):
            stream.feed(cache, LENGTH, 90)
            cache.truncate(n)
    return stream.feed(cache, LENGTH, 41)


def forgotten(cache, stream, path):
    """Tokens that are never advanced leave nothing."""
    stream.feed(cache, 250)
    stream.feed(cache, LENGTH, advance=False)
    cache.truncate(245)
    return stream.feed(cache, LENGTH, 20)


def cleared(cache, stream, path):
    Stream(77, LENGTH).feed(cache, LENGTH, 60)
    cache.clear()
    return stream.feed(cache, LENGTH)


def copied(cache, stream, path):
    other = stream.feed(cache, 70).copy()
    Stream(77, LENGTH).feed(cache, 150)
    return stream.feed(other, LENGTH, 100).copy()


def restored(cache, stream, path):
    """A snapshot in the middle of a block, back from other tokens, and in other caches."""
    snapshot = stream.feed(cache, 100).snapshot()
    Stream(77, LENGTH).feed(cache, 200, 30)
    cache.restore(snapshot)
    snapshot = stream.feed(cache, 203, 3).snapshot()
    other = kvfast.load(snapshot)
    if isinstance(cache, kvfast.Sequence):
        names = () if cache.rollback is None else ("sliding_window", "num_sink_tokens", "rollback")
        window = {name: getattr(cache.pool, name) for name in names}
        other = kvfast.PagedKVCache(*shape(cache), 20, dtype=cache.format, **window).restore(snapshot)
        Stream(77, LENGTH).feed(cache, 300)
    return stream.feed(other, LENGTH, 7)


def from_state(cache, stream, path):
    state = stream.feed(cache, 77, 4).snapshot().state_dict()
    return stream.feed(kvfast.load(kvfast.Snapshot.from_state_dict(state)), LENGTH, 50)


def from_file(cache, stream, path):
    for n, mmap in ((30, False), (75, True), (170, False), (171, True), (270, True), (LENGTH, False)):
        stream.feed(cache, n).save(path)
        cache = kvfast.load(path, mmap)
    return cache


def saved_after_a_cut(cache, stream, path):
    """Before the block that was cut is full again, and while it still has its floats."""
    stream.feed(cache, 320).truncate(250)
    for n in (253, 259):
        stream.feed(cache, n, 2).save(path)
        cache = kvfast.load(path)
    cache.truncate(251)
    return stream.feed(cache, LENGTH)


def shape(cache):
    return cache.num_layers, cache.num_kv_heads, cache.head_dim


ROUTES = [
    *(one_by_one, odd_chunks, a_little_back, far_back, forgotten, cleared, copied, restored, from_state),
    *(from_file, saved_after_a_cut),
]


KINDS_OF_SETS = list(itertools.product(LONG_KINDS, SETS))


@parametrize(("kind", "name"), KINDS_OF_SETS, usual=KINDS_OF_SETS[::5])  # with every kind, and with every set
def test_same_bytes_whatever_the_way(tmp_path, kind, name):
    stream = Stream(1, LENGTH)
    straight = stream.feed(make(kind, SETS[name]), LENGTH)
    expected, keys = told(straight), [straight.k(layer) for layer in range(straight.num_layers)]
    q = np.random.default_rng(2).standard_normal((1, 4, DIM)).astype(np.float32)
    for route in ROUTES:
        cache = route(make(kind, SETS[name]), stream, tmp_path / "cache")
        header, arrays = told(cache)
        assert header == expected[0], route.__name__
        assert [one for one in arrays if arrays[one] != expected[1].get(one)] == [], route.__name__
        for layer, k in enumerate(keys):
            assert np.array_equal(cache.k(layer), k)
            assert np.array_equal(cache.attend(layer, q), straight.attend(layer, q)), route.__name__


@pytest.mark.parametrize("name", SETS)
def test_prefixes_are_found_with_their_bytes(name):
    stream, ids = Stream(1, 500), np.arange(500)
    pool = kvfast.PagedKVCache(3, HEADS, DIM, 80, dtype=SETS[name])
    expected = told(stream.feed(pool.new_sequence(), 500))
    first = stream.feed(pool.new_sequence(), LENGTH, 7, token_ids=ids)
    for alive in (True, False):
        if not alive:
            first.free()
        with pool.match_prefix(ids[:LENGTH]) as second:
            assert len(second) == (LENGTH - 1) // pool.block_size * pool.block_size
            assert told(stream.feed(second, 500, 9, token_ids=ids)) == expected
        with pool.match_prefix(ids[:LENGTH]) as second:  # and cut back into what is shared
            second.truncate(len(second) - 21)
            assert told(stream.feed(second, 500, 9, token_ids=ids)) == expected


@pytest.mark.parametrize("name", SETS)
def test_prefixes_do_not_change_with_those_who_use_them(name):
    stream, ids = Stream(1, LENGTH), np.arange(LENGTH)
    pool = kvfast.PagedKVCache(3, HEADS, DIM, 80, dtype=SETS[name])
    with stream.feed(pool.new_sequence(), LENGTH, token_ids=ids) as first:
        found = (LENGTH - 1) // pool.block_size * pool.block_size
        before = told(first)
        with pool.match_prefix(ids) as second:
            prefix = told(second)
            second.truncate(found - 40)
            Stream(77, LENGTH).feed(second, LENGTH, 8)
        assert told(first) == before
    with pool.match_prefix(ids) as third:
        assert told(third) == prefix and len(third) == found


@pytest.mark.parametrize("kind", LONG_KINDS)
@pytest.mark.parametrize("name", FINISHING_SETS)
def test_snapshots_do_not_change(kind, name):
    stream = Stream(1, LENGTH)
    cache = make(kind, FINISHING_SETS[name])
    q = np.random.default_rng(2).standard_normal((2, 4, DIM)).astype(np.float32)
    taken = []
    for n in (3, 60, 64, 70, 85, 127, 130, 160, 259):
        stream.feed(cache, n, 13)
        stream.feed(cache, n + 3, advance=False)  # not complete, and not in the snapshot
        snapshot = cache.snapshot(uncounted="drop")
        seen = kvfast.load(snapshot)
        taken.append((snapshot, told(snapshot), snapshot.to_arrays(), seen.attend(0, q)))
        cache.truncate(n)
        if n == 130:
            cache.truncate(98)
            Stream(77, LENGTH).feed(cache, 110)
            cache.truncate(98)
    stream.feed(cache, LENGTH, 10)
    cache.truncate(300)
    cache.clear()
    Stream(77, LENGTH).feed(cache, LENGTH, 40)
    for snapshot, before, arrays, out in taken:
        assert told(snapshot) == before
        assert all(np.array_equal(a, b) for pair in zip(arrays, snapshot.to_arrays()) for a, b in zip(*pair))
        cache.restore(snapshot)
        assert told(cache) == before and np.array_equal(cache.attend(0, q), out)


@pytest.mark.parametrize("kind", ["growing", "sequence", "wide ring"])
@pytest.mark.parametrize("name", SEALING)
def test_going_back_to_other_tokens(kind, name):
    """The tokens before stay what their codes tell; how exact they were is not lost."""
    stream, form, n = Stream(1, LENGTH), SEALING[name], 250
    for size in (1.0, 0.3):
        others = Stream(77, LENGTH)
        others.arrays *= size
        cache = stream.feed(make(kind, form), LENGTH, 50)
        cache.truncate(n)
        k, v = cache.k(0), cache.v(0)
        others.feed(cache, n + 3, 1)
        for got, before in ((cache.k(0)[:n], k), (cache.v(0)[:n], v)):
            error = np.linalg.norm(got - before, axis=-1) / np.linalg.norm(before, axis=-1)
            assert error.max() < 5e-4
        check_contract(cache)
        others.feed(cache, LENGTH, 7)
        check_contract(cache)
        assert np.array_equal(cache.v(0)[:n], v)
        got, given = cache.k(0)[:n], stream.arrays[0, 0, :n]
        if size < 1 or form.centring:  # statistics that are good for what has followed stay, and with them all codes
            assert np.array_equal(got, k)
        else:  # new ones, for what the codes told
            assert relative_rms(got, given) < 1.5 * relative_rms(k, given)


@pytest.mark.parametrize("name", ["int4", "means, k8v4"])
def test_refused_tokens_leave_a_cut_block_as_it_was(name):
    stream = Stream(1, LENGTH)
    cache = stream.feed(make("growing", SEALING[name]), LENGTH)
    cache.truncate(250)
    before, k = told(cache), cache.k(0)
    bad = np.full((1, HEADS, DIM), np.nan, np.float32)
    with pytest.raises(kvfast.NonFiniteInputError):
        cache.append(0, bad, bad)
    assert told(cache) == before and np.array_equal(cache.k(0), k)


def check_contract(cache):
    q = np.random.default_rng(3).standard_normal((2, 4, cache.head_dim)).astype(np.float32)
    expected, _ = attention(q, cache.k(0), cache.v(0))
    assert relative_error(cache.attend(0, q), expected) < bound("int4")


@pairwise(
    ("name", "shape", "options"),
    FINISHING_SETS,
    [("growing", 16), ("sequence", DIM), ("ring", 128)],
    [{}, {"sliding_window": 40, "num_sink_tokens": 3}, {"softcap": 5.0, "num_splits": 2}],
)
def test_a_few_queries_at_once_get_the_bits_of_each_alone(name, shape, options):
    kind, dim = shape
    stream, layer = Stream(1, 300, dim), 2 if name == "mixed" else 1
    form = FINISHING_SETS[name]
    q = np.random.default_rng(2).standard_normal((300, 6, dim)).astype(np.float32)
    alone = stream.feed(make(kind, form, dim), 40)
    outs = [None] * 40
    for n in range(40, 300):
        stream.feed(alone, n + 1, advance=False)
        outs.append(alone.attend(layer, q[n : n + 1], **options)[0])
        alone.advance()
    for start in range(40, 284, 5):
        n = (16, 2, 9)[start % 3]
        cache = stream.feed(make(kind, form, dim), start, 64)
        stream.feed(cache, start + n, advance=False)
        together = cache.attend(layer, q[start : start + n], **options)
        assert np.array_equal(together, np.stack(outs[start : start + n])), start


@pytest.mark.parametrize("n", [1, 40, 100])
@pytest.mark.parametrize("name", FORMATS)
def test_keys_and_values_are_those_that_the_last_token_reads(rng, name, n):
    cache, q = make("growing", FORMATS[name]), rng.standard_normal((n, 4, DIM), np.float32)
    stream = Stream(1, 233 + n, DIM)
    stream.feed(stream.feed(cache, 233), 233 + n, advance=False)
    expected, _ = attention(q[-1:], cache.k(0), cache.v(0))
    for some in (q[-1:], q):
        assert relative_error(cache.attend(0, some)[-1:], expected) < bound(name)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(
    ("isa", "every"),
    [*(pytest.param(*one.values, False, marks=one.marks) for one in TIERS), pytest.param(*TIERS[0].values, True, marks=exhaustive)],
    indirect=["isa"],
)
def test_every_cache_and_number_of_threads_gives_the_same_bits(isa, name, every):
    stream = Stream(1, 700, 64)
    caches = [stream.feed(make(kind, SETS[name], 64), 690, 150) for kind in ("growing", "bounded", "sequence", "wide ring")]
    queries = [np.random.default_rng(2).standard_normal((n, 6, 64)).astype(np.float32) for n in (1, 10)]
    layers, settings = range(caches[0].num_layers), [{}, {"num_splits": 4}, {"sliding_window": 300, "num_sink_tokens": 4}]
    calls = list(itertools.product(range(2), layers, range(3)))
    expected = {
        (i, layer, j): caches[0].attend(layer, queries[i], num_threads=1, return_lse=True, **settings[j]) for i, layer, j in calls
    }
    for (i, layer, j), cache, num_threads in cases_of(every, calls, caches, (1, 2, 3)):
        out, lse = cache.attend(layer, queries[i], num_threads=num_threads, return_lse=True, **settings[j])
        assert np.array_equal(out, expected[i, layer, j][0]) and np.array_equal(lse, expected[i, layer, j][1])


def test_threads_finish_the_same_blocks():
    """Long prompts are encoded by several threads."""
    streams = Stream(1, 2048, 128, 8, 1), Stream(1, 2048, 128, 8, 1)
    states = []
    for stream, num_threads in zip(streams, (1, 3)):
        kvfast.set_num_threads(num_threads)
        try:
            for name in SEALING:
                states.append((name, told(stream.feed(kvfast.KVCache(1, 8, 128, dtype=SEALING[name]), 2048))))
        finally:
            kvfast.set_num_threads(None)
    assert states[: len(SEALING)] == states[len(SEALING) :]


@pytest.mark.parametrize("name", SETS)
def test_shared_prefixes_are_read_once(isa, name):
    stream = Stream(1, 1400, 32)
    pool = kvfast.PagedKVCache(3, HEADS, 32, 160, dtype=SETS[name])
    ids = np.arange(1400)
    parent = stream.feed(pool.new_sequence(), 1275, 300, token_ids=ids)
    others = [Stream(seed, 1400, 32) for seed in range(50, 54)]
    sequences = [parent, parent.fork(), parent.fork(), pool.match_prefix(ids[:1100]), pool.match_prefix(ids[:1275])]
    for sequence, other in zip(sequences[1:], others):
        other.feed(sequence, len(sequence) + 7)
    sequences.append(Stream(60, 1400, 32).feed(pool.new_sequence(), 130))
    counts = [1, 2, 1, 8, 3, 1]
    bounds = np.r_[0, np.cumsum(counts)]
    rng = np.random.default_rng(2)
    k, v = rng.standard_normal((2, sum(counts), HEADS, 32)).astype(np.float32)
    q = rng.standard_normal((sum(counts), 6, 32)).astype(np.float32)
    slots = pool.slot_mapping(sequences, counts)
    for layer in range(3):
        pool.append_batch(layer, k, v, slots)
        shared = pool.attend_batch(layer, q, sequences, cu_seqlens_q=bounds)
        apart = pool.attend_batch(layer, q, sequences, cu_seqlens_q=bounds, cascade=False)
        once, each = (pool.explain_batch(layer, q, sequences, cu_seqlens_q=bounds, cascade=cascade) for cascade in (True, False))
        assert once.bytes_read < each.bytes_read
        assert ways_agree(shared, apart, name)
        for i, sequence in enumerate(sequences):
            part = slice(bounds[i], bounds[i + 1])
            assert np.array_equal(sequence.attend(layer, q[part]), apart[part])
        for num_threads in (1, 2, 3):
            again = pool.attend_batch(layer, q, sequences, cu_seqlens_q=bounds, num_threads=num_threads)
            assert np.array_equal(again, shared)


@pytest.mark.parametrize("name", SETS)
def test_batches_store_what_sequences_store(name):
    """append_batch and write_batch, tokens of several sequences mixed, over the borders of blocks."""
    streams = [Stream(seed, 300) for seed in (1, 2, 3)]
    pool, starts = kvfast.PagedKVCache(3, HEADS, DIM, 80, dtype=SETS[name]), [0, 50, 118]
    sequences = [stream.feed(pool.new_sequence(), n) for stream, n in zip(streams, starts)]
    for step in range(12):
        counts = [(step * 5 + i * 7) % 13 for i in range(3)]
        slots = pool.slot_mapping(sequences, counts)
        order = np.argsort(np.concatenate([np.arange(n) for n in counts]), kind="stable")
        for layer in range(3):
            parts = [stream.arrays[layer, :, len(one) : len(one) + n] for stream, one, n in zip(streams, sequences, counts)]
            k, v = np.concatenate(parts, 1)[:, order]
            if step % 2:
                pool.append_batch(layer, k, v, slots[order])
            else:
                qkv = np.concatenate([np.zeros_like(k), k, v], 1).reshape(len(k), -1)
                pool.write_batch(layer, qkv, slots[order], num_q_heads=HEADS)
        for sequence, n in zip(sequences, counts):
            if n:
                sequence.advance(n)
    for sequence, stream in zip(sequences, streams):
        assert told(sequence) == told(stream.feed(pool.new_sequence(), len(sequence)))


def test_write_stores_what_append_stores(rng):
    for form in SETS.values():
        written, appended = make("growing", form), make("growing", form)
        for n in (100, 1, 40, 27):
            qkv = rng.standard_normal((n, 4 * HEADS * DIM)).astype(np.float32)
            _, k, v = kvfast.split_qkv_norm_rope(qkv, 2 * HEADS, HEADS, DIM)
            for layer in range(written.num_layers):
                written.write(layer, qkv)
                appended.append(layer, k, v)
            written.advance(n)
            appended.advance(n)
        assert told(written) == told(appended)


@pytest.mark.parametrize("name", FINISHING_SETS)
def test_float_rows_are_given_back(name):
    """As the sequence goes on, it takes what its codes take and the float rows of a block, and of the open and first tokens."""
    stream, form = Stream(1, 1000), FINISHING_SETS[name]
    for kind in ("growing", "sequence", "wide ring"):
        cache = make(kind, form)
        rest = []
        for n in range(300, 1000, 9):
            stream.feed(cache, n)
            size = len(cache.block_indices(0)) * cache.bytes_per_token * cache.block_size
            rest.append((cache.nbytes_used - size) / cache.block_size)
        layers, open_tokens = cache.num_layers, max(one.open_tokens for one in cache._storage.formats)
        # Values that are float32 stay so.
        most = (6 if name == "means, float values" else 4) * layers * HEADS * 32 * (1 + (32 + open_tokens) / cache.block_size)
        assert max(rest) <= most and min(rest) < 0.75 * most
        cache.truncate(500)
        stream.feed(cache, 990, 1)
        assert cache.nbytes_used - len(cache.block_indices(0)) * cache.bytes_per_token * cache.block_size <= (most * cache.block_size)


@pytest.mark.parametrize("num_tokens", [3000, 3072])
def test_layers_share_the_reserve_of_float_rows(rng, num_tokens):
    """The first layer's append of a prompt reserves memory for those of all layers."""
    cache = kvfast.KVCache(4, 2, 64, dtype="int4")
    k, v = rng.standard_normal((2, num_tokens, 2, 64), np.float32)
    sizes = []
    for layer in range(4):
        cache.append(layer, k, v)
        sizes.append(cache.nbytes)
    assert sizes[1:] == sizes[:1] * 3


def test_float_rows_of_a_long_prompt_are_given_back(rng):
    long, short = (kvfast.KVCache(2, 2, 64, 4096, dtype="int4") for _ in range(2))
    k, v = rng.standard_normal((2, 3072, 2, 64), np.float32)
    for cache, n in ((long, 3072), (short, 64)):
        filled(cache, k[:n], v[:n])
        for _ in range(100):
            filled(cache, k[:1], v[:1])
    assert long.nbytes == short.nbytes


@pytest.mark.parametrize("kind", LONG_KINDS)
@pytest.mark.parametrize("name", SEALING)
def test_kept_tokens_keep_their_codes_whatever_follows(rng, tmp_path, kind, name):
    """Regenerate, edit, go back: kept tokens are unchanged, and later ones as faithful as ever."""
    cache = make(kind, SEALING[name])
    layers, dim = range(2), 20
    size = SEALING[name].block_size
    cut, n = size + size // 2 + 3, 2 * size + 4 + SEALING[name].kept_tokens

    def extend(count, loud=1):
        k, v = loud * rng.standard_normal((2, count, HEADS, dim)).astype(np.float32)
        filled(cache, k, v)
        return k

    extend(n)
    if kind not in ("growing", "bounded", "sequence"):
        return  # a ring does not go back so far
    kept = cache.k(0)[:cut]
    for edit in range(12):
        cache.truncate(cut)
        last = extend(n - cut, 1 + 3 * (edit % 2))
    assert np.array_equal(cache.k(0)[:cut], kept)
    assert relative_rms(cache.k(0)[cut:], last) < (0.15 if SEALING[name].k_dtype in ("int3", "int4") else 0.01)
    for count in (1, 40):
        q = rng.standard_normal((count, 2 * HEADS, dim)).astype(np.float32)
        out = cache.attend(1, q)
        expected, _ = attention(q, cache.k(1), cache.v(1))
        assert relative_error(out, expected) < bound(name)
        for other in (cache.fork() if kind == "sequence" else cache.copy(), kvfast.load(cache.snapshot())):
            assert np.array_equal(other.k(0), cache.k(0))
            assert np.array_equal(other.attend(1, q), out)
    cache.save(tmp_path / "edited.kv")
    loaded = kvfast.load(tmp_path / "edited.kv")
    assert np.array_equal(loaded.attend(1, q), out) and np.array_equal(loaded.k(1), cache.k(1))
    # Cut in the middle of what follows on the kept tokens, and before them. Until the block is full again, float16 rows tell
    # what its codes do.
    for end in (cut + 5, cut - 7):
        for one in (cache, loaded):
            one.truncate(end)
            assert np.array_equal(one.k(0)[:cut], kept[:end])
            for layer in layers:
                one.append(layer, last, last)
        assert np.array_equal(cache.attend(1, q), loaded.attend(1, q))
        for one in (cache, loaded):
            one.advance(len(last))
        assert np.allclose(cache.k(0)[: min(end, cut)], kept[:end], rtol=2**-10, atol=2**-10)
        assert np.array_equal(cache.k(0), loaded.k(0))
    extend(size)
    assert np.array_equal(cache.k(0)[: cut - 7], kept[: cut - 7])


def test_a_refused_append_leaves_a_patched_block_as_it_was(rng):
    cache = kvfast.KVCache(1, 1, 16, dtype="int4")
    k = rng.standard_normal((300, 1, 16)).astype(np.float32)
    cache.append(0, k, k), cache.advance(300)
    cache.truncate(210)
    cache.append(0, 5 * k[:90], k[:90]), cache.advance(90)
    cache.truncate(230)
    rows, out = cache.k(0), cache.attend(0, k[:1])
    bad = k[:3].copy()
    bad[2] = np.nan
    with pytest.raises(kvfast.NonFiniteInputError):
        cache.append(0, bad, bad)
    assert np.array_equal(cache.k(0), rows) and np.array_equal(cache.attend(0, k[:1]), out)


def test_found_prefixes_end_before_a_patched_block(rng):
    """Whoever finds a block reads codes, which the newer tokens of a patched one do not have."""
    pool = kvfast.PagedKVCache(1, 1, 16, num_blocks=16, dtype="int4")
    k = rng.standard_normal((300, 1, 16)).astype(np.float32)
    with pool.new_sequence() as sequence:
        sequence.append(0, k, k), sequence.advance(300, range(300))
        sequence.truncate(100)
        sequence.append(0, 5 * k[:200], k[:200]), sequence.advance(200, range(1000, 1200))
        rows = sequence.k(0)
        with pool.match_prefix([*range(100), *range(1000, 1201)]) as found:
            assert len(found) == 64 and np.array_equal(found.k(0)[4:], rows[4:64])


def test_few_values_far_from_all_others_do_not_widen_their_channel(isa, rng):
    """The line of least squares goes through the many, and would leave the few several steps outside of the codes."""
    k = np.ones((128, 1, 16), np.float32) + rng.standard_normal((128, 1, 16)).astype(np.float32) * 0.01
    k[:6, 0] = np.array([-1.555, -0.458, 0.229, 0.917, 1.778, 1.02], np.float32)[:, None]
    cache = filled(kvfast.KVCache(1, 1, 16, dtype=KVFormat("int4", per_channel=True, block_size=128)), k, k)
    filled(cache, k[:40], k[:40])
    assert np.abs(cache.k(0)[:128] - k).max() < 1.02 / 15 * (k.max(0) - k.min(0)).max()


def test_a_patched_block_that_is_open_again_is_saved(rng, tmp_path):
    """Its last tokens went before its float rows did."""
    cache = kvfast.KVCache(1, 1, 16, dtype="int4")
    k = rng.standard_normal((200, 1, 16)).astype(np.float32)
    cache.append(0, k, k), cache.advance(200)
    cache.truncate(100)
    cache.append(0, 5 * k[:33], k[:33]), cache.advance(33)
    cache.truncate(125)
    cache.save(tmp_path / "cut.kv")
    loaded = kvfast.load(tmp_path / "cut.kv")
    for one in (cache, loaded):
        one.append(0, k[:60], k[:60]), one.advance(60)
    assert np.array_equal(loaded.k(0), cache.k(0)) and np.array_equal(loaded.attend(0, k[:2]), cache.attend(0, k[:2]))


WAYS = {
    "copy": lambda cache, path: cache.copy(),
    "fork": lambda cache, path: cache.fork(),
    "restore": lambda cache, path: kvfast.load(cache.snapshot()),
    "state_dict": lambda cache, path: type(cache).from_state_dict(cache.state_dict()),
    "file": lambda cache, path: (cache.save(path), kvfast.load(path))[1],
    "mapped file": lambda cache, path: (cache.save(path), kvfast.load(path, mmap=True))[1],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SEALING)
def test_patched_block_of_floats_is_carried_over(rng, tmp_path, name, way):
    """It is full, and its codes are never those of the tokens that do not fit its scales."""
    size = SEALING[name].block_size
    cache = kvfast.KVCache(1, HEADS, DIM, dtype=SEALING[name])
    for cut, n, loud in ((0, 2 * size + 40, 0.1), (size + 10, size - 4, 3), (2 * size + 6, 60, 1)):
        if cut:
            cache.truncate(cut)
        k, v = loud * rng.standard_normal((2, n, HEADS, DIM)).astype(np.float32)
        filled(cache, k, v)
        if loud == 3:  # 2 * size + 6 tokens: the block is full, and fewer than 16 tokens follow it
            before, loud_k = cache.k(0), k
            other = WAYS[way](cache, tmp_path / "cache")
            assert np.array_equal(other.k(0), before) and other.snapshot() == cache.snapshot()
    filled(other, k, v)
    assert np.array_equal(other.k(0), cache.k(0)) and np.array_equal(other.v(0), cache.v(0))
    assert relative_rms(other.k(0)[size + 10 : 2 * size], loud_k[: size - 10]) < (0.2 if SEALING[name].k_dtype == "int4" else 0.02)


@pytest.mark.parametrize("name", [name for name in SEALING if SEALING[name].per_channel])
def test_a_patched_block_is_sealed_once_tokens_that_fit_follow(rng, name):
    """Tokens with codes keep them. The others, float rows so far, get codes for the first time."""
    size = SEALING[name].block_size
    cache = kvfast.KVCache(1, HEADS, DIM, dtype=SEALING[name])

    def go_on(loud):
        """Up to three blocks, or as many tokens as are read as codes with two; ten tokens that fit, then others."""
        k, v = rng.standard_normal((2, 2 * size + max(size, SEALING[name].open_tokens) - len(cache), HEADS, DIM)).astype(np.float32)
        k *= 0.3
        k[10:] *= loud
        filled(cache, k, v)
        return k[:10], cache.k(0)[size : size + 20]

    go_on(3)
    cache.truncate(size + 10)
    coded = cache.k(0)[size:]
    given, patched = go_on(100)
    assert np.array_equal(patched[:10], coded) and relative_rms(patched[10:], given) < 1e-3
    cache.truncate(size + 20)
    _, sealed = go_on(1)
    most = 0.8 if SEALING[name].k_dtype == "int3" else 0.5  # of keys at 30 % of the statistics' range
    assert np.array_equal(sealed[:10], coded) and 1e-3 < relative_rms(sealed[10:], given) < most


@pytest.mark.parametrize("name", SEALING)
def test_tokens_that_never_came_leave_a_cut_block_as_it_was(rng, name):
    size = SEALING[name].block_size
    cache = kvfast.KVCache(2, HEADS, DIM, dtype=SEALING[name])
    k, v = rng.standard_normal((2, 3 * size, HEADS, DIM)).astype(np.float32)
    filled(cache, k, v)
    for cut in (size + 17, size + 5, 7):
        cache.truncate(cut)
        q = rng.standard_normal((3, HEADS, DIM)).astype(np.float32)
        before = [cache.k(layer) for layer in range(2)], cache.attend(1, q[: min(cut, 3)]), cache.nbytes_used
        cache.append(0, k[:20], v[:20])
        cache.truncate(cut)
        assert np.array_equal([cache.k(layer) for layer in range(2)], before[0])
        assert np.array_equal(cache.attend(1, q[: min(cut, 3)]), before[1]) and cache.nbytes_used == before[2]


def test_forged_patches_are_refused_or_read(rng):
    """What a state says of patched blocks is checked before it is believed; what is believed has its float rows."""
    cache = kvfast.KVCache(1, 1, 16, dtype="int4")
    k = rng.standard_normal((300, 1, 16)).astype(np.float32)
    cache.append(0, k, k), cache.advance(300)
    cache.truncate(100)
    cache.append(0, 5 * k[:200], k[:200]), cache.advance(200)
    state = cache.state_dict()
    header = json.loads(state["header"].tobytes())
    (place,) = header["tables"]
    assert place["patches"] == [[1, 36]]
    refused = 0
    for patches in (
        *([], [[0, 5]], [[1, 37]], [[1, 64]], [[1, 0]], [[4, 1]], [[10**9, 1]], [[1, 36], [1, 36]]),
        *([[3, 60], [2, 1]], [[-1, 3]], [[1]], [36]),
        *("36", {"1": 36}, [[1, 36, 2]], [[1.5, 3]]),
        [[0, 3], [1, 36], [2, 17]],
    ):
        place["patches"] = patches
        forged = state | {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
        try:
            other = kvfast.KVCache.from_state_dict(forged)
        except kvfast.CorruptFileError:
            refused += 1
            continue
        assert np.isfinite(other.k(0)).all() and np.isfinite(other.attend(0, k[:20])).all()
    assert refused >= 14


RULES = ["int4", "int2", "int8-centred", "int8", "int3"]  # codes once 16 or 96 tokens follow a block, or at once


@pytest.mark.parametrize("kind", [kind for kind in LONG_KINDS if kind != "ring and whole layer"])
def test_layers_of_different_rules_are_as_alone(rng, kind):
    """Neither the float rows of another layer, nor a block that is patched there, change what a layer shows and reads."""
    together = [make(kind, RULES), *(make(kind, [name]) for name in RULES)]
    states = None
    # Tokens that come and that are taken back; a state that is kept, and taken up again.
    for n in [204, -40, 10, -3, 150, -90, 70, "keep", -60, 130, "load", 77]:
        if n == "keep":
            states = [cache.snapshot().state_dict() for cache in together]
        elif n == "load":
            for cache, state in zip(together, states):
                cache.restore(kvfast.Snapshot.from_state_dict(state))
        elif n < 0:
            for cache in together:
                cache.truncate(len(cache) + n)
        else:
            for layer in range(len(RULES)):
                k, v = rng.standard_normal((2, n, HEADS, DIM)).astype(np.float32)
                k[5:] *= {150: 50, 70: 0.2}.get(n, 1)  # some do not fit the scales of a block that was cut
                together[0].append(layer, k, v), together[layer + 1].append(0, k, v)
                # The next layer, whose tokens have yet to come, is not opened by those of this one.
                _check_as_alone(rng, together, min(layer + 1, len(RULES) - 1))
            for cache in together:
                cache.advance(n)
        for layer in range(len(RULES)):
            _check_as_alone(rng, together, layer)


def _check_as_alone(rng, together, layer):
    q = rng.standard_normal((3, HEADS, DIM)).astype(np.float32)
    shown = []
    for cache, at in ((together[0], layer), (together[layer + 1], 0)):
        shown.append([cache.k(at), cache.v(at), cache.attend(at, q) if cache.layer_length(at) else q])
    assert all(np.array_equal(*pair) for pair in zip(*shown)), RULES[layer]


def test_forged_states_of_layers_are_refused(rng):
    cache = kvfast.KVCache(3, 1, 16, dtype=["int4", "int8-rotated", "int2"])
    filled(cache, each=[rng.standard_normal((2, 204, 1, 16)).astype(np.float32) for _ in range(3)])
    state = cache.state_dict()
    header = json.loads(state["header"].tobytes())
    (place,) = header["tables"]
    int4, int2 = place["layers"]
    assert int4 == {"floats_begin": 128, "kept_codes": 0} and int2 == {"floats_begin": 96, "kept_codes": 0}

    def load(table):
        text = json.dumps(header | {"tables": [table]}).encode()
        return kvfast.KVCache.from_state_dict(state | {"header": np.frombuffer(text, np.uint8)})

    assert np.array_equal(load(place).k(0), cache.k(0))
    for layers in ([], [int4], [int2], [int4, int4], [int2, int4], [int4, int2, int2], [int4, {}], [int4, int2 | {"layers": []}], 3):
        with pytest.raises(kvfast.CorruptFileError):
            load(place | {"layers": layers})
    for table in (place | int2, {"skipped_blocks": 0} | int4, {"skipped_blocks": 0} | int2):
        with pytest.raises(kvfast.CorruptFileError):
            load(table)
