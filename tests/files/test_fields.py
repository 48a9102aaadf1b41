"""Every field of every header is of its exact type and in its range, or the file is refused: one table for each reader."""

import copy
import json
import struct

import numpy as np
import pytest
from cache_kinds import KINDS, fill, filled, make
from compressed_rows import METHODS, correlated
from damaged_files import places
from file_parts import with_text

import kvfast
from kvfast.caches.multi_head import MultiHeadConfig
from kvfast.compression.fields import COMPRESSED
from kvfast.files.fields import HEADER, check_fields
from kvfast.prompts.envelope import HEADER_BYTES, complete, num_tokens_of, payload_of

pytest.importorskip("safetensors")

REFUSED = kvfast.CorruptFileError, kvfast.IncompatibleSnapshotError
OTHERS = [True, False, 0.0, 1.0, 64.0, float("nan"), "1", [], {}, [True], -1, 1 << 63, 10**400]


def other_types(value):
    """Values of every other type, and numbers beyond every range."""
    same = (int, bool) if type(value) is bool else (type(value),)
    others = [one for one in OTHERS if type(one) not in same or type(value) is int and not 0 <= one < 1 << 50]
    return others + ([float(value), str(value), value != 0] if type(value) is int else [int(value)] if type(value) is bool else [])


def heads():
    cache = kvfast.MultiHeadKVCache(3, MultiHeadConfig(1, bits=(5, 3), num_q_heads=3))
    cache.push_tokens(*np.random.default_rng(0).standard_normal((2, 50, 3, 1), np.float32))
    return cache


def latent():
    cache = filled(kvfast.MLAKVCache(1, 16, 1), np.ones((50, 17), np.float32))
    return cache


def one_of_each():
    """A cache whose sizes are all 1, where a boolean could stand for them."""
    cache = filled(kvfast.KVCache(1, 1, 1, 1, dtype="float16", block_size=16), *np.ones((2, 1, 1, 1), np.float32))
    return cache


CACHES = {
    **{kind: lambda kind=kind: fill(make(kind), np.random.default_rng(0), 150) for kind in KINDS},
    "int8": lambda: fill(make("bounded", "int8"), np.random.default_rng(0), 70),
    "heads": heads,
    "latent": latent,
    "ones": one_of_each,
}


@pytest.mark.parametrize("name", CACHES)
def test_header_of_a_cache(name):
    cache = CACHES[name]()
    snapshot = cache.snapshot() if name == "heads" else cache.snapshot(metadata={"a": "b"})
    state = snapshot.state_dict()
    header = json.loads(state["header"].tobytes())
    check_fields(header, HEADER, "header")
    for way in list(places(header))[1:]:
        inner = changed = copy.deepcopy(header)
        for key in way[:-1]:
            inner = inner[key]
        for other in other_types(inner[way[-1]]):
            if way[-1] == "seed" and other == 1 << 63:
                continue  # which is below 2**64
            inner[way[-1]] = other
            text = json.dumps(changed)
            with pytest.raises(REFUSED) as raised:
                kvfast.Snapshot.from_state_dict(state | {"header": np.frombuffer(text.encode(), np.uint8)})
            assert len(str(raised.value)) < 600
    for more in ("salted", "more"):
        for value in (False, 1, "true", None):
            text = json.dumps(header | {more: value})
            with pytest.raises(REFUSED):
                kvfast.Snapshot.from_bytes(with_text(snapshot.to_bytes(), text))
    twice = json.dumps(header)[:-1] + f', "seq_len": {header["seq_len"]}}}'
    with pytest.raises(kvfast.CorruptFileError, match="twice"):
        kvfast.Snapshot.from_bytes(with_text(snapshot.to_bytes(), twice))


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("batch", [False, True])
def test_header_of_compressed_rows(method, batch, rng):
    k, v = correlated(rng, 2, 1, 2, 300, 48)
    compressor = kvfast.KVCacheCompressor(method)
    state = (compressor.compress_kv(k, v) if batch else compressor.compress_kv_3d(k[0], v[0])).state_dict()
    header = json.loads(state["header"].tobytes())
    check_fields(header, COMPRESSED[type(method).__name__], "header")
    ways = [way for way in list(places(header))[1:] if way[:3] != ("parts", 0, "store") or len(way) < 6]
    for way in ways:
        inner = changed = copy.deepcopy(header)
        for key in way[:-1]:
            inner = inner[key]
        for other in other_types(inner[way[-1]]):
            if (
                way == ("method", "bits")
                and other == "1"
                or (way[0], way[-1], type(other)) in (("method", "energy", float), ("error", way[-1], float))
            ):
                continue
            inner[way[-1]] = other
            with pytest.raises(REFUSED):
                kvfast.CompressedKV.from_state_dict(state | {"header": np.frombuffer(json.dumps(changed).encode(), np.uint8)})


def test_positions_whose_differences_overflow(rng):
    state = kvfast.KVCacheCompressor(kvfast.VectorQuantization(16, 4)).compress_kv_3d(*correlated(rng, 2, 1, 300, 16)).state_dict()
    name = "0.positions"
    positions = state[name].copy()
    assert len(positions) >= 3
    positions[1:3] = 2**62 + 10, -(2**62) - 10
    with pytest.raises(kvfast.CorruptFileError, match="must ascend below 300"):
        kvfast.CompressedKV.from_state_dict(state | {name: positions})
    bounds = state["0.store.k.bounds"].copy()
    bounds[0, 1:3] = 2**31 - 1, -(2**31)
    with pytest.raises(kvfast.CorruptFileError, match="codebooks of side k"):
        kvfast.CompressedKV.from_state_dict(state | {"0.store.k.bounds": bounds})


def test_header_of_a_value():
    digest = bytes(range(32))
    value = complete(bytearray(HEADER_BYTES + 10), digest, b"", 77)
    assert len(payload_of(value, digest, b"")) == 10 and num_tokens_of(value[:HEADER_BYTES]) == 77
    for at, form, wrong in [
        (0, "<Q", 1),
        (8, "<I", 2),
        (12, "<I", 1),
        (16, "<Q", 11),
        (16, "<Q", 1 << 63),
        (24, "<B", 9),
        (56, "<B", value[56] ^ 1),
        (72, "<Q", 1 << 63),
        (80, "<B", 1),
        (127, "<B", 1),
    ]:
        other = bytearray(value)
        struct.pack_into(form, other, at, wrong)
        with pytest.raises(kvfast.CorruptFileError):
            payload_of(other, digest, b"")
    assert num_tokens_of(bytearray(value[:72]) + struct.pack("<Q", 1 << 63) + bytes(48)) is None
