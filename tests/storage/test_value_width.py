"""Values of another head_dim than the keys, as in multi-head latent attention that is not absorbed."""

import json

import numpy as np
import pytest
from cache_kinds import FORMATS, filled
from reference import attention, bound, relative_error
from selection import TIERS, pairwise

import kvfast
from kvfast.planning import LayerShape, ModelShape

# Padded and not, wider and narrower, equal once they are padded, and as far apart as can be.
WIDTHS = [(24, 16), (192, 128), (64, 80), (1, 3), (20, 30), (512, 8)]
FLOATS = {name: kvfast.KVFormat.of(name) for name in ("float32", "float16", "bfloat16")}
MIXED = {name: kvfast.KVFormat.of(name) for name in ("float32/int8", "int8/float32", "float16/bfloat16", "int4/int8")}
STORED = FORMATS | FLOATS | MIXED
HEADS = 2
KINDS = {
    "growing": lambda dim, v_dim, form: kvfast.KVCache(2, HEADS, dim, dtype=form, v_head_dim=v_dim),
    "bounded": lambda dim, v_dim, form: kvfast.KVCache(2, HEADS, dim, 600, dtype=form, v_head_dim=v_dim, secure=True),
    "ring": lambda dim, v_dim, form: kvfast.RingKVCache(2, HEADS, dim, [90, None], 5, dtype=form, v_head_dim=v_dim),
    "sequence": lambda dim, v_dim, form: kvfast.PagedKVCache(2, HEADS, dim, 80, dtype=form, v_head_dim=v_dim).new_sequence(),
}
# Every format and every kind of cache with widths in turn: each pair of a kind and a format, and of each and two widths.
CASES = {(kind, name): WIDTHS[(i + j) % len(WIDTHS)] for i, kind in enumerate(KINDS) for j, name in enumerate(STORED)}


def tokens(rng, n, dim, v_dim, heads=HEADS):
    return [rng.standard_normal((n, heads, one)).astype(np.float32) for one in (dim, v_dim)]


def fill(rng, cache, n=230):
    """A prompt and a few single tokens, the same in both layers; returns what a layer was given."""
    parts = [tokens(rng, count, cache.head_dim, cache.v_head_dim) for count in (n - 4, 1, 1, 2)]
    for part in parts:
        filled(cache, *part)
    return [np.concatenate(side) for side in zip(*parts)]


def queries(rng, cache, n=1):
    return rng.standard_normal((n, 2 * HEADS, cache.head_dim)).astype(np.float32)


def outputs(cache, n=3):
    rng = np.random.default_rng(7)
    return [cache.attend(layer, queries(rng, cache, n)).tobytes() for layer in range(cache.num_layers)]


@pairwise(("isa", "kind", "name"), TIERS, KINDS, STORED)
def test_attention_is_exact_on_what_is_stored(isa, rng, kind, name):
    dim, v_dim = CASES[kind, name]
    cache = KINDS[kind](dim, v_dim, STORED[name])
    fill(rng, cache)
    assert (cache.head_dim, cache.v_head_dim, len(cache)) == (dim, v_dim, 230)
    q = queries(rng, cache, 17)
    for layer in range(2):
        k, v = cache.k(layer), cache.v(layer)
        assert k.shape[1:] == (HEADS, dim) and v.shape[1:] == (HEADS, v_dim)
        window = {"sliding_window": 90, "num_sink_tokens": 5} if len(k) < 230 else {}
        # A ring gets the last queries alone: its older tokens cannot be had from outside.
        for n, splits in ((1, 0), (1, 2)) if window else ((1, 0), (3, 2), (17, 0)):
            out, lse = cache.attend(layer, q[:n], num_splits=splits, return_lse=True)
            expected, expected_lse = attention(q[:n], k, v)
            assert out.shape == (n, 2 * HEADS, v_dim)
            assert relative_error(out, expected) < bound(*([name] if name == "float32" else ["int8"]))
            assert np.allclose(lse, expected_lse, atol=2e-3)


@pytest.mark.parametrize(("kind", "name", "widths"), [(*case, widths) for case, widths in CASES.items()], ids=str)
def test_a_side_is_as_in_a_cache_of_its_width(rng, kind, name, widths):
    cache = KINDS[kind](*widths, STORED[name])
    given = fill(rng, cache)
    for i, width in enumerate(widths):
        alone = KINDS[kind](width, width, STORED[name])
        for part in np.split(given[i], [226, 227, 228]):
            filled(alone, part, part)
        for layer in range(2):
            assert np.array_equal((cache.k, cache.v)[i](layer), (alone.k, alone.v)[i](layer))


@pairwise(
    ("isa", "widths", "name"),
    TIERS,
    WIDTHS,
    ["float32", "float16", "bfloat16", "int8-rotated", "k8v4-rotated", "int4", "int8/float32", "float16/int8"],
)
def test_long_prompts(isa, rng, widths, name):
    """Many queries at once, which a matrix unit takes."""
    dim, v_dim = widths
    n = 40 if isa == "scalar" else 300
    cache = kvfast.KVCache(1, HEADS, dim, dtype=name, v_head_dim=v_dim)
    cache.append(0, *tokens(rng, n, dim, v_dim))
    q = queries(rng, cache, n)
    out = cache.attend(0, q)
    k, v = cache.k(0), cache.v(0)
    assert relative_error(out, attention(q, k, v)[0]) < bound(name)
    for threads in (1, 2):
        assert np.array_equal(out, cache.attend(0, q, num_threads=threads))
    into = np.full((n, 2 * HEADS, v_dim + 3), np.nan, np.float32)
    cache.attend(0, q, out=into[:, :, :v_dim])
    assert np.array_equal(into[:, :, :v_dim], out) and np.isnan(into[:, :, v_dim:]).all()
    assert relative_error(kvfast.attention(q, k, v), attention(q, k, v)[0]) < 1e-5


@pytest.mark.parametrize("name", ["float32", "int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_keep_the_widths(tmp_path, rng, kind, name):
    cache = KINDS[kind](24, 40, name)
    fill(rng, cache)
    before = outputs(cache)
    snapshot = cache.snapshot()
    others = [
        cache.copy(),
        kvfast.load(snapshot),
        kvfast.load(kvfast.Snapshot.from_state_dict(cache.state_dict())),
        kvfast.load(kvfast.Snapshot.from_bytes(snapshot.to_bytes())),
    ]
    cache.save(tmp_path / "cache")
    others += [kvfast.load(tmp_path / "cache"), kvfast.load(tmp_path / "cache", mmap=True)]
    for other in others:
        assert (other.head_dim, other.v_head_dim, outputs(other)) == (24, 40, before)
        assert "24 and 40" in repr(other)
    fill(rng, cache, 20)
    cache.restore(snapshot)
    assert outputs(cache) == before
    if kind != "ring":
        other = KINDS[kind](24, 40, "bfloat16")
        other.restore(snapshot, convert=True)
        assert np.allclose(other.v(1), cache.v(1), rtol=2**-8) and other.v(1).shape == (230, HEADS, 40)
        cache.truncate(100)
        short = KINDS[kind](24, 40, name)
        short.restore(snapshot.truncated(100))
        assert outputs(cache) == outputs(short)
    keys, values = snapshot.to_arrays()
    assert keys[0].shape[1] == HEADS * 24 and values[0].shape[1] == HEADS * 40
    again = kvfast.load(kvfast.Snapshot.from_arrays(keys[1:], values[1:], HEADS, "float32"))
    assert np.array_equal(again.k(0).reshape(230, -1), keys[1]) and np.array_equal(again.v(0).reshape(230, -1), values[1])


def test_sizes():
    cache = kvfast.KVCache(3, 2, [192, 64, 64], 100, "float16", v_head_dim=[128, None, 80])
    assert (cache.head_dim, cache.v_head_dim, cache.entry_size) == ((192, 64, 64), (128, 64, 80), (384, 128, 128))
    assert cache.bytes_per_token == 2 * 2 * (192 + 128 + 64 + 64 + 64 + 80)
    cache = kvfast.KVCache(1, 8, 192, dtype="int8-rotated", v_head_dim=128)
    assert cache.bytes_per_token == 8 * (192 + 128 + 2 * 4)
    cache.append(0, *tokens(np.random.default_rng(0), 4096, 192, 128, 8))
    plan = cache.explain(0, 1, num_threads=1)
    assert plan.v_head_dim == 128 and plan.bytes_read == 4096 * cache.bytes_per_token and "8 KV heads of 192/128" in str(plan)
    assert plan.operations == 2 * 4096 * 8 * (192 + 128)
    shape = ModelShape("one", (LayerShape(8, 192, v_head_dim=128),))
    assert kvfast.plan(shape, context=640, memory=1 << 30, bandwidth=1e9)["int8-rotated"].bytes_per_token == cache.bytes_per_token
    told = {
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "head_dim": 64,
    }
    assert kvfast.plan(told, memory=1 << 30, bandwidth=1e9).model.layers == shape.layers * 2
    latent = kvfast.plan(told | {"kv_lora_rank": 512}, memory=1 << 30, bandwidth=1e9)
    assert latent.model.layers == (LayerShape(1, 512, None, 64),) * 2 and "8 heads of 192 and 128" in latent.notes[0]


@pytest.mark.parametrize("name", ["float32", "int8", "int4"])
def test_fused_projection(rng, name):
    qkv = rng.standard_normal((70, (4 + 2) * 24 + 2 * 40)).astype(np.float32)
    angles = rng.standard_normal((70, 12)).astype(np.float32)
    turn = {"cos": np.cos(angles), "sin": np.sin(angles), "k_norm": np.ones(24, np.float32)}
    q, k, v = kvfast.split_qkv_norm_rope(qkv, 4, 2, 24, v_head_dim=40, **turn)
    assert np.array_equal(v.reshape(70, -1), qkv[:, -80:]) and k.shape == (70, 2, 24)
    cache, other = (kvfast.KVCache(1, 2, 24, dtype=name, v_head_dim=40) for _ in range(2))
    assert np.array_equal(cache.write(0, np.repeat(qkv, 2, axis=1)[:, ::2], **turn), q)
    other.append(0, k, v)
    pool = kvfast.PagedKVCache(1, 2, 24, 20, dtype=name, v_head_dim=40)
    sequence = pool.new_sequence()
    assert np.array_equal(pool.write_batch(0, qkv, pool.slot_mapping([sequence], 70), **turn), q)
    expected = other.attend(0, q)
    assert np.array_equal(cache.attend(0, q), expected)
    assert pool.attend_batch(0, q[-1:], [sequence]).tobytes() == other.attend(0, q[-1:]).tobytes()
    for wrong in (qkv[:, :-1], qkv[:, : 2 * 24 + 80], qkv[:, :80], qkv[0]):
        with pytest.raises(kvfast.DimensionMismatchError, match=r"\(num_q_heads \+ 2\) \* 24 \+ 2 \* 40"):
            cache.write(0, wrong)
    with pytest.raises(kvfast.DimensionMismatchError, match=r"\(3 \+ 2\) \* 24 \+ 2 \* 40"):
        cache.write(0, qkv, num_q_heads=3)


def test_batches(rng):
    pool = kvfast.PagedKVCache(1, HEADS, 24, 80, dtype="int8", v_head_dim=40)
    a = filled(pool.new_sequence(), *tokens(rng, 300, 24, 40))
    b = a.fork()
    pool.append_batch(0, *tokens(rng, 2, 24, 40), pool.slot_mapping([a, b]))
    q = queries(rng, a, 2)
    for cascade in (True, False):
        out = pool.attend_batch(0, q, [a, b], cascade=cascade)
        for one, row, alone in zip((a, b), out, q):
            assert relative_error(row[None], attention(alone[None], one.k(0), one.v(0))[0]) < bound("int8")
    into = np.empty((2, 2 * HEADS, 40), np.float16)
    assert pool.attend_batch(0, q, [a, b], cascade=False, out=into) is into and np.allclose(into, out, atol=1e-2)


def test_wrong_widths_are_refused(rng):
    cache = kvfast.KVCache(1, 2, 24, v_head_dim=16)
    k, v = tokens(rng, 3, 24, 16)
    for one, other in ((k, k), (v, v), (v, k)):
        with pytest.raises(kvfast.DimensionMismatchError):
            cache.append(0, one, other)
    cache.append(0, k, v)
    q = queries(rng, cache)
    with pytest.raises(kvfast.DimensionMismatchError, match=r"out must have shape \(1, 4, 16\), got \(1, 4, 24\)"):
        cache.attend(0, q, out=np.empty(q.shape, np.float32))
    with pytest.raises(kvfast.DimensionMismatchError, match="q must have head_dim 24"):
        cache.attend(0, q[:, :, :16])
    with pytest.raises(kvfast.DimensionMismatchError, match="k and v must have the same shape except for head_dim"):
        kvfast.attention(q, k, v[1:])
    for wrong, error in ((0, ValueError), (513, ValueError), ("16", TypeError), ([16, 16], ValueError)):
        with pytest.raises(error, match="v_head_dim"):
            kvfast.KVCache(1, 2, 24, v_head_dim=wrong)
        with pytest.raises(error, match="v_head_dim"):
            kvfast.RingKVCache(1, 2, 24, 16, v_head_dim=wrong)
    with pytest.raises(ValueError, match="v_head_dim"):
        kvfast.PagedKVCache(1, 2, 24, 8, v_head_dim=0)
    cache.advance(3)
    with pytest.raises(kvfast.IncompatibleSnapshotError, match="v_head_dim"):
        kvfast.KVCache(1, 2, 24).restore(cache.snapshot())
    with pytest.raises(kvfast.IncompatibleSnapshotError, match="v_head_dim"):
        kvfast.KVCache(1, 2, 24, v_head_dim=32).restore(cache.snapshot())
    with pytest.raises(kvfast.DimensionMismatchError, match="keys and values must hold the same number of tokens"):
        kvfast.Snapshot.from_arrays([np.ones((3, 48), "f")], [np.ones((2, 32), "f")], 2)


def test_one_width_refuses_values_of_another(rng):
    cache = kvfast.KVCache(1, 2, 32, v_head_dim=16)
    k, v = tokens(rng, 100, 32, 16)
    filled(cache, k, v)
    compressor = kvfast.KVCacheCompressor(kvfast.LowRank(rank=4))
    with pytest.raises(kvfast.DimensionMismatchError, match=r"\(2, 100, 32\) and \(2, 100, 16\)"):
        kvfast.PrefixKVCache.compress(cache, compressor)
    same = compressor.compress_kv_3d(*(rng.standard_normal((2, 2, 100, 32)).astype(np.float32)))
    with pytest.raises(kvfast.DimensionMismatchError, match=r"2 heads of 32 \(values 16\)"):
        compressor.decompress_to_cache(same, cache, 0)
    from kvfast.llama_cpp import export_layer, import_layer, write_state

    with pytest.raises(ValueError, match="keys of 32 and values of 16"):
        write_state(cache)
    pytest.importorskip("gguf")
    other = kvfast.KVCache(1, 2, 32, dtype="float32", v_head_dim=16)
    import_layer(other, 0, *export_layer(cache, 0, "f16"), "f16")
    assert np.allclose(other.v(0), cache.v(0), atol=2e-3)


def test_files_of_one_width_are_what_they_were(rng):
    """A header tells of the width of values only where it is their own."""
    same, other = kvfast.KVCache(1, 2, 24, v_head_dim=24), kvfast.KVCache(1, 2, 24)
    assert "v_head_dim" not in json.loads(same.state_dict()["header"].tobytes())["settings"]
    assert same.state_dict()["header"].tobytes() == other.state_dict()["header"].tobytes()
    two = kvfast.KVCache(1, 2, 24, v_head_dim=16).state_dict()
    header = json.loads(two["header"].tobytes())
    assert header["settings"]["v_head_dim"] == 16
    for wrong in (24, 0, -1, 1 << 40, "16", [16, 16], None):
        header["settings"]["v_head_dim"] = wrong
        with pytest.raises(kvfast.CorruptFileError):
            kvfast.Snapshot.from_state_dict(two | {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)})


def test_a_compressed_file_cannot_bring_another_width(rng):
    compressed = kvfast.KVCacheCompressor(kvfast.Quantize(8)).compress_kv_3d(*rng.standard_normal((2, 2, 100, 32)).astype(np.float32))
    other = filled(kvfast.KVCache(1, 2, 32, dtype="int8", v_head_dim=16), *tokens(rng, 100, 32, 16))
    arrays = {name: array for name, array in compressed.state_dict().items()}
    prefix = next(name for name in arrays if name.endswith("layers.0.k.0")).removesuffix("layers.0.k.0")
    arrays |= {prefix + name: array for name, array in other.state_dict().items()}
    with pytest.raises(kvfast.CorruptFileError):
        type(compressed).from_state_dict(arrays)


def test_fidelity_of_two_widths(rng):
    k, v = tokens(rng, 200, 24, 40)
    found = kvfast.fidelity(rng.standard_normal((5, 4, 24)).astype(np.float32), k, v, ["float32", "int8"])
    assert found[0].output_error < 1e-5 < found[1].output_error < 0.05
