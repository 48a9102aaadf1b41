"""PagedKVCache in memory of the caller: the same bits as in its own, and nothing else of the memory is touched."""

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


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("head_dim", [20, 64])
def test_a_schedulers_blocks_have_the_bits_of_a_pool_of_its_own(isa, dtype, head_dim):
    """Whatever the memory held before: blocks are written, written anew, and copied as bytes."""
    rng = np.random.default_rng(1)
    shape = LAYERS, HEADS, head_dim, 12, 32
    layout = buffer_layout(*shape, dtype)
    arrays, memory = strided(layout, gap=192, by_layer=False)
    pool, own = kvfast.PagedKVCache(*shape, dtype, buffer=arrays), kvfast.PagedKVCache(*shape, dtype)
    tables = np.zeros((3, 4), np.int32)
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
        slots, order = tables[one, positions // 32] * 32 + positions % 32, rng.permutation(n)
        lengths[one] += n
        for layer in range(LAYERS):
            k, v = rng.standard_normal((2, n, HEADS, head_dim), np.float32)
            for each in (pool, own):
                each.append_batch(layer, k[order], v[order], np.append(slots[order], -1)[:-1])
        if free:  # as a scheduler copies blocks: their bytes
            source, target = int(tables[one, 0]), int(free[0])
            for array in arrays:
                array[target] = array[source]
            tables[one, 0] = target
            free[0] = source
            both = own, own.num_blocks
            copy_block(*both, source, target)
        live = lengths > 0
        q = rng.standard_normal((live.sum(), 2 * HEADS, head_dim), np.float32)
        for layer in range(LAYERS):
            outs = [each.attend_batch(layer, q, block_table=tables[live], seq_lens=lengths[live]) for each in (pool, own)]
            assert np.array_equal(*outs)
    assert (outside(memory, arrays) == CANARY).all()


def copy_block(pool, num_blocks, source, target):
    """The same in a pool of its own memory."""
    inner = pool._batches.pool
    for layer in range(LAYERS):
        for head in range(HEADS):
            for values in (False, True):
                rows = inner.bytes_of_head(layer, 0, num_blocks, head, values)
                rows[target] = rows[source]


@pytest.mark.parametrize("dtype", FORMATS)
def test_no_byte_beyond_the_last_block_is_read(isa, dtype):
    """The memory ends where a page begins that nobody may touch."""
    shape = 1, 1, 64, 3, 16
    with before_a_page(buffer_layout(*shape, dtype).nbytes) as memory:
        pool = kvfast.PagedKVCache(*shape, dtype, buffer=memory)
        k, v = np.random.default_rng(0).standard_normal((2, 48, 1, 64), np.float32)
        for n in (47, 48):
            pool.append_batch(0, k[:n], v[:n], np.arange(n))
            for queries in (1, 40):
                out = pool.attend_batch(
                    0, np.repeat(k[:queries], 4, 1), block_table=[[0, 1, 2]], seq_lens=[n], cu_seqlens_q=[0, queries]
                )
                assert np.isfinite(out).all()


def test_sequences_in_a_buffer_are_saved_copied_and_found_again(tmp_path, rng):
    """All that looks at the bytes of blocks finds those of a strided buffer."""
    shape = LAYERS, HEADS, 64, 8, 32
    for dtype in ("float32", "int8"):
        arrays, _ = strided(buffer_layout(*shape, dtype), gap=64, by_layer=True)
        pool, own = kvfast.PagedKVCache(*shape, dtype, buffer=arrays), kvfast.PagedKVCache(*shape, dtype)
        k, v = rng.standard_normal((2, 70, HEADS, 64), np.float32)
        pair = [each.new_sequence() for each in (pool, own)]
        for sequence in pair:
            filled(sequence, k, v, token_ids=range(70))
        inside, outside_ = pair
        assert np.array_equal(inside.k(1), outside_.k(1)) and np.array_equal(inside.v(0), outside_.v(0))
        q = rng.standard_normal((2, 2 * HEADS, 64), np.float32)
        expected = outside_.attend(1, q)
        inside.save(tmp_path / "sequence.kv")
        for same in (
            inside.copy(),
            inside.fork(),
            kvfast.load(tmp_path / "sequence.kv"),
            own.restore(inside.snapshot()),
            pool.restore(outside_.snapshot()),
        ):
            assert np.array_equal(same.attend(1, q), expected)
        with pool.match_prefix([*range(64), 5]) as found:
            assert len(found) == 64 and np.array_equal(found.k(0), inside.k(0)[:64])


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
        pool = kvfast.PagedKVCache(1, 1, 64, 2, 16, "int8", buffer=buffer)
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
    pool = kvfast.PagedKVCache(1, 1, 64, 2, 16, "int8", buffer=[memory.reshape(2, -1)])
    view = pool.new_sequence()
    del memory, pool
    gc.collect()
    assert gone() is not None
    view.append(0, np.ones((20, 1, 64), np.float32), np.ones((20, 1, 64), np.float32))
    del view
    gc.collect()
    assert gone() is None


def test_what_cannot_be_is_refused_and_left_alone():
    layout = buffer_layout(2, 1, 64, 4, 16, "int8")
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
            kvfast.PagedKVCache(2, 1, 64, 4, 16, "int8", buffer=buffer)
    with pytest.raises(ValueError, match="secure is for memory of kvfast's own"):
        kvfast.PagedKVCache(2, 1, 64, 4, dtype="int8", secure=True, buffer=flat)
    assert (memory == CANARY).all()
    for arguments in [(0, 1, 64, 4), (2, 0, 64, 4), (2, 1, 513, 4), (2, 1, 64, 0), (2, 1, 64, 4, 24), (2, 1, 64, 4, 32, "int4")]:
        with pytest.raises(ValueError):
            buffer_layout(*arguments)


def test_alternating_layers_may_share_their_memory():
    """Layers as the inner axis: each block of a layer lies before the next layer's."""
    layout = buffer_layout(3, 1, 64, 4, 16, "int8")
    memory = aligned(layout.nbytes).reshape(4, 3, -1)
    pool = kvfast.PagedKVCache(3, 1, 64, 4, 16, "int8", buffer=[memory[:, i] for i in range(3)])
    pool.append_batch(1, np.ones((1, 1, 64), np.float32), np.ones((1, 1, 64), np.float32), [2 * 16])
    changed = np.flatnonzero((memory != 255).any(2))
    assert changed.tolist() == [2 * 3 + 1]
