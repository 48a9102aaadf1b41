"""Caches whose layers keep their tokens as floats by different rules, for `fuzz_caches`: each layer has the bits of a cache of its
format alone that had the same calls."""

from dataclasses import replace

import numpy as np
from dict_store import DictStore
from fuzz_histories import STEPS
from fuzz_inputs import often, one_of
from fuzz_oracle import Finding
from fuzz_refusals import bits

import kvfast

FORMATS = [kvfast.KVFormat.of(name) for name in ("int4", "int3", "int2", "k8v4", "int8-centred", "int8", "float16")] + [
    kvfast.KVFormat("int4/int8", per_channel=True, clip_search=False, num_first_float_tokens=3),
    kvfast.KVFormat("int8/int4", rotation="kv", codebook="gaussian", centring=True),
]
ROPE = kvfast.Rope(rotary_dim=16)


def mixed_formats(rng, layers):
    """Formats with blocks of one size, most of which seal them, after any number of tokens."""
    block, formats = int(one_of(rng, [32, 64, 64, 128])), [one_of(rng, FORMATS) for _ in range(layers)]
    recent = [int(one_of(rng, [0, 16, 32, 48, 96, 128])) if "int" in one.dtype else 0 for one in formats]
    formats = [
        replace(one, num_recent_float_tokens=own, block_size=None, recent_by_query=own > 0 and one.recent_by_query)
        for one, own in zip(formats, recent)
    ]
    return [replace(one, block_size=block) if one.seals else one for one in formats], block


class Together:
    """A cache of several layers, and one of each of its formats alone: a call of `all` is a call of each."""

    def __init__(self, caches):
        self.caches, self.layers = caches, range(len(caches) - 1)

    def of(self, layer):
        """The layer, in the cache of all and in its own."""
        return [(self.caches[0], layer), (self.caches[layer + 1], 0)]

    def all(self, call):
        """The results, or None where all refuse alike."""
        results = []
        for cache in self.caches:
            try:
                results.append(call(cache))
            except (ValueError, kvfast.CacheFullError) as error:
                results.append(error)
        wrong = [isinstance(one, Exception) for one in results]
        if any(wrong) != all(wrong):
            raise Finding(
                "layers together are refused otherwise than alone", str([one for one in results if isinstance(one, Exception)])
            )
        return None if any(wrong) else results

    def same(self, what, call):
        """Hold a layer to its own cache."""
        for layer in self.layers:
            one, alone = (call(cache, at) for cache, at in self.of(layer))
            if bits(one) != bits(alone):
                wrong = np.flatnonzero(np.abs(np.asarray(one) - alone).reshape(len(one), -1).max(1))
                raise Finding(f"a layer has other bits than alone | {what}", f"layer {layer}, rows {wrong[:1]} to {wrong[-1:]}")


class LayersWorld:
    """KVCache, RingKVCache or sequences of pools, and what becomes of them."""

    def __init__(self, case):
        self.case, self.rng = case, case.rng
        rng = self.rng
        self.formats, self.block = mixed_formats(rng, int(rng.integers(2, 4)))
        self.kind = str(one_of(rng, ["KVCache", "KVCache", "RingKVCache", "PagedKVCache", "PagedKVCache"]))
        self.settings = {"secure": often(rng, 0.2)}
        if self.kind == "RingKVCache" or self.kind == "PagedKVCache" and often(rng, 0.3):
            self.settings |= {"sliding_window": int(one_of(rng, [16, 64, 100, 300])), "rollback": int(one_of(rng, [0, 64, 100, 300]))}
            self.settings["num_sink_tokens"] = int(one_of(rng, [0, 4]))
        case.note(self.kind, [repr(one) for one in self.formats], self.settings)
        self.settings |= {"num_blocks": 60} if self.kind == "PagedKVCache" else {}
        caches = [self.make(one) for one in [self.formats, *([one] for one in self.formats)]]
        self.held, self.kept = [Together(caches)], None

    def make(self, formats):
        cache = getattr(kvfast, self.kind)(len(formats), 2, 20, dtype=formats, block_size=self.block, **self.settings)
        return cache.new_sequence() if self.kind == "PagedKVCache" else cache

    def run(self):
        for _ in range(int(self.rng.integers(4, 40))):
            some = one_of(self.rng, self.held)
            self.step(some)
            for together in self.held:
                self.check(together)

    def step(self, some):
        rng, length = self.rng, len(some.caches[0])
        way = rng.random()
        if way < 0.45 or not length:
            self.grow(some)
        elif way < 0.75:
            n = int(rng.integers(max(length - 40, 0), length + 1)) if often(rng, 0.5) else int(rng.integers(length + 1))
            self.case.note("truncate", n)
            some.all(lambda cache: cache.truncate(n))
        elif way < 0.8:
            self.case.note("snapshot")
            self.kept = some.all(lambda cache: cache.snapshot())
        elif way < 0.85 and self.kept:
            n = int(rng.integers(len(self.kept[0]) + 1)) if often(rng, 0.5) and "sliding_window" not in self.settings else None
            self.case.note("restore", n)
            snapshots = iter(self.kept if n is None else [one.truncated(n) for one in self.kept])
            some.all(lambda cache: cache.restore(next(snapshots)))
        elif way < 0.9:
            name = str(one_of(rng, ["copy", "fork"]))
            self.case.note(name)
            self.keep(some.all(lambda cache: getattr(cache, name)()))
        elif way < 0.96:
            self.keep(self.anew(some))
        else:
            self.case.note("splice")
            first, last = sorted(int(one) for one in rng.integers(length + 1, size=2))
            some.all(lambda cache: cache.drop(first, last, rope=ROPE))

    def anew(self, some):
        """By way of bytes, arrays, or a store of prompts."""
        way, length = str(one_of(self.rng, ["bytes", "state", "store"])), len(some.caches[0])
        self.case.note(way)
        if way == "bytes":
            return some.all(lambda cache: kvfast.load(kvfast.Snapshot.from_bytes(cache.snapshot().to_bytes())))
        if way == "state":
            return some.all(lambda cache: kvfast.load(kvfast.Snapshot.from_state_dict(cache.snapshot().state_dict())))
        return some.all(lambda cache: self.through_store(cache, np.arange(length)))

    def through_store(self, cache, ids):
        other = kvfast.load(cache.snapshot().truncated(0))
        with kvfast.PromptCache(DictStore(), chunk_tokens=128) as prompts:
            prompts.save(cache, ids)
            prompts.flush()
            prompts.restore(other, [*ids, len(ids)])
        return other

    def keep(self, caches):
        if caches is not None and len({len(one) for one in caches}) == 1:  # a chunk ends before a block that some layer has patched
            self.held = [*self.held[-2:], Together(caches)]

    def grow(self, some):
        rng, n, size = self.rng, int(one_of(self.rng, [*STEPS, 128, 200])), float(one_of(self.rng, [1, 1, 0.2]))
        if not all(one.can_append(n) for one in some.caches if hasattr(one, "can_append")):
            return
        self.case.note("append", n)
        for layer in some.layers:
            k, v = rng.standard_normal((2, n, 2, 20), np.float32) * np.float32(
                size
            )  # small ones fit the scales of a block that was cut
            for cache, at in some.of(layer):
                cache.append(at, k, v)
            if often(rng, 0.3):
                self.attend(some)
        if often(rng, 0.1):
            self.case.note("forget")
            some.all(lambda cache: cache.truncate(len(cache)))
        else:
            some.all(lambda cache: cache.advance(n))

    def check(self, some):
        self.case.calls += 1
        some.same("k", lambda cache, layer: cache.k(layer))
        some.same("v", lambda cache, layer: cache.v(layer))
        self.attend(some)

    def attend(self, some):
        n = int(one_of(self.rng, [1, 1, 2, 17]))
        q = self.rng.standard_normal((n, 4, 20), np.float32)

        def call(cache, layer):
            count = min(n, cache.layer_length(layer))
            try:
                return cache.attend(layer, q[:count]) if count else q[:0]
            except ValueError:  # a ring may have dropped what the first of them see
                return q[:0]

        some.same("attend", call)


class SideBySide:
    """A pool of another scheduler's blocks, and one of each of its formats alone, for `fuzz_schedulers`."""

    def __init__(self, pools):
        self.pools = pools

    def __getattr__(self, name):
        return getattr(self.pools[0], name)

    def prepare_batch(self, **tables):
        return [pool.prepare_batch(**tables) for pool in self.pools]

    def append_batch(self, layer, k, v, batches):
        self.pools[0].append_batch(layer, k, v, batches[0])
        self.pools[layer + 1].append_batch(0, k, v, batches[layer + 1])

    def attend_batch(self, layer, q, batches, **options):
        out = self.pools[0].attend_batch(layer, q, batches[0], **options)
        alone = self.pools[layer + 1].attend_batch(0, q, batches[layer + 1], **options)
        for one, other in zip(out, alone) if isinstance(out, tuple) else [(out, alone)]:
            if bits(one) != bits(other):
                raise Finding("a layer has other bits than alone | attend_batch", f"layer {layer}")
        return out
