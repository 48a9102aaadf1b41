"""Threads: the same bits for every number, and no corruption."""

import os
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
from cache_kinds import fill, filled
from in_threads import meanwhile, together
from selection import parametrize

import kvfast
import kvfast.compression
from kvfast.caches.multi_head import MultiHeadConfig
from kvfast.codec.rope import RotaryTables


@pytest.fixture(autouse=True)
def default_threads():
    yield
    kvfast.set_num_threads(None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8-plain", "k8v4", "int4"])
@pytest.mark.parametrize("n", [1, 70])
def test_same_bits_for_any_number_of_threads(rng, dtype, n):
    cache = fill(kvfast.KVCache(1, 4, 64, dtype=dtype), rng, 6000)
    q = rng.standard_normal((n, 16, 64)).astype(np.float32)
    one = cache.attend(0, q, num_threads=1)
    for num_threads in (2, 3, 8):
        assert np.array_equal(cache.attend(0, q, num_threads=num_threads), one)


def append_and_read(dtype):
    """Rows become blocks, which are finished, copied and read again."""

    def results(rng):
        cache = fill(kvfast.KVCache(1, 4, 64, dtype=dtype), rng, 6000)
        copy = cache.copy()
        return [*cache.state_dict().values(), copy.k(0), copy.v(0)]

    return results


def split_and_rotate(rng):
    angles = rng.standard_normal((2, 3000, 32), np.float32)
    return kvfast.split_qkv_norm_rope(rng.standard_normal((3000, 8 * 64), np.float32), 4, 2, 64, cos=angles[0], sin=angles[1])


def quantize_and_back(rng):
    codes, scales = kvfast.quantize(rng.standard_normal((3000, 4, 64), np.float32), 4)
    return codes, scales, kvfast.dequantize(codes, scales, head_dim=64)


REGIONS = {f"append_and_read {dtype}": append_and_read(dtype) for dtype in ("float32", "int8", "k8v4", "int4")}


@pytest.mark.parametrize(
    "region", [*REGIONS.values(), split_and_rotate, quantize_and_back], ids=[*REGIONS, "split_and_rotate", "quantize_and_back"]
)
def test_parallel_regions_besides_attention_have_the_same_bits(region):
    outcomes = []
    for num_threads in (1, 2, 4):
        kvfast.set_num_threads(num_threads)
        outcomes.append([np.asarray(array) for array in region(np.random.default_rng(3))])
    for outcome in outcomes[1:]:
        assert all(np.array_equal(array, one) for array, one in zip(outcome, outcomes[0], strict=True))


@parametrize("num_queries", [40, 200], usual=[40])
def test_second_thread_is_refused_or_served(rng, num_queries):
    cache = fill(kvfast.KVCache(1, 4, 64, dtype="int8"), rng, 6000)
    q = rng.standard_normal((num_queries, 16, 64)).astype(np.float32)
    expected = cache.attend(0, q)
    outcomes = []

    def work():
        for _ in range(10):
            try:
                outcomes.append(np.array_equal(cache.attend(0, q), expected))
            except RuntimeError as error:
                outcomes.append("another thread" in str(error))

    together(work, work, work)
    assert len(outcomes) == 30 and all(outcomes)
    assert np.array_equal(cache.attend(0, q), expected)


def kv(rng, n, heads=2, head_dim=32):
    return rng.standard_normal((2, n, heads, head_dim), np.float32)


def one_sequence(kind):
    if kind == "ring":
        return kvfast.RingKVCache(2, 2, 32, sliding_window=64, num_sink_tokens=4, rollback=8)
    return kvfast.KVCache(2, 2, 32) if kind == "contiguous" else kvfast.PagedKVCache(2, 2, 32, num_blocks=64).new_sequence()


class Meanwhile:
    """A number of threads that a call asks for when it is well under way; makes other calls then."""

    def __init__(self, calls):
        self.calls, self.outcomes = calls, {}

    def __index__(self):
        def work():
            for name, call in self.calls.items():
                try:
                    call()
                    self.outcomes[name] = "served"
                except RuntimeError as error:
                    self.outcomes[name] = str(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return 1


@pytest.mark.parametrize("kind", ["contiguous", "ring", "paged"])
def test_changes_are_refused_while_another_thread_reads(rng, tmp_path, kind):
    cache = filled(one_sequence(kind), each=[kv(rng, 100) for _ in range(2)])
    snapshot, q = cache.snapshot(), rng.standard_normal((1, 4, 32), np.float32)
    expected, stored = cache.attend(0, q), cache.state_dict()
    calls = {
        "append": lambda: cache.append(0, *kv(rng, 1)),
        "write": lambda: cache.write(0, np.zeros((1, 8 * 32), np.float32)),
        "attend": lambda: cache.attend(0, q),
        "explain": lambda: cache.explain(0, q.shape),
        "truncate": lambda: cache.truncate(99),
        "clear": cache.clear,
        "copy": cache.copy,
        "snapshot": cache.snapshot,
        "restore": lambda: cache.restore(snapshot),
        "k": lambda: cache.k(0),
        "v": lambda: cache.v(1),
        "state_dict": cache.state_dict,
        "save": lambda: cache.save(tmp_path / "cache.safetensors"),
    }
    if kind == "paged":
        calls |= {"fork": cache.fork, "free": cache.free}
    meanwhile = Meanwhile(calls)
    assert np.array_equal(cache.attend(0, q, num_threads=meanwhile), expected)
    assert meanwhile.outcomes.keys() == calls.keys()
    served = {name for name, outcome in meanwhile.outcomes.items() if outcome == "served"}
    assert served == {"attend", "explain", "k", "v"} | ({"copy"} if kind != "paged" else set())  # there it is a fork
    assert {name for name, outcome in meanwhile.outcomes.items() if "another thread" not in outcome} == served
    assert np.array_equal(cache.attend(0, q), expected)
    after = cache.state_dict()
    assert after.keys() == stored.keys() and all(np.array_equal(after[name], stored[name]) for name in stored)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["contiguous", "ring", "paged"])
def test_every_method_is_refused_while_another_thread_changes_a_cache(rng, kind):
    cache = filled(one_sequence(kind), each=[kv(rng, 100) for _ in range(2)])
    q = rng.standard_normal((1, 4, 32), np.float32)
    calls = {
        "append": lambda: cache.append(0, *kv(rng, 1)),
        "attend": lambda: cache.attend(0, q),
        "explain": lambda: cache.explain(0, q.shape),
        "truncate": lambda: cache.truncate(99),
        "copy": cache.copy,
        "snapshot": cache.snapshot,
        "k": lambda: cache.k(0),
    }
    meanwhile = Meanwhile(calls)
    cache.write(0, np.ones((1, 8 * 32), np.float32), num_threads=meanwhile)
    assert meanwhile.outcomes.keys() == calls.keys()
    assert {name for name, outcome in meanwhile.outcomes.items() if "another thread" not in outcome} == set()


def test_threads_read_together(rng):
    """Layers of a cache, sequences of a pool, finished prompts, heads: none refuses another, and all have the same bits."""
    cache = kvfast.KVCache(2, 2, 32)
    pool = kvfast.PagedKVCache(1, 2, 32, num_blocks=64)
    sequences = [pool.new_sequence() for _ in range(3)]
    heads = kvfast.MultiHeadKVCache(2, MultiHeadConfig(32))
    for layer in range(2):
        cache.append(layer, *kv(rng, 700))
    for sequence in sequences:
        sequence.append(0, *kv(rng, 500))
    for k, v in kv(rng, 90).transpose(1, 0, 2, 3):
        heads.push_token(k, v)
    finished = kvfast.KVCacheCompressor(kvfast.Quantize(8)).compress_kv_3d(*kv(rng, 300).transpose(0, 2, 1, 3))
    q = rng.standard_normal((40, 4, 32), np.float32)
    calls = [
        lambda: cache.attend(0, q),
        lambda: cache.attend(1, q[:1]),
        lambda: cache.k(0),
        lambda: cache.copy().v(1),
        *(lambda sequence=sequence: sequence.attend(0, q) for sequence in sequences),
        lambda: pool.attend_batch(0, q[:3], sequences),
        lambda: finished.attend(q),
        lambda: heads.attend(q[0, :2]),
    ]
    expected = [call() for call in calls]
    wrong = []

    def work(first):
        for i in range(40 * len(calls)):
            at = (first + i) % len(calls)
            try:
                if not np.array_equal(calls[at](), expected[at]):
                    wrong.append(at)
            except RuntimeError as error:
                wrong.append(error)

    together(*[partial(work, i) for i in range(4)])
    assert wrong == []


def test_pool_refuses_changes_while_another_thread_reads(rng):
    pool = kvfast.PagedKVCache(1, 2, 32, num_blocks=8, dtype="int8")
    one, other = pool.new_sequence(), pool.new_sequence()
    filled(one, *kv(rng, 100))
    q = rng.standard_normal((1, 4, 32), np.float32)
    calls = {
        "new_sequence": pool.new_sequence,
        "match_prefix": lambda: pool.match_prefix([1, 2, 3]),
        "slot_mapping": lambda: pool.slot_mapping([other], 1),
        "append_batch": lambda: pool.append_batch(0, *kv(rng, 1), np.array([-1])),
        "attend_batch": lambda: pool.attend_batch(0, q, [one], cu_seqlens_q=[0, 1]),
        "clear": pool.clear,
        "append": lambda: other.append(0, *kv(rng, 1)),
    }
    meanwhile = Meanwhile(calls)
    expected, free = one.attend(0, q), pool.num_free_blocks
    assert np.array_equal(one.attend(0, q, num_threads=meanwhile), expected)
    assert meanwhile.outcomes.keys() == calls.keys()
    assert {name for name, outcome in meanwhile.outcomes.items() if "another thread" not in outcome} == {"attend_batch"}
    assert pool.num_free_blocks == free and len(other) == 0


class MeetingDigest(bytes):
    """A digest that makes another call while it is looked up."""

    calls, outcomes = {}, {}

    def __hash__(self):
        meanwhile = Meanwhile(self.calls)
        meanwhile.__index__()
        self.outcomes.update(meanwhile.outcomes)
        return super().__hash__()


def test_a_found_prefix_is_not_taken_away_before_it_has_an_owner(rng):
    pool = kvfast.PagedKVCache(1, 2, 32, num_blocks=4, block_size=64, dtype="int8")
    with pool.new_sequence() as sequence:
        filled(sequence, *kv(rng, 64), token_ids=range(64))
    other = pool.new_sequence()
    MeetingDigest.calls["append"] = lambda: other.append(0, *kv(rng, 256))  # as many as the pool has
    found = kvfast.Sequence(pool, range(64), [MeetingDigest(one) for one in pool._batches.index.digests(range(64), 64)])
    assert len(found) == 64 and pool.num_free_blocks == 3
    assert "another thread" in MeetingDigest.outcomes["append"]


class MeetingIds:
    """Token ids that make calls of another thread while the sequence takes them."""

    def __init__(self, ids, meanwhile):
        self.ids, self.meanwhile = ids, meanwhile

    def tolist(self):
        self.meanwhile.__index__()
        return self.ids


def test_ids_change_together_with_their_tokens(rng):
    """Another thread finds either both done, or none."""
    pool = kvfast.PagedKVCache(1, 2, 32, num_blocks=16, block_size=64, dtype="int8-rotated")
    sequence = pool.new_sequence()
    sequence.append(0, *kv(rng, 64))
    calls = {
        "append": lambda: sequence.append(0, *kv(rng, 1)),
        "advance": lambda: sequence.advance(1, [7]),
        "truncate": lambda: sequence.truncate(3),
        "fork": sequence.fork,
        "free": sequence.free,
        "match": lambda: pool.match_prefix(range(65)),
    }
    meanwhile = Meanwhile(calls)
    sequence._storage.advance(64, lambda before: sequence._ids.add(before, MeetingIds(list(range(64)), meanwhile)))
    assert {name for name, outcome in meanwhile.outcomes.items() if "another thread" not in outcome} == set()
    assert meanwhile.outcomes.keys() == calls.keys() and len(sequence) == 64
    with pool.match_prefix(range(65)) as found:
        assert np.array_equal(found.k(0), sequence.k(0))


@pytest.mark.parametrize("left", ["advance", "truncate", "restore"])
def test_interrupted_call_forgets_ids(rng, monkeypatch, left):
    """Whoever asks for a prefix never gets the keys and values of other tokens."""
    pool = kvfast.PagedKVCache(1, 2, 32, num_blocks=16, block_size=32, dtype="int8-rotated")
    sequence, other = pool.new_sequence(), pool.new_sequence()
    for one, ids in ((sequence, range(64)), (other, range(100, 164))):
        filled(one, *kv(rng, 64), token_ids=ids)
    snapshot = other.snapshot()
    # Ctrl-C came when the tokens had changed, and what is known of them had not.
    if left == "advance":
        sequence.append(0, *kv(rng, 32))
        sequence._storage.advance(32)
    elif left == "truncate":
        sequence._storage.truncate(32)
    else:

        def interrupted(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(type(sequence._ids), "set", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sequence.restore(snapshot)
    assert sequence.snapshot().token_ids is None
    filled(sequence, *kv(rng, 64), token_ids=range(1000, 1064))
    assert len(pool.match_prefix([*range(64), *range(1000, 1064), 0])) == 64
    with pool.match_prefix([*range(100, 164), 0]) as found:
        assert np.array_equal(found.k(0), other.k(0))


def test_threads_with_sequences_of_one_pool(rng):
    """Each tries again when it is refused; in the end each has what it would have alone."""
    pool = kvfast.PagedKVCache(1, 2, 32, num_blocks=64, dtype="int8")
    sequences = [pool.new_sequence() for _ in range(4)]
    tokens = kv(rng, 4 * 200).reshape(2, 4, 200, 2, 32)
    q, refused = rng.standard_normal((1, 4, 32), np.float32), [0] * 4

    def insistently(i, call, *arguments):
        while True:
            try:
                return call(*arguments)
            except RuntimeError as error:
                assert "another thread" in str(error)
                refused[i] += 1

    def work(i):
        for t in range(0, 200, 10):
            insistently(i, sequences[i].append, 0, *tokens[:, i, t : t + 10])
            insistently(i, sequences[i].advance, 10)
            insistently(i, sequences[i].attend, 0, q)

    together(*[partial(work, i) for i in range(4)])
    for i, sequence in enumerate(sequences):
        alone = filled(kvfast.KVCache(1, 2, 32, dtype="int8"), *tokens[:, i])
        assert len(sequence) == 200 and np.array_equal(sequence.k(0), alone.k(0))
        assert np.array_equal(sequence.attend(0, q), alone.attend(0, q))


def insistently(call, *arguments):
    """Until no other thread is in."""
    while True:
        try:
            return call(*arguments)
        except RuntimeError as error:
            assert "another thread" in str(error)


def test_many_threads_on_distinct_caches():
    """Each does all that one does alone, and has the same bytes in the end."""

    def work(seed):
        rng = np.random.default_rng(seed)
        cache = one_sequence(("contiguous", "ring", "paged")[seed % 3])
        for _ in range(15):
            filled(cache, each=[kv(rng, 20) for _ in range(2)])
            cache.attend(0, rng.standard_normal((1, 4, 32), np.float32), num_threads=2)
            copied = cache.copy()
            if seed % 3 != 1:
                cache.truncate(len(cache) - 7)
            results[seed] = copied.k(0).tobytes() + cache.v(1).tobytes()

    results = {}
    together(*[partial(work, seed) for seed in range(12)])
    at_once = dict(results)
    for seed in range(12):
        work(seed)
    assert len(at_once) == 12 and at_once == results


def test_many_threads_on_one_cache(rng):
    """They append one token each at a time, and go back, when they are let in: none is lost, none is torn."""
    pool = kvfast.PagedKVCache(1, 2, 32, num_blocks=64, dtype="float32")
    sequence, wanted, read_once, torn = pool.new_sequence(), 400, threading.Event(), []

    def write(number):
        for i in range(wanted // 4):
            if i == 10:  # on a busy machine all tokens could be there before a reader is let in
                assert read_once.wait(60)
            insistently(sequence.append, 0, *np.full((2, 1, 2, 32), 1 + number * 1000 + i, np.float32))

    def read():
        if sequence.layer_length(0):
            insistently(sequence.attend, 0, np.ones((1, 4, 32), np.float32))
            rows = insistently(sequence.k, 0)
            torn.append(bool(np.any(rows != rows[:, :1, :1])))
            read_once.set()
        insistently(insistently(sequence.fork).free)

    with meanwhile(read, read):
        together(*[partial(write, number) for number in range(4)])
    sequence.advance(wanted)
    stored = sequence.k(0)[:, 0, 0]
    assert sorted(stored.tolist()) == sorted(1.0 + number * 1000 + i for number in range(4) for i in range(wanted // 4))
    for number in range(4):  # each thread's own in their order
        own = stored[(stored - 1) // 1000 == number]
        assert np.all(np.diff(own) == 1)
    assert torn and not any(torn)
    sequence.free()
    assert pool.num_free_blocks == 64


@pytest.mark.parametrize("kind", ["contiguous", "ring", "paged"])
def test_a_cache_can_be_looked_at_while_it_is_used(rng, kind):
    """By another thread, whose questions get no call of the first refused."""
    cache, stop, seen = one_sequence(kind), threading.Event(), []
    tokens, deadline = kv(rng, 100), time.monotonic() + 60

    def use():
        turn = 0
        try:
            while turn < 60 or len(seen) < 20 and time.monotonic() < deadline:
                turn += 1
                filled(cache, *tokens)
                cache.attend(0, np.ones((1, 4, 32), np.float32))
                if turn % 3 == 0:
                    cache.clear()
            cache.clear()
        finally:
            stop.set()

    def look():
        while True:
            blocks = cache.block_indices(1)
            assert blocks.size == 0 or blocks.min() >= 0
            seen.append(
                (cache.nbytes_used, cache.nbytes, cache.bytes_per_token, repr(cache), cache.context_lens.sum(), cache.capacity())
            )
            if kind == "paged":
                pool = cache.pool
                seen.append((pool.num_free_blocks, pool.num_sequences, repr(pool), cache.can_append(10), pool._batches.owners().max()))
            if stop.is_set():
                return

    together(use, look, look)
    assert len(seen) >= 20 and cache.nbytes_used == 0


def test_dropped_sequences_refuse_no_call_of_another_thread(rng):
    """Sequences that are collected give their blocks back as soon as nobody is in the pool."""
    pool = kvfast.PagedKVCache(1, 2, 32, num_blocks=200, dtype="int8")
    sequence = filled(pool.new_sequence(), *kv(rng, 60))
    dropped = [[sequence.fork() for _ in range(50)] for _ in range(3)]

    def drop(those):
        while those:
            those.pop()

    def use():
        for token in np.ones((300, 2, 1, 2, 32), np.float32):
            filled(sequence, *token)

    together(use, *[lambda those=those: drop(those) for those in dropped])
    assert len(sequence) == 360 and pool.num_sequences == 1
    sequence.free()
    assert pool.num_free_blocks == 200


def test_threads_serve_requests_from_one_pool():
    """They share a prompt's blocks, fork, free and forget sequences; each answer is what a cache alone would give."""
    pool = kvfast.PagedKVCache(1, 2, 32, num_blocks=100, dtype="int4")
    rng = np.random.default_rng(0)
    prompt, ids = kv(rng, 96), np.arange(97)
    q = rng.standard_normal((1, 4, 32), np.float32)

    def alone(own):
        cache = kvfast.KVCache(1, 2, 32, block_size=pool.block_size)
        for rows in (prompt, own):
            filled(cache, *rows)
        return cache.attend(0, q).tobytes()

    def serve(number):
        own = kv(np.random.default_rng(number), 40)
        expected = alone(own)
        for turn in range(25):
            sequence = insistently(pool.match_prefix, ids)
            if len(sequence) < 96:
                insistently(sequence.append, 0, *prompt[:, len(sequence) :])
                insistently(sequence.advance, 96 - len(sequence), ids[len(sequence) : 96])
            branch = insistently(sequence.fork)
            insistently(branch.append, 0, *own)
            insistently(branch.advance, 40)
            answers.append(insistently(branch.attend, 0, q).tobytes() == expected)
            if turn % 2:
                insistently(sequence.free)
            del sequence, branch

    answers = []
    together(*[lambda number=number: serve(number) for number in range(1, 5)])
    assert len(answers) == 100 and all(answers)
    assert pool.num_sequences == 0 and pool.num_free_blocks == 100


class Writing:
    """A number of threads that writes into an array once the call that asks for it has checked that."""

    def __init__(self, array, value):
        self.array, self.value = array, value

    def __index__(self):
        self.array[...] = self.value
        return 1


def test_arrays_that_were_checked_are_not_read_again(rng):
    """A scheduler that fills in the next step's while a call reads this one's."""
    pool = kvfast.PagedKVCache(1, 2, 32, num_blocks=8, block_size=32, dtype="int8-rotated")
    k, v = kv(rng, 96)
    pool.append_batch(0, k, v, np.arange(96))
    q = rng.standard_normal((2, 4, 32), np.float32)
    arguments = {
        "block_table": np.array([[0, 1, 2]], np.int32),
        "seq_lens": np.array([96], np.int32),
        "cu_seqlens_q": np.array([0, 2], np.int32),
    }
    expected = pool.attend_batch(0, q, **arguments)
    for name, array in arguments.items():
        mine = arguments | {name: array.copy()}
        try:  # an array is read before or after this write, as a whole
            assert np.array_equal(pool.attend_batch(0, q, **mine, num_threads=Writing(mine[name], 2**30)), expected), name
        except ValueError as error:
            assert str(2**30) in str(error)
    angles, positions = rng.standard_normal((2, 8, 16), np.float32), np.array([3, 4])
    rows = rng.standard_normal((2, 8 * 32), np.float32)
    parts = [
        kvfast.split_qkv_norm_rope(rows, 4, 2, 32, cos=angles[0], sin=angles[1], positions=one, num_threads=threads)
        for one, threads in ((positions.copy(), 1), (positions, Writing(positions, 2**40)))
    ]
    assert all(np.array_equal(one, other) for one, other in zip(*parts, strict=True)) and positions[0] == 2**40


def test_compressed_tokens_share_no_memory_with_their_state(rng):
    """A book's bounds say where on the stack its rows go: nobody else may write to them."""
    compressor = kvfast.compression.KVCacheCompressor(kvfast.compression.VectorQuantization(codebook_size=16))
    x = rng.standard_normal((2, 60, 32), np.float32)
    compressed = compressor.compress_kv_3d(x, x)
    state, expected = compressed.state_dict(), compressed.attend(x.swapaxes(0, 1))
    again = kvfast.CompressedKV.from_state_dict(state)
    for array in state.values():
        if array.flags.writeable:
            array[...] = 0
    for one in (compressed, again):
        assert np.array_equal(one.attend(x.swapaxes(0, 1)), expected)


def test_heads_without_tokens_are_refused_inside_the_lock():
    """Another thread may clear the cache between the call and the lock: a division by its length ended the process."""
    cache = kvfast.MultiHeadKVCache(2, MultiHeadConfig(head_dim=32))
    for call in (cache.attend, cache.head(1).attend):
        queries = 2 if call == cache.attend else 1
        with pytest.raises(ValueError, match="no tokens"):
            call(np.ones((queries, 32), np.float32))


class CountedBetween:
    """An array of keys, queries or a projection that has other tokens appended as its shape is asked for."""

    def __init__(self, array, meanwhile):
        self.array, self.meanwhile = array, meanwhile

    @property
    def shape(self):
        return self.array.shape

    def __array__(self, *arguments, **options):
        self.meanwhile()
        return np.array(self.array)


@pytest.mark.parametrize("method", ["append", "write", "attend"])
def test_positions_are_those_that_the_rotation_was_made_for(rng, method):
    """A ring that turns queries and keys itself stores none that were turned for another place."""
    ring = kvfast.RingKVCache(1, 2, 32, sliding_window=64, rope=kvfast.Rope())
    ring.append(0, *kv(rng, 3))
    rows = {"append": kv(rng, 1), "write": np.ones((1, 1, 8 * 32), np.float32), "attend": np.ones((1, 1, 4, 32), np.float32)}[method]
    hooked = CountedBetween(rows[0], lambda: ring._storage.append(0, *kv(rng, 1)))
    with pytest.raises(RuntimeError, match="held 3 tokens, and holds 4"):
        getattr(ring, method)(0, hooked, *rows[1:])
    assert ring.layer_length(0) == 4


def test_tables_of_rotation_are_there_for_every_thread():
    tables = RotaryTables([1.0, 0.1, 0.01, 0.001])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        together(*[lambda turn=turn: [tables(turn * i, 1) for i in range(3000)] for turn in (1, 7, 13)])
    finally:
        sys.setswitchinterval(interval)
    assert np.array_equal(tables(5, 2)[0], tables.at([5, 6])[0])


@pytest.mark.skipif(getattr(sys, "_is_gil_enabled", lambda: True)(), reason="this Python has a GIL")
def test_kvfast_needs_no_gil():
    code = "import sys, kvfast, kvfast.compression; print(sys._is_gil_enabled())"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    got = subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert got.stdout == "False\n"


SECOND_RUNTIME = """
import ctypes, os, shutil, sys, tempfile
when, folder = sys.argv[1:]
def runtimes():
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if "libgomp" in line}
def load_another(path):
    # As a library that comes with its own runtime does, and for all to see, as PyTorch's does.
    ctypes.CDLL(shutil.copy(path, os.path.join(folder, "libgomp-another.so.1")), ctypes.RTLD_GLOBAL).omp_get_max_threads()
if when == "before":
    load_another(os.environ["GOMP_PATH"])
import numpy as np, kvfast
def attend(num_threads):
    cache = kvfast.KVCache(1, 4, 64)
    rng = np.random.default_rng(0)
    cache.append(0, *rng.standard_normal((2, 6000, 4, 64), np.float32))
    return cache.attend(0, rng.standard_normal((1, 16, 64), np.float32), num_threads=num_threads)
first = attend(2)
if when == "after":
    load_another(next(iter(runtimes())))
assert np.array_equal(first, attend(1)) and np.array_equal(first, attend(2))
print(*runtimes())
"""


@pytest.fixture
def gnu_openmp():
    """Paths of GNU's OpenMP in this process; builds by clang have another one."""
    if sys.platform != "linux":
        pytest.skip("looks for it in /proc")
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libgomp" in line}
    return paths or pytest.skip("this build does not have it")


@pytest.mark.parametrize("when", ["before", "after"])
def test_second_openmp_runtime(tmp_path, when, gnu_openmp):
    """Another runtime in the process, loaded before kvfast or while it is in use: the same bits."""
    got = subprocess.run(
        [sys.executable, "-c", SECOND_RUNTIME, when, str(tmp_path)],
        env={**os.environ, "GOMP_PATH": min(gnu_openmp)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert got.returncode == 0, got.stderr
    assert any(path.endswith("libgomp-another.so.1") for path in got.stdout.split())


def test_policy():
    threadpoolctl = pytest.importorskip("threadpoolctl")
    kvfast.set_num_threads(3)
    assert kvfast.get_num_threads() == 3
    kvfast.set_num_threads(None)
    if kvfast.has_openmp():  # threadpoolctl knows no other threads
        with threadpoolctl.threadpool_limits(1):
            assert kvfast.get_num_threads() == 1
    for bad, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="num_threads"):
            kvfast.set_num_threads(bad)


def run(code, **environment):
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_environment():
    code = "import kvfast; print(kvfast.get_num_threads(), kvfast.active_isa())"
    got = run(code, KVFAST_NUM_THREADS="5", KVFAST_ISA="scalar")
    assert got.stdout.split() == ["5", "scalar"]
    assert "KVFAST_NUM_THREADS" in run(code, KVFAST_NUM_THREADS="many").stderr
    for name in ("abacus", "AVX2"):
        assert f"KVFAST_ISA in the environment: unknown ISA tier '{name}'; this CPU can run" in run(code, KVFAST_ISA=name).stderr


@pytest.mark.parametrize(("value", "threads"), [("3", 3), ("4,2", 4), (" 5 ", 5)])
def test_threads_of_openmp_in_the_environment(value, threads):
    """Also where kvfast has threads of its own."""
    got = run("import kvfast; print(kvfast.get_num_threads())", OMP_NUM_THREADS=value, KVFAST_NUM_THREADS="")
    assert got.stdout.split() == [str(threads)], got.stderr


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_no_more_threads_than_cpus_that_may_be_used():
    """By default. OpenMP asks once, when it is loaded; kvfast's own threads are counted anew in each call."""
    own = kvfast.config()["threads"] == "kvfast"
    pin = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code = "import kvfast\n" + pin if own else pin + "import kvfast\n"
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "KVFAST_NUM_THREADS")}
    command = [sys.executable, "-c", code + "print(kvfast.get_num_threads(), kvfast.config()['threads'])"]
    got = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert got.stdout.split() == ["1", "kvfast" if own else "OpenMP"]


def test_python_ends_while_a_thread_computes():
    """A daemon thread of Python may be in the middle of a call, with threads at work for it."""
    code = (
        "import threading, numpy as np, kvfast\n"
        "cache = kvfast.KVCache(1, 2, 64)\n"
        "cache.append(0, *np.ones((2, 20000, 2, 64), np.float32))\n"
        "q, begun = np.ones((1, 8, 64), np.float32), threading.Event()\n"
        "def work():\n"
        "    while True:\n"
        "        cache.attend(0, q, num_threads=3)\n"
        "        begun.set()\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "begun.wait()\n"
    )
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0 and not done.stderr, done.stderr


def test_threads_do_not_spin_for_long(gnu_openmp):
    """What runs between two calls, the BLAS of a model above all, has the processors for itself."""
    script = (
        "import os, time, numpy as np, kvfast\n"
        "assert 'GOMP_SPINCOUNT' not in os.environ or os.environ['GOMP_SPINCOUNT'] == '300000'\n"
        "kvfast.set_num_threads(2)\n"
        "cache = kvfast.KVCache(1, 2, 64)\n"
        "cache.append(0, *np.ones((2, 8192, 2, 64), np.float32))\n"
        "q, used = np.ones((1, 8, 64), np.float32), 0.0\n"
        "for _ in range(20):\n"
        "    cache.attend(0, q)\n"
        "    start = time.process_time()\n"
        "    time.sleep(0.02)\n"
        "    used += time.process_time() - start\n"
        "print(used)\n"
    )

    def seconds(**extra):
        environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} | extra
        command = [sys.executable, "-c", script]
        return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    # Neighbours that compute at the same time make single runs longer; threads that spin do so in every run.
    least = next((found for found in (seconds() for _ in range(3)) if found < 0.05), None)
    assert least is not None
    if len(os.sched_getaffinity(0)) > 1:  # what a user sets stays, and the test can tell
        assert any(seconds(GOMP_SPINCOUNT="300000") > 2 * least for _ in range(3))
