"""Any history of a cache, for `fuzz_caches`, against a fresh cache with the tokens that survived it: the same bytes, and the same bits."""

import contextlib
import tempfile

import numpy as np
from fuzz_histories import FOLDER, STEPS, Held
from fuzz_inputs import often, one_of
from fuzz_oracle import Finding
from fuzz_refusals import bits, put_rows

import kvfast


def expect(is_so, world, what):
    if not is_so:
        raise Finding(f"not as a fresh cache | {what} | {world.name}")


def check_fresh(world, held, rng):
    """A ring is held to a cache that keeps all, which reads its window."""
    track, cache = held.track, held.cache
    world.case.note("fresh", track.length)
    with contextlib.suppress(kvfast.NonFiniteInputError):  # rows that are too large once they are rotated back
        check_room(world, cache, track)
        if isinstance(cache, kvfast.RingKVCache) and None not in world.windows and often(rng, 0.5):
            check_memory(world, cache.copy(), max(track.largest, 64), rng)
        if not track.length:
            return
        check_ways(world, cache, rng)
        if not track.is_fresh():
            return
        if world.windows and world.num_sink_tokens and any(one.num_recent_float_tokens > 16 for one in world.formats):
            return  # sinks are read as codes once blocks between them and the window are gone
        world.case.calls += 1
        size = cache.block_size if any(one.seals for one in world.formats) else int(one_of(rng, [16, 32, 64, 128]))
        fresh = replayed(world, track, size, rng)
        for layer in range(len(world.formats)):
            at = world.positions(held, layer)
            rows = zip(world.decoded(cache, layer), world.decoded(fresh, layer))
            expect(all(bits(one) == bits(other[at]) for one, other in rows), world, "rows")
            window, n = world.windows and world.windows[layer], min(int(one_of(rng, [1, 1, 2, 3])), track.length)
            if world.windows and n - 1 + track.longest - track.length > world.rollback:
                n = 1
            q = held.source.queries(n, world.heads * 2, track.rows[layer])
            more = {"sliding_window": window, "num_sink_tokens": world.num_sink_tokens} if window else {}
            expect(bits(cache.attend(layer, q)) == bits(fresh.attend(layer, q, **more)), world, "attend")
        if not world.windows:
            snapshot, expected = cache.snapshot(), fresh.snapshot()
            expect(snapshot == expected and expected == snapshot, world, "snapshot")
            if size == cache.block_size:
                arrays = [
                    {name: bits(array) for name, array in one.state_dict().items() if name != "header"} for one in (snapshot, expected)
                ]
                arrays[0].pop("token_ids", None)
                expect(arrays[0] == arrays[1], world, "state_dict")


def replayed(world, track, size, rng):
    """A cache that got the same tokens in other steps."""
    fresh = world.plain(size)
    while len(fresh) < track.length:
        first, n = len(fresh), min(int(one_of(rng, [*STEPS, 1000])), track.length - len(fresh))
        for layer, (k, v) in enumerate(track.rows):
            put_rows(world, Held(fresh, None, None), layer, k[first : first + n], v[first : first + n])
        fresh.advance(n)
    return fresh


def check_room(world, cache, track):
    """A full cache tells what it would need, and what it has."""
    most = cache.max_seq_len
    if most is None or most > 1000:
        return
    many = [np.zeros((most - track.length + 1, world.heads, dim), np.float32) for dim in world.dims]
    try:
        put_rows(world, Held(cache, None, None), 0, *many)
    except kvfast.CacheFullError as error:
        expect((error.needed, error.free) == (len(many[0]), most - track.length), world, "needed and free tokens")
    else:
        raise Finding(f"a full cache took more | {world.name}")


def check_memory(world, cache, chunk, rng):
    """What a ring takes does not grow with its tokens: a window, the largest step, and some blocks that are begun."""
    size = cache.block_size
    for _ in range(40 * size // 64):
        for layer in range(cache.num_layers):
            put_rows(world, Held(cache, None, None), layer, *(rng.random((64, world.heads, dim), np.float32) for dim in world.dims))
        cache.advance(64)
    held = max(world.windows) + world.rollback + world.num_sink_tokens + chunk
    # Half as much again is the step of growth; four blocks are begun but not full, eight is the least.
    blocks = 1.5 * (held / size + 4) + 8
    # Float rows: of the chunk, of up to two blocks before it and of what stays float, and of the sinks.
    floats = (
        2
        * (chunk + 3 * size + 48 + max(one.num_recent_float_tokens for one in world.formats))
        * any(one.open_tokens or one.num_first_float_tokens for one in world.formats)
    )
    row = len(world.formats) * world.heads * 4 * sum(-(-dim // 16) * 16 for dim in world.dims)
    expect(cache.nbytes <= 1.01 * blocks * size * cache.bytes_per_token + floats * row + 4096, world, "memory of a ring")


def check_ways(world, cache, rng):
    """A snapshot is the same by way of arrays, of a file, and of a cache with blocks of another size."""
    snapshot = cache.snapshot()
    expect(kvfast.Snapshot.from_state_dict(snapshot.state_dict()) == snapshot, world, "a snapshot of arrays")
    most = None if world.windows or often(rng, 0.5) else len(cache) + int(rng.integers(90))
    with tempfile.NamedTemporaryFile(dir=FOLDER) as file:
        cache.save(file.name)
        loaded = kvfast.load(file.name, mmap=often(rng, 0.5), **{} if most is None else {"max_seq_len": most})
    expect(most is None or loaded.max_seq_len == most, world, "max_seq_len of a loaded cache")
    expect(loaded.snapshot() == snapshot, world, "a loaded cache")
    if not world.windows:
        other = world.plain(cache.block_size if any(one.seals for one in world.formats) else int(one_of(rng, [16, 64, 256])))
        other.restore(snapshot)
        expect(other.snapshot() == snapshot, world, "blocks of another size")
