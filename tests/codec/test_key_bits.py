"""INT3 and INT4 keys with channel scales say in each block how many bits each line has. Any such bytes may come from a file or from
memory of somebody else: nothing outside is read or written, and all readers agree on what they read."""

import numpy as np
import pytest
from cache_kinds import filled, relative_rms
from pool_buffers import before_a_page
from reference import attention, bound, relative_error
from selection import TIERS, pairwise

import kvfast
from kvfast import KVFormat
from kvfast.caches.buffer_layout import buffer_layout

FLAG = 0x4000  # in the uint16 of a channel's scale
FLAGS = {
    "none": lambda rng, shape: np.zeros(shape, np.uint16),
    "all": lambda rng, shape: np.full(shape, FLAG, np.uint16),
    "all wide": lambda rng, shape: np.where(np.arange(shape[-1]) % 16 < 4, FLAG, 0).astype(np.uint16) + np.zeros(shape, np.uint16),
    "all narrow": lambda rng, shape: (
        np.where(np.arange(shape[-1]) % 16 // 4 == 1, FLAG, 0).astype(np.uint16) + np.zeros(shape, np.uint16)
    ),
    "random": lambda rng, shape: rng.integers(0, 2, shape).astype(np.uint16) * FLAG,
}


def with_flags(snapshot, flags, rng):
    """The snapshot with other flags in each block of keys."""
    arrays, padded = snapshot.state_dict(), -(-snapshot.head_dim // 16) * 16
    blocks = arrays["layers.0.k.0"] = arrays["layers.0.k.0"].copy()
    size = -(-2 * padded // 64) * 64
    scales = blocks[:, -size:].view(np.uint16)[:, :padded]
    scales[:] = scales & ~np.uint16(FLAG) | flags(rng, scales.shape)
    return kvfast.Snapshot.from_state_dict(arrays)


@pairwise(("isa", "dtype", "name", "head_dim"), TIERS, ["int3", "int4"], FLAGS, [16, 64, 80, 128, 512])
def test_all_readers_agree_on_any_flags(isa, rng, dtype, name, head_dim):
    cache = kvfast.KVCache(1, 1, head_dim, dtype=KVFormat(dtype, per_channel=True))
    filled(cache, *rng.standard_normal((2, 1300, 1, head_dim), np.float32))
    given = with_flags(cache.snapshot(), FLAGS[name], rng)
    changed = kvfast.load(given)
    k, v = changed.k(0), changed.v(0)
    assert np.isfinite(k).all() and relative_rms(k, cache.k(0)) > 0.1
    for queries in (1, 40):
        q = rng.standard_normal((queries, 4, head_dim), np.float32)
        assert relative_error(changed.attend(0, q), attention(q, k, v)[0]) < bound(dtype)
    again = kvfast.load(given)  # tokens after the kept ones are encoded with the block's statistics
    again.truncate(100)
    filled(again, *rng.standard_normal((2, 200, 1, head_dim), np.float32))
    assert np.array_equal(again.k(0)[:64], k[:64]) and np.isfinite(again.attend(0, q)).all()


@pytest.mark.parametrize("dtype", ["int3", "int4"])
def test_flags_that_change_in_the_memory_of_a_pool(isa, rng, dtype):
    shape, form = (1, 1, 64, 4, 64), KVFormat(f"{dtype}/int8", per_channel=True)
    codes = 64 * 64 * int(dtype[3:]) // 8
    with before_a_page(buffer_layout(*shape, form).nbytes) as memory:
        sequence = kvfast.PagedKVCache(*shape, form, buffer=memory).new_sequence()
        filled(sequence, *rng.standard_normal((2, 256, 1, 64), np.float32))
        scales = memory.reshape(4, -1)[:, codes + 128 : codes + 256].view(np.uint16)  # after the codes and offsets of keys
        for _ in range(20):
            before = sequence.k(0)
            scales ^= rng.integers(0, 2, scales.shape).astype(np.uint16) * np.uint16(FLAG)
            k, v, q = sequence.k(0), sequence.v(0), rng.standard_normal((3, 4, 64), np.float32)
            assert (k != before).any(axis=(1, 2))[:192].all()
            assert relative_error(sequence.attend(0, q), attention(q, k, v)[0]) < bound(dtype)
