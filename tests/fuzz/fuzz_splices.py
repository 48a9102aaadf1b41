"""Caches put together from chunks for `fuzz_caches`: documents one after another, some of whose tokens are computed again."""

import contextlib
import gc

import numpy as np
from fuzz_histories import NO_DIFFERENCE, Held
from fuzz_inputs import often, one_of
from fuzz_oracle import Finding, Side, check_output, contract, rows_of
from fuzz_refusals import bits
from fuzz_twins import MOST_ALIKE, bits_of
from fuzz_worlds import SingleWorld
from reference import exact_attention, relative_error
from rotated_reference import error_of, turn

import kvfast

DOCUMENTS = [1, 5, 17, 40, 64, 65, 100, 130]


class SplicedWorld(SingleWorld):
    """Documents in one cache: keys that are rotated again in float64, values as they were given, and each query by itself."""

    name = "spliced KVCache"

    def __init__(self, case):
        super().__init__(case)
        self.settings["max_seq_len"] = None
        if often(case.fresh, 0.5):  # those that `check_rows` takes
            self.held[0].source.flavour, self.held[0].source.size = "plain", 1
        # Without a rotation the rows of a document are those of its own cache, and with one its values.
        self.rope = kvfast.Rope() if self.dims[0] % 2 == 0 and often(self.rng, 0.5) else None
        self.pool = None
        if often(self.rng, 0.5):
            settings = {"num_blocks": 100, "block_size": self.block_size, "v_head_dim": self.dims[1]}
            self.pool = kvfast.PagedKVCache(len(self.formats), self.heads, self.dims[0], dtype=self.formats, **settings)

    def document(self, n):
        """A cache with some tokens of its own, and what it was given."""
        held = Held(self.make() if self.pool is None else self.pool.new_sequence(), self.track(), self.held[0].source)
        if n:
            self.put(held, n)
        return held

    def put(self, held, n):
        for layer, (k, v) in enumerate(held.source.take(n)):
            held.cache.append(layer, k, v)
            held.track.append(layer, k, v)
        held.cache.advance(n)
        held.track.advance(n)

    def run(self):
        rng = self.rng
        held = self.document(int(one_of(rng, [0, 1, 20, 70])))
        kept = []
        for _ in range(int(rng.integers(2, 8))):
            way = rng.random()
            if way < 0.55:
                self.splice(held)
            elif way < 0.7:
                self.put(held, int(one_of(rng, [1, 2, 17, 64, 70])))
            elif way < 0.8:
                first, last = np.sort(rng.integers(len(held.cache) + 1, size=2))
                self.case.note("drop", int(first), int(last))
                held.cache.drop(int(first), int(last), rope=self.rope)
                self.cut(held, int(first), int(last))
            elif way < 0.9:
                n = int(rng.integers(len(held.cache) + 1))
                self.case.note("truncate", n)
                held.cache.truncate(n)
                held.track.truncate(n)
            else:
                how = str(one_of(self.case.fresh, ["fork", "copy", "restore"]))
                self.case.note(how)
                fork = self.again(held.cache, how)
                kept.append((fork, self.shown(fork)))
                if kept[-1][1] != self.shown(held.cache):
                    raise Finding(f"a spliced cache has other rows | {how}")
                if often(self.case.fresh, 0.5):
                    held.cache, kept[-1] = fork, (held.cache, kept[-1][1])
            self.attend_all(held)
            for fork, before in kept:
                if self.shown(fork) != before:
                    raise Finding("a fork of a spliced cache is not what it was")
        self.convert(held)
        held = fork = None
        kept.clear()
        gc.collect(0)
        if self.pool is not None and self.pool.num_free_blocks != self.pool.num_blocks:
            raise Finding("a spliced cache keeps blocks that nobody has", f"{self.pool.num_blocks - self.pool.num_free_blocks}")

    def again(self, cache, how):
        if how != "restore":
            return getattr(cache, how)()
        other = self.document(0).cache
        other.restore(cache.snapshot())
        return other

    def cut(self, held, first, last):
        for pair in held.track.rows:
            pair[0] = np.concatenate([pair[0][:last], self.moved(pair[0][last:], first - last)])
        held.track.rows = [[np.delete(side, slice(first, last), 0) for side in pair] for pair in held.track.rows]
        held.track.length -= last - first

    def splice(self, held):
        """One or two documents; or one, of which the first tokens were computed again, or all of them."""
        rng, count = self.rng, int(one_of(self.rng, [1, 1, 2]))
        if count == 1 and often(rng, 0.6):
            n = int(one_of(rng, DOCUMENTS))
            again = n if often(rng, 0.5) else int(rng.integers(1, n + 1))
            self.put(held, again)
            documents = [self.document(n)]
        else:
            documents, again = [self.document(int(one_of(rng, DOCUMENTS))) for _ in range(count)], 0
        self.case.note("splice", [len(one.cache) for one in documents], again)
        self.case.calls += 1
        chunks = [one.cache if often(rng, 0.5) else one.cache.snapshot() for one in documents]
        held.cache.splice(*chunks, rope=self.rope, recomputed=again)
        for one in documents:
            for pair, (k, v) in zip(held.track.rows, one.track.rows):
                rows = self.moved(k, held.track.length - again), v
                pair[:] = [np.concatenate([side, other[again:]]) for side, other in zip(pair, rows)]
            held.track.length += one.track.length - again

    def moved(self, k, by):
        """Keys that are rotated for positions as far away."""
        return turn(k, by, self.rope).astype(np.float32)

    def check_rows(self, held, layer):
        """Where keys and values stand, and how far keys are turned: bounds are loose, as codes have worlds of their own."""
        if held.source.flavour != "plain" or self.dims[0] < 16:  # a few elements may all fall between two codes
            return
        for side, got in zip(held.track.rows[layer], (held.cache.k(layer), held.cache.v(layer))):
            error = relative_error(got.reshape(len(got), -1), side.reshape(len(side), -1))
            if len(got) != len(side) or not error < error_of(self.formats[layer]):
                raise Finding("rows of a spliced cache are not what was given", f"layer {layer}: {error:.3g}")

    def shown(self, cache):
        return [
            bits(side) for layer in range(cache.num_layers) if cache.layer_length(layer) for side in (cache.k(layer), cache.v(layer))
        ]

    def attend_all(self, held):
        """Several queries have the bits of one, and are attention over what is shown."""
        rng, cache, length = self.rng, held.cache, len(held.cache)
        if length != held.track.length:
            raise Finding("length of a spliced cache", f"{length} for {held.track.length}")
        if not length:
            return
        layer, heads = int(rng.integers(cache.num_layers)), self.random_heads()
        self.check_rows(held, layer)
        n = min(int(one_of(rng, [1, 2, 3, 16, 33])), length)
        q, options = held.source.queries(n, heads, held.track.rows[layer]), self.options(heads)
        self.narrow(options, length, n, None)
        self.case.note("attend", layer, n, heads, options)
        self.case.calls += 2
        try:
            got = cache.attend(layer, q, **options)
        except kvfast.NonFiniteInputError:
            return
        except ValueError as error:
            if "since the last splice" not in str(error):
                raise
            return
        if n <= MOST_ALIKE and not options.keys() & {"spans", "tree_parents"}:  # alone, a query sees other tokens
            self.check_alone(cache, layer, q, got, options, int(rng.integers(n)))
        if not any(one.open_tokens for one in self.formats):
            self.check_shown(cache, layer, q, got, options)

    def check_alone(self, cache, layer, q, got, options, at):
        """A query has the bits that it has alone, where it stands."""
        alone = cache.fork()
        # Formats with newest tokens as floats show them again where tokens after them are gone; queries that look ahead see other tokens.
        if self.formats[layer].open_tokens or not options.get("causal", True):
            at = len(q) - 1
        alone.truncate(len(cache) - len(q) + 1 + at)
        if "indices" in options:
            options = options | {"indices": options["indices"][at : at + 1]}
        one = alone.attend(layer, q[at : at + 1], **options)
        if bits_of(rows_of(got, at, at + 1)) != bits_of(one):
            raise Finding("several queries have other bits than one | spliced", f"query {at} of {len(q)}")

    def check_shown(self, cache, layer, q, got, options):
        """Attention is that over the rows that the cache shows."""
        out, lse = got if isinstance(got, tuple) else (got, None)
        fast = options.get("precision") == "fast"
        options = {name: value for name, value in options.items() if name not in NO_DIFFERENCE}
        length = len(cache)
        exact = exact_attention(q, cache.k(layer), cache.v(layer), np.arange(length), np.arange(length - len(q), length), **options)
        limit = contract([Side(self.formats[layer], False), Side(self.formats[layer], True)])
        check_output(out, lse, exact, 2 * limit, "attend is not attention over k() and v() | spliced", fast=fast)

    def convert(self, held):
        """Snapshots of spliced caches go where others go."""
        size = int(one_of(self.rng, [16, 32, 64, 128]))
        if any(one.seals for one in self.formats) or not len(held.cache):
            return
        other = self.plain(size)
        self.case.note("convert", size)
        with contextlib.suppress(kvfast.NonFiniteInputError):
            other.restore(held.cache.snapshot(), convert=True)
            for layer, (_, values) in enumerate(held.track.rows):
                error, most = np.abs(other.v(layer) - held.cache.v(layer)).max(), np.abs(values).max()
                if len(other) != len(held.cache) or not error <= most:
                    raise Finding("a spliced snapshot is not what it was | convert", f"{error:.3g}")
