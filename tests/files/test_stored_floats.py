"""Floats from outside the process: rows, scales and means must be numbers that a cache stores, whatever brings them."""

import json
import warnings

import numpy as np
import pytest
from cache_kinds import DIM, FORMATS, KINDS, LAYERS, Stream, fill, filled, make
from compressed_rows import METHODS, correlated
from dict_store import DictStore
from file_parts import with_tensors
from selection import parametrize

import kvfast
from kvfast.prompts.envelope import HEADER_BYTES, complete

pytest.importorskip("safetensors")

PADDED = -(-DIM // 16) * 16
BITS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
FLOATS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
FORMS = {**FORMATS, "float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}

USUAL = ["int4", "int8", "means, int4", "int5/int2", "channels, int3", "float16", "float32"]


def lines(nbytes):
    return -(-nbytes // 64) * 64


def floats_in_blocks(form, side, block_size):
    """(dtype, offset, count) of all floats in a block of a side, by the rules of docs/reference/file-format.md."""
    dtype = form.k_dtype if side == "k" else form.v_dtype
    if dtype in FLOATS:
        return [(dtype, 0, block_size * PADDED)]
    bits, of_channels = int(dtype[3:]), side == "k" and form.per_channel
    at, found = block_size * PADDED * bits // 8, []
    if not of_channels:
        is_wide = bits == 8 or bits == 4 and form.codebook == "uniform"
        found.append(("float32" if is_wide else "bfloat16", at, block_size))
        at += block_size * (4 if is_wide else 2)
    if side == "k" and (form.per_channel or form.centring):
        found.append(("float16", lines(at), PADDED))
    return found


def places(arrays, form):
    """(name of an array, dtype, byte offsets of its floats)."""
    block_size = json.loads(arrays["header"].tobytes())["block_size"]
    for name, array in arrays.items():
        if name in ("header", "token_ids"):
            continue
        _, _, side, kind = name.split(".")
        if kind == "floats":
            dtype = {"k": form.k_dtype, "v": form.v_dtype}[side]
            blocks = [(dtype if dtype in FLOATS else "float16", 0, array.shape[1] // (4 if dtype == "float32" else 2))]
        else:
            blocks = floats_in_blocks(form, side, block_size)
        for dtype, at, count in blocks:
            starts = np.arange(len(array))[:, None] * array.shape[1] + at + np.arange(count) * np.dtype(FLOATS[dtype]).itemsize
            yield name, dtype, starts.reshape(-1)


def forged(array, dtype, at, extra):
    """A copy with NaN or infinity at a byte."""
    array = array.copy()
    array.reshape(-1)[at : at + np.dtype(FLOATS[dtype]).itemsize].view(FLOATS[dtype])[0] = BITS[dtype] + extra
    return array


@parametrize(
    ("name", "kind"),
    [(name, kind) for name in FORMS for kind in ("growing", "ring with sinks")],
    [*((name, "growing") for name in USUAL), ("int4", "ring with sinks")],
)
def test_states_and_files(name, kind, rng, tmp_path):
    """NaN and infinity at every kind of place, first, last and in between."""
    form = kvfast.KVFormat.of(FORMS[name])
    cache = fill(make(kind, form), rng, 150 if form.block_size != 256 else 300)
    state, data, found = cache.state_dict(), cache.snapshot().to_bytes(), 0
    assert kvfast.Snapshot.from_bytes(with_tensors(data, dict)) == cache.snapshot()
    for array, dtype, starts in places(state, form):
        for at in {starts[0], starts[-1], starts[len(starts) // 2]} if len(starts) else ():
            for extra in (0, 1, 1 << (8 * np.dtype(FLOATS[dtype]).itemsize - 1)):
                wrong = forged(state[array], dtype, int(at), extra)
                with pytest.raises(kvfast.CorruptFileError, match=f"{array} cannot be used: it holds NaN or infinity"):
                    type(cache).from_state_dict(state | {array: wrong})
                found += 1
        bad = with_tensors(data, lambda tensors, array=array, wrong=wrong: tensors | {array: wrong})
        with pytest.raises(kvfast.CorruptFileError, match=f"{array} cannot be used"):
            kvfast.Snapshot.from_bytes(bad)
        (tmp_path / "cache").write_bytes(bad)
        with pytest.raises(kvfast.CorruptFileError, match=f"cache: {array} cannot be used"):
            kvfast.load(tmp_path / "cache")
        if array.endswith(("floats", "tail")):  # what is mapped is not read
            with pytest.raises(kvfast.CorruptFileError, match=f"cache: {array} cannot be used"):
                kvfast.load(tmp_path / "cache", mmap=True)
    assert found >= 6


@parametrize("name", FORMS, USUAL)
def test_the_largest_numbers_come_back(name):
    """What `append` takes, the readers take: also tokens that were read as codes, and then as floats again."""
    form = kvfast.KVFormat.of(FORMS[name])
    cache, size = kvfast.KVCache(1, 2, DIM, dtype=form), form.block_size or 64
    signs = np.sign(np.random.default_rng(0).standard_normal((3 * size, 2, DIM)))
    for most in (3.4e38, 2e38, 5e35, 65504, 65504 / 5):
        try:
            cache.append(0, *2 * [(signs * most).astype(np.float32)])
            break
        except kvfast.NonFiniteInputError:
            continue
    cache.advance(3 * size)
    for _ in range(2):
        state = cache.state_dict()
        assert kvfast.KVCache.from_state_dict(state).snapshot() == cache.snapshot()
        assert np.isfinite(cache.k(0)).all() and np.isfinite(cache.v(0)).all()
        cache.truncate(size + size // 2)  # within a sealed block
        filled(cache, *2 * [(signs[:3] * most).astype(np.float32)])


@pytest.mark.parametrize("name", ["int4", "int8", "means, int8", "int5/int2", "float16", "float32"])
@pytest.mark.parametrize("kind", ["growing", "sequence", "ring"])
def test_values_of_a_store(name, kind):
    """Chunks and ends with right checksums: what is wrong is deleted, and what was found before it is used."""
    form = kvfast.KVFormat.of(FORMS[name])
    store, stream = DictStore(), Stream(5, 300, layers=2)
    prompts = kvfast.PromptCache(store, chunk_tokens=64)
    cache = stream.feed(make("ring" if kind == "ring" else "growing", form), 290)
    prompts.save(cache, np.arange(290), "")
    sound, tried = dict(store.values), 0
    is_float = form.k_dtype in FLOATS
    for key, value in sound.items():
        if key.startswith("t"):
            continue
        payload = np.frombuffer(value, np.uint8)[HEADER_BYTES:].copy()
        start = 0 if key.startswith("c") else 4 + int.from_bytes(payload[:4].tobytes(), "little")
        if is_float:
            places = [(form.k_dtype, start), (form.v_dtype, len(payload) - 8)]
        elif key.startswith("e") and form.seals:
            places = [("float16", len(payload) - 2 * PADDED)]  # a float row
        elif key.startswith("c"):  # of a full block of keys
            places = [(dtype, at) for dtype, at, _ in floats_in_blocks(form, "k", 64)]
        else:
            places = []
        for dtype, at in places:
            at -= at % np.dtype(FLOATS[dtype]).itemsize if start == 0 else 0
            wrong = forged(payload, dtype, at, 1)
            store.values = sound | {key: complete(bytearray(HEADER_BYTES) + wrong.tobytes(), bytes.fromhex(key[2:]), b"", 0)}
            other = make(kind, form)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = prompts.restore(other, np.arange(300))
            tried += 1
            assert key not in store.values and found == len(other) < 290
            assert all(np.isfinite(side(layer)).all() for layer in range(LAYERS) for side in (other.k, other.v))
    assert tried or (kind == "ring" and not is_float and not form.seals)
    store.values = sound
    assert prompts.restore(make(kind, form), np.arange(300)) == 290


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_compressed_rows(method, rng):
    """Every float of compressed keys and values: bases, codebooks, and the caches within."""
    state = kvfast.KVCacheCompressor(method).compress_kv_3d(*correlated(rng, 2, 2, 300, 48)).state_dict()
    tried = 0
    for name, array in state.items():
        if array.dtype.kind == "f":
            wrong = array.copy()
            wrong.reshape(-1)[-1] = np.nan
        elif name.endswith("floats") or ".exact." in name and not name.endswith("header") and array.size:
            wrong = array.copy()
            wrong.reshape(-1).view(np.uint16)[:] = 0x7F81  # NaN as float16, as bfloat16 and as float32
        else:
            continue
        tried += 1
        with pytest.raises(kvfast.CorruptFileError):
            kvfast.CompressedKV.from_state_dict(state | {name: wrong})
    assert tried or not isinstance(method, kvfast.LowRank)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["int4", "k4v3"])
def test_a_forged_state_cannot_end_the_process(kind, name, rng):
    """What was accepted once ended it when the block was sealed."""
    cache = fill(make(kind, name), rng, 50)
    state = cache.state_dict()
    rows = state["layers.0.k.floats"] = state["layers.0.k.floats"].copy()
    rows.view(np.uint16)[:] = 0x7E00
    with pytest.raises(kvfast.CorruptFileError):
        kvfast.Snapshot.from_state_dict(state)
