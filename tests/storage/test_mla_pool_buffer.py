"""PagedMLAKVCache in memory of the caller: the same bits as in its own, and nothing else of the memory is touched."""

import numpy as np
import pytest
from cache_kinds import filled
from pool_buffers import CANARY, aligned, before_a_page, outside, strided

import kvfast
from kvfast.caches.buffer_layout import buffer_layout

LAYERS = 2
FORMATS = ["float32", "float16", "bfloat16", "int8", "int4", "int3-plain", "int8/bfloat16"]
SIZES = [(512, 64), (100, 20), (64, 0)]


def layout_of(latent_dim, rope_dim, num_blocks, block_size, dtype, layers=LAYERS):
    return buffer_layout(layers, 1, latent_dim, num_blocks, block_size, dtype, rope_dim=rope_dim)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_schedulers_blocks_have_the_bits_of_a_pool_of_its_own(isa, dtype, sizes):
    """Whatever the memory held before: blocks are written in any order, written anew, and copied as bytes."""
    rng = np.random.default_rng(1)
    shape = *sizes, 12, 16, dtype
    arrays, memory = strided(layout_of(*shape), gap=192, by_layer=False)
    pool, own = kvfast.PagedMLAKVCache(LAYERS, *shape, buffer=arrays), kvfast.PagedMLAKVCache(LAYERS, *shape)
    assert pool.nbytes == own.bytes_per_token * 12 * 16
    for start in (0, 12, 30, 0, 7):  # once more from the beginning, over what is there
        table, n = rng.permutation(12)[:5], int(rng.integers(1, 40))
        length = start + n
        earlier = rng.standard_normal((LAYERS, length, sum(sizes)), np.float32)
        positions, order = np.arange(length), rng.permutation(length)
        slots = table[positions // 16] * 16 + positions % 16
        q = rng.standard_normal((n, 16, sum(sizes)), np.float32)
        for layer in range(LAYERS):
            for each in (pool, own):
                each.append_batch(layer, earlier[layer][order], np.append(slots[order], -1)[:-1])
        whole = positions[-1] // 16 + 1
        spare = np.setdiff1d(np.arange(12), table)
        for array in arrays:  # as a scheduler copies blocks: their bytes
            array[spare[:whole]] = array[table[:whole]]
        for layer in range(LAYERS):
            expected = own.attend_batch(layer, q, block_table=[table], seq_lens=[length], cu_seqlens_q=[0, n])
            for blocks in (table, spare[:whole]):
                out = pool.attend_batch(layer, q, block_table=[blocks], seq_lens=[length], cu_seqlens_q=[0, n])
                assert np.array_equal(out, expected) and np.isfinite(out).all()
    assert (outside(memory, arrays) == CANARY).all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("sizes", SIZES)
def test_no_byte_beyond_the_last_block_is_read(isa, dtype, sizes):
    """The memory ends where a page begins that nobody may touch."""
    rows = np.random.default_rng(0).standard_normal((48, sum(sizes)), np.float32)
    with before_a_page(layout_of(*sizes, 3, 16, dtype, layers=1).nbytes) as memory:
        pool = kvfast.PagedMLAKVCache(1, *sizes, 3, 16, dtype, buffer=memory)
        for n in (47, 48):
            pool.append_batch(0, rows[:n], np.arange(n))
            for queries in (1, 40):
                q = np.repeat(rows[:queries, None], 16, 1)
                out = pool.attend_batch(0, q, block_table=[[0, 1, 2]], seq_lens=[n], cu_seqlens_q=[0, queries])
                assert np.isfinite(out).all()


def test_sequences_in_a_buffer_are_saved_and_restored(tmp_path, rng):
    arrays, _ = strided(layout_of(100, 20, 8, 32, "int8"), gap=64, by_layer=True)
    shape = LAYERS, 100, 20, 8, 32, "int8"
    pool, own = kvfast.PagedMLAKVCache(*shape, buffer=arrays), kvfast.PagedMLAKVCache(*shape)
    rows, q = rng.standard_normal((70, 120), np.float32), rng.standard_normal((2, 4, 120), np.float32)
    inside, alone = pair = [each.new_sequence() for each in (pool, own)]
    for sequence in pair:
        filled(sequence, rows, token_ids=range(70))
    expected = alone.attend(1, q)
    inside.save(tmp_path / "sequence.kv")
    for same in (
        inside,
        inside.fork(),
        kvfast.load(tmp_path / "sequence.kv"),
        own.restore(inside.snapshot()),
        pool.restore(alone.snapshot()),
    ):
        assert np.array_equal(same.attend(1, q), expected)


def test_what_cannot_be_is_refused_and_left_alone():
    layout = layout_of(64, 16, 4, 16, "int8")
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
            kvfast.PagedMLAKVCache(2, 64, 16, 4, 16, "int8", buffer=buffer)
    with pytest.raises(ValueError, match="secure is for memory of kvfast's own"):
        kvfast.PagedMLAKVCache(2, 64, 16, 4, 16, "int8", secure=True, buffer=flat)
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
