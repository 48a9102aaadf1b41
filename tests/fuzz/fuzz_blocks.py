"""The blocks of a pool against a model of them, for `fuzz_caches`: who owns each, which are known by their tokens, what is free.

Each sequence has a cache of its own with it, which had the same steps: a KVCache, a RingKVCache or an MLAKVCache. All bits are the same.
"""

import numpy as np
from cache_kinds import ANY_BLOCK, CENTRED, DTYPES, PLAIN, alike, close, same
from fuzz_inputs import often, one_of
from fuzz_oracle import Finding
from fuzz_refusals import REFUSALS, pool_state
from pool_buffers import CANARY, outside, strided
from pool_buffers import FORMATS as OF_BUFFERS
from reference import bound, halves_bound, relative_error

import kvfast
from kvfast.caches.buffer_layout import buffer_layout

LAYERS, HEADS, DIM = 2, 2, 20
# What a token stores follows from all tokens up to it, so a found prefix can be told from a wrong one.
ROWS = np.random.default_rng(0).standard_normal((LAYERS, 2, 1024, HEADS, DIM)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).integers(1 << 63, size=4096, dtype=np.uint64)


def rows(ids, first, layer):
    """Keys and values of the tokens from `first` on."""
    hashes = np.cumsum(np.array(ids, np.uint64) * WEIGHTS[: len(ids)], dtype=np.uint64) >> np.uint64(54)
    return ROWS[layer][:, hashes[first:].astype(int)]


def expect(is_so, what, told=""):
    if not is_so:
        raise Finding(f"blocks of a pool | {what}", str(told))


class Model:
    """A sequence, its tokens, a cache of its own that holds them, and the blocks that it was last seen to have, -1 for one
    that it has given back."""

    def __init__(self, sequence, whole, ids=(), blocks=(), salt=b"", named=True, high=0):
        self.sequence, self.whole, self.ids, self.blocks = sequence, whole, list(ids), list(blocks)
        self.salt, self.named = salt, named  # named: all tokens came with their ids
        self.high = high  # the most tokens since it was empty


class BlocksWorld:
    """Sequences of one pool: plain ones, with a window, in memory of the caller, or of latent rows."""

    def __init__(self, case):
        self.case, self.rng = case, case.rng
        rng = self.rng
        self.kind = str(one_of(rng, ["plain", "plain", "window", "window", "latent", "buffer"]))
        self.window, self.num_sink_tokens, self.rollback, self.memory = None, 0, 0, None
        if self.kind == "latent":
            mixed = [f"{k}/{v}" for k in PLAIN[:3] for v in ("int8", "int4")]
            self.dtypes = {"dtype": one_of(rng, [*ANY_BLOCK, "int4", *mixed])}
        elif self.kind == "buffer":
            self.dtypes = {"dtype": one_of(rng, [*OF_BUFFERS, "int4", CENTRED])}
        elif often(rng, 0.5):
            self.dtypes = {name: str(one_of(rng, PLAIN)).removesuffix("-plain") for name in ("k_dtype", "v_dtype")}
        else:
            self.dtypes = {"dtype": one_of(rng, DTYPES[len(PLAIN) :])}
        self.shape = (LAYERS, 2 * HEADS * DIM - DIM, DIM) if self.kind == "latent" else (LAYERS, HEADS, DIM)
        self.settings = {}
        if self.kind == "window":
            self.window, self.rollback = int(rng.integers(1, 151)), int(one_of(rng, [0, 10, 64]))
            self.num_sink_tokens = min(int(one_of(rng, [0, 5, 20])), self.window)
            self.settings = {"num_sink_tokens": self.num_sink_tokens, "rollback": self.rollback}
        self.format = self.new_whole().format
        self.size = self.format.block_size or int(one_of(rng, [16, 32, 64]))
        num_blocks = int(rng.integers(4, 25))
        self.pool = self.new_pool(num_blocks)
        case.note(self.kind, repr(self.format), num_blocks, self.size, self.window, self.settings)
        self.live, self.owners = [], np.zeros(num_blocks, int)
        self.known, self.idle = {}, []  # (salt, tokens) -> block; known blocks without an owner, oldest first
        self.new_sequence()

    # What the kinds do differently.

    def new_pool(self, num_blocks):
        if self.kind == "latent":
            return kvfast.PagedMLAKVCache(*self.shape, num_blocks, self.size, **self.dtypes)
        shape, more = (*self.shape, num_blocks, self.size), {}
        if self.kind == "buffer":  # it holds no numbers at first; float rows lie in memory of the pool's own
            self.arrays, self.memory = strided(buffer_layout(*shape, **self.dtypes), gap=64, by_layer=num_blocks % 2 == 0)
            more = {"buffer": self.arrays}
        if self.window:
            more = {"sliding_window": self.window, **self.settings}
        return kvfast.PagedKVCache(*shape, **more, **self.dtypes)

    def new_whole(self, block_size=None):
        if self.kind == "latent":
            return kvfast.MLAKVCache(*self.shape, block_size=block_size, **self.dtypes)
        if self.window:
            return kvfast.RingKVCache(*self.shape, self.window, block_size=block_size, **self.settings, **self.dtypes)
        return kvfast.KVCache(*self.shape, block_size=block_size, **self.dtypes)

    def given(self, pair):
        """What `append` takes of keys and values; as rows, the values of the last head are the rotary part."""
        return (pair.swapaxes(0, 1).reshape(pair.shape[1], -1),) if self.kind == "latent" else pair

    def shown(self, cache, layer):
        if self.kind == "latent":
            return cache.get_latent(layer).reshape(-1, 2, HEADS, DIM).swapaxes(0, 1)
        return np.stack((cache.k(layer), cache.v(layer)))

    def queries(self, n, group):
        """Queries and options of an attend; latent ones with 10, 20 or 30 heads: a pass of vectors, and of a matrix unit."""
        if self.kind == "latent":
            return self.rng.standard_normal((n, 10 * group, sum(self.shape[1:]))).astype(np.float32), {"scale": 0.2}
        window = min(30, self.window or 30) if often(self.rng, 0.3) else None
        return self.rng.standard_normal((n, HEADS * group, DIM)).astype(np.float32), {"sliding_window": window}

    def same(self, first, second):
        if self.kind != "latent":
            return (alike if self.window else same)(first, second)
        q, _ = self.queries(1, 2)
        return len(first) == len(second) and all(
            np.array_equal(self.shown(first, layer), self.shown(second, layer))
            and (not len(first) or np.array_equal(first.attend(layer, q), second.attend(layer, q)))
            for layer in range(LAYERS)
        )

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

    # The model of the blocks.

    def watch(self, model):
        """Follow a table to the blocks it has now: new ones were taken, missing ones given back."""
        old, model.blocks = model.blocks, self.pool.block_table([model.sequence])[0].tolist()
        for i, block in enumerate(model.blocks):
            if block == -1:
                self.give_back(old[i : i + 1])
            elif old[i : i + 1] != [block]:
                expect(self.owners[block] == 0, "a block that is taken has an owner")
                if block in self.known.values():
                    oldest = self.idle.pop(0) == block and len(self.idle) + 1 == np.sum(self.owners == 0)
                    expect(oldest, "a known block is taken before others")
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
        held = [block for block in model.blocks if block >= 0]
        shown = self.pool.block_table([model.sequence])[0].tolist()
        expect(shown == model.blocks and model.sequence.block_indices().tolist() == held, "a table", f"{shown} for {model.blocks}")
        self.owners[held] += 1
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
        begun = [model.blocks[len(model.ids) // self.size :][:1] for model in models]
        stay = [at[0] for at in begun if at and at[0] in self.known.values()]
        self.case.calls += 1
        if not batched:
            expect(models[0].sequence.can_append(len(new[0])) == (needed <= free), "can_append")
        try:
            if batched:
                slots = self.pool.slot_mapping([model.sequence for model in models], [len(ids) for ids in new])
                for layer in range(LAYERS):
                    self.pool.append_batch(layer, *self.given(np.concatenate(parts[layer], axis=1)), slots)
            else:
                for layer in range(LAYERS):
                    models[0].sequence.append(layer, *self.given(parts[layer][0]))
        except kvfast.CacheFullError as error:
            told = (error.needed, error.free)
            expect(needed > free and told == (needed, free), "a full pool", f"{told} for {(needed, free)}")
            return  # `check` sees that nothing has changed
        expect(needed <= free, "a full pool took more")
        for model in models:
            self.watch(model)
            expect(not set(stay) & set(model.blocks[len(model.ids) // self.size :]), "a known block is written")
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
        return [1] * n if often(self.rng, 0.5) else self.rng.integers(1, 3, n).tolist()

    # What is done.

    def run(self):
        ways = {
            self.new_sequence: 1,
            self.match_prefix: 3,
            self.append: 3,
            self.append_batch: 3,
            self.append_and_abandon: 1,
            self.truncate: 2,
            self.fork: 2,
            self.restore_from_another_cache: 2,
            self.through_arrays: 1,
            self.free: 2,
            self.attend_batch: 3,
        }
        shares = np.array(list(ways.values()), float)
        for _ in range(int(self.rng.integers(3, 26))):
            way = list(ways)[self.rng.choice(len(ways), p=shares / shares.sum())]
            self.case.note(way.__name__)
            way()
            self.check()
        for model in self.live:
            model.sequence.free()
        expect(self.pool.num_free_blocks == self.pool.num_blocks, "a block is never given back")
        self.pool.clear()
        expect(self.pool.num_cached_blocks == 0, "known blocks after clear")
        if self.memory is not None:
            expect((outside(self.memory, self.arrays) == CANARY).all(), "memory outside of the blocks was written")

    def one(self):
        return one_of(self.rng, self.live)

    def new_sequence(self):
        self.adopt(Model(self.pool.new_sequence(), self.new_whole()))

    def match_prefix(self):
        """A prompt that begins like a sequence or like a known block, of a freed sequence perhaps."""
        rng, salt = self.rng, bytes(one_of(self.rng, [b"", b"salt"]))
        ids = list(one_of(rng, [model.ids for model in self.live] + [list(ids) for _, ids in self.known]))
        ids = ids[: int(one_of(rng, [1, 1, rng.random()]) * len(ids))] + self.new_ids(int(one_of(rng, [0, 1, 20, 70, 300, 600])))
        every = [self.known.get((salt, tuple(ids[:end]))) for end in range(self.size, len(ids), self.size)]
        counts = [n for n in range(len(every) + 1) if None not in self.without_skipped(every[:n], n * self.size)]
        found = max(counts) * self.size
        sequence = self.pool.match_prefix(ids, salt)
        self.case.note(len(ids), salt, found)
        expect(len(sequence) == sequence.num_cached_tokens == found, "tokens of a prefix", f"{len(sequence)} for {found}")
        model = Model(sequence, self.new_whole(), [], self.without_skipped(every[: max(counts)], found), salt, high=found)
        if found and self.format.open_tokens:
            # The codes of a block depend on what its tokens were when it became full: another sequence's rows.
            model.whole.restore(sequence.snapshot())
            model.ids = ids[:found]
        elif found:
            self.follow(model, ids[:found])
        self.adopt(model)
        if ids[found:]:
            self.extend([model], [ids[found:]], True, batched=False)

    def append(self):
        self.extend([self.one()], [self.new_ids(int(self.rng.integers(1, 201)))], often(self.rng, 0.75), batched=False)

    def append_batch(self):
        models, most = self.some(), int(one_of(self.rng, [1, 5, 100]))
        self.extend(models, [self.new_ids(int(self.rng.integers(1, most + 1))) for _ in models], often(self.rng, 0.75))

    def some(self):
        return [self.live[i] for i in sorted(self.rng.permutation(len(self.live))[: int(self.rng.integers(1, 7))])]

    def append_and_abandon(self):
        model, new, layer = self.one(), self.new_ids(int(self.rng.integers(1, 51))), int(self.rng.integers(LAYERS))
        if self.needed([model], [new]) <= np.sum(self.owners == 0):
            for one in (model.sequence, model.whole):  # tokens may get float rows of their codes again
                one.append(layer, *self.given(rows(model.ids + new, len(model.ids), layer)))
            self.watch(model)
            self.back(model, len(model.ids))

    def truncate(self):
        model = self.one()
        length = len(model.ids)
        self.back(model, int(self.rng.random() * length) if often(self.rng, 0.5) else max(0, length - int(self.rng.integers(20))))
        if often(self.rng, 0.5):
            self.extend([model], [self.new_ids(int(self.rng.integers(1, 30)))], often(self.rng, 0.75), batched=False)

    def back(self, model, n):
        if n and not self.holds(model, n - self.window if self.window and n > self.window else 0):
            try:
                model.sequence.truncate(n)
                expect(False, "a window is gone, and truncate goes back to it")
            except ValueError as error:
                expect("cannot go back" in str(error), "a window is gone", error)
            n = max(n, model.high - self.rollback)
        model.sequence.truncate(n)
        model.whole.truncate(n)
        model.ids, model.named, model.high = model.ids[:n], model.named or n == 0, model.high if n else 0
        self.watch(model)

    def fork(self):
        model = self.one()
        self.adopt(Model(model.sequence.fork(), model.whole.copy(), model.ids, model.blocks, model.salt, model.named, model.high))
        self.attend(self.live, 0, 8, 2)  # few queries to shared blocks: what a cascade is for

    def restore_from_another_cache(self):
        """One with blocks of another size, if that may be."""
        model, told = self.one(), often(self.rng, 0.5)
        other = self.new_whole(self.size if self.format.block_size else int(one_of(self.rng, [16, 64, 256])))
        other.restore(model.sequence.snapshot())
        expect(self.same(other, model.whole), "a snapshot has other bits elsewhere")
        copy = Model(self.pool.new_sequence(), other, model.ids, [], b"", told or not model.ids, model.high)
        try:
            copy.sequence.restore(other.snapshot(copy.ids if told else None))
        except kvfast.CacheFullError:
            copy.sequence.free()
            return
        self.watch(copy)
        self.make_known(copy, 0)
        self.owners[copy.sequence.block_indices()] -= 1  # `adopt` counts it
        self.adopt(copy)

    def through_arrays(self):
        model = self.one()
        model.whole = type(model.whole).from_state_dict(model.sequence.state_dict())
        expect(self.same(model.whole, model.sequence) and self.same(model.whole.copy(), model.whole), "arrays have other bits")

    def free(self, which=None, forgotten=None):
        if len(self.live) < 2:
            return
        model = self.live.pop(int(self.rng.integers(len(self.live))) if which is None else which)
        sequence, model.sequence = model.sequence, None
        self.give_back(model.blocks)
        if often(self.rng, 0.5) if forgotten is None else forgotten:
            return
        sequence.free()
        sequence.free()
        q, _ = self.queries(1, 1)
        for use in (
            lambda: sequence.append(0, *self.given(rows([1], 0, 0))),
            lambda: sequence.attend(0, q),
            lambda: sequence.truncate(0),
            lambda: self.shown(sequence, 0),
            sequence.fork,
            lambda: self.pool.slot_mapping([sequence]),
        ):
            try:
                use()
            except REFUSALS:
                continue
            raise Finding("a sequence that has been freed is used")

    def attend_batch(self):
        models = self.some() if often(self.rng, 0.5) else self.live
        self.attend(models, int(self.rng.integers(LAYERS)), int(one_of(self.rng, [1, 8, 30])), int(self.rng.integers(1, 4)))

    def attend(self, models, layer, most, group):
        models = [model for model in models if model.ids] or self.live
        counts = [int(self.rng.integers(min(most, self.most_queries(model)) + 1)) for model in models]
        if not sum(counts):
            return
        q, options = self.queries(sum(counts), group)
        starts, alone = np.cumsum([0] + counts), []
        for model, n, end in zip(models, counts, starts[1:]):
            if n:
                part = q[end - n : end]
                alone.append(model.sequence.attend(layer, part, **options))
                expect(np.array_equal(alone[-1], model.whole.attend(layer, part, **options)), "attend has other bits than a cache")
        alone = np.concatenate(alone)
        batch = layer, q, [model.sequence for model in models]
        options["cu_seqlens_q"] = starts
        self.case.calls += 2
        expect(np.array_equal(self.pool.attend_batch(*batch, cascade=False, **options), alone), "a batch has other bits")
        # Integer values get weights rounded by the largest of a tile, and a prefix that is read apart has other tiles: rows of 20
        # elements are off by up to 3.3e-4 either way. Many queries are rounded elsewhere than a few.
        dtypes = self.format.k_dtype, self.format.v_dtype
        limit = bound("int8") if dtypes[self.kind != "latent"].startswith("int") else 1e-5
        if kvfast.active_isa() == "amx" and "int" in "".join(dtypes):
            limit = bound("int8")
        elif "float32" not in dtypes:
            limit = max(limit, halves_bound())
        error = relative_error(self.pool.attend_batch(*batch, cascade=True, **options), alone)
        expect(error < limit, "a cascade is not attention of each", f"{error:.2e} where {limit:.0e} is allowed")

    def most_queries(self, model):
        held = self.rollback + 1 - (model.high - len(model.ids))
        return len(model.ids) if self.holds(model, 0) else min(held, len(model.ids))

    def check(self):
        pool, table = self.pool, self.pool.block_table([model.sequence for model in self.live])
        for row, model in zip(table, self.live):
            expect(row[: len(model.blocks)].tolist() == model.blocks == self.without_skipped(model.blocks, model.high), "a table")
            held = -1 not in model.blocks[self.evicted(model.high) // self.size :]
            expect(held and (row[len(model.blocks) :] == -1).all(), "a table ends elsewhere")
        counts = np.bincount(table[table >= 0], minlength=pool.num_blocks)
        expect(pool_state(pool)["owners"] == counts.tolist() == self.owners.tolist(), "owners")
        expect(pool.num_blocks - pool.num_free_blocks == np.count_nonzero(counts), "num_free_blocks")
        expect(pool.num_cached_blocks == len(self.known), "num_cached_blocks", f"{pool.num_cached_blocks} for {len(self.known)}")
        expect(pool.num_sequences == len(self.live), "num_sequences")
        for model in self.live:
            expect(len(model.sequence) == len(model.whole) == len(model.ids), "length")
            for layer in range(LAYERS):
                shown = self.shown(model.sequence, layer)
                expect(np.array_equal(shown, self.shown(model.whole, layer)), "rows have other bits than those of a cache")
                expect(close(shown, rows(model.ids, 0, layer)[:, self.shown_positions(model)]), "rows are not those that were given")
