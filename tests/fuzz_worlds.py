"""Every kind of cache for `fuzz_caches`: how it is made, and what may be done to it."""

import numpy as np
from fuzz_histories import (
    BLOCKS,
    DIMS,
    Held,
    Rows,
    Track,
    World,
    as_given,
    fitting,
    often,
    one_of,
    random_dim,
    random_format,
    random_formats,
    told,
)  # fmt: skip
from fuzz_oracle import Finding, Side, allowed, check_output, exact_attention, norms

import kvfast
from kvfast.multi_head_config import signs_of


class SingleWorld(World):
    """A cache of one sequence, its copies, and snapshots of them."""

    name, plain_class, rollback = "KVCache", kvfast.KVCache, 1 << 60
    latent = False

    def __init__(self, case):
        super().__init__(case)
        rng = self.rng
        layers = int(one_of(rng, [1, 1, 2, 3]))
        self.formats = random_formats(rng, layers, self.latent)
        self.shape()
        self.settings = {"secure": often(rng, 0.15)}
        self.arrange()
        case.note(self.name, [repr(one) for one in self.formats], self.heads, self.dims, self.settings)
        cache = self.make()
        self.block_size = cache.block_size
        self.held = [Held(cache, self.track(), self.source())]
        self.snapshots = []

    def shape(self):
        self.heads, dim = int(self.rng.integers(1, 4)), random_dim(self.rng)
        self.dims = (dim, dim)

    def arrange(self):
        self.max_seq_len = int(one_of(self.rng, [1, 20, 64, 100, 300])) if often(self.rng, 0.4) else None
        self.settings["max_seq_len"] = self.max_seq_len
        if not any(one.finishes for one in self.formats) and often(self.rng, 0.6):
            self.settings["block_size"] = int(one_of(self.rng, BLOCKS))

    def make(self):
        return kvfast.KVCache(len(self.formats), self.heads, self.dims[0], dtype=self.formats, **self.settings)

    def track(self):
        return Track(self.formats, self.heads, self.dims, self.block_size)

    rows_class = Rows

    def source(self):
        source = self.rows_class(self.rng, self.formats, len(self.formats), self.heads, *self.dims)
        self.case.note("rows", source.flavour, *[source.loud] * (source.flavour == "loud"))
        return source

    def room(self, held):
        return 1 << 30 if held.cache.max_seq_len is None else held.cache.max_seq_len - held.track.length

    def step(self):
        rng, held = self.rng, one_of(self.rng, self.held)
        way = rng.random()
        if way < 0.42:
            self.grow(held)
        elif way < 0.68:
            self.attend(held)
        elif way < 0.76:
            self.back(held)
        elif way < 0.80:
            self.edit(held)
        elif way < 0.84:
            self.case.note("snapshot")
            self.snapshots = [*self.snapshots[-2:], (held.cache.snapshot(), held.track.copy(), held.source)]
        elif way < 0.89 and self.snapshots:
            self.restore(held, *one_of(rng, self.snapshots))
        elif way < 0.93:
            self.case.note("copy")
            self.keep(Held(held.cache.copy(), held.track.copy(), held.source if often(rng, 0.5) else self.source()))
        elif way < 0.96:
            self.keep(self.through_bytes(held))
        elif way < 0.97:
            self.case.note("clear")
            held.cache.clear()
            held.track.truncate(0)
        else:
            self.check_all(held)

    def keep(self, held):
        self.check_all(held)
        self.held = [*self.held[-2:], held]

    def restore(self, held, snapshot, track, source):
        if held.cache.max_seq_len is not None and track.length > held.cache.max_seq_len:
            return
        self.case.note("restore", track.length)
        self.case.calls += 1
        if often(self.rng, 0.3):
            track = track.copy()
            if often(self.rng, 0.5) and not self.windows:
                track.truncate(int(self.rng.integers(track.length + 1)))
                snapshot = snapshot.truncated(track.length)
            self.keep(Held(snapshot.to_cache(), track, source))
            return
        held.cache.restore(snapshot)
        held.track, held.source = track.copy(), source
        self.check_all(held)

    def run(self):
        for _ in range(int(self.rng.integers(4, 14))):
            self.step()
        for held in self.held:
            self.check_all(held)
            self.attend(held)


class RingWorld(SingleWorld):
    name, plain_class = "RingKVCache", kvfast.RingKVCache

    def arrange(self):
        rng, layers = self.rng, len(self.formats)
        windows = [int(one_of(rng, [1, 2, 7, 16, 30, 64, 65, 100])) for _ in range(layers)]
        if often(rng, 0.5):
            windows = [windows[0]] * layers
        if layers > 1 and often(rng, 0.4):
            windows[int(rng.integers(layers))] = None
        self.windows = windows
        least = min(one for one in windows if one is not None)
        self.num_sink_tokens = int(rng.integers(min(least, 20) + 1)) if often(rng, 0.5) else 0
        self.rollback = int(one_of(rng, [0, 1, 10, 64, 100]))
        self.settings |= {"window": windows, "num_sink_tokens": self.num_sink_tokens, "rollback": self.rollback}

    def make(self):
        return kvfast.RingKVCache(len(self.formats), self.heads, self.dims[0], dtype=self.formats, **self.settings)

    def positions(self, held, layer):
        length, window = held.track.layer_length(layer), self.windows[layer]
        if window is None:
            return np.arange(length)
        first = max(length - window, 0)
        sinks = np.arange(min(self.num_sink_tokens, first))
        expected = np.concatenate([sinks, np.arange(first, length)])
        got = held.cache.positions(layer)
        if not np.array_equal(got, expected):
            raise Finding("positions of a ring", f"{got} for {expected}")
        return expected


class LatentRows(Rows):
    def queries(self, n, num_q_heads, rows):
        rope = self.rng.standard_normal((n, num_q_heads, self.dims[1]), np.float32) * fitting(rows[1])
        return np.concatenate([super().queries(n, num_q_heads, rows), rope], axis=2)


class LatentWorld(SingleWorld):
    """Rows of a latent and a rotary part, which are keys and, without that part, values."""

    name, plain_class, takes_windows, latent = "MLAKVCache", kvfast.MLAKVCache, False, True
    rows_class = LatentRows

    def shape(self):
        rng, self.heads = self.rng, 1
        latent, rope = random_dim(rng), int(one_of(rng, [0, 0, 1, 3, 8, 16, 17, 64]))
        self.dims = (512, 64) if often(rng, 0.03) else (latent, rope)

    def make(self):
        return kvfast.MLAKVCache(len(self.formats), *self.dims, dtype=self.formats, **self.settings)

    def write(self, held, layer, k, v):
        rows, kept = as_given(self.rng, np.concatenate([k[:, 0], v[:, 0]], axis=1), held.prompt is None)
        held.cache.append(layer, rows)
        return kept[:, None, : self.dims[0]], kept[:, None, self.dims[0] :]

    def decoded(self, cache, layer):
        rows = cache.get_latent(layer)[:, None]
        return rows[..., : self.dims[0]], rows[..., self.dims[0] :]

    @property
    def out_dim(self):
        return self.dims[0]

    @property
    def default_scale(self):
        return sum(self.dims) ** -0.5

    def random_heads(self):
        return int(one_of(self.rng, [1, 2, 3, 8, 16, 17, 32]))

    def sides_of(self, k, v):
        return np.concatenate([k, v], axis=2), k

    def errors_of(self, k, v):
        return np.hypot(k, v), k

    def explain_refusal(self, held, layer, q, options, out_dtype):
        rows = np.concatenate(held.track.rows[layer], axis=2)
        if max(np.abs(rows).max() * np.abs(q).max() * rows.shape[2], np.abs(rows).max()) < (6e4 if out_dtype == "float16" else 1e37):
            raise Finding(f"refused although finite | {self.where(layer)}")


class PoolWorld(SingleWorld):
    """Sequences of one pool, alone and in batches; some of them say what their tokens are."""

    name, plain_class, pool_class = "PagedKVCache", kvfast.KVCache, kvfast.PagedKVCache

    def arrange(self):
        rng = self.rng
        self.settings["num_blocks"] = int(one_of(rng, [8, 20, 60, 300]))
        if not any(one.finishes for one in self.formats) and often(rng, 0.7):
            self.settings["block_size"] = int(one_of(rng, [16, 16, 32, 64]))
        self.prompts = []

    def make_pool(self):
        return self.pool_class(len(self.formats), self.heads, self.dims[0], dtype=self.formats, **self.settings)

    def make(self):
        self.pool = self.make_pool()
        return self.pool.new_sequence()

    def room(self, held):
        if not hasattr(held.cache, "can_append"):
            return 1 << 30  # what came from a file has its memory to itself
        for n in (1 << 30, 700, 257, 128, 64, 33, 16, 8, 1):
            if held.cache.can_append(n):
                return n
        return 0

    def next_rows(self, held, n):
        """Tokens of a prompt whose ids are told, as far as it goes, or any others."""
        if held.prompt is None or not held.is_known:
            return held.source.take(n), {}
        ids, rows = held.prompt
        first = held.track.length
        if first + n > len(ids):
            held.is_known = False
            return held.source.take(n), {}
        return [tuple(one[first : first + n] for one in pair) for pair in rows], {"token_ids": ids[first : first + n]}

    def step(self):
        rng, way = self.rng, self.rng.random()
        sequences = [one for one in self.held if hasattr(one.cache, "pool")]
        if way < 0.07 or not sequences:
            self.add(self.begin())
        elif way < 0.12:
            held = one_of(rng, sequences)
            self.case.note("fork")
            self.add(self.like(held, held.cache.fork(), held.track.copy()))
        elif way < 0.17:
            held = one_of(rng, sequences)
            self.case.note("free", held.track.length)
            held.cache.free()
            self.held.remove(held)
            if not self.held:
                self.add(self.begin())
        elif way < 0.22 and self.snapshots:
            snapshot, track, source = one_of(rng, self.snapshots)
            if self.pool.can_append(track.length):
                self.case.note("restore", track.length)
                self.add(Held(self.pool.restore(snapshot), track.copy(), source))
        elif way < 0.42:
            self.batch(sequences, often(rng, 0.6))
        else:
            super().step()

    def add(self, held):
        """One more, in the place of an old one if there are many."""
        if len(self.held) >= 6:
            old = self.held.pop(int(self.rng.integers(len(self.held))))
            if hasattr(old.cache, "free"):
                old.cache.free()
        self.held.append(held)
        self.check_all(held)

    keep = add

    def like(self, held, cache, track):
        other = Held(cache, track, held.source if often(self.rng, 0.3) else self.source(), held.prompt)
        other.is_known = held.is_known
        return other

    def begin(self):
        """An empty sequence, or one that begins as another did."""
        rng = self.rng
        if often(rng, 0.4):
            self.case.note("new sequence")
            return Held(self.pool.new_sequence(), self.track(), self.source())
        if self.prompts and often(rng, 0.7):
            ids, rows = one_of(rng, self.prompts)
            if often(rng, 0.5):  # the same at first
                n = int(rng.integers(len(ids)))
                ids = np.concatenate([ids[:n], rng.integers(1 << 40, size=len(ids) - n)])
                others = self.source().take(len(ids) - n)
                rows = [tuple(np.concatenate([a[:n], b]) for a, b in zip(*pair)) for pair in zip(rows, others)]
        else:
            n = int(rng.integers(20, 200) if often(rng, 0.9) else rng.integers(260, 500))  # from 256 on they are read together
            ids, rows = rng.integers(1 << 40, size=n), self.source().take(n)
        self.prompts = [*self.prompts[-3:], (ids, rows)]
        cache, track = self.pool.match_prefix(ids), self.track()
        found = len(cache)
        self.case.note("match_prefix", len(ids), found)
        if found:
            for layer, (k, v) in enumerate(rows):
                track.append(layer, k[:found], v[:found])
            track.length = track.longest = track.coded = track.lossy = found
        held = Held(cache, track, self.source(), (ids, rows))
        held.is_known = True
        return held

    def back(self, held):
        super().back(held)
        if held.track.length == 0:
            held.prompt = None

    def batch(self, sequences, growing):
        """Some sequences at once: tokens for each, then attention, then complete; or attention alone."""
        rng = self.rng
        some = [sequences[i] for i in rng.permutation(len(sequences))[: int(rng.integers(1, 5))]]
        if growing:
            counts = [int(one_of(rng, [1, 1, 1, 2, 5, 17, 40])) for _ in some]
            needed = sum(-(-n // self.block_size) + 1 for n in counts)
            if needed > self.pool.num_free_blocks:
                return
            self.case.note("append_batch", counts)
            slots, new = self.pool.slot_mapping([one.cache for one in some], counts), []
            for held, n in zip(some, counts):
                new.append(self.next_rows(held, n))
            for layer in range(len(self.formats)):
                k, v = (np.concatenate([rows[layer][side] for rows, _ in new]) for side in (0, 1))
                k, v = self.append_batch(layer, k, v, slots)
                for held, last, n in zip(some, np.cumsum(counts), counts):
                    held.track.append(layer, k[last - n : last], v[last - n : last])
                if often(rng, 0.4):
                    self.attend_batch(some, layer)
            for held, n, (_, ids) in zip(some, counts, new):
                held.cache.advance(n, **ids)
                held.track.advance(n)
        some = [one for one in some if one.track.length]
        if some:
            self.attend_batch(some, int(rng.integers(len(self.formats))))

    def append_batch(self, layer, k, v, slots):
        self.case.calls += 1
        (k, kept_k), (v, kept_v) = (as_given(self.rng, one, not self.prompts) for one in (k, v))
        self.pool.append_batch(layer, k, v, slots)
        return kept_k, kept_v

    def attend_batch(self, some, layer):
        rng, num_q_heads = self.rng, self.random_heads()
        counts = [1 if often(rng, 0.6) else self.queries_of(held, layer, 20) for held in some]
        queries = [held.source.queries(n, num_q_heads, held.track.rows[layer]) for held, n in zip(some, counts)]
        q, exact_q = as_given(rng, np.concatenate(queries))
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        options = self.options(num_q_heads)
        given = {"cascade": often(rng, 0.7)}
        if counts != [1] * len(some) or often(rng, 0.5):
            given["cu_seqlens_q"] = bounds
        sequences = [held.cache for held in some]
        if often(rng, 0.3) and not any(one.finishes or one.num_float_tokens for one in self.formats):
            lengths = [held.track.layer_length(layer) for held in some]
            given |= {"block_table": self.pool.block_table(sequences), "seq_lens": np.array(lengths, np.int32)}
        else:
            given["sequences"] = sequences
        out, out_dtype = self.random_out((len(q), num_q_heads, self.out_dim))
        self.case.note("attend_batch", layer, counts, [one.track.layer_length(layer) for one in some], options)
        try:
            got = self.pool.attend_batch(layer, q, out=out, **given, **options)
        except kvfast.NonFiniteInputError:
            for held, query in zip(some, queries):
                if max(np.abs(one).max(initial=0) for one in (*held.track.rows[layer], query)) > 1e4:
                    return
            raise
        for held, first, last in zip(some, bounds, bounds[1:]):
            part = tuple(one[first:last] for one in got) if isinstance(got, tuple) else got[first:last]
            self.verify(held, layer, exact_q[first:last], part, options, out_dtype)


class LatentPoolWorld(PoolWorld, LatentWorld):
    name, plain_class, pool_class = "PagedMLAKVCache", kvfast.MLAKVCache, kvfast.PagedMLAKVCache

    def make_pool(self):
        return self.pool_class(len(self.formats), *self.dims, dtype=self.formats, **self.settings)

    def append_batch(self, layer, k, v, slots):
        rows, kept = as_given(self.rng, np.concatenate([k[:, 0], v[:, 0]], axis=1), not self.prompts)
        self.pool.append_batch(layer, rows, slots)
        return kept[:, None, : self.dims[0]], kept[:, None, self.dims[0] :]


class SchedulerWorld(PoolWorld):
    """A pool whose blocks another scheduler hands out: sequences are tables of blocks here."""

    name = "PagedKVCache of a scheduler"

    def __init__(self, case):
        SingleWorld.__init__(self, case)
        self.free = list(self.rng.permutation(self.pool.num_blocks))
        self.tables = {}
        self.held = []
        for _ in range(int(self.rng.integers(1, 5))):
            held = Held(None, self.track(), self.source())
            self.tables[id(held)] = []
            self.held.append(held)

    def shape(self):
        super().shape()
        self.formats = [kvfast.KVFormat.of("int8") if one.finishes or one.num_float_tokens else one for one in self.formats]

    def make(self):
        self.pool = self.make_pool()
        return self.pool

    def run(self):
        rng, size = self.rng, self.block_size
        for _ in range(int(rng.integers(3, 12))):
            some = [self.held[i] for i in rng.permutation(len(self.held))[: int(rng.integers(1, 5))]]
            if often(rng, 0.15):  # one is done, and its blocks serve the next
                old = some.pop()
                self.free += self.tables.pop(id(old))
                self.held[self.held.index(old)] = held = Held(None, self.track(), self.source())
                self.tables[id(held)] = []
                some.append(held)
            counts = [int(one_of(rng, [1, 1, 2, 17, 40])) for _ in some]
            slots = []
            for held, n in zip(some, counts):
                table = self.tables[id(held)]
                while len(table) * size < held.track.length + n and self.free:
                    table.append(self.free.pop())
                slots.append([table[at // size] * size + at % size if at // size < len(table) else -1
                              for at in range(held.track.length, held.track.length + n)])  # fmt: skip
            if any(-1 in one for one in slots):
                return
            padding = int(rng.integers(3))
            slots = np.array([one for some_slots in slots for one in some_slots] + [-1] * padding, np.int64)
            new = [held.source.take(n) for held, n in zip(some, counts)]
            self.case.note("append_batch", counts)
            for layer in range(len(self.formats)):
                k, v = (np.concatenate([rows[layer][side] for rows in new] + [rows[layer][side][:1] for rows in new[:1]] * padding)
                        for side in (0, 1))  # fmt: skip
                k, v = self.append_batch(layer, k, v, slots)
                for held, last, n in zip(some, np.cumsum(counts), counts):
                    held.track.append(layer, k[last - n : last], v[last - n : last])
            for held, n in zip(some, counts):
                held.track.advance(n)
            for layer in range(len(self.formats)):
                self.attend_tables(some, layer)

    def attend_tables(self, some, layer):
        rng, num_q_heads = self.rng, self.random_heads()
        q, exact_q = as_given(rng, np.concatenate([held.source.queries(1, num_q_heads, held.track.rows[layer]) for held in some]))
        tables = [self.tables[id(held)] for held in some]
        table = np.full((len(some), max(map(len, tables))), -1, np.int32)
        for row, one in zip(table, tables):
            row[: len(one)] = one
        options = self.options(num_q_heads)
        self.case.note("attend_batch", layer, [one.track.length for one in some], options)
        got = self.pool.attend_batch(layer, q, block_table=table, seq_lens=np.array([one.track.length for one in some]), **options)
        for i, held in enumerate(some):
            part = tuple(one[i : i + 1] for one in got) if isinstance(got, tuple) else got[i : i + 1]
            self.verify_inputs(held, layer, exact_q[i : i + 1], part, options)

    def verify_inputs(self, held, layer, q, got, options):
        """There is no k() here: floats are held to what they must be, codes to what another cache has of the same rows."""
        cache = kvfast.KVCache(1, self.heads, self.dims[0], dtype=[self.formats[layer]])
        cache.append(0, *held.track.rows[layer])
        held.cache = _Shown(cache, layer)
        self.verify(held, layer, q, got, options)


class _Shown:
    """The rows of one layer of another cache, as if they were those of this one."""

    def __init__(self, cache, layer):
        self._cache, self._layer = cache, layer

    def k(self, layer):
        return self._cache.k(0)

    def v(self, layer):
        return self._cache.v(0)


class HeadsWorld(World):
    """A MultiHeadKVCache, token by token."""

    name, takes_windows = "MultiHeadKVCache", False

    def run(self):
        rng = self.rng
        dim, heads = random_dim(rng), int(rng.integers(1, 5))
        bits = int(rng.integers(2, 9)) if often(rng, 0.5) else tuple(map(int, rng.integers(2, 9, 2)))
        codebook = str(one_of(rng, ["gaussian", "uniform", "trellis"]))
        if codebook == "trellis" and 4 not in np.atleast_1d(bits):
            codebook = "gaussian"
        config = kvfast.MultiHeadConfig(dim, bits, often(rng, 0.7), codebook, heads * int(one_of(rng, [1, 2, 4])), int(rng.integers(1 << 30)))
        form = config.format
        self.case.note(self.name, heads, config)
        cache, source = kvfast.MultiHeadKVCache(heads, config), Rows(rng, [form], 1, heads, dim, dim)
        signs = signs_of(config.seed, heads, dim) if config.rotation else np.ones((heads, dim))
        sides, kept = [Side(form, False), Side(form, True)], [np.empty((0, heads, dim), np.float32)] * 2
        where = f"{self.name} {told(form)}"
        for _ in range(int(rng.integers(1, 6))):
            k, v = source.take(int(one_of(rng, [1, 5, 16, 33, 70])))[0]
            for pair in zip(k, v):
                cache.push_token(*pair)
            kept = [np.concatenate(pair) for pair in zip(kept, (k, v))]
            if often(rng, 0.3):
                window = int(rng.integers(1, len(kept[0]) + 20))
                if cache.evict_outside_window(window) != max(len(kept[0]) - window, 0):
                    raise Finding(f"evict_outside_window | {where}")
                kept = [one[-window:] for one in kept]
            if often(rng, 0.2):
                cache = cache.copy()
            self.case.calls += len(k) + 4
            rows, positions = [cache.decode_keys(), cache.decode_values()], np.arange(len(kept[0])) + 16
            for side, got, given in zip(sides, rows, kept):
                side.check(got * signs, given * signs, positions, np.zeros(1), 1 << 60, where)
            q = source.queries(1, config.num_q_heads, kept)
            exact = exact_attention(q, *rows, positions, positions[-1:], causal=False)
            check_output(cache.attend(q[0])[None], None, exact, 1e-3, f"attend is not attention over decoded rows | {where}")
            weights = cache.attention_scores(q[0], softmax=True)
            if not np.allclose(weights.sum(1), 1, atol=1e-4):
                raise Finding(f"weights do not sum up to 1 | {where}")
            head = int(rng.integers(heads))
            group = config.num_q_heads // heads
            one = cache.head(head).attend(q[0, head * group : (head + 1) * group])
            error = np.linalg.norm(one - exact.out[0, head * group : (head + 1) * group], axis=-1)
            if (error > allowed(exact, 1e-3)[0][0, head * group : (head + 1) * group]).any():
                raise Finding(f"attend of one head | {where}")


class PlainWorld(World):
    """`kvfast.attention` on arrays of any dtype and strides."""

    name = "attention"

    def run(self):
        rng = self.rng
        self.heads, dim, self.formats = int(rng.integers(1, 4)), random_dim(rng), [kvfast.KVFormat("float32")]
        self.dims, length = (dim, dim), int(one_of(rng, [1, 2, 15, 16, 17, 64, 100, 129, 300]))
        source = Rows(rng, self.formats, 1, self.heads, dim, dim)
        k, v = source.take(length)[0]
        strides = str(one_of(rng, ["broadcast tokens", "broadcast heads", "backwards"])) if often(rng, 0.25) else ""
        num_q_heads = self.random_heads()
        n = min(int(one_of(rng, [1, 2, 5, 16, 40])), length)
        q, exact_q = as_given(rng, source.queries(n, num_q_heads, (k, v)))
        options = self.options(num_q_heads)
        out, out_dtype = self.random_out((n, num_q_heads, dim))
        self.case.note("attention", length, n, num_q_heads, strides, options)
        if strides == "broadcast tokens":
            k = kept_k = np.broadcast_to(k[:1], k.shape)
            v = kept_v = np.broadcast_to(v[:1], v.shape)
        elif strides == "broadcast heads":
            k = kept_k = np.broadcast_to(k[:, :1], k.shape)
            v = kept_v = np.broadcast_to(v[:, :1], v.shape)
        elif strides == "backwards":
            k = kept_k = k[::-1]
            v = kept_v = v[::-1]
        else:
            (k, kept_k), (v, kept_v) = as_given(rng, k), as_given(rng, v)
        self.case.calls += 1
        try:
            got = kvfast.attention(q, k, v, out=out, **options)
        except kvfast.NonFiniteInputError:
            if np.abs(kept_v).max() < 6e4 and np.abs(kept_k).max() < 1e30:
                raise
            return
        out, lse = got if options.pop("return_lse", False) else (got, None)
        for name in ("num_splits", "num_threads"):
            options.pop(name, None)
        exact = exact_attention(exact_q, kept_k, kept_v, np.arange(length), np.arange(length - n, length), **options)
        limit = 1e-5 if k.dtype == v.dtype == np.float32 else 1e-3
        check_output(out, lse, exact, limit, f"attention | {k.dtype}/{v.dtype}{', softcap' if options.get('softcap', 0) >= 300 else ''}",
                     out_dtype=out_dtype)  # fmt: skip


class CompressedWorld(World):
    """A CompressedKV, and a PrefixKVCache with it: attention over what `decode` tells, and the error that is told."""

    name = "CompressedKV"

    def run(self):
        rng = self.rng
        heads, dim, n = int(rng.integers(1, 3)), int(one_of(rng, DIMS[4:])), int(one_of(rng, [20, 40, 65, 130]))
        bits = int(one_of(rng, [4, 8]))
        method = [kvfast.Quantize(), kvfast.Hybrid(), kvfast.Hybrid(rank=max(dim // 2, 1)), kvfast.LowRank(max(dim // 2, 1)),
                  kvfast.LowRank(energy=0.9), kvfast.VectorQuantization(4, seed=1)][int(rng.integers(6))]  # fmt: skip
        form = random_format(rng)
        source = Rows(rng, [form], 2, heads, dim, dim)
        while source.flavour in ("denormal", "large", "tiny"):
            source = Rows(rng, [form], 2, heads, dim, dim)
        rows = source.take(n)
        self.case.note(self.name, method, bits, heads, dim, n, repr(form))
        compressor = kvfast.KVCacheCompressor(method, bits)
        layers = [compressor.compress_kv_3d(*(one.swapaxes(0, 1) for one in pair)) for pair in rows]
        where = f"CompressedKV {type(method).__name__}"
        for one, pair in zip(layers, rows):
            if often(rng, 0.3):
                one = kvfast.CompressedKV.from_state_dict(one.state_dict())
            decoded = [array.swapaxes(0, 1) for array in one.decode()]
            for got, given, told_error in zip(decoded, pair, one.reconstruction_error):
                error = np.linalg.norm(got.astype(np.float64) - given) / max(np.linalg.norm(given), 1e-30)
                if not abs(error - told_error) <= 1e-3 * error + 1e-5 and np.linalg.norm(given):
                    raise Finding(f"reconstruction_error | {where}", f"{told_error} for {error}")
            queries = int(rng.integers(1, min(n, 6)))
            q = source.queries(queries, heads * int(one_of(rng, [1, 2, 3])), pair)
            causal = often(rng, 0.7)
            exact = exact_attention(q, *decoded, np.arange(n), np.arange(n - queries, n), causal=causal)
            self.case.calls += 3
            more = self.of_mean(method, decoded[1], q)
            check_output(*one.attend(q, causal=causal, return_lse=True), exact, 1e-3, f"attend is not attention over decode() | {where}", more)
        self.prefix(layers, source, form, heads, dim, n, method)

    def of_mean(self, method, v, q):
        """A Hybrid has values relative to their mean: what is near 0 is what the two leave of each other."""
        if not isinstance(method, kvfast.Hybrid):
            return 0.0
        return 1e-3 * np.repeat(norms(v.mean(0)), q.shape[1] // v.shape[1])

    def prefix(self, layers, source, form, heads, dim, n, method):
        cache, rng = kvfast.PrefixKVCache(layers, dtype=form), self.rng
        where = f"PrefixKVCache {told(form)}"
        for _ in range(int(rng.integers(1, 5))):
            count = int(one_of(rng, [1, 2, 17, 70]))
            for layer, pair in enumerate(source.take(count)):
                cache.append(layer, *pair)
            layer, queries = int(rng.integers(2)), int(rng.integers(1, min(count, 8) + 1))
            q = source.queries(queries, heads * int(one_of(rng, [1, 2])), pair)
            k, v = cache.k(layer), cache.v(layer)
            length = cache.layer_length(layer)
            exact = exact_attention(q, k, v, np.arange(length), np.arange(length - queries, length))
            self.case.calls += 5
            before = length - n - count
            # As in `World.reads_what_is_shown`: queries that look back from tokens that are not complete.
            if not form.finishes or length - n < form.block or before == 0:
                more = self.of_mean(method, v[:n], q)
                check_output(*cache.attend(layer, q, return_lse=True), exact, 1e-3, f"attend is not attention over k() and v() | {where}", more)
            cache.advance(count)
            if often(rng, 0.3):
                cache.truncate(n + int(rng.integers(len(cache) - n + 1)))


WORLDS = {SingleWorld: 30, RingWorld: 14, PoolWorld: 24, LatentWorld: 8, LatentPoolWorld: 7, SchedulerWorld: 5, HeadsWorld: 4, PlainWorld: 6,
          CompressedWorld: 2}  # fmt: skip
