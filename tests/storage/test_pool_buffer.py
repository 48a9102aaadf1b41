"""PagedKVCache and PagedMLAKVCache in memory of the caller: the same bits as in its own, and nothing else of the memory is touched."""

import gc
import mmap
import weakref

import numpy as np
import pytest
from cache_kinds import filled
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_buffers import CANARY, FORMATS, aligned, before_a_page, outside, strided

import kvfast
from kvfast.caches.buffer_layout import buffer_layout

LAYERS, HEADS = 2, 3


class Heads:
    """Pools of keys and values."""

    formats = FORMATS

    def __init__(self, dim):
        self.dim, self.num_q_heads = dim, 2 * HEADS

    def layout(self, layers, *shape):
        return buffer_layout(layers, HEADS, self.dim, *shape)

    def pool(self, layers, *shape, **options):
        return kvfast.PagedKVCache(layers, HEADS, self.dim, *shape, **options)

    def rows(self, rng, n):
        return rng.standard_normal((2, n, HEADS, self.dim), np.float32)


class Latents(Heads):
    """Pools of latent rows."""

    formats = ("float32", "float16", "bfloat16", "int8-rotated", "int4", "int3-plain", "int8/bfloat16")

    def __init__(self, latent_dim, rope_dim):
        self.latent_dim, self.rope_dim, self.dim, self.num_q_heads = latent_dim, rope_dim, latent_dim + rope_dim, 16

    def layout(self, layers, *shape):
        return buffer_layout(layers, 1, self.latent_dim, *shape, rope_dim=self.rope_dim)

    def pool(self, layers, *shape, **options):
        return kvfast.PagedMLAKVCache(layers, self.latent_dim, self.rope_dim, *shape, **options)

    def rows(self, rng, n):
        return rng.standard_normal((1, n, self.dim), np.float32)


KINDS = {"20": Heads(20), "64": Heads(64), "512 + 64": Latents(512, 64), "100 + 20": Latents(100, 20), "64 + 0": Latents(64, 0)}
every_kind = pytest.mark.parametrize(("kind", "dtype"), [(name, dtype) for name, kind in KINDS.items() for dtype in kind.formats])


@every_kind
def test_a_schedulers_blocks_have_the_bits_of_a_pool_of_its_own(isa, kind, dtype):
    """Whatever the memory held before: blocks are written, written anew, and copied as bytes."""
    rng, kind = np.random.default_rng(1), KINDS[kind]
    shape = LAYERS, 12, 32, dtype
    arrays, memory = strided(kind.layout(*shape), gap=192, by_layer=False)
    pool, own = kind.pool(*shape, buffer=arrays), kind.pool(*shape)
    assert pool.nbytes == own.bytes_per_token * 12 * 32
    tables, moved = np.zeros((3, 4), np.int32), np.arange(12)  # where the blocks of `own` are in the buffer
    free, lengths = list(rng.permutation(12)), np.zeros(3, np.int32)
    for _ in range(12):
        one, n = int(rng.integers(3)), int(rng.integers(1, 60))
        if lengths[one] + n > 100:  # ends, and its blocks go to others with what they hold
            free += tables[one, : -(-lengths[one] // 32)].tolist()
            lengths[one] = 0
        held = -(-lengths[one] // 32)
        needed = -(-(lengths[one] + n) // 32)
        if needed - held > len(free):
            continue
        tables[one, held:needed] = [free.pop(0) for _ in range(needed - held)]
        positions = np.arange(lengths[one], lengths[one] + n)
        blocks, order = tables[one, positions // 32], rng.permutation(n)
        lengths[one] += n
        for layer in range(LAYERS):
            rows = kind.rows(rng, n)
            for each, places in ((pool, moved), (own, np.arange(12))):
                slots = (places[blocks] * 32 + positions % 32)[order]
                each.append_batch(layer, *rows[:, order], np.append(slots, -1)[:-1])
        if free:  # as a scheduler copies blocks: their bytes
            both = [tables[one, 0], free[0]]
            for array in arrays:
                array[moved[both[1]]] = array[moved[both[0]]]
            moved[both] = moved[both[::-1]]
        live = lengths > 0
        starts = np.cumsum([0, *np.minimum(lengths[live], rng.integers(1, 40))])
        q = rng.standard_normal((starts[-1], kind.num_q_heads, kind.dim), np.float32)
        lens = {"seq_lens": lengths[live], "cu_seqlens_q": starts}
        for layer in range(LAYERS):
            expected = own.attend_batch(layer, q, block_table=tables[live], **lens)
            out = pool.attend_batch(layer, q, block_table=moved[tables[live]], **lens)
            assert np.array_equal(out, expected) and np.isfinite(out).all()
    assert (outside(memory, arrays) == CANARY).all()


@every_kind
def test_no_byte_beyond_the_last_block_is_read(isa, kind, dtype):
    """The memory ends where a page begins that nobody may touch."""
    rng, kind = np.random.default_rng(0), KINDS[kind]
    with before_a_page(kind.layout(1, 3, 16, dtype).nbytes) as memory:
        pool, rows = kind.pool(1, 3, 16, dtype, buffer=memory), kind.rows(rng, 48)
        for n in (47, 48):
            pool.append_batch(0, *rows[:, :n], np.arange(n))
            for queries in (1, 40):
                q = rng.standard_normal((queries, kind.num_q_heads, kind.dim), np.float32)
                out = pool.attend_batch(0, q, block_table=[[0, 1, 2]], seq_lens=[n], cu_seqlens_q=[0, queries])
                assert np.isfinite(out).all()


@pytest.mark.parametrize(("kind", "dtype"), [("64", "float32"), ("64", "int8-rotated"), ("100 + 20", "int8-rotated")])
def test_sequences_in_a_buffer_are_saved_copied_and_found_again(tmp_path, rng, kind, dtype):
    """All that looks at the bytes of blocks finds those of a strided buffer."""
    shape, kind = (LAYERS, 8, 32, dtype), KINDS[kind]
    arrays, _ = strided(kind.layout(*shape), gap=64, by_layer=True)
    pool, own = kind.pool(*shape, buffer=arrays), kind.pool(*shape)
    rows = kind.rows(rng, 70)
    inside, outside_ = (filled(each.new_sequence(), *rows, token_ids=range(70)) for each in (pool, own))
    q = rng.standard_normal((2, kind.num_q_heads, kind.dim), np.float32)
    expected = outside_.attend(1, q)
    inside.save(tmp_path / "sequence.kv")
    for same in (
        *(inside, inside.copy(), inside.fork(), kvfast.load(tmp_path / "sequence.kv")),
        *(own.restore(inside.snapshot()), pool.restore(outside_.snapshot())),
    ):
        assert np.array_equal(same.attend(1, q), expected) and same.snapshot() == outside_.snapshot()
    with pool.match_prefix([*range(64), 5]) as found:
        inside.truncate(64)
        assert len(found) == 64 and found.snapshot() == inside.snapshot()


@settings(deadline=None, max_examples=30)
@given(
    heads=st.integers(1, 4),
    dim=st.integers(1, 130),
    v_dim=st.integers(1, 130),
    blocks=st.integers(1, 5),
    size=st.sampled_from([16, 32, 64, 128, 256]),
    dtype=st.sampled_from(FORMATS),
)
def test_a_layout_is_what_the_pool_takes(heads, dim, v_dim, blocks, size, dtype):
    layout = buffer_layout(2, heads, dim, blocks, size, dtype, v_head_dim=v_dim)
    own = kvfast.PagedKVCache(2, heads, dim, blocks, size, dtype, v_head_dim=v_dim)
    assert (layout.num_blocks, layout.block_size, layout.alignment) == (blocks, size, 64)
    assert layout.nbytes == blocks * size * own.bytes_per_token == blocks * sum(layout.block_nbytes)
    assert all(nbytes % layout.alignment == 0 and nbytes % size == 0 for nbytes in layout.block_nbytes)
    memory = aligned(layout.nbytes)
    pool = kvfast.PagedKVCache(2, heads, dim, blocks, size, dtype, v_head_dim=v_dim, buffer=memory)
    assert pool.nbytes == layout.nbytes
    k, v = np.ones((1, heads, dim), np.float32), np.ones((1, heads, v_dim), np.float32)
    pool.append_batch(1, k, v, [blocks * size - 1])
    assert (memory[: layout.nbytes - layout.block_nbytes[1]] == 255).all()  # in the last block


def test_any_kind_of_memory():
    layout = buffer_layout(1, 1, 64, 2, 16)
    shared = mmap.mmap(-1, layout.nbytes)
    numbers = aligned(layout.nbytes).view(np.float32)
    for buffer in (shared, numbers, [numbers.reshape(2, -1)], numbers.reshape(1, 2, -1), (memoryview(numbers.reshape(2, -1)),)):
        pool = kvfast.PagedKVCache(1, 1, 64, 2, 16, "int8-rotated", buffer=buffer)
        pool.append_batch(0, np.ones((1, 1, 64), np.float32), np.ones((1, 1, 64), np.float32), [0])
    assert any(shared[:64])
    del pool
    shared.close()  # nobody has it any more


def test_the_memory_lives_as_long_as_the_pool():
    class Memory(np.ndarray):
        pass

    layout = buffer_layout(1, 1, 64, 2, 16)
    memory = aligned(layout.nbytes).view(Memory)
    gone = weakref.ref(memory)
    pool = kvfast.PagedKVCache(1, 1, 64, 2, 16, "int8-rotated", buffer=[memory.reshape(2, -1)])
    view = pool.new_sequence()
    del memory, pool
    gc.collect()
    assert gone() is not None
    view.append(0, np.ones((20, 1, 64), np.float32), np.ones((20, 1, 64), np.float32))
    del view
    gc.collect()
    assert gone() is None


def test_what_cannot_be_is_refused_and_left_alone():
    layout = buffer_layout(2, 1, 64, 4, 16, "int8-rotated")
    memory = aligned(2 * layout.nbytes, CANARY)
    size = layout.block_nbytes[0]
    flat = memory[: layout.nbytes]
    blocks = memory[: layout.nbytes].reshape(2, 4, size)
    frozen = flat.copy()
    frozen.flags.writeable = False
    odd = aligned(layout.nbytes + 64, CANARY)[4:][: layout.nbytes]
    wide = np.lib.stride_tricks.as_strided
    for buffer, error, message in [
        (flat[:-1], ValueError, "at least 17,408 bytes for 4 blocks of 4,352 bytes, got 17,407"),
        (frozen, ValueError, "writable"),
        (bytes(layout.nbytes), ValueError, "writable"),
        (odd, ValueError, "aligned to 64 bytes"),
        (flat[::-1], kvfast.DimensionMismatchError, "one piece of memory"),
        (memory[::2][: layout.nbytes], kvfast.DimensionMismatchError, "one piece of memory"),
        (list(blocks) + [blocks[0]], kvfast.DimensionMismatchError, "2 arrays, one per layer, got 3"),
        ([blocks[0]], kvfast.DimensionMismatchError, "2 arrays, one per layer, got 1"),
        ([blocks[0], blocks[1, :3]], kvfast.DimensionMismatchError, r"buffer\[1\] must have 4 blocks of 2,176 bytes"),
        ([blocks[0], blocks[1, :, :-64]], kvfast.DimensionMismatchError, "4 blocks of 2,176 bytes"),
        ([blocks[0], blocks[1, ::-1]], ValueError, "must not overlap"),
        ([blocks[0], wide(memory, (4, size), (size - 64, 1))], ValueError, "blocks of .* must not overlap"),
        ([blocks[0], wide(memory[layout.nbytes :], (4, size), (size + 4, 1))], ValueError, "aligned to 64"),
        ([blocks[0], np.zeros((4, size, 2), np.uint8)[:, :, 0]], ValueError, "lie in one piece"),
        ([blocks[0], blocks[0]], ValueError, r"must not overlap, and buffer\[0\] and buffer\[1\] do"),
        ([blocks[0], memory[size:].reshape(-1)[: 4 * size].reshape(4, size)], ValueError, "must not overlap"),
        ([wide(memory, (4, size), (2 * size, 1)), wide(memory[size - 64 :], (4, size), (2 * size, 1))], ValueError, "must not overlap"),
        ([wide(memory, (4, size), (2 * size, 1)), wide(memory[size:], (4, size), (size + 64, 1))], ValueError, "must not overlap"),
        ([blocks[0], None], TypeError, r"buffer\[1\] must be an array or a buffer of bytes, got NoneType"),
        ("memory", TypeError, "buffer of bytes, got str"),
        (7, TypeError, "buffer of bytes, got int"),
        ([blocks[0], np.full((4, size // 8), None)], TypeError, "bytes or numbers"),
    ]:
        with pytest.raises(error, match=message):
            kvfast.PagedKVCache(2, 1, 64, 4, 16, "int8-rotated", buffer=buffer)
    with pytest.raises(ValueError, match="secure is for memory of kvfast's own"):
        kvfast.PagedKVCache(2, 1, 64, 4, dtype="int8-rotated", secure=True, buffer=flat)
    assert (memory == CANARY).all()
    for arguments in [(0, 1, 64, 4), (2, 0, 64, 4), (2, 1, 513, 4), (2, 1, 64, 0), (2, 1, 64, 4, 24), (2, 1, 64, 4, 32, "int4")]:
        with pytest.raises(ValueError):
            buffer_layout(*arguments)


def test_latents_refuse_and_leave_alone():
    layout = Latents(64, 16).layout(2, 4, 16, "int8-rotated")
    memory = aligned(2 * layout.nbytes, CANARY)
    flat, size = memory[: layout.nbytes], layout.block_nbytes[0]
    blocks = flat.reshape(2, 4, size)
    frozen = flat.copy()
    frozen.flags.writeable = False
    for buffer, error, message in [
        (flat[:-1], ValueError, f"at least {layout.nbytes:,} bytes"),
        (frozen, ValueError, "writable"),
        (memory[4:][: layout.nbytes], ValueError, "aligned to 64 bytes"),
        ([blocks[0]], kvfast.DimensionMismatchError, "2 arrays, one per layer, got 1"),
        ([blocks[0], blocks[1, :3]], kvfast.DimensionMismatchError, f"4 blocks of {size:,} bytes"),
        ([blocks[0], blocks[0]], ValueError, "must not overlap"),
        (7, TypeError, "buffer of bytes, got int"),
    ]:
        with pytest.raises(error, match=message):
            kvfast.PagedMLAKVCache(2, 64, 16, 4, 16, "int8-rotated", buffer=buffer)
    with pytest.raises(ValueError, match="secure is for memory of kvfast's own"):
        kvfast.PagedMLAKVCache(2, 64, 16, 4, 16, "int8-rotated", secure=True, buffer=flat)
    assert (memory == CANARY).all()
    for options, message in [
        ({"num_kv_heads": 2}, "one head.*got num_kv_heads=2"),
        ({"v_head_dim": 64}, "v_head_dim=64"),
        ({"k_dtype": "int8"}, "k_dtype='int8'"),
        ({"head_dim": 513}, "latent_dim must be"),
        ({"rope_dim": 129}, "rope_dim must be"),
        ({"dtype": kvfast.KVFormat("int4", centring=True)}, "a scale per token"),
    ]:
        with pytest.raises(ValueError, match=message):
            buffer_layout(**{"num_layers": 2, "num_kv_heads": 1, "head_dim": 64, "num_blocks": 4, "rope_dim": 16} | options)


def test_alternating_layers_may_share_their_memory():
    """Layers as the inner axis: each block of a layer lies before the next layer's."""
    layout = buffer_layout(3, 1, 64, 4, 16, "int8-rotated")
    memory = aligned(layout.nbytes).reshape(4, 3, -1)
    pool = kvfast.PagedKVCache(3, 1, 64, 4, 16, "int8-rotated", buffer=[memory[:, i] for i in range(3)])
    pool.append_batch(1, np.ones((1, 1, 64), np.float32), np.ones((1, 1, 64), np.float32), [2 * 16])
    changed = np.flatnonzero((memory != 255).any(2))
    assert changed.tolist() == [2 * 3 + 1]
