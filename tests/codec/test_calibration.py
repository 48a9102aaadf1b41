"""Calibrations: their matrices, their files, and every cache that stores keys in their bases."""

import copy
import io
import json
import pickle
import tracemalloc
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from cache_kinds import DIM, HEADS, KINDS, LAYERS, contents, fill, filled, make, relative_rms, same, tokens
from reference import attention, relative_error

import kvfast
from kvfast import Calibration, KVFormat
from kvfast.codec.calibration import Moments

RNG = np.random.default_rng(98)
SPREADS = np.exp(RNG.uniform(-1.5, 1.5, (2, LAYERS, 1, 1, DIM)))  # of channels of queries and keys: they differ much


def text(rng, n, spread=SPREADS):
    """Queries and keys of all layers, with channels that depend on each other and have means."""
    mixed = np.random.default_rng(7).standard_normal((DIM, DIM)) / 10
    rows = rng.standard_normal((2, LAYERS, n, HEADS, DIM)) * spread + 0.5
    return (rows + rows @ mixed).astype(np.float32)


@pytest.fixture(scope="module")
def calibration():
    return kvfast.calibrate(*text(RNG, 640))


NAMES = ["int2", "int3", "int4", "int8", "k8v4"]


def formats(calibration):
    """One of each way in which keys are stored."""
    return {name: replace(KVFormat.of(name), calibration=calibration) for name in NAMES} | {
        "k8v4, centred": KVFormat("int8/int4", rotation="kv", centring=True, block_size=32, calibration=calibration),
        "channels, 128": KVFormat("int4/float16", per_channel=True, block_size=128, num_first_float_tokens=2, calibration=calibration),
    }


FORMATS = list(formats(None))


class TestMatrices:
    @pytest.mark.parametrize("channels", [False, True])
    def test_products_of_queries_and_keys_stay_the_same(self, calibration, channels):
        q, k = text(np.random.default_rng(1), 50)
        for layer in range(LAYERS):
            pairs = calibration[layer].matrices(channels, HEADS, DIM)
            for head, (to_stored, to_queries) in enumerate(pairs):
                exact = q[layer][:, head].astype(float) @ k[layer][:, head].T
                turned = q[layer][:, head].astype(float) @ to_queries @ (k[layer][:, head] @ to_stored).T
                assert relative_error(turned, exact) < 1e-5

    def test_both_moments_become_the_same_diagonal(self):
        q, k = text(np.random.default_rng(2), 704)
        bases = kvfast.calibrate(q, k)
        moments = Moments(HEADS, DIM)
        moments.add(q[0][64:], k[0][64:])
        for head in range(HEADS):
            to_stored, to_queries = bases[0].matrices(False, HEADS, DIM)[head].astype(float)
            keys, queries = (rows[0][64:, head] @ m for rows, m in ((k, to_stored), (q, to_queries)))
            of_keys, of_queries = keys.T @ keys / len(keys), queries.T @ queries / len(queries)
            sizes = np.diag(of_keys)
            assert np.abs(of_keys - np.diag(sizes)).max() < 0.02 * sizes.max()
            assert np.allclose(sizes / sizes.sum(), np.diag(of_queries) / np.trace(of_queries), atol=0.005)
            assert np.all(np.diff(sizes) <= 0.02 * sizes.max())
            assert np.isclose(sizes.sum(), (k[0][64:, head] ** 2.0).sum(1).mean(), rtol=0.01)

    def test_keys_lose_less_where_channels_differ(self, calibration):
        rng = np.random.default_rng(3)
        (q,), (k,) = text(rng, 512, SPREADS[:, :1])[:, :1]
        v = rng.standard_normal(k.shape).astype(np.float32)
        for name in ("int2", "int4"):
            form = replace(KVFormat.of(name), num_first_float_tokens=0)
            plain, fitted = kvfast.fidelity(q[-128:], k, v, [form, replace(form, calibration=calibration[0])])
            assert fitted.kl < 0.8 * plain.kl

    def test_refusals(self):
        q, k = text(np.random.default_rng(4), 200)
        for given, reason in [
            ((q, k[:1]), "for the same layers, at least one, got 2 and 1"),
            (([], []), "at least one, got 0 and 0"),
            ((q[..., :3], k), r"q\[0\] and k\[0\] must have shapes"),
            ((np.concatenate([q, q[:, :, :1]], 2), k), "a multiple of KV heads"),
        ]:
            with pytest.raises(kvfast.DimensionMismatchError, match=reason):
                kvfast.calibrate(*given)
        with pytest.raises(ValueError, match="at least 128 tokens, got 127"):
            kvfast.calibrate(q[:, :127], k[:, :127])
        k[1, 100, 0, 3] = np.nan
        with pytest.raises(kvfast.NonFiniteInputError, match=r"k\[1\] must be finite"):
            kvfast.calibrate(q, k)

    def test_a_channel_without_energy_is_no_obstacle(self):
        q, k = text(np.random.default_rng(5), 200)
        k[..., 3] = 0
        q[..., 4] = 0
        q[1], k[1] = 0, 0
        cache = kvfast.KVCache(LAYERS, HEADS, DIM, dtype=KVFormat("int8", rotation="kv", calibration=kvfast.calibrate(q, k)))
        cache.append(0, k[0], k[0])
        assert relative_error(cache.k(0), k[0]) < 0.02


class TestCalibration:
    def test_arrays_are_checked(self):
        eye = np.tile(np.eye(4), (2, 3, 1, 1))
        assert repr(Calibration(eye, eye)).endswith("2 layers, 3 KV heads x 4)")
        for rows, channels, error, reason in [
            (eye[0], eye, kvfast.DimensionMismatchError, "rows must have shape"),
            (eye, eye[:1], kvfast.DimensionMismatchError, "the same shape"),
            (eye, eye * np.nan, kvfast.NonFiniteInputError, "channels must be finite"),
            (eye, eye * [1, 1, 1, 0], ValueError, "a matrix of channels has no inverse"),
            (eye * [1, 1, 1, 1e-5], eye, ValueError, "a matrix of rows has no inverse"),
        ]:
            with pytest.raises(error, match=reason):
                Calibration(rows, channels)

    def test_equal_if_all_matrices_are(self, calibration):
        again = kvfast.calibrate(*text(np.random.default_rng(98), 640))
        assert pickle.loads(pickle.dumps(calibration)) == calibration and copy.deepcopy(calibration) == calibration
        assert calibration != again and calibration[0] != calibration[1] and calibration[0] != again[0]
        assert len({calibration, again, pickle.loads(pickle.dumps(calibration))}) == 2
        assert pickle.loads(pickle.dumps(calibration[1])) == calibration[1]

    def test_files(self, calibration, tmp_path):
        path = tmp_path / "calibration.npz"
        calibration.save(path)
        assert Calibration.load(path) == calibration
        whole = path.read_bytes()
        for damaged in (b"", b"hello", whole[:300], whole[: len(whole) // 2]):
            path.write_bytes(damaged)
            with pytest.raises(kvfast.CorruptFileError, match="calibration.npz"):
                Calibration.load(path)
        np.savez(path, rows=np.eye(3))
        with pytest.raises(kvfast.CorruptFileError, match="must hold the arrays rows and channels, got rows"):
            Calibration.load(path)
        np.savez(path, rows=np.array([{}]), channels=np.eye(3))
        with pytest.raises(kvfast.CorruptFileError, match="holds no calibration"):
            Calibration.load(path)
        with pytest.raises(FileNotFoundError):
            Calibration.load(tmp_path / "none")


class TestFormats:
    def test_names_and_fields(self, calibration):
        form = replace(KVFormat.of("int2"), calibration=calibration)
        assert str(form) == "int2 calibrated" and form != KVFormat.of("int2")
        assert json.loads(json.dumps(form.to_dict()))["calibration"] == calibration.digest
        with pytest.raises(TypeError, match="calibration must be a Calibration or one of its layers"):
            KVFormat.of(form.to_dict())
        assert pickle.loads(pickle.dumps(form)) == form and hash(form) == hash(pickle.loads(pickle.dumps(form)))

    def test_refusals(self, calibration):
        for options in ({"dtype": "int8"}, {"dtype": "int8", "rotation": "v"}, {"dtype": "float16"}):
            with pytest.raises(ValueError, match="calibration is for keys that are rotated or per_channel"):
                KVFormat(**options, calibration=calibration)
        with pytest.raises(ValueError, match="k_dtype and v_dtype name plain dtypes, which have no calibration"):
            kvfast.KVCache(LAYERS, HEADS, DIM, dtype=KVFormat("int8", rotation="kv", calibration=calibration), v_dtype="int4")
        for wrong in (7, "a file", "0" * 32, np.eye(3)):
            with pytest.raises(TypeError, match="calibration must be a Calibration or one of its layers"):
                KVFormat("int8", rotation="kv", calibration=wrong)

    @pytest.mark.parametrize(
        "make_cache",
        [
            lambda *shape, **options: kvfast.KVCache(*shape, **options),
            lambda *shape, **options: kvfast.RingKVCache(*shape, 40, **options),
            lambda *shape, **options: kvfast.PagedKVCache(*shape, 8, **options),
        ],
    )
    def test_other_shapes_are_refused(self, calibration, make_cache):
        form = replace(KVFormat.of("int8"), calibration=calibration)
        with pytest.raises(kvfast.DimensionMismatchError, match="for 2 layers, and the cache has 3"):
            make_cache(3, HEADS, DIM, dtype=form)
        for heads, dim in ((HEADS + 1, DIM), (HEADS, DIM + 1)):
            with pytest.raises(
                kvfast.DimensionMismatchError, match=f"for 2 KV heads of 20 elements, and the cache has {heads} of {dim}"
            ):
                make_cache(LAYERS, heads, dim, dtype=form)

    def test_latent_rows_and_compressors_refuse_it(self, calibration):
        form = replace(KVFormat.of("int8"), calibration=calibration[0])
        with pytest.raises(ValueError, match="a calibration is for keys"):
            kvfast.MLAKVCache(1, DIM, 4, dtype=form)
        with pytest.raises(ValueError, match="a calibration is for keys"):
            kvfast.PagedMLAKVCache(1, DIM, 4, 8, dtype=form)


@pytest.mark.parametrize("name", FORMATS)
class TestCaches:
    def test_attends_to_what_it_stores(self, calibration, name, isa):
        """On every tier, the scores of turned queries are those of the keys that come back."""
        cache, rng = kvfast.KVCache(LAYERS, HEADS, DIM, dtype=formats(calibration)[name]), np.random.default_rng(11)
        q, k = text(rng, 300)
        filled(cache, each=[(k[layer], tokens(rng, 300)[1]) for layer in range(LAYERS)])
        for layer in range(LAYERS):
            out = cache.attend(layer, q[layer][-3:])
            assert relative_error(out, attention(q[layer][-3:], cache.k(layer), cache.v(layer))[0]) < 2e-3
            assert relative_rms(cache.k(layer), k[layer]) < (0.6 if name == "int2" else 0.35 if name == "int3" else 0.25)

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_cache(self, calibration, name, kind):
        """The same bits whatever the chunks, and after a snapshot, a rollback, a copy and a state; other bits than without it."""
        form = formats(calibration)[name]
        whole = fill(make(kind, form), np.random.default_rng(12), 150)
        snapshot = whole.snapshot()
        seen = contents(whole)
        other = fill(make(kind, replace(form, calibration=None)), np.random.default_rng(12), 150)
        assert not same(seen, other)
        fill(whole, np.random.default_rng(13), 70)
        whole.restore(snapshot)
        assert same(seen, whole)
        assert same(seen, kvfast.load(kvfast.Snapshot.from_state_dict(snapshot.state_dict(), calibration)))
        with pytest.raises(kvfast.IncompatibleSnapshotError, match="dtype|calibr"):
            other.restore(snapshot)

    def test_paged_batches_and_forks(self, calibration, name):
        form = formats(calibration)[name]
        pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, 40, dtype=form)
        first = fill(pool.new_sequence(), np.random.default_rng(14), 200)
        second = fill(first.fork(), np.random.default_rng(15), 60)
        q = np.random.default_rng(16).standard_normal((2, 4, DIM)).astype(np.float32)
        for layer in range(LAYERS):
            both = pool.attend_batch(layer, q, [first, second])
            assert np.array_equal(both[:1], first.attend(layer, q[:1])) and np.array_equal(both[1:], second.attend(layer, q[1:]))

    def test_a_file_needs_its_calibration(self, calibration, name, tmp_path):
        mine = kvfast.calibrate(*text(np.random.default_rng(17), 300))
        cache = fill(kvfast.KVCache(LAYERS, HEADS, DIM, dtype=formats(mine)[name]), np.random.default_rng(18), 150)
        seen = contents(cache)
        cache.save(tmp_path / "cache")
        mine.save(tmp_path / "calibration")
        mine = Calibration.load(tmp_path / "calibration")
        state, data = cache.state_dict(), cache.snapshot().to_bytes()
        reads = {
            "load": lambda **given: kvfast.load(tmp_path / "cache", **given),
            "mapped": lambda **given: kvfast.load(tmp_path / "cache", mmap=True, **given),
            "Snapshot.load": lambda **given: kvfast.load(kvfast.Snapshot.load(tmp_path / "cache", **given)),
            "from_bytes": lambda **given: kvfast.load(kvfast.Snapshot.from_bytes(data, **given)),
            "from_state_dict": lambda **given: kvfast.KVCache.from_state_dict(state, **given),
        }
        for read in reads.values():
            assert same(seen, read(calibration=mine))
            with pytest.raises(kvfast.IncompatibleSnapshotError, match=rf"{mine[0].digest}: pass .*Calibration.load\(path\)$"):
                read()
            for other in (calibration, calibration[0], mine[1]):
                with pytest.raises(kvfast.IncompatibleSnapshotError, match=f"{mine[0].digest}: pass .* has no such layer"):
                    read(calibration=other)
            with pytest.raises(TypeError, match="calibration must be a Calibration or one of its layers, got 7"):
                read(calibration=7)
        with pytest.raises(ValueError, match="calibration must be None for a Snapshot"):
            kvfast.load(cache.snapshot(), calibration=mine)

    def test_one_layer_is_enough_for_its_file(self, calibration, name):
        cache = kvfast.KVCache(1, HEADS, DIM, dtype=formats(calibration[1])[name])
        filled(cache, *np.random.default_rng(18).standard_normal((2, 150, HEADS, DIM)).astype(np.float32))
        for given in (calibration, calibration[1]):
            again = kvfast.KVCache.from_state_dict(cache.state_dict(), given)
            assert np.array_equal(again.k(0), cache.k(0)) and again.format == cache.format


def test_splices_turn_the_queries_of_each_segment(calibration):
    form = KVFormat("int8", rotation="kv", calibration=calibration)
    rope = kvfast.Rope(frequencies=1.0 / 100 ** (np.arange(DIM // 2) / (DIM // 2)))
    part = fill(kvfast.KVCache(LAYERS, HEADS, DIM, dtype=form), np.random.default_rng(19), 100)
    cache = fill(kvfast.KVCache(LAYERS, HEADS, DIM, dtype=form), np.random.default_rng(20), 70)
    cache.splice(part, rope=rope)
    q = np.random.default_rng(21).standard_normal((1, 4, DIM)).astype(np.float32)
    assert relative_error(cache.attend(0, q), attention(q, cache.k(0), cache.v(0))[0]) < 2e-3


@pytest.mark.parametrize("shape", [(1 << 20, 1 << 10, 16, 16), (1, 1, 16, 16), (1, 64, 512, 512), (), (1 << 60,) * 4])
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_sizes_are_checked_against_the_file(shape, compression, tmp_path):
    """Whatever an array says that it holds, nothing is allocated for it."""
    path = tmp_path / "calibration.npz"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name in ("rows", "channels"):
            head = io.BytesIO()
            np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": shape})
            archive.writestr(
                f"{name}.npy", head.getvalue() + bytes(64 << 20 if shape[:1] == (1,) and shape[1] == 64 and compression else 100)
            )
    tracemalloc.start()
    try:
        with pytest.raises(kvfast.CorruptFileError):
            kvfast.Calibration.load(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
