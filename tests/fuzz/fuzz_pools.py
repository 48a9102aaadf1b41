"""Pools of many sequences for `fuzz_caches`."""

import numpy as np
from fuzz_histories import Held
from fuzz_inputs import as_given, often, one_of
from fuzz_oracle import rows_of
from fuzz_worlds import LatentWorld, RingWorld, SingleWorld

import kvfast


class PoolWorld(SingleWorld):
    """Sequences of one pool, alone and in batches; some of them say what their tokens are."""

    name, plain_class, pool_class = "PagedKVCache", kvfast.KVCache, kvfast.PagedKVCache

    def arrange(self):
        rng = self.rng
        self.settings["num_blocks"] = int(one_of(rng, [8, 20, 60, 300]))
        if not any(one.seals for one in self.formats) and often(rng, 0.7):
            self.settings["block_size"] = int(one_of(rng, [16, 16, 32, 64]))
        self.prompts = []
        later = self.case.later
        if self.takes_windows and often(later, 0.3):
            window = int(one_of(later, [1, 2, 7, 16, 30, 64, 65, 100]))
            self.windows, self.plain_class = [window] * len(self.formats), kvfast.RingKVCache
            self.num_sink_tokens = int(later.integers(min(window, 20) + 1)) if often(later, 0.5) else 0
            self.rollback = int(one_of(later, [0, 1, 10, 64, 100]))
            self.settings |= {"sliding_window": window, "num_sink_tokens": self.num_sink_tokens, "rollback": self.rollback}

    def positions(self, held, layer):
        return RingWorld.positions(self, held, layer) if self.windows else super().positions(held, layer)

    def make_pool(self, **more):
        return self.pool_class(
            len(self.formats), self.heads, self.dims[0], dtype=self.formats, v_head_dim=self.dims[1], **self.settings | more
        )

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

    def run(self):
        for _ in range(3 if often(self.rng, 0.4) else 0):
            self.add(self.begin(of_prompt=True))
        super().run()

    def step(self):
        rng, way = self.rng, self.rng.random()
        sequences = [one for one in self.held if hasattr(one.cache, "pool")]
        if way < 0.12 or not sequences:
            self.add(self.begin())
        elif way < 0.17:
            held = one_of(rng, sequences)
            self.case.note("fork")
            self.add(self.like(held, held.cache.fork(), held.track.copy()))
        elif way < 0.21:
            held = one_of(rng, sequences)
            self.case.note("free", held.track.length)
            held.cache.free()
            self.held.remove(held)
            if not self.held:
                self.add(self.begin())
        elif way < 0.26 and self.snapshots:
            snapshot, track, source = one_of(rng, self.snapshots)
            if self.pool.can_append(track.length):
                self.case.note("restore", track.length)
                self.add(Held(self.pool.restore(snapshot), track.copy(), source))
        elif way < 0.46:
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

    def begin(self, of_prompt=False):
        """An empty sequence, or one that begins as another did."""
        rng = self.rng
        if not of_prompt and often(rng, 0.4):
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
            track.length = track.longest = found
            track.coded, track.lossy = ([found] * len(self.formats) for _ in range(2))
            track.lost = [0] * len(self.formats)  # the floats of another sequence, which may have gone back
        held = Held(cache, track, self.source(), (ids, rows))
        if often(rng, 0.7):  # at once, so that others find it
            self.grow(held, len(ids) - found)
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
        options = self.options(num_q_heads, self.windows and self.windows[layer])
        given = {"cascade": often(rng, 0.7)}
        if counts != [1] * len(some) or often(rng, 0.5):
            given["cu_seqlens_q"] = bounds
        sequences = [held.cache for held in some]
        if often(rng, 0.3) and not any(one.open_tokens or one.num_first_float_tokens for one in self.formats):
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
        except ValueError:
            # Earlier queries need what is gone.
            if self.windows and any(n - 1 + one.track.longest - one.track.length > self.rollback for one, n in zip(some, counts)):
                return
            raise
        for held, first, last in zip(some, bounds, bounds[1:]):
            self.verify(held, layer, exact_q[first:last], rows_of(got, first, last), options, out_dtype)


class LatentPoolWorld(PoolWorld, LatentWorld):
    name, plain_class, pool_class = "PagedMLAKVCache", kvfast.MLAKVCache, kvfast.PagedMLAKVCache

    def make_pool(self):
        return self.pool_class(len(self.formats), *self.dims, dtype=self.formats, **self.settings)

    def append_batch(self, layer, k, v, slots):
        rows, kept = as_given(self.rng, np.concatenate([k[:, 0], v[:, 0]], axis=1), not self.prompts)
        self.pool.append_batch(layer, rows, slots)
        return kept[:, None, : self.dims[0]], kept[:, None, self.dims[0] :]
