"""PagedKVCache against a KVCache for each sequence and a model of its blocks, over random sequences of calls; and so
PagedMLAKVCache and MLAKVCache, and pools with a window and RingKVCache."""

import numpy as np
import pytest
from cache_kinds import ANY_BLOCK, CENTRED, PLAIN, alike, close, format_of, same, storage_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_buffers import CANARY, FORMATS, outside, strided
from reference import bound, halves_bound, relative_error
from selection import cases_of_machine

import kvfast
from kvfast.caches.buffer_layout import buffer_layout

LAYERS, HEADS, DIM = 2, 2, 20
SALTS, WHICH = st.sampled_from([b"", b"salt"]), st.integers(0, 99)

# What a token stores follows from all tokens up to it, so a found prefix can be told from a wrong one.
ROWS = np.random.default_rng(0).standard_normal((LAYERS, 2, 1024, HEADS, DIM)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).integers(1 << 63, size=4096, dtype=np.uint64)


def rows(ids, first, layer):
    """Keys and values of the tokens from `first` on."""
    hashes = np.cumsum(np.array(ids, np.uint64) * WEIGHTS[: len(ids)], dtype=np.uint64) >> np.uint64(54)
    return ROWS[layer][:, hashes[first:].astype(int)]


class Model:
    """A sequence, its tokens, a cache of its own that holds them, and the blocks that it was last seen to have, -1 for one
    that it has given back."""

    def __init__(self, sequence, whole, ids=(), blocks=(), salt=b"", named=True, high=0):
        self.sequence, self.whole, self.ids, self.blocks = sequence, whole, list(ids), list(blocks)
        self.salt, self.named = salt, named  # named: all tokens came with their ids
        self.high = high  # the most tokens since it was empty


class PagedMachine(RuleBasedStateMachine):
    # What latent rows do differently.

    storage = storage_settings()
    window, num_sink_tokens, rollback = None, 0, 0
    rings = st.none()

    def new_pool(self, num_blocks, block_size):
        return kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks, block_size, **self.dtypes)

    def new_whole(self, block_size=None):
        return kvfast.KVCache(LAYERS, HEADS, DIM, block_size=block_size, **self.dtypes)

    def format_of(self, storage):
        return format_of(storage)

    def given(self, pair):
        """What `append` takes of keys and values."""
        return pair

    def shown(self, cache, layer):
        return np.stack((cache.k(layer), cache.v(layer)))

    def queries(self, n, group, window):
        """q and options of an attend."""
        return self.rng.standard_normal((n, HEADS * group, DIM)).astype(np.float32), {"sliding_window": window}

    def same(self, first, second):
        return same(first, second)

    @property
    def values_dtype(self):
        return self.format.v_dtype

    # What a window does.

    def evicted(self, high):
        """First position outside the sinks that a sequence of once `high` tokens has."""
        return max(0, high - self.window - self.rollback) if self.window else 0

    def holds(self, model, position):
        evicted = self.evicted(model.high)
        return position >= evicted or evicted <= self.num_sink_tokens

    def without_skipped(self, blocks, high):
        """-1 for those of a list that are before the window."""
        first = -(-self.num_sink_tokens // self.size)
        return [-1 if first <= i < self.evicted(high) // self.size else block for i, block in enumerate(blocks)]

    def shown_positions(self, model):
        oldest = max(0, len(model.ids) - self.window) if self.window else 0
        return np.r_[: min(oldest, self.num_sink_tokens), oldest : len(model.ids)]

    @initialize(num_blocks=st.integers(4, 24), block_size=st.sampled_from([16, 32, 64]), data=st.data(), seed=st.integers(0, 99))
    def start(self, num_blocks, block_size, data, seed):
        storage, ring = data.draw(self.storage), data.draw(self.rings)
        if ring is not None:
            self.window, self.rollback, self.num_sink_tokens = *ring[:2], min(ring[2], ring[0])
        self.dtypes, self.format = storage, self.format_of(storage)
        block_size = self.format.block_size or block_size
        self.rng, self.size = np.random.default_rng(seed), block_size
        self.pool = self.new_pool(num_blocks, block_size)
        self.live, self.owners = [], np.zeros(num_blocks, int)
        self.known, self.idle = {}, []  # (salt, tokens) -> block; known blocks without an owner, oldest first
        self.new_sequence()

    def watch(self, model):
        """Follow a table to the blocks it has now: new ones were taken, missing ones given back."""
        old, model.blocks = model.blocks, model.sequence._table.map.block_row().tolist()
        for i, block in enumerate(model.blocks):
            if block == -1:
                self.give_back(old[i : i + 1])
            elif old[i : i + 1] != [block]:
                assert self.owners[block] == 0
                if block in self.known.values():
                    assert self.idle.pop(0) == block and len(self.idle) + 1 == np.sum(self.owners == 0)
                    self.known = {key: other for key, other in self.known.items() if other != block}
                self.owners[block] = 1
                self.give_back(old[i : i + 1])
        self.give_back(old[len(model.blocks) :])

    def give_back(self, blocks):
        for block in reversed(blocks):
            if block == -1:
                continue
            self.owners[block] -= 1
            if self.owners[block] == 0 and block in self.known.values():
                self.idle.append(block)

    def adopt(self, model):
        """A new sequence, with blocks that are there already."""
        self.live.append(model)
        assert model.sequence._table.map.block_row().tolist() == model.blocks
        assert model.sequence.block_indices().tolist() == [block for block in model.blocks if block >= 0]
        for block in model.sequence.block_indices():
            self.owners[block] += 1
        self.idle = [block for block in self.idle if block not in model.blocks]
        if len(self.live) > 6:
            self.free(0, False)

    def needed(self, models, new):
        owners, needed = self.owners.copy(), 0
        for model, ids in zip(models, new):
            needed += -(-(len(model.ids) + len(ids)) // self.size) - len(model.blocks)
            for block in model.blocks[len(model.ids) // self.size :]:  # begun; copied if others (may) read it
                if owners[block] > 1 or block in self.known.values():
                    owners[block] -= 1
                    needed += 1
        return needed

    def extend(self, models, new, named, batched=True):
        """Append and advance, or see the pool refuse it."""
        parts = [[rows(model.ids + ids, len(model.ids), layer) for model, ids in zip(models, new)] for layer in range(LAYERS)]
        needed, free = self.needed(models, new), int(np.sum(self.owners == 0))
        if not batched:
            assert models[0].sequence.can_append(len(new[0])) == (needed <= free)
        try:
            if batched:
                slots = self.pool.slot_mapping([model.sequence for model in models], [len(ids) for ids in new])
                for layer in range(LAYERS):
                    self.pool.append_batch(layer, *self.given(np.concatenate(parts[layer], axis=1)), slots)
            else:
                for layer in range(LAYERS):
                    models[0].sequence.append(layer, *self.given(parts[layer][0]))
        except kvfast.CacheFullError as error:
            assert needed > free and (error.needed, error.free) == (needed, free)
            return  # the invariants see that nothing has changed
        assert needed <= free
        for model in models:
            self.watch(model)
        for model, ids in zip(models, new):
            model.sequence.advance(len(ids), token_ids=ids if named else None)
            self.follow(model, ids)
            model.named = model.named and named
            self.make_known(model, len(model.ids) - len(ids))
            model.high = max(model.high, len(model.ids))
            self.watch(model)

    def make_known(self, model, first):
        """The blocks that are full since there were `first` tokens."""
        for at in range(first // self.size, len(model.ids) // self.size * model.named):
            key = model.salt, tuple(model.ids[: (at + 1) * self.size])
            block = model.blocks[at]
            if key in self.known or block in self.known.values() or not self.holds(model, at * self.size):
                continue
            if not self.pool._batches.pool.is_patched(block):  # some tokens of a patched block have no codes to be found
                self.known[key] = block

    def follow(self, model, new):
        """Give the model's own cache the same tokens."""
        ids = model.ids + new
        for layer in range(LAYERS):
            model.whole.append(layer, *self.given(rows(ids, len(model.ids), layer)))
        model.whole.advance(len(new))
        model.ids = ids

    def new_ids(self, n):
        n = min(n, self.pool.capacity() * 2 // 3)
        return [1] * n if self.rng.random() < 0.5 else self.rng.integers(1, 3, n).tolist()

    def some(self, which):
        return [self.live[i] for i in sorted({i % len(self.live) for i in which})]

    @rule()
    def new_sequence(self):
        self.adopt(Model(self.pool.new_sequence(), self.new_whole()))

    @rule(n=st.sampled_from([0, 1, 20, 70, 300, 600]), like=st.integers(0, 99), keep=st.floats(0, 1), salt=SALTS)
    def match_prefix(self, n, like, keep, salt):
        """A prompt that begins like a sequence or like a known block, of a freed sequence perhaps."""
        others = [model.ids for model in self.live] + [list(ids) for _, ids in self.known]
        ids = others[like % len(others)]
        ids = ids[: int(keep * len(ids))] + self.new_ids(n)
        every = [self.known.get((salt, tuple(ids[:end]))) for end in range(self.size, len(ids), self.size)]
        counts = [n for n in range(len(every) + 1) if None not in self.without_skipped(every[:n], n * self.size)]
        found = max(counts) * self.size
        sequence = self.pool.match_prefix(ids, salt)
        assert len(sequence) == sequence.num_cached_tokens == found
        model = Model(sequence, self.new_whole(), [], self.without_skipped(every[: max(counts)], found), salt, high=found)
        if found and self.format.seals:
            # The codes of a block depend on what its tokens were when it became full: another sequence's rows.
            model.whole.restore(sequence.snapshot())
            model.ids = ids[:found]
            for layer in range(LAYERS):
                assert close(self.shown(sequence, layer), rows(model.ids, 0, layer)[:, self.shown_positions(model)])
        elif found:
            self.follow(model, ids[:found])
        self.adopt(model)
        if ids[found:]:
            self.extend([model], [ids[found:]], True, batched=False)

    @rule(which=WHICH, n=st.integers(1, 200), named=st.integers(0, 3))
    def append(self, which, n, named):
        self.extend(self.some([which]), [self.new_ids(n)], named > 0, batched=False)

    @rule(which=st.lists(WHICH, min_size=1), most=st.integers(1, 100), named=st.integers(0, 3))
    def append_batch(self, which, most, named):
        models = self.some(which)
        self.extend(models, [self.new_ids(int(self.rng.integers(1, most + 1))) for _ in models], named > 0)

    @rule(which=WHICH, n=st.integers(1, 50), layer=st.integers(0, LAYERS - 1))
    def append_and_abandon(self, which, n, layer):
        [model], new = self.some([which]), self.new_ids(n)
        if self.needed([model], [new]) <= np.sum(self.owners == 0):
            for one in (model.sequence, model.whole):  # tokens may get float rows of their codes again
                one.append(layer, *self.given(rows(model.ids + new, len(model.ids), layer)))
            self.watch(model)
            self.truncate(which, 1.0)

    @rule(which=WHICH, keep=st.floats(0, 1))
    def truncate(self, which, keep):
        [model] = self.some([which])
        n = int(keep * len(model.ids))
        if n and not self.holds(model, n - self.window if self.window and n > self.window else 0):
            with pytest.raises(ValueError, match="cannot go back"):
                model.sequence.truncate(n)
            n = max(n, model.high - self.rollback)
        model.sequence.truncate(n)
        model.whole.truncate(n)
        model.ids, model.named, model.high = model.ids[:n], model.named or n == 0, model.high if n else 0
        self.watch(model)

    @rule(which=WHICH)
    def fork(self, which):
        [model] = self.some([which])
        self.adopt(Model(model.sequence.fork(), model.whole.copy(), model.ids, model.blocks, model.salt, model.named, model.high))
        self.attend_batch([], 0, 8, None, 2)  # few queries to shared blocks: what a cascade is for

    @rule(which=WHICH, size=st.sampled_from([16, 64, 256]), told=st.booleans())
    def restore_from_another_cache(self, which, size, told):
        """One with blocks of another size, if that may be."""
        [model] = self.some([which])
        other = self.new_whole(self.size if self.format.block_size else size)
        other.restore(model.sequence.snapshot())
        assert self.same(other, model.whole)
        copy = Model(self.pool.new_sequence(), other, model.ids, [], b"", told or not model.ids, model.high)
        try:
            copy.sequence.restore(other.snapshot(copy.ids if told else None))
        except kvfast.CacheFullError:
            copy.sequence.free()
            return
        self.watch(copy)
        self.make_known(copy, 0)
        for block in copy.sequence.block_indices():
            self.owners[block] -= 1  # `adopt` counts it
        self.adopt(copy)

    @rule(which=WHICH)
    def through_arrays(self, which):
        [model] = self.some([which])
        model.whole = type(model.whole).from_state_dict(model.sequence.state_dict())
        assert self.same(model.whole, model.sequence) and self.same(model.whole.copy(), model.whole)

    @precondition(lambda self: len(self.live) > 1)
    @rule(which=WHICH, forgotten=st.booleans())
    def free(self, which, forgotten):
        model = self.live.pop(which % len(self.live))
        sequence, model.sequence = model.sequence, None
        self.give_back(model.blocks)
        if forgotten:
            return
        sequence.free()
        sequence.free()
        q, _ = self.queries(1, 1, None)
        for use in (
            lambda: sequence.append(0, *self.given(rows([1], 0, 0))),
            lambda: sequence.attend(0, q),
            lambda: sequence.truncate(0),
            lambda: self.shown(sequence, 0),
            sequence.fork,
            lambda: self.pool.slot_mapping([sequence]),
        ):
            with pytest.raises(ValueError):
                use()

    @rule(
        which=st.lists(WHICH),
        layer=st.integers(0, LAYERS - 1),
        most=st.sampled_from([1, 8, 30]),
        window=st.sampled_from([None, None, 30]),
        group=st.integers(1, 3),
    )
    def attend_batch(self, which, layer, most, window, group):
        models = [model for model in self.some(which or range(6)) if model.ids] or self.live
        counts = [int(self.rng.integers(min(most, self.most_queries(model)) + 1)) for model in models]
        if not sum(counts):
            return
        q, options = self.queries(sum(counts), group, window)
        starts, alone = np.cumsum([0] + counts), []
        for model, n, end in zip(models, counts, starts[1:]):
            if n:
                part = q[end - n : end]
                alone.append(model.sequence.attend(layer, part, **options))
                assert np.array_equal(alone[-1], model.whole.attend(layer, part, **options))
        alone = np.concatenate(alone)
        batch = layer, q, [model.sequence for model in models]
        options["cu_seqlens_q"] = starts
        assert np.array_equal(self.pool.attend_batch(*batch, cascade=False, **options), alone)
        # Integer values get weights rounded by the largest of a tile, and a prefix that is read apart has other tiles: rows of 20
        # elements are off by up to 3.3e-4 either way. Many queries are rounded elsewhere than a few.
        limit = bound("int8") if self.values_dtype.startswith("int") else 1e-5
        if kvfast.active_isa() == "amx" and "int" in self.format.k_dtype + self.format.v_dtype:
            limit = bound("int8")
        elif "float32" not in (self.format.k_dtype, self.format.v_dtype):
            limit = max(limit, halves_bound())
        assert relative_error(self.pool.attend_batch(*batch, cascade=True, **options), alone) < limit

    def most_queries(self, model):
        held = self.rollback + 1 - (model.high - len(model.ids))
        return len(model.ids) if self.holds(model, 0) else min(held, len(model.ids))

    @invariant()
    def blocks_are_accounted_for(self):
        if not hasattr(self, "pool"):
            return
        table = self.pool.block_table([model.sequence for model in self.live])
        for row, model in zip(table, self.live):
            assert row[: len(model.blocks)].tolist() == model.blocks == self.without_skipped(model.blocks, model.high)
            assert -1 not in model.blocks[self.evicted(model.high) // self.size :] and (row[len(model.blocks) :] == -1).all()
        counts = np.bincount(table[table >= 0], minlength=self.pool.num_blocks)
        assert np.array_equal(self.pool._batches.owners(), counts) and np.array_equal(self.owners, counts)
        assert self.pool.num_blocks - self.pool.num_free_blocks == np.count_nonzero(counts)
        assert self.pool.num_cached_blocks == len(self.known)
        assert self.pool.num_sequences == len(self.live)

    @invariant()
    def sequences_hold_what_was_given(self):
        for model in getattr(self, "live", []):
            assert len(model.sequence) == len(model.whole) == len(model.ids)
            for layer in range(LAYERS):
                shown = self.shown(model.sequence, layer)
                assert np.array_equal(shown, self.shown(model.whole, layer))
                assert close(shown, rows(model.ids, 0, layer)[:, self.shown_positions(model)])

    def teardown(self):
        if hasattr(self, "pool"):
            for model in self.live:
                model.sequence.free()
            assert self.pool.num_free_blocks == self.pool.num_blocks
            self.pool.clear()
            assert self.pool.num_cached_blocks == 0


class PagedWindowMachine(PagedMachine):
    """Sequences that give back the blocks before a window."""

    rings = st.tuples(st.integers(1, 150), st.sampled_from([0, 10, 64]), st.sampled_from([0, 5, 20]))

    @property
    def settings(self):
        return {"num_sink_tokens": self.num_sink_tokens, "rollback": self.rollback}

    def new_pool(self, num_blocks, block_size):
        return kvfast.PagedKVCache(
            LAYERS, HEADS, DIM, num_blocks, block_size, sliding_window=self.window, **self.settings, **self.dtypes
        )

    def new_whole(self, block_size=None):
        return kvfast.RingKVCache(LAYERS, HEADS, DIM, self.window, block_size=block_size, **self.settings, **self.dtypes)

    def queries(self, n, group, window):
        return super().queries(n, group, window and min(window, self.window))

    def same(self, first, second):
        return alike(first, second)


class BufferedMachine(PagedMachine):
    """Sequences, forks, prefixes and snapshots, in memory that holds no numbers at first."""

    storage = st.sampled_from([{"dtype": dtype} for dtype in [*FORMATS, "int4", CENTRED]])

    def new_pool(self, num_blocks, block_size):
        shape = LAYERS, HEADS, DIM, num_blocks, block_size
        layout = buffer_layout(*shape, **self.dtypes)  # float rows lie in memory of the pool's own
        self.arrays, self.memory = strided(layout, gap=64, by_layer=num_blocks % 2 == 0)
        return kvfast.PagedKVCache(*shape, **self.dtypes, buffer=self.arrays)

    def teardown(self):
        super().teardown()
        if hasattr(self, "memory"):
            assert (outside(self.memory, self.arrays) == CANARY).all()


class PagedLatentMachine(PagedMachine):
    """The same keys and values as rows, with the values of the last head as rotary part."""

    storage = st.fixed_dictionaries(
        {"dtype": st.sampled_from([*ANY_BLOCK, "int4", *(f"{k}/{v}" for k in PLAIN[:3] for v in ("int8", "int4"))])}
    )
    shape = LAYERS, 2 * HEADS * DIM - DIM, DIM

    def new_pool(self, num_blocks, block_size):
        return kvfast.PagedMLAKVCache(*self.shape, num_blocks, block_size, **self.dtypes)

    def new_whole(self, block_size=None):
        return kvfast.MLAKVCache(*self.shape, block_size=block_size, **self.dtypes)

    def format_of(self, storage):
        return kvfast.MLAKVCache(*self.shape, **storage).format

    def given(self, pair):
        return (pair.swapaxes(0, 1).reshape(pair.shape[1], -1),)

    def shown(self, cache, layer):
        return cache.get_latent(layer).reshape(-1, 2, HEADS, DIM).swapaxes(0, 1)

    def queries(self, n, group, window):
        """With 10, 20 or 30 heads: a pass of vectors, and of a matrix unit."""
        return self.rng.standard_normal((n, 10 * group, sum(self.shape[1:]))).astype(np.float32), {"scale": 0.2}

    def same(self, first, second):
        q, _ = self.queries(1, 2, None)
        return len(first) == len(second) and all(
            np.array_equal(self.shown(first, layer), self.shown(second, layer))
            and (not len(first) or np.array_equal(first.attend(layer, q), second.attend(layer, q)))
            for layer in range(LAYERS)
        )

    @property
    def values_dtype(self):
        return self.format.k_dtype


TestPagedMachine, TestPagedMachineLonger = cases_of_machine(PagedMachine, max_examples=100, steps=25)
TestPagedWindowMachine, TestPagedWindowMachineLonger = cases_of_machine(PagedWindowMachine, max_examples=100, steps=25)
TestPagedLatentMachine, TestPagedLatentMachineLonger = cases_of_machine(PagedLatentMachine, max_examples=60, steps=25)
TestBufferedMachine, TestBufferedMachineLonger = cases_of_machine(BufferedMachine, max_examples=40, steps=25)
