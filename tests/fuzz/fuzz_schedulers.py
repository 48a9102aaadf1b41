"""Pools whose blocks another scheduler hands out, for `fuzz_caches`: step by step, with pauses, drafts and shared blocks."""

import functools

import numpy as np
from fuzz_histories import NO_DIFFERENCE
from fuzz_inputs import often, one_of, random_formats
from fuzz_layers import SideBySide, mixed_formats
from fuzz_oracle import Finding, open_tokens, rows_of
from fuzz_pools import PoolWorld
from fuzz_refusals import bits, filling, left_out, refuse_numbers
from fuzz_worlds import SingleWorld

import kvfast

WINDOW = "sliding_window", "num_sink_tokens", "rollback"


class Scheduled:
    """A sequence of a scheduler: its blocks, what it was given, and a KVCache of the same steps."""

    def __init__(self, world, table=(), track=None, twin=None):
        self.table, self.track, self.source = list(table), track or world.track(), world.source()
        self.shared = len(self.table)  # of its first blocks, which it does not write
        # Those who begin with the blocks of others may read codes where computing would have floats.
        self.twin = twin


class PreparedWorld(PoolWorld):
    """A pool under another scheduler: outputs have the bits of a cache that did the same steps. One with float rows prepares its
    batches; others take slots and tables as they come, and may have a window."""

    name = "PagedKVCache of a scheduler"

    def __init__(self, case):
        SingleWorld.__init__(self, case)
        self.free, self.owners = list(self.rng.permutation(self.pool.num_blocks)), {}
        self.filling = filling(self.rng)
        self.held = []
        for _ in range(int(one_of(self.rng, [1, 2, 3, 6, 20, 40]))):
            self.begin()

    def shape(self):
        super().shape()
        self.dims = tuple(min(one, 64) for one in self.dims)
        self.is_prepared = often(self.rng, 0.6)
        if not self.is_prepared:
            self.formats = [
                kvfast.KVFormat.of("int8-rotated") if one.open_tokens or one.num_first_float_tokens else one for one in self.formats
            ]
            return
        while not any(one.open_tokens or one.num_first_float_tokens for one in self.formats):
            self.formats = random_formats(self.rng, len(self.formats))
        if often(self.case.newest, 0.5):
            self.formats, _ = mixed_formats(self.case.newest, int(self.case.newest.integers(1, 4)))

    def arrange(self):
        super().arrange()
        if self.is_prepared:  # such pools have no windows
            self.settings = {name: value for name, value in self.settings.items() if name not in WINDOW}
            self.windows, self.num_sink_tokens = None, 0
        self.settings["num_blocks"] = 150

    def make(self):
        formats, self.pool = self.formats, self.make_pool()
        pools = [self.pool]
        for self.formats in [[one] for one in formats] if len({open_tokens(one) for one in formats}) > 1 else ():
            pools.append(self.make_pool(block_size=self.pool.block_size))
        self.formats, self.pool = formats, SideBySide(pools) if len(pools) > 1 else self.pool
        return pools[0]

    def begin(self, table=(), track=None):
        for block in table:
            self.owners[block] += 1
        self.held.append(Scheduled(self, table, track, None if table else self.plain(self.block_size)))
        return self.held[-1]

    def plain(self, block_size):
        if not self.windows:
            return super().plain(block_size)
        shape, window = (len(self.formats), self.heads, self.dims[0]), {name: self.settings[name] for name in WINDOW}
        return kvfast.RingKVCache(*shape, dtype=self.formats, v_head_dim=self.dims[1], block_size=block_size, **window)

    def end(self, held):
        self.held.remove(held)
        for block in held.table:
            self.owners[block] -= 1
            if not self.owners[block]:
                self.free.append(block)

    def run(self):
        rng, size = self.rng, self.block_size
        for _ in range(int(rng.integers(5, 30))):
            if often(rng, 0.1) and len(self.held) > 1:
                self.case.note("end")
                self.end(one_of(rng, self.held))
            if often(rng, 0.2):
                self.share(one_of(rng, self.held))
            if not self.held:
                self.begin()
            some = [self.held[i] for i in rng.permutation(len(self.held))[: int(rng.integers(1, 5))]]
            for held in some:
                if often(rng, 0.15):
                    self.back(held)
            counts = [int(one_of(rng, [1, 1, 1, 2, 17, size - 1, size, size + 6])) for _ in some]
            if sum(-(-n // size) + 1 for n in counts) > len(self.free):
                for held in self.held[:3]:
                    self.end(held)
                continue
            self.one_step(some, counts)

    def share(self, held):
        """Another sequence, which begins with some of the full blocks of one."""
        full = held.track.length // self.block_size
        if full:
            count = int(self.rng.integers(1, full + 1))
            track = held.track.copy()
            track.truncate(count * self.block_size)
            self.case.note("share", count)
            if track.length == held.track.length:
                held.twin = None  # its last block is full: no table tells which of both goes on from here
            self.begin(held.table[:count], track)

    def back(self, held):
        """Refused drafts: the newest tokens of a block that is not full are written again."""
        length, size = held.track.length, self.block_size
        first = max(length - length % size, held.shared * size)
        own = next((i for i, block in enumerate(held.table) if all(self.owners[one] == 1 for one in held.table[i:])), length)
        far = own * size < length and often(self.case.newest, 0.3)  # whole blocks, which begin anew
        if length > first or far:
            n = int(self.rng.integers(min(first, length), length + 1))
            if far:
                n = first = size * int(self.case.newest.integers(own, (length - 1) // size + 1))
            self.case.note("back", length, n)
            if held.track.coded_at(n) != held.track.coded_at(length) or n == first:
                held.twin = None  # a cache has given back the floats of a block by now, which the pool may have yet; or as in `share`
            held.track.truncate(n)
            if held.twin is not None and held.track.longest - n > self.rollback:
                held.twin = None
            if held.twin is not None:
                held.twin.truncate(n)
            while len(held.table) * size >= n + size:
                self.owners[held.table[-1]] -= 1
                self.free.append(held.table.pop())

    def one_step(self, some, counts):
        rng, size = self.rng, self.block_size
        slots = []
        for held, n in zip(some, counts):
            while len(held.table) * size < held.track.length + n:
                held.table.append(int(self.free.pop()))
                self.owners[held.table[-1]] = 1
            slots += [held.table[at // size] * size + at % size for at in range(held.track.length, held.track.length + n)]
        padding = int(one_of(rng, [0, 0, 0, 0, 1, 3]))
        table = np.full((len(some), max(len(held.table) for held in some)), -1, np.int32)
        for row, held in zip(table, some):
            row[: len(held.table)] = held.table
        bounds, lengths = np.concatenate([[0], np.cumsum(counts)]), [held.track.length + n for held, n in zip(some, counts)]
        self.case.note("prepare", [self.held.index(one) for one in some], lengths, counts)
        slots, tables = slots + [-1] * padding, {"block_table": table, "seq_lens": lengths, "cu_seqlens_q": bounds}
        if self.is_prepared:
            if often(rng, 0.1):
                refuse_numbers(self, self.pool.prepare_batch, tables | {"slot_mapping": slots}, rng)
            slots = self.pool.prepare_batch(**tables, slot_mapping=slots)
            tables = {"batch": slots}
        else:
            self.hide_what_no_query_sees(table, lengths, counts)
        new = [held.source.take(n) for held, n in zip(some, counts)]
        for layer in range(len(self.formats)):
            rows = [np.concatenate([one[layer][side] for one in new]) for side in (0, 1)]
            for held, first, last in zip(some, bounds, bounds[1:]):
                held.track.append(layer, rows[0][first:last], rows[1][first:last])
                if held.twin is not None:
                    held.twin.append(layer, rows[0][first:last], rows[1][first:last])
            k, v = (np.concatenate([one, np.full((padding, *one.shape[1:]), self.filling, np.float32)]) for one in rows)
            self.case.calls += 1
            if not self.is_prepared and often(rng, 0.1):
                refuse_numbers(self, functools.partial(self.pool.append_batch, layer, k, v), {"slot_mapping": slots}, rng)
            with left_out(padding and self.filling):
                self.pool.append_batch(layer, k, v, slots)
            if often(rng, 0.7):
                self.attend_tables(some, counts, layer, **tables)
        for held, n in zip(some, counts):
            held.track.advance(n)
            if held.twin is not None:
                held.twin.advance(n)

    def hide_what_no_query_sees(self, table, lengths, counts):
        """Blocks before a window, of which a table may tell anything."""
        for row, length, n in zip(table, lengths, counts) if self.windows else ():
            first, sinks = (length - n + 1 - self.windows[0]) // self.block_size, -(-self.num_sink_tokens // self.block_size)
            row[sinks : max(first, sinks)] = one_of(self.rng, [-1, 1 << 30, 0])

    def attend_tables(self, some, counts, layer, batch=None, **tables):
        rng, num_q_heads, window = self.rng, self.random_heads(), self.windows and self.windows[layer]
        options = self.options(num_q_heads, window)
        if self.is_prepared:
            options.pop("attention_chunk_size", None)
        queries = [held.source.queries(n, num_q_heads, held.track.rows[layer]) for held, n in zip(some, counts)]
        self.case.note("attend_batch", layer, options)
        cascade = often(rng, 0.3)
        call = functools.partial(self.pool.attend_batch, layer, np.concatenate(queries), batch, cascade=cascade, **options)
        self.case.calls += 1
        if tables and often(rng, 0.1):
            refuse_numbers(self, call, tables, rng)
        try:
            got = call(**tables)
        except kvfast.NonFiniteInputError:
            return
        at = 0
        for held, query in zip(some, queries):
            part = rows_of(got, at, at + len(query))
            at += len(query)
            out = part[0] if isinstance(part, tuple) else part
            if held.twin is not None and not cascade:
                expected = held.twin.attend(layer, query, **options)
                expected = expected[0] if isinstance(expected, tuple) else expected
                if bits(out) != bits(expected):
                    raise Finding("a scheduler's sequence has other bits than a cache", f"by {np.abs(out - expected).max():.3g}")
            elif often(rng, 0.1 if self.is_prepared else 0.4):  # what has the bits of a cache is as right as that
                exact_options = {"sliding_window": window, "num_sink_tokens": self.num_sink_tokens} if window else {}
                exact_options |= {name: value for name, value in options.items() if name not in NO_DIFFERENCE}
                positions = np.arange(held.track.layer_length(layer))
                fast = options.get("precision") == "fast"
                self.verify_given(held.track, layer, query, out, positions, exact_options, "float32", self.where(layer), fast)
