"""States of llama.cpp: by themselves, damaged, and through llama.cpp itself."""

import ctypes
import struct

import numpy as np
import pytest
from cache_kinds import fill

import kvfast
from kvfast import CorruptFileError, IncompatibleSnapshotError, KVCache

gguf = pytest.importorskip("gguf")

from kvfast.engines.llama_cpp.ggml import TYPES, from_ggml, to_ggml
from kvfast.engines.llama_cpp.state import read_state, write_state


def cache_with(rng, dtype="float32", tokens=21, dim=64, layers=2):
    return fill(KVCache(layers, 2, dim, dtype=dtype), rng, tokens)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dim, rope_dims", [(64, 64), (128, 0), (32, 16)])
@pytest.mark.parametrize("token_ids", [None, list(range(21))], ids=["data", "file"])
def test_there_and_back(rng, kind, dim, rope_dims, token_ids):
    cache, other = cache_with(rng, dim=dim), KVCache(2, 2, dim, dtype="float32")
    state = read_state(write_state(cache, kind, token_ids=token_ids, rope_dims=rope_dims))
    assert state.k_types == (kind,) * 2 and state.num_tokens == 21 and not state.transposed
    assert (state.token_ids is None) == (token_ids is None)
    state.append_to(other, rope_dims=rope_dims)
    # Rounded to 24, 11 or 8 bits; of the largest of 32 that share a scale, turned perhaps.
    step = {"f32": 0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.01, "q4_0": 0.15}[kind]
    for layer in range(2):
        for got, given in ((other.k(layer), cache.k(layer)), (other.v(layer), cache.v(layer))):
            assert (abs(got - given) <= step * (abs(given).max() if kind[0] == "q" else abs(given)) + (kind == "f16") * 1e-7).all()
    if kind == "f16":  # nothing is lost twice
        assert write_state(other, kind, token_ids=token_ids, rope_dims=rope_dims) == write_state(
            cache, kind, token_ids=token_ids, rope_dims=rope_dims
        )


def test_where_each_byte_lies(rng):
    cache = cache_with(rng, layers=1, tokens=2)
    data = write_state(cache, "f16", "q8_0", rope_dims=64, rotated=False)
    assert struct.unpack_from("<IiII", data) == (0xAF143CD8, 0, 1, 2)
    assert struct.unpack_from("<6i", data, 16) == (0, 1, 0, 1, 1, 0)
    assert struct.unpack_from("<IIiQ", data, 40) == (0, 1, 1, 256)
    k = np.frombuffer(data, np.float16, 256, 60).reshape(2, 2, 64)
    np.testing.assert_array_equal(k[:, :, 0::2], cache.k(0)[:, :, :32].astype(np.float16))  # pairs lie side by side
    np.testing.assert_array_equal(k[:, :, 1::2], cache.k(0)[:, :, 32:].astype(np.float16))
    assert struct.unpack_from("<iQ", data, 572) == (8, 136)
    assert data[584:] == to_ggml(cache.v(0), "q8_0").tobytes()


def test_transposed_values_and_cells_in_any_order(rng):
    cache, other = cache_with(rng), KVCache(2, 2, 64, dtype="float32")
    state = read_state(write_state(cache, "f32", transposed=True))
    assert state.transposed
    state.append_to(other)
    np.testing.assert_array_equal(other.v(1), cache.v(1))
    with pytest.raises(ValueError, match="transposed"):
        write_state(cache, "q8_0", transposed=True)
    rows = np.arange(21 * 4, dtype=np.float32).reshape(21, 1, 4)
    place = rng.permutation(21)  # cell i holds position place[i]
    cells = np.stack([place, np.ones(21), np.full(21, 3)], axis=1).astype("<i4").tobytes()
    one = struct.pack("<iQ", 0, 16) + rows[place].tobytes()
    streams = struct.pack("<IIIII", 0xAF143CD8, 3, 3, 0, 21) + cells + struct.pack("<II", 0, 1) + one + one + struct.pack("<I", 0)
    small = KVCache(1, 1, 4, dtype="float32")
    read_state(streams).append_to(small)
    np.testing.assert_array_equal(small.k(0), rows)


def test_turned_as_llama_cpp_does(rng):
    """Quantised rows are the product with the orthogonal Hadamard matrix in Sylvester's order."""
    cache = cache_with(rng, dim=128)
    turned = read_state(write_state(cache, "q8_0"))
    matrix = np.array([[(-1) ** (i & j).bit_count() for j in range(128)] for i in range(128)], np.float32)
    k, v = cache.k(0) @ (matrix / np.sqrt(128)), cache.v(0).reshape(21, 2, 2, 64) @ (matrix[:64, :64] / 8)
    for got, wanted in ((turned.k[0], k), (turned.v[0], v.reshape(21, 2, 128))):
        decoded = from_ggml(got, "q8_0", 2, 128)
        assert abs(decoded - wanted).max() < 0.03
    with pytest.raises(ValueError, match="multiple of 64"):
        write_state(cache_with(rng, dim=32), "q8_0", rotated=True)


def test_states_that_do_not_fit(rng):
    cache = cache_with(rng)
    state = read_state(write_state(cache, "f16"))
    for other in (KVCache(3, 2, 64), KVCache(2, 3, 64), KVCache(2, 2, 32), cache):
        before = len(other)
        with pytest.raises(IncompatibleSnapshotError):
            state.append_to(other)
        assert len(other) == before
    full = KVCache(2, 2, 64, max_seq_len=20)
    with pytest.raises(kvfast.CacheFullError):
        state.append_to(full)
    assert full.layer_length(0) == 0
    for wrong in (3, -2, 66, True, 1.0):
        with pytest.raises(ValueError, match="rope_dims"):
            state.append_to(KVCache(2, 2, 64), rope_dims=wrong)
    with pytest.raises(ValueError, match="no tokens"):
        write_state(KVCache(1, 2, 64))
    with pytest.raises(ValueError, match="token_ids"):
        write_state(cache, token_ids=[1, 2])
    ring = kvfast.RingKVCache(1, 2, 64, 8)
    ring.append(0, *rng.standard_normal((2, 21, 2, 64)).astype(np.float32))
    ring.advance(21)
    with pytest.raises(ValueError, match="dropped"):
        write_state(ring)


def test_files_of_an_older_version(rng):
    """llama-cpp-python 0.3.30 writes them: they differ in the number of the version alone."""
    data = write_state(cache_with(rng, tokens=3, dim=4, layers=2), "f32", token_ids=[1, 2, 3])
    older = data[:4] + struct.pack("<I", 2) + data[8:]
    state, expected = read_state(older), read_state(data)
    assert state.token_ids.tolist() == [1, 2, 3]
    assert all(np.array_equal(*both) for both in zip((*state.k, *state.v), (*expected.k, *expected.v)))
    with pytest.raises(IncompatibleSnapshotError, match="version 2 or 3, got version 4"):
        read_state(data[:4] + struct.pack("<I", 4) + data[8:])


@pytest.mark.parametrize("transposed", [False, True])
def test_damaged_states(rng, transposed, tmp_path):
    """Whatever the bytes, an error of ours, and no more memory than the bytes."""
    cache = cache_with(rng, tokens=3, dim=4, layers=2)
    data = write_state(cache, "f32", token_ids=[1, 2, 3], transposed=transposed)
    path = tmp_path / "state"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptFileError):
            read_state(path)
    with pytest.raises(IncompatibleSnapshotError, match="several caches"):
        read_state(data + b"\0")
    expected = {
        0: (CorruptFileError, "must begin with"),
        4: (IncompatibleSnapshotError, "got version"),
        8: (CorruptFileError, "ends at"),
    }
    for at, (error, told) in expected.items():
        with pytest.raises(error, match=told):
            read_state(data[:at] + struct.pack("<I", 0xFFFFFFFF) + data[at + 4 :])
    for _ in range(3000):
        bad = bytearray(data)
        for at in rng.integers(0, len(bad), rng.integers(1, 4)):
            bad[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        other = KVCache(2, 2, 4, dtype="float32")
        try:
            read_state(bytes(bad)).append_to(other)
        except (CorruptFileError, IncompatibleSnapshotError, kvfast.NonFiniteInputError):
            assert len(other) == 0 and other.layer_length(0) == 0


@pytest.mark.model
@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_texts_go_on_in_the_other_runtime(smollm2, kind):
    pytest.importorskip("llama_cpp")
    from kvfast.tools.evaluation.llama_cpp_caches import CacheTypes, LlamaCpp, _Context

    path, model, tokenizer = smollm2
    prompt = tokenizer.encode("The capital of France is Paris, and the capital of Italy is")
    rope_dims = model.config.rope_dims

    def ours(cache, tokens):
        return model.logits(model.forward(tokens, cache))[-1]

    with LlamaCpp(path, model.cache_shape) as runtime:
        api, contexts = runtime._api, [_Context(runtime._api, runtime._model, CacheTypes(kind, kind), 64, 32) for _ in "ab"]
        there, back = contexts
        token = int(there(prompt)[-1].argmax())
        size = api.llama_state_seq_get_size(there._context, 0)
        buffer = (ctypes.c_uint8 * size)()
        assert api.llama_state_seq_get_data(there._context, buffer, size, 0) == size
        # Prompt in llama.cpp, the rest here.
        cache = KVCache(*model.cache_shape, dtype="float32")
        read_state(bytes(buffer)).append_to(cache, rope_dims=rope_dims)
        own = KVCache(*model.cache_shape, dtype="float32")
        assert int(ours(own, prompt).argmax()) == token
        tolerance = {"f32": 0.02, "f16": 0.05, "q8_0": 0.15}[kind]
        for layer in (0, 15, 29):
            for got, wanted in ((cache.k(layer), own.k(layer)), (cache.v(layer), own.v(layer))):
                assert np.linalg.norm(got - wanted) < tolerance * np.linalg.norm(wanted)
        # Prompt here, the rest in llama.cpp.
        data = write_state(own, kind, rope_dims=rope_dims, transposed=kind == "f32")
        assert len(data) == size
        given = (ctypes.c_uint8 * size).from_buffer_copy(data)
        assert api.llama_state_seq_set_data(back._context, given, size, 0) == size
        back._length = len(prompt)
        texts = [[token], [token], [token]]
        for _ in range(12):
            for text, step in zip(texts, (lambda t: ours(own, t), lambda t: ours(cache, t), lambda t: back(t)[-1])):
                text.append(int(step([text[-1]]).argmax()))
        for context in contexts:
            context.close()
    assert texts[1] == texts[0] and texts[2] == texts[0]
