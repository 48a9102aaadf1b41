"""Numbers at the limits of floats: computed within the contract, or refused by name, never NaN."""

import contextlib

import numpy as np
import pytest
from cache_kinds import DTYPES, PLAIN, cache_of, filled
from reference import attention, bound, relative_error

import kvfast
from kvfast.caches.multi_head import MultiHeadConfig
from kvfast.caches.paged_mla import MLASequence

MOST = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4028235e38, "int8-plain": 3.3e38, "int4-plain": 3.3e38}


def normal(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def summed(q, k, v, **options):
    """The mean size of the values that each output row sums up: of the row itself, little is left where they cancel."""
    return attention(q, k, np.linalg.norm(v.astype(np.float64), axis=-1, keepdims=True) + 0 * v, **options)[0][..., 0]


def check(cache, q, dtype, scale=None, **options):
    """Within the contract of float64 attention over what is stored, for scores of 16 and more as many times as they are."""
    k, v = cache.k(0), cache.v(0)
    options["scale"] = scale = q.shape[-1] ** -0.5 if scale is None else scale
    largest = scale * np.linalg.norm(q.astype(np.float64), axis=-1).max() * np.linalg.norm(k.astype(np.float64), axis=-1).max()
    limit = bound(dtype) * max(1, largest / 16)
    expected, _ = attention(q, k, v, **options)
    out, lse = cache.attend(0, q, return_lse=True, **options)
    assert np.isfinite(out).all() and np.isfinite(lse).all()
    error = np.linalg.norm(out - expected, axis=-1)
    assert (error <= limit * summed(q, k, v, **options)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1e-30, 1e-25, 1e-10, 1e3])
def test_from_denormals_to_large_numbers(isa, rng, dtype, magnitude):
    """Keys that small give even weights, and values come back as well as their format tells so small numbers."""
    k, v, q = (normal(rng, n, 2, 20) for n in (70, 70, 2))
    with np.errstate(under="ignore"):
        cache = cache_of(dtype, k * np.float32(magnitude), v * np.float32(magnitude))
        stored = cache.v(0)
        if dtype in PLAIN[:1]:
            assert np.array_equal(stored, v * np.float32(magnitude))
        # Denormals are rounded to multiples of 1.4e-45 each; what is below 1e-28 may count as nothing where codes are multiplied.
        expected, _ = attention(q, cache.k(0), stored)
        out = cache.attend(0, q)
    assert np.isfinite(out).all()
    assert np.abs(out - expected).max() <= bound(dtype) * np.abs(stored).max() + (1e-43 if dtype == "float32" else 1e-28)


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("side", ["k", "v"])
def test_the_largest_numbers(isa, rng, dtype, side):
    """As keys with small queries and as values they are computed; beyond the range of what is stored they are refused."""
    most = MOST[dtype]
    k, v, q = normal(rng, 40, 2, 16), normal(rng, 40, 2, 16), normal(rng, 2, 4, 16)
    # A query that makes small scores of codes that large would itself be too small to be told as codes.
    large = np.clip(normal(rng, 40, 2, 16), -1, 1) * np.float32(most / (1e10 if side == "k" and "int" in dtype else 64))
    cache = cache_of(dtype, *((large, v) if side == "k" else (k, large)))
    check(cache, q / np.abs(large).max() if side == "k" else q, dtype)
    before = len(cache), cache.k(0).tobytes(), cache.v(0).tobytes()
    beyond = np.full((1, 2, 16), np.inf, np.float32)
    if dtype == "float16":
        beyond[:] = 65520.0
    with pytest.raises(kvfast.NonFiniteInputError):
        cache.append(0, *((beyond, v[:1]) if side == "k" else (k[:1], beyond)))
    assert before == (len(cache), cache.k(0).tobytes(), cache.v(0).tobytes())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_queries", [1, 3, 30])
def test_a_score_beyond_float32_is_refused(isa, rng, dtype, num_queries):
    """Whatever its sign, also where only some of the scores are."""
    k, v = normal(rng, 300, 2, 32), normal(rng, 300, 2, 32)
    k *= np.float32(1000)
    q = normal(rng, num_queries, 4, 32)
    cache = cache_of(dtype, k, v)
    good = cache.attend(0, q, scale=1e-3)
    for factor in (3e38, -3e38):
        with pytest.raises(kvfast.NonFiniteInputError, match="beyond float32"):
            cache.attend(0, q, scale=factor)
        with pytest.raises(kvfast.NonFiniteInputError, match="beyond float32"):
            cache.attend(0, np.clip(q, -1, 1) * np.float32(3e38), scale=factor)
    assert np.array_equal(cache.attend(0, q, scale=1e-3), good)


def test_sums_of_products_that_cancel_are_refused_and_not_lost(isa, rng):
    """Inf - inf is NaN, of which no maximum and no sum may make nothing."""
    k, v = normal(rng, 200, 1, 16), normal(rng, 200, 1, 16)
    k[77] = np.float32(3e38) * np.array([1, -1] * 8, np.float32)
    for k_dtype in ("float32", "bfloat16"):
        cache = cache_of(k_dtype, k, v)
        for q in (np.full((1, 2, 16), 3e5, np.float32), np.full((20, 2, 16), 3e5, np.float32)):
            try:
                out = cache.attend(0, q)
            except kvfast.NonFiniteInputError:
                continue
            # Where sums are taken in an order in which they cancel, the score is the small number that it is.
            assert relative_error(out, attention(q, cache.k(0), cache.v(0))[0]) < bound(k_dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8-plain"])
def test_sums_of_values_beyond_float32_are_refused(isa, dtype):
    """As many equal values as there are weights: their mean is in range, their sum is not."""
    v = np.full((50, 1, 16), MOST[dtype] / 4, np.float32)
    cache = cache_of(dtype, np.zeros_like(v), v)
    with contextlib.suppress(kvfast.NonFiniteInputError):
        assert relative_error(cache.attend(0, v[:1] * 0), v[:1].astype(np.float64)) < 1e-2
    few = cache_of(dtype, np.zeros_like(v[:2]), v[:2])
    assert relative_error(few.attend(0, v[:1] * 0), few.v(0)[:1].astype(np.float64)) < bound(dtype)


def test_an_output_that_out_cannot_hold_is_refused(isa):
    v = np.full((3, 1, 16), 1e6, np.float32)
    cache = cache_of("float32", np.zeros_like(v), v)
    with pytest.raises(kvfast.NonFiniteInputError, match="beyond float16"):
        cache.attend(0, v[:1] * 0, out=np.zeros((1, 1, 16), np.float16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ["constant", "one hot", "zero", "one large"])
def test_rows_without_shape(isa, rng, dtype, rows):
    k, v = normal(rng, 2, 200, 2, 40) if rows == "one large" else np.zeros((2, 200, 2, 40), np.float32)
    if rows == "constant":
        k[:], v[:] = 3.5, np.arange(200, dtype=np.float32)[:, None, None] - 100
    elif rows == "one hot":
        k[np.arange(200), :, np.arange(200) % 40] = 5
        v[np.arange(200), :, np.arange(200) % 40] = -2
    elif rows == "one large":
        k[::7, :, 3] = 1000
        v[5] = 1000
    cache = cache_of(dtype, k, v)
    q = normal(rng, 3, 4, 40)
    if rows == "zero":
        assert not cache.k(0).any() and not cache.v(0).any() and not cache.attend(0, q).any()
        q[:] = 0
    check(cache, q, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_scores_that_overflow_a_naive_softmax(isa, rng, dtype, scale):
    """exp of more than 88 is infinite: scores are taken relative to the largest. The largest is far ahead of the others,
    so that its own rounding weighs nothing."""
    k, v = normal(rng, 150, 1, 32), normal(rng, 150, 1, 32)
    q = k[[10, 120]] * 20
    cache = cache_of(dtype, k, v)
    check(cache, q, dtype, scale=scale, causal=False)
    check(cache, -q * 0 - 20, dtype, scale=0.01, causal=False)


def test_a_query_always_sees_its_own_token(rng):
    """Nothing that can be asked for masks all of a query's tokens; `merge_states` tells what that would be."""
    k, v, q = normal(rng, 30, 1, 16), normal(rng, 30, 1, 16), normal(rng, 5, 1, 16)
    cache = cache_of("float32", k, v)
    out = cache.attend(0, q, sliding_window=1)
    assert relative_error(out, v[-5:].astype(np.float64)) < 1e-5
    with pytest.raises(ValueError, match="sliding_window"):
        cache.attend(0, q, sliding_window=0)
    nothing = np.zeros_like(out), np.full(out.shape[:2], -np.inf, np.float32)
    out, lse = kvfast.merge_states(*nothing, *nothing)
    assert not out.any() and np.isneginf(lse).all()
    empty = kvfast.KVCache(1, 1, 16)
    with pytest.raises(ValueError, match="no tokens"):
        empty.attend(0, q[:1])


@pytest.mark.parametrize("dtype", ["int4-plain", "int8-plain", "float16", "float32"])
def test_a_million_tokens(dtype):
    """The same 2**14 tokens 64 times: attention to them all is attention to one copy, its log-sum-exp log(64) more."""
    rng = np.random.default_rng(5)
    count, copies, dim = 1 << 14, 64, 16
    k, v = rng.standard_normal((2, count, 1, dim), np.float32)
    cache = kvfast.KVCache(1, 1, dim, dtype=dtype)
    for _ in range(copies):
        filled(cache, k, v)
    assert len(cache) == 1 << 20
    q = rng.standard_normal((1, 2, dim), np.float32)
    once = cache_of(dtype, k, v)
    for options in ({}, {"num_splits": 1}, {"num_splits": 1000}):
        out, lse = cache.attend(0, q, return_lse=True, **options)
        expected, expected_lse = attention(q, once.k(0), once.v(0))
        assert (np.linalg.norm(out - expected, axis=-1) < bound(dtype) * summed(q, once.k(0), once.v(0))).all()
        assert np.abs(lse - expected_lse - np.log(copies)).max() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [1, 512])
def test_the_smallest_and_the_largest_head(isa, rng, dtype, head_dim):
    k, v, q = normal(rng, 90, 2, head_dim), normal(rng, 90, 2, head_dim), normal(rng, 20, 4, head_dim)
    check(cache_of(dtype, k, v), q, dtype)


def test_rotation_and_norm_beyond_float32_are_refused(isa):
    """Rows to split and rows to store are refused before any is written."""
    large = np.full((2, 3 * 16), 3e38, np.float32)
    turn = np.ones((2, 8), np.float32)
    for options in ({"cos": turn, "sin": -turn}, {"q_norm": np.ones(16, np.float32)}):
        with pytest.raises(kvfast.NonFiniteInputError):
            kvfast.split_qkv_norm_rope(large, 1, 1, 16, **options)
        cache = kvfast.KVCache(1, 1, 16, dtype="float32")
        with pytest.raises(kvfast.NonFiniteInputError):
            cache.write(0, large, **options)
        assert cache.layer_length(0) == 0
    with pytest.raises(kvfast.NonFiniteInputError, match="the projection must be finite"):
        kvfast.split_qkv_norm_rope(large * np.float32(np.nan), 1, 1, 16, cos=turn, sin=turn)


def test_scores_of_heads_beyond_float32_are_refused(isa):
    heads = kvfast.MultiHeadKVCache(2, MultiHeadConfig(16, 8))
    rows = np.full((2, 16), 1e30, np.float32)
    heads.push_token(rows, rows)
    for method in (heads.attend, heads.attention_scores):
        with pytest.raises(kvfast.NonFiniteInputError, match="beyond float32"):
            method(rows)
    assert np.isfinite(heads.attention_scores(rows / np.float32(1e30))).all()


def test_projections_beyond_float32_are_refused():
    cache = kvfast.MLAKVCache(1, 16, 0, dtype="float32")
    cache.append(0, np.full((1, 16), 3e38, np.float32))
    up = np.ones((16, 2, 4), np.float32)
    with pytest.raises(kvfast.NonFiniteInputError, match="beyond float32"):
        cache.get_kv(0, up, up)
    assert np.isfinite(cache.get_kv(0, up / 1000, up / 1000)[0]).all()


# What `fuzz_api` once found.


def test_a_sequence_is_made_by_its_pool():
    """Another object in the place of its table was read as one."""
    pools = {kvfast.Sequence: kvfast.PagedKVCache(1, 1, 16, 4), MLASequence: kvfast.PagedMLAKVCache(1, 16, 4, num_blocks=4)}
    for kind, own in pools.items():
        others = [pool for pool in pools.values() if pool is not own]
        for wrong in (None, 3, object(), own._batches, own.new_sequence(), *others):
            with pytest.raises(TypeError, match="made by its pool"):
                kind(wrong)


def test_a_sequence_without_blocks_takes_none_of_another_scheduler():
    """Slots of a scheduler were taken where a sequence had no block yet, and its next tokens overwrote them."""
    pool = kvfast.PagedKVCache(1, 1, 16, num_blocks=4, dtype="float32")
    sequence, row = pool.new_sequence(), np.ones((1, 1, 16), np.float32)
    with pytest.raises(ValueError, match="while a pool has sequences"):
        pool.append_batch(0, row, row, [0])
    sequence.append(0, 2 * row, row)
    sequence.free()
    pool.append_batch(0, row, row, [0])
    with pytest.raises(ValueError, match="another scheduler"):
        pool.new_sequence()


def test_bits_are_a_number():
    with pytest.raises(ValueError, match="bits must be 8 or 4, got masked"):
        kvfast.quantize(np.ones((2, 8), np.float32), np.ma.masked)


def test_dequantize_writes_to_arrays():
    codes, scales = kvfast.quantize(np.ones((2, 16), np.float32))
    for wrong in (3, [[0.0] * 16] * 2, kvfast.KVCache(1, 1, 16)):
        with pytest.raises(TypeError, match="out must be"):
            kvfast.dequantize(codes, scales, wrong)


def test_a_state_is_a_mapping():
    for kind in (kvfast.KVCache, kvfast.Snapshot, kvfast.CompressedKV):
        for wrong in (None, 3, [1, 2], np.zeros(3)):
            with pytest.raises(TypeError, match="mapping"):
                kind.from_state_dict(wrong)


def test_a_prompt_cache_takes_caches(tmp_path):
    prompts = kvfast.PromptCache(tmp_path)
    for wrong in (None, 3.5, [], kvfast.PagedKVCache(1, 1, 16, 4)):
        with pytest.raises(TypeError, match="cache must be"):
            prompts.save(wrong, [1])
        with pytest.raises(TypeError, match="cache must be"):
            prompts.restore(wrong, [1])


@pytest.mark.parametrize("dtype", ["int8-plain", "int4-plain", "int8-rotated"])
def test_codes_beyond_float32_are_refused_when_they_are_read(dtype):
    """Each forged scale is a number, and with its codes it stands for none."""
    cache = filled(kvfast.KVCache(1, 1, 64, dtype=dtype), *np.random.default_rng(0).standard_normal((2, 20, 1, 64)).astype(np.float32))
    state = cache.state_dict()
    for name in [name for name in state if name.endswith("tail")]:
        forged = state[name].copy()
        scales = forged[0, 64 * 64 // (1 if dtype.startswith("int8") else 2) :][: 64 * 4].view(np.float32)
        scales[:] = np.finfo(np.float32).max
        state[name] = forged
    loaded = kvfast.KVCache.from_state_dict(state)
    for read in (loaded.k, loaded.v):
        with pytest.raises(kvfast.NonFiniteInputError, match="beyond float32"):
            read(0)
    with pytest.raises(kvfast.NonFiniteInputError):
        loaded.attend(0, np.ones((1, 1, 64), np.float32))
