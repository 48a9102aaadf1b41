"""Rows of ggml's types against the gguf package."""

import numpy as np
import pytest
from cache_kinds import filled

import kvfast
from kvfast.engines.llama_cpp import ggml

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", ggml.TYPES)
@pytest.mark.parametrize("heads, dim", [(3, 64), (1, 32), (8, 128), (4, 8)])
def test_rows_are_those_of_gguf(rng, kind, heads, dim):
    rows = rng.standard_normal((37, heads, dim)).astype(np.float32)
    rows[3] = 0
    ours, kind_of = ggml.to_ggml(rows, kind), gguf.GGMLQuantizationType[kind.upper()]
    reference = gguf.quants.quantize(rows.reshape(37, -1), kind_of)
    assert ours.dtype == np.uint8 and ours.shape == (37, ggml.row_bytes(kind, heads * dim))
    assert ours.tobytes() == reference.tobytes()
    back = ggml.from_ggml(ours, kind, heads, dim)
    np.testing.assert_array_equal(back.reshape(37, -1), gguf.quants.dequantize(reference, kind_of))
    np.testing.assert_array_equal(ggml.to_ggml(back, kind), ours) if kind[0] != "q" else None
    one, steps = ggml.to_ggml(rows[5:6], kind), {"f32": 0, "f16": 1e-3, "bf16": 8e-3, "q8_0": 8e-3, "q4_0": 0.13}
    assert one.tobytes() == ours[5].tobytes()  # a row does not depend on the others
    assert abs(back - rows).max() <= steps[kind] * abs(rows).max()


def test_q8_0_by_hand():
    """A block is a float16 scale and 32 codes; of q4_0, two to a byte, the second half of the block in the high nibbles."""
    row = np.arange(-16, 16, dtype=np.float32)
    block = ggml.to_ggml(row.reshape(1, 1, 32), "q8_0")[0]
    assert block[:2].view(np.float16)[0] == np.float16(16 / 127)
    np.testing.assert_array_equal(block[2:].view(np.int8), np.round(row / np.float32(16 / 127)))
    block = ggml.to_ggml(row.reshape(1, 1, 32), "q4_0")[0]
    assert block[:2].view(np.float16)[0] == 2 and block[2] == 0 | 8 << 4


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_a_layer_out_and_in(rng, dtype):
    cache, other = kvfast.KVCache(2, 2, 64, dtype=dtype), kvfast.KVCache(2, 2, 64, dtype="float32")
    filled(cache, each=[rng.standard_normal((2, 100, 2, 64)).astype(np.float32) for _ in range(2)])
    for layer in range(2):
        k, v = ggml.export_layer(cache, layer, "q8_0", "f16")
        assert k.tobytes() == ggml.to_ggml(cache.k(layer), "q8_0").tobytes()
        ggml.import_layer(other, layer, k, v, "q8_0", "f16")
        np.testing.assert_array_equal(other.v(layer), cache.v(layer).astype(np.float16))
        np.testing.assert_array_equal(other.k(layer), ggml.from_ggml(k, "q8_0", 2, 64))
    other.advance(100)


def test_what_is_refused(rng):
    cache = kvfast.KVCache(1, 2, 64, dtype="float32")
    rows = rng.standard_normal((5, 2, 64)).astype(np.float32)
    with pytest.raises(ValueError, match="unknown ggml type 'q5_1'"):
        ggml.to_ggml(rows, "q5_1")
    with pytest.raises(ValueError, match="whole blocks of 32"):
        ggml.to_ggml(rows[:, :1, :20], "q8_0")
    with pytest.raises(kvfast.DimensionMismatchError):
        ggml.to_ggml(rows[0], "q8_0")
    blocks = ggml.to_ggml(rows, "q8_0")
    for wrong in (blocks[:, :-1], blocks[0], blocks.astype(np.int16)):
        with pytest.raises(kvfast.CorruptFileError):
            ggml.import_layer(cache, 0, wrong, blocks)
    damaged = blocks.copy()
    damaged[2, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    with pytest.raises(kvfast.NonFiniteInputError):
        ggml.import_layer(cache, 0, blocks, damaged)
    assert cache.layer_length(0) == 0
