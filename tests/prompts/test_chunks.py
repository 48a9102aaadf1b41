"""Chunks of prompts: what is shared, what comes back, and what a store may do."""

import contextlib
import os
import threading
import time
import warnings

import numpy as np
import pytest
from cache_kinds import FORMATS, KINDS, Stream, make, seals
from dict_store import DictStore
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfast
from kvfast.prompts import patient
from kvfast.prompts.stores import FolderStore, TieredStore, troubles
from kvfast.prompts.writer import MOST_PENDING, Writer

pytest.importorskip("safetensors")

TOKENS = list(range(300))
STREAM = Stream(11, 480, layers=2)


def prompts_of(store=None, dtype="int8-rotated", **options):
    size = kvfast.KVFormat.of(dtype).block_size or 64
    return kvfast.PromptCache(DictStore() if store is None else store, chunk_tokens=max(64, size), **options)


def rows_of(cache):
    return [side(layer) for layer in range(cache.num_layers) for side in (cache.k, cache.v)]


def same_rows(cache, other):
    return len(cache) == len(other) and all(map(np.array_equal, rows_of(cache), rows_of(other)))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["growing", "bounded", "sequence"])
def test_every_format_comes_back(name, kind):
    dtype = FORMATS[name]
    prompts, whole = prompts_of(dtype=dtype), STREAM.feed(make("growing", dtype), 300, 70)
    assert prompts.save(whole, TOKENS)
    for given_tokens, common in [(TOKENS, 299), (TOKENS[:280] + [999] * 20, 280), (TOKENS[:200] + [999] * 90, 200)]:
        cache = make(kind, dtype, long=kind == "bounded")
        found = prompts.restore(cache, given_tokens)
        if found < common:  # only full blocks are shared, and the end of another prompt at least 16 tokens long
            assert common - found < prompts.chunk_tokens and found % prompts.chunk_tokens == 0
        if found == common or dtype.seals or found <= 280 - dtype.open_tokens:  # else `whole` still has floats of what was found
            assert same_rows(cache, kvfast.load(whole.snapshot().truncated(found)))
        if not dtype.open_tokens:
            assert cache.snapshot() == STREAM.feed(make("growing", dtype), found).snapshot()
        # Going on with the same tokens ends in the same bytes.
        end = 330 if dtype.seals else 330 + dtype.open_tokens
        assert STREAM.feed(cache, end, 37).snapshot() == STREAM.feed(make("growing", dtype), end, 37).snapshot()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["int4", "int8-rotated", "float16"])
def test_every_kind_comes_back(kind, dtype):
    prompts = prompts_of(dtype=dtype)
    whole = STREAM.feed(make(kind, dtype), 300, 1)
    assert prompts.save(whole, TOKENS)
    cache = make(kind, dtype)
    assert prompts.restore(cache, [*TOKENS, 7]) == 300
    assert same_rows(cache, whole) and cache.snapshot() == whole.snapshot()
    q = np.ones((1, 4, 20), np.float32)
    assert np.array_equal(cache.attend(1, q), whole.attend(1, q))


@pytest.mark.parametrize(
    "make_cache",
    [
        lambda: kvfast.MLAKVCache(2, 64, 16),
        lambda: kvfast.MLAKVCache(2, 64, 16, dtype="float16", block_size=16),
        lambda: kvfast.PagedMLAKVCache(2, 64, 16, num_blocks=20, block_size=32).new_sequence(),
    ],
)
def test_latent_rows_come_back(make_cache):
    prompts, rng, whole = prompts_of(), np.random.default_rng(3), make_cache()
    rows = rng.standard_normal((2, 300, 80)).astype(np.float32)
    for layer in range(2):
        whole.append(layer, rows[layer])
    whole.advance(300)
    assert prompts.save(whole, TOKENS)
    cache = make_cache()
    assert prompts.restore(cache, TOKENS) == 299
    assert all(np.array_equal(cache.get_latent(layer), whole.get_latent(layer)[:299]) for layer in range(2))


def test_the_same_beginning_is_stored_once():
    prompts = prompts_of()
    for last in range(20):
        tokens = [*TOKENS[:200], *[900 + last] * 100]
        assert prompts.save(STREAM.feed(make("growing", "int8-rotated"), 300), tokens)
    store = prompts.store
    # 200 tokens have 3 whole chunks; what follows is each prompt's own.
    assert len(store.keys("c")) == 3 + 20 and len(store.keys("e")) == 20
    before = len(store.values)
    assert prompts.save(STREAM.feed(make("growing", "int8-rotated"), 300), tokens) and len(store.values) == before


def test_a_prompt_is_found_with_few_calls():
    prompts = prompts_of()
    prompts.save(STREAM.feed(make("growing", "int8-rotated"), 300), TOKENS)
    prompts.flush()
    for _ in range(2):
        prompts.store.calls.clear()
        assert prompts.restore(make("growing", "int8-rotated"), TOKENS) == 299
        prompts.flush()
        names = [name for name, _ in prompts.store.calls]
        # One for all chunks, then lists of tails, the end, and the chunks themselves.
        assert names.count("contains") == 1 and names.count("get") <= 6 and names.count("touch") == 1
        for i in range(50):
            prompts.save(STREAM.feed(make("growing", "int8-rotated"), 90), [1000 + i] * 90)
        prompts.flush()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["int4", "int8-rotated"])
def test_a_saved_beginning_is_found_for_any_longer_prompt(kind, dtype):
    """A system prompt, however long the question; also where another prompt has the same beginning and more chunks."""
    prompts, ids = prompts_of(dtype=dtype), np.arange(2000)
    whole = STREAM.feed(make(kind, dtype), 241)
    assert prompts.save(whole, ids[:241])
    for length in (242, 257, 300, 320, 321, 384, 385, 474, 1000, 2000):
        cache = make(kind, dtype)
        assert prompts.restore(cache, ids[:length]) == 241
        assert same_rows(cache, whole)
    assert prompts.save(STREAM.feed(make(kind, dtype), 390), ids[:390])
    cache, asked = make(kind, dtype), np.append(ids[:300], np.arange(5000, 5700))
    found = prompts.restore(cache, asked)
    assert found >= 241 and (seals(dtype) or same_rows(cache, STREAM.feed(make(kind, dtype), found)))


@pytest.mark.parametrize("window", [64, 300])
def test_a_pool_with_a_window_finds_a_saved_beginning(window):
    """As a server uses it: `match_prefix`, whatever is asked."""
    prompts, ids = prompts_of(), np.arange(2000)
    rows = np.random.default_rng(0).standard_normal((2, 241, 2, 20), np.float32)

    def pool():
        new = kvfast.PagedKVCache(1, 2, 20, num_blocks=80, dtype="int8-rotated", sliding_window=window, num_sink_tokens=4)
        new.use_prompt_cache(prompts, save=False)
        return new

    sequence = pool().new_sequence()
    sequence.append(0, *rows)
    sequence.advance(241, ids[:241])
    assert prompts.save(sequence, ids[:241])
    for length in (242, 320, 321, 500, 2000):
        assert len(pool().match_prefix(ids[:length])) == 241


def test_a_long_prompt_of_a_ring_is_found_with_few_calls():
    prompts, ids = prompts_of(), np.arange(20_000)
    prompts.save(STREAM.feed(make("ring", "int8-rotated"), 100), ids[:100])
    prompts.flush()
    prompts.store.calls.clear()
    assert prompts.restore(make("ring", "int8-rotated"), ids) == 100
    prompts.flush()
    names = [name for name, _ in prompts.store.calls]
    assert names.count("contains") == 1 and names.count("get") <= 2


@pytest.mark.parametrize("kind", ["growing", "sequence", "sequence with window", "ring and whole layer"])
@pytest.mark.parametrize("dtype", ["int4", "int8-rotated"])
@settings(max_examples=12, deadline=None)  # a busy machine takes longer
@given(data=st.data())
def test_any_history_equals_computing(kind, dtype, data):
    """Whatever was saved, evicted or damaged: what is restored are the tokens of the prompt, and going on gives the same bytes."""
    prompts, rng = prompts_of(dtype=dtype), np.random.default_rng(data.draw(st.integers(0, 99)))
    store = prompts.store
    for _ in range(data.draw(st.integers(1, 8))):
        branch, length = int(rng.integers(3)), int(rng.integers(1, 330))
        cut = int(rng.integers(length + 1)) if branch else length
        tokens = [*range(cut), *[1000 * branch + i for i in range(cut, length)]]
        arrays = [STREAM.arrays[:, :, i] * (1 + branch * (i >= cut)) for i in range(length)]
        cache = make(kind, dtype)
        found = prompts.restore(cache, [*tokens, 5])
        computed = make(kind, dtype)
        for one, first in ((cache, found), (computed, 0)):
            for i in range(first, length):
                for layer in range(2):
                    one.append(layer, *arrays[i][layer, :, None])
                one.advance(1)
        if seals(dtype):
            assert same_codes(computed, cache)
        elif kind in ("growing", "sequence"):
            assert computed.snapshot() == cache.snapshot()
        else:  # a ring that was taken back may hold fewer tokens before its window
            assert same_rows(computed, cache)
        prompts.save(cache, tokens)
        for key in list(store.values):
            if rng.random() < 0.15:
                del store.values[key]


def same_codes(cache, other):
    """Whether all tokens are the same, as well as INT4 has them; a restored prefix has lost the float rows of its last tokens."""
    return len(cache) == len(other) and all(np.max(np.abs(a - b), initial=0) < 0.8 for a, b in zip(rows_of(cache), rows_of(other)))


@pytest.mark.parametrize("dtype", ["int4", "int8-rotated"])
@pytest.mark.parametrize("wrong", ["flipped", "cut", "longer", "empty", "swapped", "another", "random"])
def test_lies_are_never_attended_to(wrong, dtype):
    tokens = [*range(310)]  # `int4` has codes of four whole blocks then
    prompts, whole = prompts_of(dtype=dtype), STREAM.feed(make("growing", dtype), 310)
    prompts.save(whole, tokens)
    other = prompts_of(dtype=dtype)
    other.save(Stream(12, 310, layers=2).feed(make("growing", dtype), 310), tokens, model="")
    rng, store = np.random.default_rng(5), prompts.store
    lies = {
        "flipped": lambda key, value: bytes(
            b ^ (1 << int(rng.integers(8))) if i == at else b for at in [int(rng.integers(len(value)))] for i, b in enumerate(value)
        ),
        "cut": lambda key, value: value[: int(rng.integers(len(value)))],
        "longer": lambda key, value: value + b"\0",
        "empty": lambda key, value: b"",
        "swapped": lambda key, value: store.values[[*store.values][int(rng.integers(len(store.values)))]],
        "another": lambda key, value: value[:64] + value[64:][::-1],
        "random": lambda key, value: rng.bytes(len(value)),
    }
    for seed in range(6):
        rng, chosen = np.random.default_rng(seed), [*store.values][seed % len(store.values)]
        values = dict(store.values)
        store.changed = lambda key, value, chosen=chosen: lies[wrong](key, value) if key == chosen and value is not None else value
        cache = make("growing", dtype)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = prompts.restore(cache, tokens)
        if found < 309 and not seed:  # each kind of warning comes once
            assert "cannot be used" in str(caught[0].message)
        assert found == len(cache) and (found == 0 or same_rows(cache, kvfast.load(whole.snapshot().truncated(found))))
        store.values = values


def test_tenants_do_not_meet():
    store = DictStore()
    ours, theirs, none = (prompts_of(store, secret=secret) for secret in (b"ours", b"theirs", b""))
    whole = STREAM.feed(make("growing", "int8-rotated"), 300)
    ours.save(whole, TOKENS)
    assert ours.restore(make("growing", "int8-rotated"), TOKENS) == 299
    for other in (theirs, none):
        assert other.restore(make("growing", "int8-rotated"), TOKENS) == 0
    assert ours.restore(make("growing", "int8-rotated"), TOKENS, salt=b"x") == 0
    # Values of another tenant under the keys of this one are refused.
    theirs.save(whole, TOKENS)
    keys = store.keys("c")
    half = len(keys) // 2
    for a, b in zip(keys[:half], keys[half:]):
        store.values[a] = store.values[b]
    with pytest.warns(RuntimeWarning, match="another key"):
        assert ours.restore(make("growing", "int8-rotated"), TOKENS) == 0


def test_a_store_that_fails_costs_a_warning():
    prompts = prompts_of(time_limit=0.2)
    whole = STREAM.feed(make("growing", "int8-rotated"), 300)
    prompts.save(whole, TOKENS)
    prompts.flush()  # or what marks the values as used fails first, and warns of writing
    prompts.store.error = kvfast.StoreError("the server is gone")
    with pytest.warns(RuntimeWarning, match="computed, as dict fails: the server is gone"):
        assert prompts.restore(make("growing", "int8-rotated"), TOKENS) == 0
    for _ in range(3):  # and no other warning
        assert prompts.restore(make("growing", "int8-rotated"), TOKENS) == 0
        assert not prompts.save(whole, [*TOKENS[:299], 5])
    calls = len(prompts.store.calls)
    assert prompts.restore(make("growing", "int8-rotated"), TOKENS) == 0 and len(prompts.store.calls) == calls  # it pauses


TOLD = "prompts are not saved, as dict fails: it has no room"


def test_a_full_store_is_told_once_and_left_alone(monkeypatch, caplog):
    """Figures of their own for what it took and what not; a line when it takes values again; and no more of both for a while."""
    now = 100.0
    monkeypatch.setattr(patient.time, "monotonic", lambda: now)
    prompts, whole = prompts_of(), STREAM.feed(make("growing", "int8-rotated"), 300)
    store, puts = prompts.store, lambda: sum(name == "put" for name, _ in prompts.store.calls)
    for times in range(3):
        store.put = lambda key, value: store.calls.append(("put", 1))  # as a store of the user that says nothing
        store.calls.clear()
        with pytest.warns(RuntimeWarning, match=TOLD) if not times else contextlib.nullcontext():
            assert not prompts.save(whole, TOKENS)
        assert not prompts.save(whole, [*TOKENS[:299], 5]) and 1 <= puts() <= 2  # for each thread that writes
        assert prompts.restore(make("growing", "int8-rotated"), TOKENS) == 0 and not caplog.records[1:]
        assert times < prompts.stats.num_refused <= 2 * (times + 1) and prompts.stats.bytes_refused > 0  # what it was offered
        now += patient.FIRST_PAUSE
        del store.put
        assert prompts.save(whole, TOKENS) and prompts.restore(make("growing", "int8-rotated"), TOKENS) == 299
        prompts.flush()
        assert [one.message for one in caplog.records] == ["prompts are saved again, as dict is well"]
        assert prompts.stats.bytes_written == (times + 1) * sum(map(len, store.values.values()))
        store.values.clear()
    now += troubles.QUIET
    store.put = lambda key, value: False
    caplog.clear()
    assert not prompts.save(whole, TOKENS) and [one.message for one in caplog.records] == [TOLD]


@pytest.mark.parametrize("is_tiered", [False, True])
def test_a_value_that_is_too_large_is_refused_alone(tmp_path, is_tiered):
    """The store takes the next one at once, and is not said to be full."""
    store = FolderStore(tmp_path, max_bytes=20_000)
    store = TieredStore(store, FolderStore(tmp_path / "far", max_bytes=30_000)) if is_tiered else store
    with prompts_of(store) as prompts, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not prompts.chunks.put("c-" + "0" * 64, bytearray(40_000), 0).result() and not prompts.chunks.is_paused
        assert prompts.chunks.put("c-" + "1" * 64, bytearray(10_000), 0).result()
        assert prompts.stats.bytes_refused == 40_000
    why = "neither takes a value" if is_tiered else "a value is larger than max_bytes=20000"
    assert [str(one.message) for one in caught] == [f"a value is not saved in {store.url}: {why}"]


def test_nothing_is_done_for_a_store_that_is_left_alone(monkeypatch):
    monkeypatch.setattr(patient, "FIRST_PAUSE", 60.0)
    prompts, whole = prompts_of(), STREAM.feed(make("growing", "int8-rotated"), 300)
    assert prompts.save(whole, TOKENS)
    prompts.store.put = lambda key, value: False
    with pytest.warns(RuntimeWarning, match=TOLD):
        assert not prompts.save(whole, [*TOKENS[:299], 5])
    refused = prompts.stats.num_refused
    monkeypatch.setattr(prompts.chunks, "put", pytest.fail)
    assert not prompts.save(whole, [*TOKENS[:298], 5, 6]) and prompts.stats.num_refused == refused > 0
    assert prompts.save(whole, TOKENS)  # which is there


def test_a_trouble_that_comes_again_is_shown_again(monkeypatch, caplog):
    """Python shows a warning of the same text and line once."""
    monkeypatch.setattr(patient, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(troubles, "QUIET", 0.0)
    prompts, shown = prompts_of(), []
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *others: shown.append(str(message))
        for error in (kvfast.StoreError("gone"), None) * 3:
            prompts.store.error = error
            assert prompts.restore(make("growing", "int8-rotated"), TOKENS) == 0
    trouble, end = "prompts are computed, as dict fails: gone", "prompts are found again, as dict is well"
    assert shown == [trouble] and [one.message for one in caplog.records] == [end, trouble, end, trouble, end]


def test_a_slow_store_costs_its_time_limit():
    prompts = prompts_of(time_limit=0.2)
    prompts.save(STREAM.feed(make("growing", "int8-rotated"), 300), TOKENS)
    prompts.store.delay = 2
    begin = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert prompts.restore(make("growing", "int8-rotated"), TOKENS) == 0
        assert time.perf_counter() - begin < 1.9
        prompts.close()  # waits for the thread that asks the store, and tells it
    assert any("no answer within 0.2 s" in str(one.message) for one in caught)


def test_what_is_faster_to_compute_is_not_fetched():
    prompts = prompts_of()
    prompts.save(STREAM.feed(make("growing", "int8-rotated"), 300), TOKENS)
    prompts.store.delay = 0.05
    assert prompts.restore(make("growing", "int8-rotated"), TOKENS, tokens_per_second=1) == 299
    gets = len(prompts.store.keys("c"))
    assert gets == 4
    found = [prompts.restore(make("growing", "int8-rotated"), TOKENS, tokens_per_second=1e6) for _ in range(3)]
    assert found == [0, 0, 0]
    assert prompts.restore(make("growing", "int8-rotated"), TOKENS) == 299


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(tmp_path):
    with prompts_of(str(tmp_path)) as prompts:
        prompts.save(STREAM.feed(make("growing", "int8-rotated"), 300), TOKENS)
        assert prompts.restore(make("growing", "int8-rotated"), TOKENS) == 299
        child = os.fork()
        if not child:
            os._exit(prompts.restore(make("growing", "int8-rotated"), TOKENS) != 299)
        assert os.waitpid(child, 0)[1] == 0
        assert prompts.restore(make("growing", "int8-rotated"), TOKENS) == 299


def test_saving_in_the_background():
    with prompts_of(background=True) as prompts:
        prompts.store.delay = 0.05
        cache = STREAM.feed(make("growing", "int8-rotated"), 300)
        assert prompts.save(cache, TOKENS)
        cache.clear()
        STREAM.feed(cache, 100)  # the saved bytes are those of before
        prompts.flush()
        assert len(prompts.store.keys("c")) == 4 and len(prompts) == 1
        other = make("growing", "int8-rotated")
        assert prompts.restore(other, TOKENS) == 299
        assert other.snapshot() == STREAM.feed(make("growing", "int8-rotated"), 299).snapshot()


@pytest.mark.parametrize(
    ("dtype", "block_size", "window"),
    [("int4", None, None), ("int8-rotated", 64, None), ("int8-rotated", 32, None), ("int8-rotated", 16, 100)],
)
def test_a_pool_goes_on_to_the_store(dtype, block_size, window):
    store, tokens = DictStore(), [*range(310)]  # `int4` has codes of four whole blocks then

    def new_pool(num_blocks=40):
        pool = kvfast.PagedKVCache(2, 2, 20, num_blocks=num_blocks, block_size=block_size, dtype=dtype, sliding_window=window)
        prompts = prompts_of(store)
        pool.use_prompt_cache(prompts, "tiny")
        return pool

    def compute(sequence):
        first = len(sequence)
        STREAM.feed(sequence, 310, advance=False)
        sequence.advance(310 - first, token_ids=tokens[first:])
        return sequence

    whole = compute(new_pool().match_prefix(tokens))
    rows = rows_of(whole)
    whole.free()
    if window:  # a sequence with a window needs the end of a prompt, and a free sequence writes chunks alone
        assert not store.values
        return
    assert len(store.keys("c")) == 4 and not store.keys("e")
    pool = new_pool()
    first = pool.match_prefix([*tokens, 5])
    assert len(first) == first.num_cached_tokens == 256
    compute(first)
    second = pool.match_prefix([*tokens, 6])  # now from the pool
    assert len(second) == 310 // pool.block_size * pool.block_size
    for sequence in (first, second):
        n = min(len(sequence), 256)
        assert all(np.array_equal(a[:n], b[:n]) for a, b in zip(rows_of(sequence), rows))
    # A pool that knows the first blocks takes only the rest from the store.
    third = new_pool()
    short = third.match_prefix(tokens[:130])
    assert len(short) == 128
    long = third.match_prefix([*tokens, 7])
    assert len(long) == 256 and all(np.array_equal(a, b[:256]) for a, b in zip(rows_of(long), rows))
    if block_size in (None, 64):
        assert np.array_equal(long.block_indices()[:2], short.block_indices()[:2])
    # Too small a pool takes what fits.
    small = new_pool(3 if pool.block_size == 64 else 6).match_prefix(tokens)
    assert len(small) == (192 if block_size in (None, 64) else 0)


def test_bad_input(tmp_path):
    for options, error, text in [
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens"),
        ({"secret": "x"}, TypeError, "secret"),
        ({"secret": b"x" * 65}, ValueError, "secret"),
        ({"time_limit": 0}, ValueError, "time_limit"),
        ({"max_bytes": -1}, ValueError, "max_bytes"),
        ({"near": tmp_path}, ValueError, "near"),
    ]:
        with pytest.raises(error, match=text):
            kvfast.PromptCache(tmp_path, **options)
    with pytest.raises(ValueError, match="ftp://"):
        kvfast.PromptCache("ftp://user:password@host/")
    with pytest.raises(ValueError, match="multiple of the 64 tokens"):
        kvfast.PromptCache(tmp_path, chunk_tokens=96).restore(make("growing", "int4"), TOKENS)
    for rate in (0, -1.0, float("nan"), "fast"):
        with pytest.raises(ValueError, match="tokens_per_second"):
            kvfast.PromptCache(DictStore()).restore(make("growing", "int4"), TOKENS, tokens_per_second=rate)
    pool = kvfast.PagedKVCache(1, 1, 16, num_blocks=2)
    with pytest.raises(TypeError, match="PromptCache"):
        pool.use_prompt_cache("folder")
    with kvfast.PromptCache(DictStore()) as prompts:
        with pytest.raises(TypeError, match="must be one of a pool, got KVCache"):
            prompts.extended(kvfast.KVCache(1, 1, 16), TOKENS)
        pool.use_prompt_cache(prompts)
    with pytest.raises(ValueError, match="closed: make another one"):
        prompts.restore(kvfast.KVCache(1, 1, 16), TOKENS)
    with pool.match_prefix(TOKENS) as sequence:  # the pool goes on without the store
        assert len(sequence) == 0 and pool.num_sequences == 1
    assert pool.num_sequences == 0


def test_calls_without_bytes_wait_for_none():
    """So what is done after the values of a prompt never holds its user up."""
    writer, go_on = Writer(2), threading.Event()
    large = writer.begin(go_on.wait, MOST_PENDING + 1)
    assert writer.begin(lambda: True).result(10) and writer.begin(lambda: True, 1, waits=False) is None
    go_on.set()
    assert large.result(10)
    writer.close()
