"""One history twice for `fuzz_caches`: what happens to other caches changes no bit of a cache."""

import contextlib
import functools

import numpy as np
from fuzz_histories import STEPS
from fuzz_inputs import often, one_of
from fuzz_oracle import Finding, rows_of
from fuzz_pools import LatentPoolWorld, PoolWorld
from fuzz_refusals import bits, put_rows, refuse
from fuzz_worlds import LatentWorld, RingWorld, SingleWorld

import kvfast

MOST_ALIKE = 16  # up to this number of queries have the bits that each of them has alone


class Twins:
    """Two caches of one kind with the same tokens: one is left alone, the other is forked, copied, saved and refused all the way.

    What they show and what they compute has the same bits; so has a fork that nobody touches.
    """

    def __init__(self, case):
        self.case, self.rng = case, case.rng
        self.world = one_of(case.rng, [SingleWorld, SingleWorld, RingWorld, PoolWorld, PoolWorld, LatentWorld, LatentPoolWorld])(case)
        self.world.dims = tuple(min(one, 64) for one in self.world.dims)
        if hasattr(self.world, "pool"):
            self.world.settings["num_blocks"] = 60
        self.alone, self.busy = self.make(), self.make()
        self.kept = []  # what came of the busy one, with the bits that it had

    def make(self):
        world = self.world
        cache = world.make()
        return type(world.held[0])(cache, world.track(), None)

    def run(self):
        rng, source = self.rng, self.world.source()
        for _ in range(int(rng.integers(4, 20))):
            self.step(source)
            for cache, before in self.kept:
                if self.seen(cache) != before:
                    raise Finding(f"a fork is not what it was | {self.world.name}")
            for _ in range(int(rng.integers(1, 3))):
                self.disturb()
            if self.seen(self.alone.cache) != self.seen(self.busy.cache):
                raise Finding(f"bits depend on other caches | {self.world.name}", self.difference())

    def step(self, source):
        rng, alone, length = self.rng, self.alone.cache, len(self.alone.cache)
        way = rng.random()
        if way < 0.6 or not length:
            n = min(int(one_of(rng, STEPS)), self.room())
            if n <= 0:
                return
            self.case.note("append", n)
            for layer, (k, v) in enumerate(source.take(n)):
                cut = int(rng.integers(n + 1)) if often(rng, 0.2) else n
                for part in (slice(0, cut), slice(cut, n)):
                    if part.stop > part.start:
                        self.both(functools.partial(put_rows, self.world, layer=layer, k=k[part], v=v[part]))
                if often(rng, 0.5):
                    self.attend(source, layer, (k, v))
            if often(self.case.fresh, 0.2):
                branch = np.flatnonzero(self.case.fresh.random(n) < one_of(self.case.fresh, [0.1, 0.5, 0.9]))
                self.case.note("keep", branch)
                other = self.busy.cache.fork()  # which has all the drafts yet
                self.kept.append((other, self.seen(other)))
                if not isinstance(self.both(lambda held: held.cache.truncate(length, branch)), type):
                    n = len(branch)
            if n:
                self.both(lambda held: held.cache.advance(n))
        elif way < 0.95:
            least = max(length - 40, 0) if often(rng, 0.5) else 0
            if self.world.windows:
                least = max(least, length - self.world.rollback)
            n = int(rng.integers(least, length + 1))
            self.case.note("truncate", n)
            self.both(lambda held: held.cache.truncate(n))
        else:
            self.case.note("clear")
            self.both(lambda held: held.cache.clear())
        if len(alone) and often(rng, 0.5):
            layer = int(rng.integers(alone.num_layers))
            self.attend(source, layer, source.take(1)[layer])

    def room(self):
        rooms = []
        for held in (self.alone, self.busy):
            if hasattr(held.cache, "pool"):
                rooms.append(next((n for n in (100, 64, 16, 1) if held.cache.can_append(n)), 0))
            elif held.cache.max_seq_len is not None:
                rooms.append(held.cache.max_seq_len - len(held.cache))
        return min(rooms, default=100)

    def both(self, call):
        """Do the same to both. They have the same result, or are refused alike."""
        results = []
        for held in (self.alone, self.busy):
            self.case.calls += 1
            try:
                results.append(call(held))
            except (kvfast.NonFiniteInputError, ValueError) as error:
                results.append(type(error))
        if bits_of(results[0]) != bits_of(results[1]):
            raise Finding(f"two caches with one history differ | {self.world.name}", str([type(one) for one in results]))
        return results[0]

    def attend(self, source, layer, rows):
        world, rng = self.world, self.rng
        heads, window = world.random_heads(), world.windows[layer] if world.windows else None
        n = min(int(one_of(rng, [1, 1, 2, 3, 15, 16, 17, 33])), self.alone.cache.layer_length(layer))
        q, options = source.queries(n, heads, rows), world.options(heads, window)
        self.case.note("attend", layer, n, heads, options)
        out = self.both(lambda held: held.cache.attend(layer, q, **options))
        if isinstance(out, type) or n > MOST_ALIKE:
            return
        last = self.both(lambda held: held.cache.attend(layer, q[-1:], **options))
        if bits_of(rows_of(out, n - 1, n)) != bits_of(last):
            raise Finding(f"several queries have other bits than one | {world.name}")

    def disturb(self):
        """Do something to another cache than the busy one."""
        rng, world, cache = self.rng, self.world, self.busy.cache
        way = str(one_of(rng, ["fork", "fork", "fork", "fork", "fork", "snapshot", "copy", "state", "refuse", "forget"]))
        self.case.note(way)
        if way == "refuse":
            refuse(world, self.busy, rng)
        elif way == "state":
            cache.state_dict()
        elif way == "forget":
            self.forget()
        else:
            with contextlib.suppress(kvfast.CacheFullError):
                other = getattr(cache, way)()
                if way == "snapshot":
                    other = kvfast.load(other)
                self.kept.append((other, self.seen(other)))
                if self.kept[-1][1] != self.seen(cache):
                    raise Finding(f"a {way} has other bits | {world.name}")
        if len(self.kept) > 3:
            self.forget()

    def forget(self):
        if self.kept:
            cache, _ = self.kept.pop(int(self.rng.integers(len(self.kept))))
            if hasattr(cache, "free"):
                cache.free()

    def seen(self, cache):
        """Bits of all that a cache shows."""
        shown = [len(cache)]
        for layer in range(cache.num_layers):
            if cache.layer_length(layer):
                try:
                    shown += [bits(side) for side in self.world.decoded(cache, layer)]
                except kvfast.NonFiniteInputError as error:  # the largest rows, once they are rotated back
                    shown.append(str(error))
        return shown

    def difference(self):
        for layer in range(self.alone.cache.num_layers):
            for one, other in zip(self.world.decoded(self.alone.cache, layer), self.world.decoded(self.busy.cache, layer)):
                if bits(one) != bits(other):
                    return f"layer {layer}: by at most {np.abs(one - other).max():.3g}"
        return "lengths"


def bits_of(result):
    if isinstance(result, tuple):
        return [bits(one) for one in result]
    return bits(result) if isinstance(result, np.ndarray) else result
