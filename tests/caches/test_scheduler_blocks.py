"""Formats with float rows under the tables of another scheduler: the bits of sequences, whatever the scheduler does with its blocks.

Histories at random are `PreparedWorld`, in fuzz/fuzz_schedulers.py.
"""

import numpy as np
import pytest
from cache_kinds import SEALING, UNSEALED, filled
from pool_buffers import CANARY, outside, strided

import kvfast
from kvfast.caches.buffer_layout import buffer_layout

LAYERS, HEADS, DIM = 2, 2, 32
FORMATS = SEALING | {name: fmt for name, fmt in UNSEALED.items() if fmt.num_first_float_tokens or fmt.open_tokens}


def rows(rng, n):
    return rng.standard_normal((LAYERS, 2, n, HEADS, DIM)).astype(np.float32)


class Request:
    """What a scheduler knows of a sequence, and a cache of its own that holds the same."""

    def __init__(self, form, size, blocks=()):
        self.cache = kvfast.KVCache(LAYERS, HEADS, DIM, dtype=form, block_size=size)
        self.blocks, self.length = list(blocks), 0


class Scheduler:
    """Gives out the blocks of a pool, at random."""

    def __init__(self, form, rng, num_blocks=24, **options):
        fmt = kvfast.KVFormat.of(form)
        self.size = fmt.block_size or 64
        self.pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks, self.size, form, **options)
        self.form, self.rng, self.free, self.limits = form, rng, rng.permutation(num_blocks).tolist(), {}

    def new(self, blocks=()):
        return Request(self.form, self.size, blocks)

    def tables(self, requests, counts):
        for request, n in zip(requests, counts):
            while len(request.blocks) * self.size < request.length + n:
                request.blocks.append(self.free.pop())
        table = np.full((len(requests), max(len(request.blocks) for request in requests) + 1), -1, np.int32)
        for row, request in zip(table, requests):
            row[: len(request.blocks)] = request.blocks
        lens = np.array([request.length + n for request, n in zip(requests, counts)], np.int32)
        positions = [np.arange(request.length, request.length + n) for request, n in zip(requests, counts)]
        slots = [row[at // self.size].astype(np.int64) * self.size + at % self.size for row, at in zip(table, positions)]
        return {"block_table": table, "seq_lens": lens, "cu_seqlens_q": np.cumsum([0, *counts]).astype(np.int32)}, np.concatenate(slots)

    def step(self, requests, counts, given=None, accepted=None):
        """New tokens of each request; all but the first `accepted` are taken back. The outputs are those of the requests' caches."""
        tables, slots = self.tables(requests, counts)
        batch = self.pool.prepare_batch(**tables, slot_mapping=np.append(slots, -1) if len(slots) % 2 else slots, **self.limits)
        given = given or [rows(self.rng, n) for n in counts]
        q = self.rng.standard_normal((sum(counts), 2 * HEADS, DIM)).astype(np.float32)
        starts = tables["cu_seqlens_q"]
        for layer in range(LAYERS):
            k, v = np.concatenate([part[layer] for part in given], axis=1)
            padding = np.zeros((len(slots) % 2, HEADS, DIM), np.float32)
            self.pool.append_batch(layer, np.concatenate([k, padding]), np.concatenate([v, padding]), batch)
            out = self.pool.attend_batch(layer, q, batch, cascade=False)
            assert np.array_equal(out[: counts[0]], self.pool.attend_batch(layer, q[: counts[0]], batch.only(0)))
            for request, part, first, last in zip(requests, given, starts, starts[1:]):
                request.cache.append(layer, *part[layer])
                assert np.array_equal(request.cache.attend(layer, q[first:last]), out[first:last])
        for i, (request, n) in enumerate(zip(requests, counts)):
            kept = n if accepted is None else accepted[i]
            request.length += kept
            if kept < n:
                request.cache.truncate(request.length - kept)
                for layer in range(LAYERS):
                    request.cache.append(layer, *given[i][layer][:, :kept])
            request.cache.advance(kept)

    def release(self, request):
        self.free = [int(block) for block in self.rng.permutation(self.free + request.blocks)]


@pytest.mark.parametrize("name", FORMATS)
def test_prefixes_are_shared(rng, name):
    """By a request of the same step, as by later ones: as codes. At the end of a prompt, later ones read what computing it would."""
    scheduler = Scheduler(FORMATS[name], rng)
    size, [first] = scheduler.size, [rows(rng, 6 * scheduler.size + 5)]
    one, other = scheduler.new(), scheduler.new()
    one.blocks = [scheduler.free.pop() for _ in range(7)]
    other.blocks, other.length = one.blocks[:2], 2 * size
    for layer in range(LAYERS):
        other.cache.append(layer, *first[layer][:, : 2 * size])
        other.cache.append(layer, *rows(rng, 300)[layer])
    other.cache.advance(2 * size + 300)
    other.cache.truncate(2 * size)  # all of which have codes alone now
    tables, slots = scheduler.tables([one, other], [first.shape[2], 7])
    batch = scheduler.pool.prepare_batch(**tables, slot_mapping=slots)
    tail, q = rows(rng, 7), rng.standard_normal((first.shape[2] + 7, HEADS, DIM)).astype(np.float32)
    for layer in range(LAYERS):
        scheduler.pool.append_batch(layer, *np.concatenate([first[layer], tail[layer]], axis=1), batch)
        out = scheduler.pool.attend_batch(layer, q, batch)
        one.cache.append(layer, *first[layer])
        other.cache.append(layer, *tail[layer])
        assert np.array_equal(out[:-7], one.cache.attend(layer, q[:-7]))
        assert np.array_equal(out[-7:], other.cache.attend(layer, q[-7:]))
    one.cache.advance(first.shape[2])
    one.length = first.shape[2]
    for _ in range(30):
        scheduler.step([one], [1])
    late, again = scheduler.new(one.blocks[:1]), scheduler.new(one.blocks[:6])
    late.length, again.length = size, 6 * size
    late.cache.restore(one.cache.snapshot())
    late.cache.truncate(size)
    for layer in range(LAYERS):
        again.cache.append(layer, *first[layer][:, : 6 * size])
    again.cache.advance(6 * size)
    for counts in ([1, 40, 1], [1, 1, 40], [3, 2, 1]):
        scheduler.step([one, late, again], counts)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("steps", [[200], [100, 100], [16] * 12 + [8]])
def test_a_known_text_is_read_as_computed(rng, name, steps):
    """The same prompt again, the text that goes on, and the text that was preempted, each at the last block that is full, whatever
    else was computed meanwhile. The scheduler keeps 16 texts."""
    scheduler = Scheduler(FORMATS[name], rng, num_blocks=400)
    scheduler.limits = {"max_num_seqs": 16}
    size, prompt, tail = scheduler.size, rows(rng, 200 + scheduler.size), rows(rng, 100)
    text = np.concatenate([prompt, tail], axis=2)

    def known(length, cut):
        """A request of the first tokens, whose cache computes them in steps."""
        request, at = scheduler.new(one.blocks[: length // size]), 0
        request.length = length // size * size
        for n in cut:
            n = min(n, request.length - at)
            if n == 0:
                break
            for layer in range(LAYERS):
                request.cache.append(layer, *text[layer][:, at : at + n])
            request.cache.advance(n)
            at += n
        return request

    one, other = scheduler.new(), scheduler.new()
    steps = [*steps, size]
    for n in steps:
        scheduler.step([one], [n], [prompt[:, :, one.length : one.length + n]])
    for i in range(100):
        scheduler.step([one, other], [1, 3], [tail[:, :, i : i + 1], rows(rng, 3)])
    cut = [*steps, *[1] * 100]
    for request in (known(prompt.shape[2] - 1, cut), known(one.length, cut), known(prompt.shape[2] - 1, cut)):
        for n in (1, 20, 1):
            scheduler.step([request, other], [n, 1])


def test_float_rows_are_bounded(rng):
    """Those of open blocks, of the newest tokens, and of the first tokens of known sequences."""
    scheduler = Scheduler("int4", rng, num_blocks=60)
    empty = scheduler.pool.nbytes
    requests = [scheduler.new() for _ in range(3)]
    scheduler.step(requests, [900, 900, 900])
    scheduler.step(requests, [1] * 3)
    piece = 16 * LAYERS * HEADS * 2 * DIM * 2  # bytes of 16 float16 tokens
    assert scheduler.pool.nbytes - empty <= 3 * (2 * 64 + 2 * 16) // 16 * piece + 8 * piece


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("shared", "further"), [(1, 6), (2, 0)])
def test_another_shares_its_blocks_and_runs_ahead(rng, name, shared, further):
    scheduler = Scheduler(FORMATS[name], rng)
    behind, ahead, other = (scheduler.new() for _ in "abc")
    prompt = rows(rng, shared * scheduler.size + further)
    scheduler.step([behind], [prompt.shape[2]], [prompt])
    ahead.blocks, ahead.length = behind.blocks[:shared], shared * scheduler.size
    for layer in range(LAYERS):
        ahead.cache.append(layer, *prompt[layer][:, : ahead.length])
    ahead.cache.advance(ahead.length)  # reads the newest tokens as floats, like the shorter one
    if further == 0:  # or else nobody could tell the two apart
        scheduler.step([behind, ahead], [1, 3])
    for n in (36, 1, 1, 80, 1):
        scheduler.step([ahead], [n])
        scheduler.step([other], [n])
    scheduler.step([behind, ahead], [1, 1])
    for _ in range(30):
        scheduler.step([behind, other], [3, 1])


def test_drafts_lose_their_block_to_another(rng):
    """A resting sequence still holds the blocks before it."""
    scheduler = Scheduler("int4", rng)
    resting, other = scheduler.new(), scheduler.new()
    scheduler.step([resting], [60])
    scheduler.step([resting], [8], accepted=[4])
    scheduler.free.append(resting.blocks.pop())
    scheduler.step([other], [130])
    for _ in range(30):
        scheduler.step([other], [1])
    scheduler.step([resting, other], [1, 1])


def test_the_last_block_of_an_ended_text_is_given_to_another(rng):
    """At the same place of its table. The other goes on with itself, not with the text that held that block alone."""
    scheduler = Scheduler("int4", rng, num_blocks=4)
    ended, other = scheduler.new(), scheduler.new()
    scheduler.step([ended], [2 * scheduler.size - 1])
    scheduler.step([ended], [1])
    scheduler.step([other], [scheduler.size])
    last = ended.blocks[-1]
    scheduler.release(ended)
    scheduler.free.append(scheduler.free.pop(scheduler.free.index(last)))
    scheduler.step([other], [2])
    assert other.blocks[-1] == last


def test_nobody_says_that_a_text_has_ended(rng):
    """Float rows of ended texts stay until their blocks begin anew, and do not add up."""
    scheduler = Scheduler("int4", rng, num_blocks=12)
    piece, sizes = 16 * LAYERS * HEADS * 2 * DIM * 2, []
    empty, talk = scheduler.pool.nbytes, scheduler.new()
    scheduler.step([talk], [100])
    for _ in range(40):
        text = scheduler.new()
        scheduler.step([talk, text], [1, 90])
        scheduler.release(text)
        sizes.append(scheduler.pool.nbytes - empty)
    assert max(sizes) <= (12 * 4 + 32) * piece
    scheduler.pool.clear()
    assert scheduler.pool.nbytes - empty < min(sizes)


def test_a_number_of_sequences_bounds_float_rows(rng):
    scheduler = Scheduler("int4", rng, num_blocks=200)
    scheduler.limits = {"max_num_seqs": 8}
    piece, most = 16 * LAYERS * HEADS * 2 * DIM * 2, 0
    empty, talk = scheduler.pool.nbytes, scheduler.new()
    scheduler.step([talk], [100])
    rested = []
    for _ in range(80):
        rested.append(scheduler.new())
        scheduler.step([talk, rested[-1]], [1, 90])
        most = max(most, scheduler.pool.nbytes - empty)
    assert (
        most <= ((2 * 9) * 4 + 16 * 4 + 81 + 32) * piece
    )  # 16 ends of prompts; the first tokens of each text, which always stay floats
    scheduler.step(rested[-6:], [1] * 6)  # as many as that have their bits
    with pytest.raises(ValueError, match="max_num_seqs must be at least 1, got 0"):
        scheduler.pool.prepare_batch([[0]], [0], [0, 0], [], max_num_seqs=0)


@pytest.mark.parametrize("name", SEALING)
def test_a_closed_text_loses_what_has_no_codes(rng, name):
    """Nothing is written into its blocks, whose memory other layers may have now. Its full blocks are still known."""
    scheduler, arrays = over_arrays(FORMATS[name], rng)
    scheduler.limits, size = {"max_num_seqs": 3}, scheduler.size
    closed, given = scheduler.new(), rows(rng, scheduler.size + 30)
    scheduler.step([closed], [size + 30], [given])
    before = [array[closed.blocks].copy() for array in arrays]
    for _ in range(4):
        scheduler.step([scheduler.new()], [20])
    assert all(np.array_equal(array[closed.blocks], kept) for array, kept in zip(arrays, before))
    tables, slots = scheduler.tables([closed], [1])
    refused(scheduler, "and only 0 were written before it", tables, slots)
    known = scheduler.new(closed.blocks[:1])
    known.length = size
    for layer in range(LAYERS):
        known.cache.append(layer, *given[layer][:, :size])
    known.cache.advance(size)
    scheduler.step([known], [3])


def test_in_memory_of_the_caller(isa, rng):
    scheduler = Scheduler("int4", rng)
    layout = buffer_layout(LAYERS, HEADS, DIM, 24, dtype="int4")
    arrays, memory = strided(layout, gap=64, by_layer=False)
    for array in arrays:
        array.view(np.uint8)[...] = 255  # no numbers
    scheduler.pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, 24, dtype="int4", buffer=arrays)
    requests = [scheduler.new() for _ in range(3)]
    scheduler.step(requests, [200, 3, 64])
    for _ in range(40):
        scheduler.step(requests, [3, 1, 2])
    # The bytes of a block with codes alone may be copied to another.
    block = requests[0].blocks[1]
    before = [array[block].copy() for array in arrays]
    for array in arrays:
        array[block] = 0
    for array, kept in zip(arrays, before):
        array[block] = kept
    scheduler.step(requests, [1, 1, 1])
    assert (outside(memory, arrays) == CANARY).all()


def over_arrays(form, rng):
    """A scheduler whose blocks are in arrays of its own, and these."""
    scheduler = Scheduler(form, rng)
    layout = buffer_layout(LAYERS, HEADS, DIM, 24, scheduler.size, form)
    arrays, _ = strided(layout, gap=64, by_layer=False)
    scheduler.pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, 24, scheduler.size, form, buffer=arrays)
    return scheduler, arrays


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_come_from_another_pool(isa, rng, name):
    """Right after the step that filled them; and to blocks that others had, of which some still hold float rows."""
    scheduler, arrays = over_arrays(FORMATS[name], rng)
    other, its_arrays = over_arrays(FORMATS[name], rng)
    size, one, before = scheduler.size, scheduler.new(), other.new()
    scheduler.step([one], [3 * size + 5])
    other.step([before], [3 * size + 20])
    assert scheduler.pool.are_coded(one.blocks).tolist() == [True, True, True, False]
    floats = scheduler.pool.first_float_rows(one.blocks[0])
    assert floats.shape == (scheduler.pool.first_float_rows_nbytes,)
    other.release(before)
    blocks = before.blocks[:3][::-1]
    other.free = [block for block in other.free if block not in blocks]
    for source, target in zip(arrays, its_arrays):
        target[blocks] = source[one.blocks[:3]]
    other.pool.take_blocks(blocks, floats)
    late = other.new(blocks)
    late.length = 3 * size
    # Tokens that are taken back far enough have codes alone.
    longer = filled(one.cache.copy(), each=rows(rng, 2 * size + FORMATS[name].open_tokens))
    longer.truncate(3 * size)
    late.cache.restore(longer.snapshot())
    for count in (1, 40, 1, 100):
        other.step([late], [count])
        scheduler.step([one], [count])  # as if nothing had been sealed


def test_unknown_blocks_have_no_float_rows(rng):
    scheduler, _ = over_arrays("int4", rng)
    request, pool = scheduler.new(), scheduler.pool
    scheduler.step([request], [150])
    floats = pool.first_float_rows(request.blocks[0])
    for block in (request.blocks[1], scheduler.free[0]):
        with pytest.raises(ValueError, match="must be the first of a sequence"):
            pool.first_float_rows(block)
    for call in (pool.are_coded, pool.take_blocks):
        for blocks in ([24], [0, -1]):
            with pytest.raises(ValueError, match="block_ids must be between 0 and 23"):
                call(blocks)
    with pytest.raises(ValueError, match=r"first_float_rows must be uint8 of shape \(\d+,\), got"):
        pool.take_blocks([scheduler.free[0]], floats[1:])
    scheduler.step([request], [60])  # nothing has changed
    plain = kvfast.PagedKVCache(LAYERS, HEADS, DIM, 4, dtype="int8-rotated")
    assert plain.are_coded([0, 1]).all() and plain.first_float_rows(0).shape == (plain.first_float_rows_nbytes,) == (0,)
    plain.take_blocks([0, 1])
    own = kvfast.PagedKVCache(LAYERS, HEADS, DIM, 4)
    sequence = own.new_sequence()
    with pytest.raises(ValueError, match="while a pool has sequences"):
        own.take_blocks([0])
    sequence.free()


def refused(scheduler, message, tables, slots):
    state = scheduler.pool.nbytes
    with pytest.raises(ValueError, match=message):
        scheduler.pool.prepare_batch(**tables, slot_mapping=slots)
    assert scheduler.pool.nbytes == state


def test_scheduler_errors_are_refused(rng):
    scheduler = Scheduler("int4", rng)
    request, other = scheduler.new(), scheduler.new()
    scheduler.step([request], [150])
    scheduler.step([request], [1])
    tables, slots = scheduler.tables([request], [1])
    refused(scheduler, "needs slot_mapping", tables, None)
    refused(scheduler, "must be slot", tables, slots + 1)
    refused(scheduler, "-1 after them", tables, np.append(slots, slots + 1))
    gap = tables | {"seq_lens": tables["seq_lens"] + 5}
    refused(scheduler, "were written before it", gap, slots + 5)
    sealed = tables | {"seq_lens": np.array([64], np.int32)}
    refused(scheduler, "have codes alone", sealed, np.array([request.blocks[0] * 64 + 63]))
    unwritten = {
        "block_table": np.array([[other_block := scheduler.free[0], scheduler.free[1]]], np.int32),
        "seq_lens": np.array([65], np.int32),
    }
    refused(scheduler, "of them were written", unwritten, np.array([scheduler.free[1] * 64]))
    assert other_block not in request.blocks
    middle = {"block_table": np.array([[request.blocks[1], scheduler.free[1]]], np.int32), "seq_lens": np.array([65], np.int32)}
    for _ in range(60):
        scheduler.step([request], [1])
    refused(scheduler, "not written as the first", middle, np.array([scheduler.free[1] * 64]))
    scheduler.step([request, other], [1, 70])  # nothing has changed

    tables, slots = scheduler.tables([request], [1])
    old = scheduler.pool.prepare_batch(**tables, slot_mapping=slots)
    new = scheduler.pool.prepare_batch(**tables, slot_mapping=slots)
    k, v = rows(rng, 1)[0]
    for call in (lambda batch: scheduler.pool.append_batch(0, k, v, batch), lambda batch: scheduler.pool.attend_batch(0, k, batch)):
        with pytest.raises(ValueError, match="of an earlier step"):
            call(old)
        with pytest.raises(ValueError, match="of an earlier step"):
            scheduler.pool.attend_batch(0, k, old.only(0))
        call(new)
    with pytest.raises(ValueError, match="index must be"):
        new.only(1)
    with pytest.raises(ValueError, match="without slot_mapping"):
        scheduler.pool.append_batch(0, k, v, new.only(0))
    with pytest.raises(ValueError, match="batches from prepare_batch"):
        scheduler.pool.append_batch(0, k, v, slots)
    with pytest.raises(ValueError, match="batches from prepare_batch"):
        scheduler.pool.attend_batch(0, k, **tables)
    with pytest.raises(ValueError, match="another scheduler"):
        scheduler.pool.new_sequence()
    scheduler.pool.clear()
    with pytest.raises(ValueError, match="of an earlier step"):
        scheduler.pool.attend_batch(0, k, new)
    sequence = scheduler.pool.new_sequence()
    refused(scheduler, "while a pool has sequences", tables, slots)
    sequence.free()
    windowed = kvfast.PagedKVCache(1, HEADS, DIM, 24, dtype="int4", sliding_window=100)
    with pytest.raises(ValueError, match="without a window"):
        windowed.prepare_batch(**tables, slot_mapping=slots)


def test_layers_of_different_rules_are_as_in_pools_of_their_own(rng):
    """A sequence that goes back to a block's first token finds the block before it as its layer's own format left it: of int4 with codes
    alone, where int2 has its floats yet."""
    forms, size = ["int4", "int2", "int8"], 64
    pools = [kvfast.PagedKVCache(len(one), HEADS, DIM, 8, size, one) for one in (forms, *([form] for form in forms))]
    table, length = np.arange(8, dtype=np.int32)[None], 0
    for back, n in ((0, 200), (0, 1), (128, 30), (158, 60), (192, 1), (64, 5), (69, 130)):
        length = (back or length) + n
        tables = {"block_table": table, "seq_lens": [length], "cu_seqlens_q": [0, n], "slot_mapping": np.arange(length - n, length)}
        batches = [pool.prepare_batch(**tables) for pool in pools]
        q = rng.standard_normal((n, 2 * HEADS, DIM)).astype(np.float32)
        for layer in range(len(forms)):
            k, v = rng.standard_normal((2, n, HEADS, DIM)).astype(np.float32)
            pools[0].append_batch(layer, k, v, batches[0]), pools[layer + 1].append_batch(0, k, v, batches[layer + 1])
            alone = pools[layer + 1].attend_batch(0, q, batches[layer + 1])
            assert np.array_equal(pools[0].attend_batch(layer, q, batches[0]), alone), (forms[layer], length)
