"""Caches into compressed form and back, compressed prefixes with live tokens, and files."""

import copy
import json

import numpy as np
import pytest
import reference
from compressed_rows import METHODS, correlated, tokens_first

import kvfast
from kvfast import CompressedKV, Hybrid, KVCacheCompressor, LowRank, PrefixKVCache, Quantize, VectorQuantization
from kvfast.caches.multi_head import MultiHeadConfig

COMPRESSOR = KVCacheCompressor(Hybrid())


def make(kind):
    if kind == "cache":
        return kvfast.KVCache(2, 3, 32, dtype="float32")
    if kind == "ring":
        return kvfast.RingKVCache(2, 3, 32, sliding_window=60, num_sink_tokens=4, dtype="float32")
    return kvfast.PagedKVCache(2, 3, 32, num_blocks=12, block_size=16, dtype="float32").new_sequence()


@pytest.mark.parametrize("kind", ["cache", "ring", "sequence"])
def test_bridges(kind, rng):
    cache = make(kind)
    with pytest.raises(ValueError, match="layer 1 is empty"):
        COMPRESSOR.compress_cache(cache, 1)
    k, v = correlated(rng, 2, 3, 100, 32), correlated(rng, 2, 3, 100, 32)
    for layer in range(2):
        cache.append(layer, tokens_first(k[layer]), tokens_first(v[layer]))
    cache.advance(100)
    shown = [(cache.k(layer).copy(), cache.v(layer).copy()) for layer in range(2)]
    compressed = [COMPRESSOR.compress_cache(cache, layer) for layer in range(2)]
    assert compressed[1].layout.seq_len == (64 if kind == "ring" else 100)
    for (keys, values), one in zip(shown, compressed):
        direct = COMPRESSOR.compress_kv_3d(keys.swapaxes(0, 1), values.swapaxes(0, 1))
        assert all(np.array_equal(array, direct.state_dict()[name]) for name, array in one.state_dict().items())
    assert np.array_equal(cache.k(0), shown[0][0]) and len(cache) == 100

    other = make(kind)
    for layer in range(2):
        COMPRESSOR.decompress_to_cache(compressed[layer], other, layer)
    other.advance(compressed[0].layout.seq_len)
    for layer, one in enumerate(compressed):
        for got, decoded in zip((other.k(layer), other.v(layer)), one.decode()):
            assert np.array_equal(got, tokens_first(decoded))

    with pytest.raises(IndexError, match="layer"):
        COMPRESSOR.compress_cache(cache, 2)
    narrow = COMPRESSOR.compress_kv_3d(*np.ones((2, 3, 20, 16), np.float32))
    with pytest.raises(kvfast.DimensionMismatchError, match="3 heads of 32 like the cache, got 3 of 16"):
        COMPRESSOR.decompress_to_cache(narrow, other, 0)
    with pytest.raises(kvfast.DimensionMismatchError, match="as a batch"):
        COMPRESSOR.decompress_to_cache(COMPRESSOR.compress_kv(*np.ones((2, 1, 3, 20, 32), np.float32)), other, 0)
    assert len(other) == compressed[0].layout.seq_len


def test_bridges_of_the_wrong_kind():
    cache, pool = kvfast.KVCache(1, 1, 16), kvfast.PagedKVCache(1, 1, 16, num_blocks=4)
    for call in (lambda: COMPRESSOR.compress_cache(pool, 0), lambda: COMPRESSOR.compress_cache(cache.snapshot(), 0)):
        with pytest.raises(TypeError, match="must be a"):
            call()
    with pytest.raises(TypeError, match="a sequence of the pool, got PagedKVCache"):
        COMPRESSOR.decompress_to_cache(COMPRESSOR.compress_kv_3d(*np.ones((2, 1, 20, 16), np.float32)), pool, 0)


def test_bridges_of_a_cache_by_head(rng):
    cache, other = (kvfast.MultiHeadKVCache(3, MultiHeadConfig(head_dim=32, bits=8)) for _ in "ab")
    cache.push_tokens(*rng.standard_normal((2, 100, 3, 32)).astype(np.float32))
    compressed = COMPRESSOR.compress_cache(cache, 0)
    COMPRESSOR.decompress_to_cache(compressed, other, 0)
    assert len(other) == 100 and reference.relative_error(other.k(), cache.k()) < 0.05
    with pytest.raises(kvfast.DimensionMismatchError, match="2 heads of 32 like the cache, got 3"):
        COMPRESSOR.decompress_to_cache(compressed, kvfast.MultiHeadKVCache(2, cache.config), 0)
    for call in (lambda: COMPRESSOR.compress_cache(cache, 1), lambda: COMPRESSOR.decompress_to_cache(compressed, other, 1)):
        with pytest.raises(IndexError, match="layer must be between 0 and 0, got 1"):
            call()
    with pytest.raises(ValueError, match="layer 0 is empty"):
        COMPRESSOR.compress_cache(kvfast.MultiHeadKVCache(3, cache.config), 0)


def test_pool_too_small(rng):
    compressed = COMPRESSOR.compress_kv_3d(*correlated(rng, 2, 3, 100, 32))
    pool = kvfast.PagedKVCache(1, 3, 32, num_blocks=2, block_size=16, dtype="float32")
    with pool.new_sequence() as sequence:
        with pytest.raises(kvfast.CacheFullError):
            COMPRESSOR.decompress_to_cache(compressed, sequence, 0)
        assert pool.num_free_blocks == 2 and sequence.layer_length(0) == 0


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("dtype", ["int8", "int4", "float32"])
def test_prefix(method, dtype, rng):
    """Attention to a compressed prefix and live tokens is attention to what both decode to."""
    k, v = (tokens_first(correlated(rng, 3, 420, 48)) for _ in "kv")
    cache = kvfast.KVCache(1, 3, 48, dtype="float32")
    cache.append(0, k[:400], v[:400])
    cache.advance(400)
    both = PrefixKVCache.compress(cache, KVCacheCompressor(method), dtype=dtype)
    assert len(both) == both.prefix_len == 400
    for start, stop in ((400, 401), (401, 410), (410, 420)):
        both.append(0, k[start:stop], v[start:stop])
        q = rng.standard_normal((stop - start, 6, 48)).astype(np.float32)
        out, lse = both.attend(0, q, return_lse=True)
        exact, exact_lse = reference.attention(q, both.k(0), both.v(0))
        assert reference.relative_error(out, exact) < 1e-3
        np.testing.assert_allclose(lse, exact_lse, atol=2e-3)
        both.advance(stop - start)
        assert len(both) == stop
    target = np.empty((10, 6, 48), np.float32)
    assert both.attend(0, q, out=target) is target and np.array_equal(target, out)
    both.truncate(405)
    assert len(both) == 405
    with pytest.raises(ValueError, match="n must be at least 400, got 399"):
        both.truncate(399)
    both.clear()
    assert len(both) == 400 and both.nbytes_used == sum(one.nbytes for one in both.prefix)


def test_prefix_write(rng):
    """Positions of rotary angles go on after the prefix."""
    turns = np.arange(300)[:, None] * 0.1 ** np.arange(16)
    angles = {"cos": np.cos(turns).astype(np.float32), "sin": np.sin(turns).astype(np.float32)}
    qkv = rng.standard_normal((300, 8 * 32)).astype(np.float32)
    cache = kvfast.KVCache(1, 2, 32, dtype="float32")
    cache.write(0, qkv[:290], **angles)
    cache.advance(290)
    both = PrefixKVCache.compress(cache, KVCacheCompressor(Quantize("float32")), dtype="float32")
    for start, stop in ((290, 291), (291, 300)):
        one, other = (which.write(0, qkv[start:stop], **angles) for which in (cache, both))
        assert np.array_equal(one, other)
        np.testing.assert_allclose(both.attend(0, one), cache.attend(0, one), atol=1e-5)
        cache.advance(stop - start)
        both.advance(stop - start)
    assert np.array_equal(both.k(0), cache.k(0))


def test_bad_prefixes(rng):
    one = COMPRESSOR.compress_kv_3d(*correlated(rng, 2, 3, 100, 32))
    longer = COMPRESSOR.compress_kv_3d(*correlated(rng, 2, 3, 101, 32))
    with pytest.raises(TypeError, match="a CompressedKV for each layer"):
        PrefixKVCache([])
    with pytest.raises(kvfast.DimensionMismatchError, match="the same shape"):
        PrefixKVCache([one, longer])
    with pytest.raises(ValueError, match="max_seq_len must be between 101"):
        PrefixKVCache([one], max_seq_len=100)
    with pytest.raises(ValueError, match="empty"):
        PrefixKVCache.compress(kvfast.KVCache(1, 3, 32), COMPRESSOR)
    with pytest.raises(TypeError, match="KVCache or a Sequence, got RingKVCache"):
        PrefixKVCache.compress(kvfast.RingKVCache(1, 3, 32, sliding_window=32), COMPRESSOR)
    with pytest.raises(TypeError, match="KVCache or a Sequence, got MLASequence"):
        PrefixKVCache.compress(kvfast.PagedMLAKVCache(1, 32, 8, num_blocks=4).new_sequence(), COMPRESSOR)
    with pytest.raises(TypeError, match="must be a KVCacheCompressor, got str"):
        PrefixKVCache.compress(kvfast.KVCache(1, 3, 32), "hybrid")
    both = PrefixKVCache([one], max_seq_len=101)
    with pytest.raises(kvfast.DimensionMismatchError):
        both.write(0, 3.0, cos=np.ones((200, 16), np.float32), sin=np.ones((200, 16), np.float32))
    for out, error in ((np.empty((5, 1, 6, 32), np.float32), ValueError), (np.empty((1, 6, 32), np.int8), TypeError)):
        with pytest.raises(error, match="out must"):
            both.attend(0, np.ones((1, 6, 32), np.float32), out=out)
    both.append(0, *np.ones((2, 1, 3, 32), np.float32))
    with pytest.raises(kvfast.CacheFullError):
        both.append(0, *np.ones((2, 1, 3, 32), np.float32))


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("batch", [None, 2])
def test_round_trip(method, batch, rng, tmp_path):
    shape = (3, 300, 48) if batch is None else (batch, 3, 300, 48)
    compressor = KVCacheCompressor(method)
    k, v = correlated(rng, *shape), correlated(rng, *shape)
    compressed = compressor.compress_kv_3d(k, v) if batch is None else compressor.compress_kv(k, v)
    path = tmp_path / "compressed.safetensors"
    compressed.save(path)
    q = rng.standard_normal((*shape[:-3], 5, 6, 48)).astype(np.float32)
    for other in (CompressedKV.load(path), CompressedKV.from_state_dict(compressed.state_dict())):
        assert (other.layout, other.method, other.nbytes) == (compressed.layout, compressed.method, compressed.nbytes)
        assert other.reconstruction_error == compressed.reconstruction_error
        assert np.array_equal(other.attend(q), compressed.attend(q))
        assert all(np.array_equal(a, b) for a, b in zip(other.decode(), compressed.decode()))
    with pytest.raises(kvfast.CorruptFileError):
        kvfast.load(path)
    if batch is None:
        cache = kvfast.KVCache(1, 3, 48)
        cache.save(path)
        with pytest.raises(kvfast.IncompatibleSnapshotError, match="this is not a CompressedKV"):
            CompressedKV.load(path)


def test_damaged_file(rng, tmp_path):
    compressed = KVCacheCompressor(VectorQuantization(16)).compress_kv_3d(*correlated(rng, 2, 3, 300, 48))
    path = tmp_path / "compressed.safetensors"
    compressed.save(path)
    sound = path.read_bytes()
    for at in np.linspace(len(sound) // 2, len(sound) - 1, 12).astype(int):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        with pytest.raises(kvfast.CorruptFileError, match="damaged"):
            CompressedKV.load(path)
    path.write_bytes(sound[:-5])
    with pytest.raises(kvfast.CorruptFileError):
        CompressedKV.load(path)


def change(name, value):
    return lambda state, header: state.update({name: value(state[name])})


def set_header(*path_and_value):
    *path, last, value = path_and_value

    def apply(state, header):
        fields = header
        for key in path:
            fields = fields[key]
        fields[last] = value

    return apply


def filled(x, value):
    return np.full_like(x, value)


@pytest.mark.parametrize(
    ("method", "damage", "match"),
    [
        ("vq", change("0.store.k.codes", lambda x: filled(x, 255)), "codebooks of side k"),
        ("vq", change("0.store.v.centroids", lambda x: filled(x, np.nan)), "codebooks of side v"),
        ("vq", change("0.store.k.bounds", lambda x: x[:, ::-1]), "codebooks of side k"),
        ("vq", change("0.store.k.bounds", lambda x: x + 1000), "codebooks of side k"),
        ("vq", change("0.store.k.codes", lambda x: x[:, 1:]), "0.store.k.codes must be uint8 of shape"),
        ("vq", change("0.store.k.mean", lambda x: filled(x, np.inf)), "a basis must be finite"),
        ("vq", change("0.positions", lambda x: x[::-1]), "must ascend below 300"),
        ("vq", change("0.positions", lambda x: x + 297), "must ascend below 300"),
        ("vq", lambda state, header: state.pop("0.store.v.codes"), "0.store.v.codes is missing"),
        ("vq", lambda state, header: state.update(more=np.zeros(3, np.uint8)), "unexpected array more"),
        ("vq", set_header("parts", 0, "store", "count", 4), "must be float16"),
        ("vq", set_header("parts", 0, "store", "count", 1 << 70), "count must be an integer from 2 to 256, got int"),
        ("vq", set_header("parts", 0, "store", "subvectors", "a"), "subvectors must be an integer from 1 to 512, got str"),
        ("vq", set_header("parts", 0, "num_exact", -1), "num_exact must be an integer from 0"),
        ("vq", set_header("parts", 0, "num_exact", 300), "fewer than 300"),
        ("vq", set_header("parts", []), "parts must be a list of 1 to"),
        ("vq", set_header("layout", "seq_len", 1 << 39), "must be"),
        ("vq", set_header("layout", "seq_len", "many"), "describes no compressed"),
        ("vq", set_header("layout", "head_dim", 1000), "head_dim"),
        ("vq", set_header("layout", None), "describes no compressed"),
        ("vq", set_header("method", "name", "System"), "describes no compressed"),
        ("vq", set_header("method", "codebook_size", 1000), "codebook_size"),
        ("vq", set_header("method", "name", "Hybrid"), "describes no compressed"),
        ("vq", set_header("error", [1]), "describes no compressed"),
        ("vq", set_header("compressed", 1), "version 1"),
        ("rank", set_header("parts", 0, "store", "ranks", [1000]), "ranks.0 must be an integer from 1 to 512"),
        ("rank", set_header("parts", 0, "store", "ranks", [49]), "a rank must be between"),
        ("rank", set_header("parts", 0, "store", "ranks", [8]), "must be float16 of shape"),
        ("rank", set_header("parts", 0, "store", "heads", [[0, 1, 1]]), "each of 3 heads once"),
        ("rank", set_header("parts", 0, "store", "heads", [[0.0, 1.0, 2.0]]), "heads.0.[012] must be an integer"),
        ("rank", set_header("layout", "num_heads", 1 << 40), "each of 1099511627776 heads once"),
        ("rank", set_header("parts", 0, "store", "basis", "object"), "describes no compressed"),
        ("rank", change("0.store.0.coordinates.header", lambda x: x[:50]), "not JSON"),
        ("rank", change("0.store.0.k.lift", lambda x: filled(x, np.nan)), "a basis must be finite"),
        ("rank", lambda state, header: state.pop("0.store.0.coordinates.header"), "header is missing"),
    ],
)
def test_hostile_state(method, damage, match, rng):
    """Whatever a header or an array says, the answer is an error that names it."""
    method = VectorQuantization(5, 12) if method == "vq" else LowRank(rank=16)
    state = KVCacheCompressor(method).compress_kv_3d(*correlated(rng, 2, 3, 300, 48)).state_dict()
    header = json.loads(state["header"].tobytes())
    damage(state, header)
    state["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with pytest.raises((kvfast.CorruptFileError, kvfast.IncompatibleSnapshotError), match=match):
        CompressedKV.from_state_dict(state)


def test_header_that_is_none():
    for header in (b"", b"[]", b"{}", b"[" * 100000, b"\xff"):
        with pytest.raises((kvfast.CorruptFileError, kvfast.IncompatibleSnapshotError)):
            CompressedKV.from_state_dict({"header": np.frombuffer(header, np.uint8)})


def test_a_prefix_tells_of_tokens_that_were_not_counted(rng):
    cache, rows = kvfast.KVCache(1, 2, 64), rng.standard_normal((100, 2, 64), np.float32)
    cache.append(0, rows, rows)
    cache.advance(100)
    cache.append(0, rows[:7], rows[:7])
    with pytest.raises(ValueError, match=r"layers hold 7 tokens that were never counted.*advance\(7\)"):
        PrefixKVCache.compress(cache, COMPRESSOR)
    assert len(PrefixKVCache.compress(cache, COMPRESSOR, uncounted="drop")) == 100


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, kvfast.PrefixKVCache.copy])
def test_a_copy_goes_its_own_way(rng, copied):
    k, v = rng.standard_normal((2, 100, 2, 64)).astype(np.float32)
    cache = kvfast.KVCache(1, 2, 64, dtype="float16")
    cache.append(0, k, v)
    cache.advance(100)
    one = kvfast.PrefixKVCache.compress(cache, kvfast.KVCacheCompressor(kvfast.Hybrid(quant_bits=8)))
    other = copied(one)
    other.append(0, k[:3], v[:3])
    other.advance(3)
    assert len(one) == 100 and len(other) == 103
