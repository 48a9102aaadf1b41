"""Caches of one sequence for `fuzz_caches`: how they are made, and what may be done to them."""

import numpy as np
from fuzz_fresh import check_fresh
from fuzz_histories import Held, World
from fuzz_inputs import Rows, as_given, fitting, often, one_of, random_dim, random_dims, random_formats
from fuzz_oracle import Finding
from fuzz_refusals import refuse
from fuzz_stores import longer_prompt
from fuzz_tracks import Track

import kvfast

BLOCKS = [16, 32, 64, 128]


class SingleWorld(World):
    """A cache of one sequence, its copies, and snapshots of them."""

    name, plain_class, rollback = "KVCache", kvfast.KVCache, 1 << 60

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
        self.heads, self.dims = int(self.rng.integers(1, 4)), random_dims(self.case)

    def arrange(self):
        self.max_seq_len = int(one_of(self.rng, [1, 20, 64, 100, 300])) if often(self.rng, 0.4) else None
        self.settings["max_seq_len"] = self.max_seq_len
        if not any(one.seals for one in self.formats) and often(self.rng, 0.6):
            self.settings["block_size"] = int(one_of(self.rng, BLOCKS))

    def make(self):
        return kvfast.KVCache(len(self.formats), self.heads, self.dims[0], dtype=self.formats, v_head_dim=self.dims[1], **self.settings)

    def plain(self, block_size):
        """A cache that keeps all tokens of one sequence."""
        shape = len(self.formats), self.heads, self.dims[0]
        return kvfast.KVCache(*shape, dtype=self.formats, v_head_dim=self.dims[1], block_size=block_size)

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
        elif way < 0.85:
            self.case.note("snapshot")
            self.snapshots = [*self.snapshots[-2:], (held.cache.snapshot(), held.track.copy(), held.source)]
        elif way < 0.91 and self.snapshots:
            self.restore(held, *one_of(rng, self.snapshots))
        elif way < 0.94:
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
            self.keep(Held(kvfast.load(snapshot), track, source))
            return
        try:
            held.cache.restore(snapshot)
        except kvfast.CacheFullError:  # a sequence, and a snapshot of another pool: the sequence stays as it was
            if not held.cache.is_paged or held.cache.pool.can_append(track.length):
                raise
        else:
            held.track, held.source = track.copy(), source
        self.check_all(held)

    def run(self):
        for _ in range(int(self.rng.integers(4, 14))):
            self.step()
            if often(self.case.newest, 0.2):
                refuse(self, one_of(self.case.newest, self.held), self.case.newest)
            if often(self.case.fresh, 0.1):
                check_fresh(self, one_of(self.case.fresh, self.held), self.case.fresh)
        for held in self.held:
            self.check_all(held)
            self.attend(held)
            if often(self.case.fresh, 0.3):
                check_fresh(self, held, self.case.fresh)
            if held.track.length and often(self.case.newest, 0.1):
                longer_prompt(self, held, self.case.newest)
            if held.track.length > 1 and often(self.case.later, 0.25):
                other = self.through_store(held)
                self.check_all(other)
                if other.track.length:
                    self.grow(other)
                    self.check_all(other)


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
        self.settings |= {"sliding_window": windows, "num_sink_tokens": self.num_sink_tokens, "rollback": self.rollback}

    def make(self):
        return kvfast.RingKVCache(
            len(self.formats), self.heads, self.dims[0], dtype=self.formats, v_head_dim=self.dims[1], **self.settings
        )

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

    def plain(self, block_size):
        return kvfast.MLAKVCache(len(self.formats), *self.dims, dtype=self.formats, block_size=block_size)

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
        if often(self.case.threads, 0.4):
            return int(one_of(self.case.threads, [40, 64, 100, 128]))
        return int(one_of(self.rng, [1, 2, 3, 8, 16, 17, 32]))

    def sides_of(self, k, v):
        return np.concatenate([k, v], axis=2), k

    def errors_of(self, k, v):
        return np.hypot(k, v), k

    def explain_refusal(self, held, layer, q, options, out_dtype):
        rows = np.concatenate(held.track.rows[layer], axis=2)
        if max(np.abs(rows).max() * np.abs(q).max() * rows.shape[2], np.abs(rows).max()) < (6e4 if out_dtype == "float16" else 1e37):
            raise Finding(f"refused although finite | {self.where(layer)}")
