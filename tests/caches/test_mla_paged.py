"""PagedMLAKVCache: batches of sequences of latent rows."""

import numpy as np
import pytest
from cache_kinds import fill
from latent_reference import DTYPES, oracle, rows
from reference import bound, relative_error, ways_agree
from selection import TIERS, pairwise

import kvfast
from kvfast.caches.paged_mla import MLASequence

LATENT, ROPE = 48, 16
SCALE = 0.1


def new_pool(num_blocks=64, layers=1, rope_dim=ROPE, **options):
    return kvfast.PagedMLAKVCache(layers, LATENT, rope_dim, num_blocks, **{"block_size": 32} | options)


@pairwise(("isa", "dtype", "block_size", "rope_dim"), TIERS, DTYPES, [16, 32, 128], [0, ROPE])
def test_ragged_batches_have_the_bits_of_contiguous_caches(isa, rng, dtype, block_size, rope_dim):
    pool = new_pool(1600 // block_size, rope_dim=rope_dim, block_size=block_size, dtype=dtype)
    lengths, counts = [1, 17, 200, 64, 333], [1, 5, 1, 30, 1]
    sequences = [fill(pool.new_sequence(), rng, n) for n in lengths]
    caches = [kvfast.MLAKVCache(1, LATENT, rope_dim, dtype=dtype) for _ in lengths]
    for sequence, cache in zip(sequences, caches):
        cache.restore(sequence.snapshot())
    latent, q = rows(rng, sum(counts), pool.head_dim), rows(rng, sum(counts), 20, pool.head_dim)
    pool.append_batch(0, latent, pool.slot_mapping(sequences, counts))
    bounds = np.r_[0, np.cumsum(counts)]
    out, lse = pool.attend_batch(0, q, sequences, cu_seqlens_q=bounds, scale=SCALE, return_lse=True)
    plain = {"block_table": pool.block_table(sequences), "seq_lens": pool.seq_lens(sequences) + counts, "cu_seqlens_q": bounds}
    assert np.array_equal(pool.attend_batch(0, q, scale=SCALE, **plain), out)
    for i, (sequence, cache) in enumerate(zip(sequences, caches)):
        part = slice(bounds[i], bounds[i + 1])
        cache.append(0, latent[part])
        for one in (cache, sequence):
            alone, alone_lse = one.attend(0, q[part], scale=SCALE, return_lse=True)
            assert np.array_equal(out[part], alone) and np.array_equal(lse[part], alone_lse)
        sequence.advance(counts[i]), cache.advance(counts[i])
        assert np.array_equal(sequence.get_latent(0), cache.get_latent(0))
    assert relative_error(out[part], oracle(q[part], cache.get_latent(0), LATENT, SCALE)[0]) < bound(dtype)


@pytest.mark.parametrize("heads", [4, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_prefixes_are_read_once(isa, rng, dtype, heads):
    pool = new_pool(100, dtype=dtype)
    system = fill(pool.new_sequence(), rng, 2100)
    sequences = [system.fork() for _ in range(3)] + [fill(pool.new_sequence(), rng, 90)]
    counts, bounds = [1, 2, 1, 1], [0, 1, 3, 4, 5]
    pool.append_batch(0, rows(rng, 5, pool.head_dim), pool.slot_mapping(sequences, counts))
    q = rows(rng, 5, heads, pool.head_dim)
    shared, apart = (pool.attend_batch(0, q, sequences, cu_seqlens_q=bounds, cascade=cascade) for cascade in (True, False))
    assert ways_agree(shared, apart, dtype)
    for num_threads in (1, 2):
        again = pool.attend_batch(0, q, sequences, cu_seqlens_q=bounds, num_threads=num_threads)
        assert np.array_equal(again, shared)
    shared, apart = (pool.explain_batch(0, q.shape, sequences, cu_seqlens_q=bounds, cascade=cascade) for cascade in (True, False))
    assert len(shared.items) > 4 and shared.kernels[1] == "accumulate_latent"
    assert shared.bytes_read < apart.bytes_read
    q = rows(rng, 5, 32, pool.head_dim)
    shared, apart = (pool.attend_batch(0, q, sequences, cu_seqlens_q=bounds, cascade=cascade) for cascade in (True, False))
    assert np.array_equal(shared, apart)  # each query has whole passes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope_dim", [0, ROPE])
def test_between_paged_and_contiguous(tmp_path, rng, dtype, rope_dim):
    pool, other = (new_pool(layers=2, rope_dim=rope_dim, dtype=dtype) for _ in range(2))
    ids, q = rng.integers(0, 1000, 150), rows(rng, 2, 20, pool.head_dim)
    sequence = fill(pool.new_sequence(), rng, 150, token_ids=ids)
    expected = [(sequence.get_latent(layer), sequence.attend(layer, q)) for layer in range(2)]
    path = tmp_path / "latents.safetensors"
    sequence.save(path)
    snapshot, contiguous = sequence.snapshot(), kvfast.MLAKVCache(2, LATENT, rope_dim, 200, dtype=dtype)
    contiguous.restore(snapshot)
    fork = sequence.fork()
    sequence.truncate(40)
    sequence.restore(contiguous.snapshot(ids))
    assert snapshot == contiguous.snapshot() == sequence.snapshot()
    prompts = kvfast.PromptCache(tmp_path / "prompts")
    assert prompts.save(sequence, ids)
    found = other.new_sequence()
    assert prompts.restore(found, np.r_[ids, 5]) == 150
    for one in (
        sequence,
        fork,
        contiguous,
        found,
        other.restore(snapshot),
        kvfast.load(path),
        kvfast.load(snapshot),
        kvfast.MLAKVCache.from_state_dict(fork.state_dict()),
    ):
        assert len(one) == 150
        for layer, (latent, out) in enumerate(expected):
            assert np.array_equal(one.get_latent(layer), latent) and np.array_equal(one.attend(layer, q), out)
    with pytest.raises(kvfast.IncompatibleSnapshotError, match="kind|head_dim"):
        kvfast.PagedKVCache(2, 1, LATENT, 8, dtype="float32").restore(snapshot)
    with pytest.raises(kvfast.IncompatibleSnapshotError):
        new_pool(layers=1, rope_dim=rope_dim, dtype=dtype).restore(snapshot)


def test_forks_and_prefixes(rng):
    pool = new_pool(8, block_size=32)
    ids = rng.integers(0, 1000, 70)
    parent = fill(pool.new_sequence(), rng, 70, token_ids=ids)
    child, before = parent.fork(), parent.get_latent(0)
    assert isinstance(child, MLASequence) and pool.usage == 3 / 8
    child.append(0, rows(rng, 1, pool.head_dim))
    assert pool.usage == 4 / 8 and np.array_equal(parent.get_latent(0), before)
    parent.free()
    child.free()
    with pool.match_prefix(ids) as found:
        assert len(found) == 64 and np.array_equal(found.get_latent(0), before[:64])
        with pytest.raises(kvfast.CacheFullError):
            found.append(0, rows(rng, 200, pool.head_dim))
        assert np.array_equal(found.get_latent(0), before[:64])
        up_k, up_v = rows(rng, LATENT, 3, 8), rows(rng, LATENT, 3, 8)
        k, v = found.get_kv(0, up_k, up_v)
        found.append_kv(0, k[:2], v[:2], up_k.transpose(1, 2, 0), up_v.transpose(1, 2, 0))
        assert found.layer_length(0) == 66
    assert pool.num_free_blocks == 8 and pool.num_sequences == 0


def test_slots_of_another_scheduler(rng):
    pool = new_pool(8, block_size=32)
    latent = rows(rng, 40, pool.head_dim)
    slots = np.r_[7 * 32 : 8 * 32, 2 * 32 : 2 * 32 + 8]
    order = rng.permutation(40)
    pool.append_batch(0, latent[order], slots[order])
    cache = kvfast.MLAKVCache(1, LATENT, ROPE)
    cache.append(0, latent)
    q = rows(rng, 2, 20, pool.head_dim)
    out = pool.attend_batch(0, q, block_table=[[7, 2, -1]], seq_lens=[40], cu_seqlens_q=[0, 2])
    assert np.array_equal(out, cache.attend(0, q))
    for at, part in ((3, "latent"), (-1, "rotary")):
        bad = latent.copy()
        bad[5, at] = np.inf
        with pytest.raises(kvfast.NonFiniteInputError, match=f"the {part} part"):
            pool.append_batch(0, bad, slots)
    assert np.array_equal(pool.attend_batch(0, q, block_table=[[7, 2, -1]], seq_lens=[40], cu_seqlens_q=[0, 2]), out)


def test_sizes_and_names(rng):
    pool = new_pool(8, layers=2)
    assert (pool.latent_dim, pool.rope_dim, pool.head_dim, pool.entry_size, pool.num_kv_heads) == (LATENT, ROPE, 64, 64, 1)
    assert pool.bytes_per_token == kvfast.MLAKVCache(2, LATENT, ROPE).bytes_per_token == 2 * (64 + 8)
    assert pool.capacity() == 8 * 32 and pool.is_paged
    assert repr(pool).startswith("PagedMLAKVCache(int8-rotated, 2 layers x (48 + 16), 0/8 blocks of 32")
    sequence = fill(pool.new_sequence(), rng, 40)
    assert sequence.pool is pool and sequence.is_paged and sequence.nbytes == 2 * pool.bytes_per_token * 32
    assert repr(sequence) == "MLASequence(int8-rotated, 2 layers x (48 + 16), 40 tokens in 2 blocks)"
    assert pool.seq_lens([sequence]).tolist() == [40] and pool.can_append(192) and not pool.can_append(193)


def test_refused(rng):
    pool, stranger = new_pool(8), new_pool(8).new_sequence()
    sequence = fill(pool.new_sequence(), rng, 20)
    before, slots = sequence.get_latent(0), pool.slot_mapping([sequence], 2)
    for shape in [(2, 63), (2, 48), (2, 1, 64), (0, 64)]:
        with pytest.raises(kvfast.DimensionMismatchError, match=r"48 \+ 16"):
            pool.append_batch(0, np.ones(shape, np.float32), slots)
    with pytest.raises(kvfast.DimensionMismatchError, match="slot_mapping"):
        pool.append_batch(0, rows(rng, 3, 64), slots)
    with pytest.raises(ValueError, match="next to be written"):
        pool.append_batch(0, rows(rng, 2, 64), slots + 1)
    with pytest.raises(TypeError, match="latent"):
        pool.append_batch(0, np.ones((2, 64), int), slots)
    for at in (0, 50):
        bad = rows(rng, 2, 64)
        bad[1, at] = np.nan
        with pytest.raises(kvfast.NonFiniteInputError):
            pool.append_batch(0, bad, slots)
        with pytest.raises(kvfast.NonFiniteInputError):
            pool.attend_batch(0, bad[1:, None].repeat(20, 1), [sequence])
    with pytest.raises(IndexError, match="layer"):
        pool.append_batch(1, rows(rng, 2, 64), slots)
    q = rows(rng, 1, 20, 64)
    for shape in [(20, 64), (1, 20, 48), (1, 20, 65)]:
        with pytest.raises(kvfast.DimensionMismatchError, match=r"48 \+ 16"):
            pool.attend_batch(0, np.ones(shape, np.float32), [sequence])
        with pytest.raises(kvfast.DimensionMismatchError, match=r"48 \+ 16"):
            pool.explain_batch(0, shape, [sequence])
    for sequences, options, message in [
        ([stranger], {}, "not a sequence of this pool"),
        ([], {}, "at least one sequence"),
        (None, {}, "either sequences, or block_table"),
        ([sequence], {"out": np.empty((1, 20, 64), np.float32)}, "out must have"),
        ([sequence], {"out": q[..., 16:]}, "share memory"),
        ([sequence], {"cu_seqlens_q": [0, 2]}, "cu_seqlens_q"),
    ]:
        with pytest.raises(ValueError, match=message):
            pool.attend_batch(0, q, sequences, **options)
    assert len(sequence) == sequence.layer_length(0) == 20 and np.array_equal(sequence.get_latent(0), before)
    sequence.free()
    for use in (lambda: sequence.append(0, q[0, :1]), lambda: sequence.attend(0, q), lambda: sequence.get_latent(0), sequence.fork):
        with pytest.raises(ValueError, match="has been freed"):
            use()
    for arguments, message in [
        ((1, 513, 16, 4), "between"),
        ((1, 48, 129, 4), "between"),
        ((1, 48, 16, 0), "num_blocks"),
        ((1, 48, 16, 4, 24), "16, 32, 64, 128 or 256"),
    ]:
        with pytest.raises(ValueError, match=message):
            kvfast.PagedMLAKVCache(*arguments)
    with pytest.raises(ValueError, match="latent rows"):
        new_pool(dtype=kvfast.KVFormat("int8", centring=True))


def test_compression(rng):
    pool, other = new_pool(32, dtype="float32"), kvfast.MLAKVCache(1, LATENT, ROPE, dtype="float32")
    sequence, target = fill(pool.new_sequence(), rng, 300), pool.new_sequence()
    compressor = kvfast.KVCacheCompressor(kvfast.Quantize(8))
    compressed = compressor.compress_cache(sequence, 0)
    compressor.decompress_to_cache(compressed, target, 0)
    compressor.decompress_to_cache(compressor.compress_cache(sequence, 0), other, 0)
    assert np.array_equal(target.get_latent(0), other.get_latent(0))
    assert relative_error(target.get_latent(0), sequence.get_latent(0)) < 0.05
    with pytest.raises(TypeError, match="must be a sequence of the pool, got PagedMLAKVCache"):
        compressor.compress_cache(pool, 0)
