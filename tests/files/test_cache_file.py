"""Caches in files: what comes back, what is refused, and what survives a kill.

``KVFAST_KILLS=200 python -m pytest tests/files/test_cache_file.py -k killed`` kills more processes than the usual 30.
"""

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from functools import partial

import numpy as np
import pytest
import safetensors
from cache_kinds import ALONE, CENTRED, DIM, DTYPES, HEADS, KINDS, LAYERS, QUERIES, contents, fill, make, same, seals, stored, tokens
from file_parts import fields, joined, parts, with_fields, with_settings, with_tensors, with_text
from in_threads import meanwhile
from selection import cases_of, exhaustive, pairwise, parametrize

import kvfast
from kvfast.files import cache_file

REFUSED = kvfast.CorruptFileError, kvfast.IncompatibleSnapshotError


@pytest.fixture(params=[False, True], ids=["read", "mapped"])
def mmap(request):
    return request.param


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


def saved(cache, path, **settings):
    cache.save(path, **settings)
    return path.read_bytes()


def refused(data, path, mmap=False, error=REFUSED, match=None):
    """A file is refused, and no large Python objects are made; `DamagedWorld` of the fuzzer has little memory."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(error, match=match) as caught:
            kvfast.load(path, mmap=mmap)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(str(path)) and peak < 20 * len(data) + (1 << 22)
    with pytest.raises(error):
        kvfast.Snapshot.load(path, mmap=mmap)


@pairwise(("kind", "dtype", "n", "mmap"), KINDS, DTYPES, [1, 64, 200], [False, True])
def test_comes_back_as_it_was(rng, path, kind, dtype, n, mmap):
    cache = fill(make(kind, dtype), rng, n)
    cache.append(0, *tokens(rng, 5))  # in progress: not saved
    snapshot = cache.snapshot(uncounted="drop")
    cache.save(path, uncounted="drop")
    loaded = kvfast.load(path, mmap=mmap)
    cache.restore(snapshot)
    assert type(loaded) is ALONE.get(kind, type(cache))
    assert same(loaded, cache) and loaded.snapshot() == snapshot and loaded.max_seq_len == cache.max_seq_len
    assert loaded.block_size == cache.block_size and stored(loaded) == stored(kvfast.Snapshot.load(path))
    rows = [tokens(rng, 90) for _ in range(LAYERS)]
    for one in (cache, loaded):
        for layer in range(LAYERS):
            one.append(layer, *rows[layer])
        one.advance(90)
    assert same(loaded, cache)
    cache.restore(kvfast.Snapshot.load(path, mmap=mmap))
    loaded.restore(snapshot)
    assert same(loaded, cache) and cache.snapshot() == snapshot


def test_threads_write_and_read_the_same(path, rng, mmap, kind, monkeypatch):
    """One thread does all the work of a file with few bytes."""
    cache = fill(make(kind), rng, 200)
    data = saved(cache, path)
    assert len(data) < cache_file.FEW_BYTES
    monkeypatch.setattr(cache_file, "FEW_BYTES", 0)
    header, body = parts(data)
    assert parts(saved(cache, path)) == parts(cache.snapshot().to_bytes()) == (header, body)
    assert same(kvfast.load(path, mmap=mmap), cache) and kvfast.Snapshot.from_bytes(data) == cache.snapshot()
    damaged, name = bytearray(data), next(name for name in header if name.startswith("layers.1.v"))
    damaged[header[name]["data_offsets"][0] - len(body)] ^= 1
    refused(bytes(damaged), path, False, kvfast.CorruptFileError, f"{name} is damaged: its checksum is wrong")


def test_empty(path, kind, rng, mmap):
    make(kind).save(path)
    loaded = kvfast.load(path, mmap=mmap)
    assert len(loaded) == 0 and loaded.max_seq_len == make(kind).max_seq_len
    snapshot = kvfast.Snapshot.load(path, mmap=mmap)
    assert snapshot == make(kind).snapshot()
    rows = np.random.default_rng(1)
    fresh = make(kind)
    fresh.restore(snapshot)
    assert same(fill(fresh, np.random.default_rng(1), 70), fill(loaded, rows, 70))


def test_ids_and_metadata(path, rng, mmap):
    given = {"model": 'Größe \ud800 \0 "x"', "": "é" * 5000}
    cache = fill(make("growing"), rng, 20)
    for n, ids in ((20, [-(1 << 63), (1 << 63) - 1, *range(18)]), (0, [])):
        cache.truncate(n)
        cache.save(path, token_ids=np.array(ids, np.int64), metadata=given)
        snapshot = kvfast.Snapshot.load(path, mmap=mmap)
        assert snapshot.token_ids.tolist() == ids and snapshot.metadata == given
        snapshot.save(path)
        again = kvfast.Snapshot.load(path, mmap=mmap)
        assert again.token_ids.tolist() == ids and again.metadata == given
    cache.save(path)
    assert kvfast.Snapshot.load(path).token_ids is None and kvfast.Snapshot.load(path).metadata == {}
    for wrong in ([1], np.zeros(0), "a"):
        with pytest.raises(ValueError):
            fill(cache, rng, 2).save(path, token_ids=wrong)
    assert len(kvfast.load(path)) == 0  # and the file is as it was


def test_restored_into_a_sequence_with_its_ids(path, rng, mmap):
    for dtype, found in (("int8", 96), ("int4", 64), (CENTRED, 96)):
        cache = fill(make("growing", dtype), rng, 100)
        cache.save(path, token_ids=range(100))
        size = None if seals(dtype) else 16
        pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks=8, block_size=size, dtype=dtype)
        sequence = pool.new_sequence()
        sequence.restore(kvfast.Snapshot.load(path, mmap=mmap))
        assert same(sequence, cache) and len(pool.match_prefix(range(100))) == found


@pytest.mark.parametrize("names", [3, 30, 300])
def test_tensors_start_at_a_page_and_the_library_reads_them(path, rng, kind, names):
    cache = fill(make(kind), rng, 130)
    cache.save(path, token_ids=range(130), metadata={f"name {i}": "x" * i for i in range(names)})
    header, _ = parts(path.read_bytes())
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 4096 == 0
    arrays = cache.snapshot().state_dict()
    with safetensors.safe_open(path, framework="np") as file:
        streams = [f"layers.{i}.{side}." for i in range(LAYERS) for side in "kv"]
        expected = {f"{stream}{part}" for stream in streams for part in [*range(HEADS), "floats"]}
        expected -= {name for name in expected if name not in arrays}  # of a ring, a layer may be short of full blocks
        assert set(file.keys()) == {"token_ids", *expected}
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            assert tensor.dtype == np.uint8 and (name == "token_ids" or np.array_equal(tensor, arrays[name]))
        assert file.get_tensor("token_ids").tobytes() == np.arange(130, dtype="<i8").tobytes()
    assert all(entry["data_offsets"][0] % 64 == 0 for name, entry in header.items() if name != "__metadata__")


def test_many_layers_and_heads(path, rng, mmap):
    """Names sort as their numbers do, from 10 on as well."""
    cache = kvfast.KVCache(12, 11, 16, k_dtype=["int8", "int4", "float16"] * 4)
    for layer in range(12):
        cache.append(layer, *rng.standard_normal((2, 200, 11, 16)).astype(np.float32))
    cache.advance(200)
    cache.save(path)
    loaded = kvfast.load(path, mmap=mmap)
    assert all(np.array_equal(loaded.k(i), cache.k(i)) and np.array_equal(loaded.v(i), cache.v(i)) for i in range(12))


@pytest.mark.parametrize("dtype", DTYPES)
def test_max_seq_len(path, rng, mmap, dtype):
    cache = fill(make("growing", dtype), rng, 100)
    cache.save(path)
    for most in (100, 101, 500, 5000):
        loaded = kvfast.load(path, mmap=mmap, max_seq_len=most)
        assert loaded.max_seq_len == most and loaded.capacity() >= most and same(loaded, cache)
        reserved = loaded.nbytes
        more = min(most - 100, 400)
        for n in [16] * (more // 16) + [more % 16]:  # so few that their float rows have room
            fill(loaded, rng, n)
        assert loaded.nbytes <= reserved  # float rows that a mapped file needed are given back
        if most <= 500:
            with pytest.raises(kvfast.CacheFullError):
                loaded.append(0, *tokens(rng, 1))
        loaded.truncate(100)
        assert same(loaded, cache) or seals(dtype) and most > 116
        loaded.clear()
        assert loaded.nbytes <= reserved
    for wrong, error in (
        (99, ValueError),
        (0, ValueError),
        (-1, ValueError),
        (1 << 41, ValueError),
        ("9", TypeError),
        (200.0, TypeError),
    ):
        with pytest.raises(error):
            kvfast.load(path, mmap=mmap, max_seq_len=wrong)
    make("bounded", dtype).save(path)
    assert kvfast.load(path, mmap=mmap).max_seq_len == 400
    assert kvfast.load(path, mmap=mmap, max_seq_len=10).max_seq_len == 10
    for n in (0, 100):
        fill(make("ring", dtype), rng, n).save(path)
        with pytest.raises(ValueError, match="max_seq_len"):
            kvfast.load(path, mmap=mmap, max_seq_len=1000)


def test_paths(tmp_path, rng, monkeypatch):
    cache = fill(make("growing"), rng, 10)
    monkeypatch.chdir(tmp_path)
    for path in ("relative", tmp_path / "Größe", str(tmp_path / "text"), os.fsencode(tmp_path / "bytes"), b"short"):
        cache.save(path)
        assert same(kvfast.load(path), cache) and kvfast.Snapshot.load(path, mmap=True) == cache.snapshot()
    (tmp_path / "link").symlink_to("text")
    fill(cache, rng, 1).save("link")
    assert (tmp_path / "link").is_symlink() and len(kvfast.load("text")) == 11
    assert sorted(os.listdir()) == ["Größe", "bytes", "link", "relative", "short", "text"]
    for path in ("none/x", "nothing"):
        with pytest.raises(FileNotFoundError):
            kvfast.load(path)
    with pytest.raises(OSError, match="none"):
        cache.save("none/x")
    with pytest.raises(OSError):
        cache.save(tmp_path)
    with pytest.raises(OSError):
        kvfast.load(tmp_path)
    for wrong in (None, 3.5, cache):
        with pytest.raises(TypeError):
            cache.save(wrong)
        with pytest.raises(TypeError):
            kvfast.load(wrong)
    assert len(os.listdir()) == 6  # and no part of a file is left


@pytest.mark.parametrize("dtype", ["int8", "int4", CENTRED])
def test_dropped_tokens_are_not_in_the_file(path, rng, kind, dtype):
    """The file is that of a cache that has never held them, but for the order of metadata: the library shuffles it."""
    given = [tokens(rng, 90) for _ in range(LAYERS)]
    secret, plain = make(kind, dtype), make(kind, dtype)
    for cache in (secret, plain):
        for layer in range(LAYERS):
            cache.append(layer, *given[layer])
        cache.advance(90)
    expected = parts(saved(plain, path))
    if kind.startswith("ring") or kind == "sequence with window":
        for layer in range(LAYERS):
            secret.append(layer, *tokens(rng, 70))
        secret.truncate(90)
    else:
        # After more, tokens before 90 have no float rows any more.
        fill(secret, rng, 5 if kvfast.KVFormat.of(dtype).open_tokens else 170)
        secret.append(0, *tokens(rng, 30))
        secret.truncate(90)
    assert parts(saved(secret, path)) == expected
    fill(secret, rng, 64)
    secret.clear()
    assert parts(saved(secret, path)) == parts(saved(make(kind, dtype), path))


def test_mapped_cache_lives_without_its_file(path, rng, kind):
    cache = fill(make(kind), rng, 200)
    before = saved(cache, path)
    first, second = kvfast.load(path, mmap=True), kvfast.load(path, mmap=True)
    fill(first, rng, 100)
    assert path.read_bytes() == before and same(second, cache)
    first.save(path)  # over what is mapped
    assert same(kvfast.load(path), first) and same(second, cache)
    path.unlink()
    assert same(second, cache)
    copy, snapshot = second.copy(), second.snapshot()
    second.clear()
    assert same(copy, cache) and snapshot == cache.snapshot()


def test_mapped_bytes_are_counted_once(path, rng):
    cache = fill(make("ring of two windows"), rng, 200)
    size = len(saved(cache, path))
    loaded = kvfast.load(path, mmap=True)
    # The blocks that are not full are in memory: one of each window, and seven more for the next tokens; and 128
    # float rows of each.
    floats = LAYERS * 128 * HEADS * 32 * 2 * 2
    assert loaded.nbytes <= size + 8 * loaded.block_size * loaded.bytes_per_token + floats


def test_other_files(path, tmp_path, rng, mmap):
    from safetensors.numpy import save

    x = np.zeros((2, 3), np.uint8)
    for data in (
        *(b"", b"\0", b"\0" * 8, b"\0" * 100000),
        *(b"\xff" * 5000, b"just a text\n" * 100, b"{}", (2).to_bytes(8, "little") + b"{}"),
        *(save({"a": x}), save({"layers.0.k": x}, {"kvfast": "{}"}), save({}), b"PK\3\4" + bytes(100)),
    ):
        refused(data, path, mmap, kvfast.CorruptFileError)
    np.savez(tmp_path / "cache.npz", **fill(make("growing"), rng, 3).state_dict())
    refused((tmp_path / "cache.npz").read_bytes(), path, mmap, kvfast.CorruptFileError)
    refused(save({"a": x}), path, mmap, kvfast.CorruptFileError, "not a kvfast file")
    refused(b"", path, mmap, kvfast.CorruptFileError, "not a sound safetensors file")


def tiny(path, n=3):
    cache = kvfast.KVCache(1, 1, 16, block_size=16, dtype="int8")
    if n:
        cache.append(0, *np.random.default_rng(n).standard_normal((2, n, 1, 16)).astype(np.float32))
        cache.advance(n)
    return cache, saved(cache, path)


def test_truncated(path, mmap):
    _, data = tiny(path)
    for length in {*range(0, len(data), 97), *range(16), *range(4090, 4110), *range(len(data) - 70, len(data))}:
        refused(data[:length], path, mmap, kvfast.CorruptFileError)
    for more in (b"\0", data[-64:], data):
        refused(data + more, path, mmap, kvfast.CorruptFileError)


@exhaustive
def test_every_bit_of_the_header(path):
    """A flipped bit is seen, unless it is in what means nothing: then the cache is what it was."""
    cache, data = tiny(path)
    snapshot, accepted = cache.snapshot(), 0
    header = parts(data)[0]
    padding = header["__metadata__"]["padding"]
    first = data.index(padding.encode())
    for at in range(4096):
        if first + 8 <= at < first + len(padding) - 8:
            continue  # thousands of spaces
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            path.write_bytes(changed)
            try:
                loaded = kvfast.Snapshot.load(path)
            except REFUSED:
                continue
            accepted += 1
            assert loaded == snapshot and loaded.metadata == {}
    assert accepted < 400  # in the padding and its name


def test_flips_in_the_blocks(path, rng):
    cache = fill(make("growing"), rng, 100)
    data = saved(cache, path, token_ids=range(100))
    for at in [4096, len(data) - 1, *rng.integers(4096, len(data), 100)]:
        changed = bytearray(data)
        changed[at] ^= 1 << int(rng.integers(8))
        refused(bytes(changed), path, False, kvfast.CorruptFileError, "is damaged: its checksum is wrong")


def test_versions(path, mmap):
    _, data = tiny(path)
    for version in (0, 1, 3, 4, 5, 6, 7, 1 << 40, 10**400):
        refused(with_fields(data, version=version), path, mmap, kvfast.IncompatibleSnapshotError, "this kvfast reads version 2")
        refused(
            with_text(data, json.dumps({"version": version, "whatever": 1})), path, mmap, kvfast.IncompatibleSnapshotError, "version"
        )
    for version in (-1, True, 1.0, "1", None, [1]):
        refused(with_fields(data, version=version), path, mmap, kvfast.CorruptFileError, "not a kvfast header")


def test_digest_protects_the_header(path, mmap):
    cache, data = tiny(path)
    header, body = parts(data)
    header["__metadata__"]["kvfast"] = json.dumps(fields(data) | {"metadata": {"a": "b"}})
    refused(joined(header, body), path, mmap, kvfast.CorruptFileError, "the header is damaged: its checksum is wrong")
    path.write_bytes(with_fields(data, metadata={"a": "b"}))  # the digest is not a secret, and these helpers do what they should
    assert kvfast.Snapshot.load(path, mmap=mmap).metadata == {"a": "b"} and stored(kvfast.load(path)) == stored(cache)
    for name in ("kvfast", "checksums", "digest"):
        one = {"__metadata__": {key: text for key, text in header["__metadata__"].items() if key != name}}
        refused(joined(header | one, body), path, mmap, kvfast.CorruptFileError, "not a kvfast file")


ABSURD = [
    *(-1, -(10**30), 10**400, 1 << 40, (1 << 40) + 1, 1 << 62, 1 << 63, 1 << 64),
    *(0.5, 3.0, 1e308, float("nan"), float("inf")),
    *("3", [], [3], {}),
    *(True, False),
]


@pytest.mark.parametrize("n", [0, 3])
@pytest.mark.parametrize("name", ["seq_len", "block_size", "max_seq_len", "tables", "settings", "metadata", "version"])
def test_absurd_fields(path, mmap, n, name):
    _, data = tiny(path, n)
    for value in [*ABSURD, None, *([0] if name != "seq_len" and n else [])]:
        if name == "max_seq_len" and (value is None or value == 1 << 40 and value is not True):
            path.write_bytes(with_fields(data, max_seq_len=value))  # a limit; no memory goes with it
            assert kvfast.load(path, mmap=mmap).max_seq_len == value and kvfast.load(path).nbytes < 1 << 20
        elif not (name == "metadata" and value == {}):
            refused(with_fields(data, **{name: value}), path, mmap)
    missing = fields(data)
    del missing[name]
    refused(with_text(data, json.dumps(missing)), path, mmap)


@pytest.mark.parametrize("n", [0, 3])
@pytest.mark.parametrize("name", ["kind", "num_layers", "num_kv_heads", "head_dim", "dtype"])
def test_absurd_settings(path, mmap, n, name):
    _, data = tiny(path, n)
    others = [None, "int9x", ["int8", "int8"], ["int9"], [None], [[]], "sequence", int("9" * 4300)]
    for value in ABSURD + others:
        refused(with_settings(data, **{name: value}), path, mmap, kvfast.CorruptFileError)
    settings = fields(data)["settings"]
    del settings[name]
    refused(with_fields(data, settings=settings), path, mmap, kvfast.CorruptFileError)
    refused(with_settings(data, more=1), path, mmap, kvfast.CorruptFileError)


def test_texts_that_are_no_header(path, mmap):
    _, data = tiny(path)
    good = json.dumps(fields(data))
    for text in (
        *("", " ", "null", "[]", "3", '"a"', "{"),
        *(good[:-1], good + "}", "[" * 100_000, '{"a":' * 100_000),
        *("9" * 5000, "\0", "NaN"),
    ):
        refused(with_text(data, text), path, mmap, kvfast.CorruptFileError)
    refused(with_fields(data, metadata={"a": 1}), path, mmap, kvfast.CorruptFileError)
    refused(with_text(data, good.replace('"seq_len": 3', '"seq_len": 3, "seq_len": 99')), path, mmap, kvfast.CorruptFileError)


def test_checksums_that_are_none(path, mmap):
    _, data = tiny(path)
    for checksums in (
        *("", "null", "[]", "{}", "3"),
        *("[" * 100_000, "9" * 5000, '{"layers.0.k": 3}', '["layers.0.k", "layers.0.v"]'),
        "\0",
    ):
        refused(with_text(data, None, checksums), path, mmap, kvfast.CorruptFileError)
    for value in (None, 3, [], "", "0" * 32):
        refused(
            with_text(data, None, json.dumps({f"layers.0.{side}.{name}": value for side in "kv" for name in ("0", "tail")})),
            path,
            False,
            kvfast.CorruptFileError,
        )


def test_ids_taken_out_of_the_file(path, rng, mmap):
    """Without a digest to match: the checksums tell which tensors there are."""
    header, body = parts(saved(fill(make("growing"), rng, 64), path, token_ids=range(64)))
    assert header.pop("token_ids")["data_offsets"][1] == len(body)
    refused(joined(header, body[: -64 * 8]), path, mmap, kvfast.CorruptFileError, "do not belong to these tensors")


@pytest.mark.parametrize(("dtype", "rest"), [("int8", "tail"), ("int4", "floats")])
def test_wrong_tensors(path, rng, mmap, dtype, rest):
    cache = fill(make("growing", dtype), rng, 100)
    data = saved(cache, path, token_ids=range(100))
    k = np.zeros((HEADS, 2, 5), np.uint8)
    for change, match in [
        (lambda t: t | {"extra": k}, "arrays"),
        (lambda t: {n: a for n, a in t.items() if n != "layers.1.v.0"}, "arrays"),
        (lambda t: {("layers.2.v" if n == "layers.1.v.0" else n): a for n, a in t.items()}, "layers.1.v.0 is missing"),
        (lambda t: t | {f"layers.0.k.{rest}": k}, "must have shape"),
        (lambda t: t | {"layers.0.k.0": t["layers.0.k.0"].reshape(-1)}, "must have shape"),
        (lambda t: t | {"layers.0.k.0": t["layers.0.k.0"][:, :1]}, "must have shape"),
        (lambda t: t | {f"layers.0.k.{rest}": t[f"layers.0.k.{rest}"].view("<f4")}, "must have dtype U8, got F32"),
        (lambda t: t | {"layers.0.k.0": t["layers.0.k.0"].view(np.int8)}, "must have dtype U8"),
        (lambda t: t | {"token_ids": t["token_ids"][:-1]}, "token_ids must have shape"),
        (lambda t: t | {"token_ids": t["token_ids"].reshape(-1)}, "token_ids must have shape"),
        (lambda t: t | {"token_ids": t["token_ids"].view("<i8")}, "must have dtype U8"),
        (lambda t: {}, "arrays"),
    ]:
        refused(with_tensors(data, change), path, mmap, kvfast.CorruptFileError, match)
    path.write_bytes(with_tensors(data, lambda t: {n: a for n, a in t.items() if n != "token_ids"}))
    assert kvfast.Snapshot.load(path, mmap=mmap).token_ids is None


def test_offsets_written_by_hand(path, mmap):
    _, data = tiny(path)
    header, body = parts(data)
    size, names = len(body) // 2, [name for name in header if name != "__metadata__"]
    for first, second in [
        ((0, size), (0, size)),
        ((0, size), (size - 64, 2 * size - 64)),
        ((0, size), (size, 3 * size)),
        ((0, size), (2 * size, 3 * size)),
        ((0, size), (1 << 40, (1 << 40) + size)),
        ((size, 0), (size, 2 * size)),
        ((0, size), (-size, 0)),
        ((0, size), (size, (1 << 64) - 1)),
        ((0, size), ((1 << 64) - size, 1 << 64)),
        ((0, 0), (0, 0)),
        ((0.0, size), (size, 2 * size)),
        ((size, 2 * size), (2 * size, 3 * size)),
    ]:
        changed = {names[0]: header[names[0]] | {"data_offsets": first}, names[1]: header[names[1]] | {"data_offsets": second}}
        refused(joined(header | changed, body), path, mmap, kvfast.CorruptFileError)
    for shape in ([1, 1, size + 1], [1 << 40, 1 << 40, 1 << 40], [0], [], [-1, -1, size], [size], [1, size, 1], [1 << 64]):
        refused(joined(header | {names[0]: header[names[0]] | {"shape": shape}}, body), path, mmap, kvfast.CorruptFileError)
    text = json.dumps(header).encode()
    for wrong in (
        text[:-1],
        text + b"}",
        b"[" * 5000,
        text.replace(b'"U8"', b'"U9"'),
        text.replace(b'"U8"', b'"F32"'),
        b"\xff" + text,
        text.replace(names[1].encode(), names[0].encode()),
    ):
        refused(joined(wrong, body), path, mmap, kvfast.CorruptFileError)
    for length in (0, 1, 7, len(data), len(data) - 8, 100_000_001, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1, (1 << 64) - 8):
        refused(struct.pack("<Q", length) + data[8:], path, mmap, kvfast.CorruptFileError)


def test_swapped_offsets_are_seen_by_the_checksums(path, rng):
    data = saved(fill(make("growing"), rng, 64), path)
    header, body = parts(data)
    one, other = header["layers.0.k.0"], header["layers.1.k.0"]
    header |= {"layers.0.k.0": other, "layers.1.k.0": one}
    refused(joined(header, body), path, False, kvfast.CorruptFileError, "layers.[01].k.0 is damaged")


def test_mapping_needs_aligned_tensors(path, rng):
    cache = fill(make("growing"), rng, 64)
    header, body = parts(saved(cache, path))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64 + 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    assert same(kvfast.load(path), cache)
    with pytest.raises(ValueError, match="cannot be mapped"):
        kvfast.load(path, mmap=True)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", ["ring", "ring with sinks", "ring without rollback", "ring and whole layer"])
@parametrize("every", [False, True], usual=[False])
def test_places_of_a_ring(path, rng, mmap, name, dtype, every):
    """Whatever a file says of what a ring has dropped, no block is read that is not in it."""
    ring = fill(make(name, dtype), rng, 700)
    data = saved(ring, path)
    tables, length = fields(data)["tables"], len(ring)
    [at] = [i for i, place in enumerate(tables) if "evicted_tokens" in place]
    good, accepted = tables[at], 0
    skips, evictions = good["skipped_blocks"], good["evicted_tokens"]
    cases = cases_of(
        every,
        sorted({0, 1, skips - 1, skips, skips + 1, 11, 12, 1 << 33, 1 << 62}),
        sorted({0, 1, evictions - 1, evictions, evictions + 1, 700, 701, 1 << 40, 1 << 62}),
        (length, length - 1, length + 64, length - 64, 1, (1 << 33) + length),
    )
    for skipped, evicted, seq_len in [(skips, evictions, length), *cases]:
        place = good | {"skipped_blocks": skipped, "evicted_tokens": evicted}
        path.write_bytes(with_fields(data, seq_len=seq_len, tables=[place if i == at else one for i, one in enumerate(tables)]))
        try:
            loaded = kvfast.load(path, mmap=mmap)
        except kvfast.CorruptFileError:
            assert (place, seq_len) != (good, length)
            continue
        accepted += 1
        for _ in range(2):
            for layer in range(LAYERS):
                assert loaded.attend(layer, QUERIES[:1]).shape == (1, 4, DIM)
                assert len(loaded.k(layer)) == len(loaded.v(layer)) == len(loaded.positions(layer))
            fill(loaded, rng, 100)
        if (place, seq_len) == (good, length):
            loaded = kvfast.load(path, mmap=mmap)
            assert same(loaded, ring)
    assert accepted
    for place in (
        *({}, {"skipped_blocks": 0}, good | {"more": 1}, good | {"evicted_tokens": 3.0}),
        *(good | {"skipped_blocks": True}, good | {"skipped_blocks": -1}, good | {"evicted_tokens": -1}),
        *(good | {"evicted_tokens": None}, [], None),
    ):
        refused(
            with_fields(data, tables=[place if i == at else one for i, one in enumerate(tables)]), path, mmap, kvfast.CorruptFileError
        )
    for wrong in ([], tables * 2, tables[::-1] if len(tables) > 1 else [{}]):
        refused(with_fields(data, tables=wrong), path, mmap, kvfast.CorruptFileError)


def test_place_of_a_cache_that_keeps_everything(path, mmap):
    _, data = tiny(path)
    for place in (
        *({}, {"skipped_blocks": 1}, {"skipped_blocks": 0.0}, {"skipped_blocks": -0.0}),
        *({"skipped_blocks": False}, {"skipped_blocks": 0, "evicted_tokens": 0}),
    ):
        refused(with_fields(data, tables=[place]), path, mmap, kvfast.CorruptFileError)


def test_settings_of_rings(path, rng, mmap):
    data = saved(fill(make("ring with sinks"), rng, 100), path)
    for changes in (
        *({"windows": [90]}, {"windows": [90, 90, 90]}, {"windows": [0, 90]}, {"windows": [None, None]}),
        *({"windows": 90.5}, {"windows": "ab"}, {"windows": [90, 1 << 62]}, {"windows": [90, -1]}),
        *({"windows": []}, {"windows": None}, {"windows": {}}, {"windows": [[90], 90]}, {"windows": [4, 4]}),
        *({"num_sink_tokens": 91}, {"num_sink_tokens": -1}, {"num_sink_tokens": None}, {"rollback": -1}),
        *({"rollback": 1.5}, {"rollback": 1 << 62}, {"rope": "cache"}, {"rope": 0}, {"rope": []}, {"rope": {}}),
        *({"rope": True}, {"sliding_window": 90}, {"more": 1}, {"windows": [90, 40]}, {"kind": "full"}),
        *({"kind": []}, {"kind": {}}, {"kind": None}, {"kind": "Ring"}),
    ):
        refused(with_settings(data, **changes), path, mmap, kvfast.CorruptFileError)
    refused(with_fields(data, block_size=32), path, mmap, kvfast.CorruptFileError)
    refused(with_fields(data, max_seq_len=1000), path, mmap, kvfast.CorruptFileError)
    whole = saved(fill(make("growing"), rng, 100), path)
    refused(with_settings(whole, kind="ring"), path, mmap, kvfast.CorruptFileError)


def test_windows_of_any_size_reserve_nothing(path, rng, mmap):
    """A window is a number in a file; what is reserved follows from the bytes that are there."""
    for n in (0, 60, 100):  # without blocks, with an open one, with full ones, which may be mapped
        data = saved(fill(kvfast.RingKVCache(LAYERS, HEADS, DIM, 100, rollback=0), rng, n), path)
        for window in (1 << 20, 1 << 31, 1 << 40):
            for rollback in (0, 1 << 40):
                path.write_bytes(with_settings(data, windows=[window] * 2, rollback=rollback))
                first = kvfast.load(path, mmap=mmap)
                for ring in (first, kvfast.load(kvfast.Snapshot.load(path)), kvfast.load(first.snapshot())):
                    assert ring.sliding_window == window and ring.nbytes < 1 << 20
                    fill(ring, rng, 100)
                    assert ring.nbytes < 1 << 20 and len(contents(ring)) == 7
                    assert ring.copy().nbytes < 1 << 20


def test_a_ring_that_goes_back_far_is_loaded(path, rng, mmap):
    """A large rollback of a ring's own: its file takes memory for the tokens that are there, and goes on as the ring does."""
    ring = fill(kvfast.RingKVCache(LAYERS, HEADS, DIM, 32, rollback=10**6, dtype="float32"), rng, 70)
    ring.save(path)
    others = [kvfast.load(path, mmap=mmap), kvfast.load(kvfast.Snapshot.load(path))]
    k, v = tokens(rng, 500)
    for cache in (ring, *others):
        for layer in range(LAYERS):
            cache.append(layer, k, v)
        cache.advance(500)
        cache.truncate(60)
    assert all(same(one, ring) and one.nbytes < 1 << 22 for one in others)


def test_layers_without_arrays_are_refused_before_they_are_made(path, rng, mmap):
    data, count = saved(fill(make("ring"), rng, 10), path), 1 << 14
    form, table = fields(data)["settings"]["dtype"][:1], fields(data)["tables"][:1]
    forged = with_settings(data, num_layers=count, dtype=form * count, windows=list(range(32, 32 + count)))
    path.write_bytes(with_fields(forged, tables=table * count))
    tracemalloc.start()
    with pytest.raises(kvfast.CorruptFileError, match="arrays"):
        kvfast.load(path, mmap=mmap)
    assert tracemalloc.get_traced_memory()[1] < 8 * path.stat().st_size
    tracemalloc.stop()


def test_rope_of_rings(path, rng, mmap):
    ring = fill(make("ring that rotates"), rng, 100)
    data = saved(ring, path)
    assert same(kvfast.load(path, mmap=mmap), ring)
    for frequencies in (
        *([float("nan")] * 8, [float("inf")], [1.0] * 11, [1.0] * 100_000),
        *([], ["a"], ["1.0"] * 8, [[1.0] * 8], {"a": 1}),
        *("abc", 3, [10**400], [1.0, None]),
        *([[]], [{}], True),
    ):
        refused(with_settings(data, rope={"frequencies": frequencies, "interleaved": True}), path, mmap, kvfast.CorruptFileError)
    for rope in ({"frequencies": [1.0] * 8}, {"interleaved": True}, [1.0] * 8, "frequencies", 3):
        refused(with_settings(data, rope=rope), path, mmap, kvfast.CorruptFileError)


def test_many_layers_in_a_header_alone(path, mmap):
    _, data = tiny(path)
    for count in (2, 1 << 16, 1 << 20):
        refused(with_settings(data, num_layers=count), path, mmap, kvfast.CorruptFileError, "describes no cache")


def test_sparse_file_of_a_terabyte(path, mmap):
    """Its size is refused before anything is read."""
    _, data = tiny(path)
    path.write_bytes(data)
    os.truncate(path, 1 << 40)
    start = time.perf_counter()
    with pytest.raises(kvfast.CorruptFileError):
        kvfast.load(path, mmap=mmap)
    assert time.perf_counter() - start < 5


def test_replaced_while_others_load(path, rng):
    """A loader gets the old file or the new one, whole."""
    caches = [fill(make(kind), rng, n) for kind, n in (("growing", 30), ("growing", 200), ("ring and whole layer", 150))]
    snapshots = [cache.snapshot() for cache in caches]
    caches[0].save(path)
    loads = [0, 0]

    def load(which, expected):
        assert kvfast.Snapshot.load(path, mmap=which == 1) in expected
        loads[which] += 1

    # Loaders in this process share the interpreter with each other; the saver is another process.
    script = (
        "import sys, kvfast\n"
        "path, *sources = sys.argv[1:]\n"
        "snapshots = [kvfast.Snapshot.load(source) for source in sources]\n"
        "for _ in range(60):\n"
        "    for snapshot in snapshots:\n"
        "        snapshot.save(path)\n"
    )
    sources = [path.with_name(f"source{i}") for i in range(3)]
    for snapshot, source in zip(snapshots, sources):
        snapshot.save(source)
    # A snapshot serves one thread.
    loaders = [partial(load, which, [kvfast.Snapshot.load(source) for source in sources]) for which in (0, 1)]
    with meanwhile(*loaders):
        subprocess.run([sys.executable, "-c", script, path, *sources], check=True, timeout=60)
    assert min(loads) > 10
    assert len(os.listdir(path.parent)) == 4


SAVER = """
import sys, kvfast, safetensors.numpy
path, *sources = sys.argv[1:]
snapshots = [kvfast.Snapshot.load(source) for source in sources]
print("ready", flush=True)
while True:
    for snapshot in snapshots:
        snapshot.save(path)
"""


@pytest.mark.skipif(os.name != "posix", reason="kill -9")
@parametrize("kills", [3, 30], usual=[3])
def test_killed_while_saving(tmp_path, rng, kills):
    """After `kill -9` at any moment the file is one of the two that were saved in turn, and complete."""
    kills, dice, seen = int(os.environ.get("KVFAST_KILLS", kills)), random.Random(0), []
    path, sources, snapshots = tmp_path / "cache", [tmp_path / "a", tmp_path / "b"], []
    for value, source in zip((1.0, 2.0), sources):
        cache = kvfast.KVCache(4, 4, 64, dtype="float32")
        rows = np.full((300, 4, 64), value, np.float32)
        for layer in range(4):
            cache.append(layer, rows, -rows)
        cache.advance(300)
        snapshots.append(cache.snapshot([int(value)] * 300, {"value": str(value)}))
        snapshots[-1].save(source)
    start = time.perf_counter()
    for snapshot in snapshots:
        snapshot.save(path)
    round_trip, killed_inside = time.perf_counter() - start, 0
    for _ in range(kills):
        with subprocess.Popen([sys.executable, "-c", SAVER, path, *sources], stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(dice.uniform(0, 2 * round_trip))
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert process.returncode == -signal.SIGKILL
        left = set(os.listdir(tmp_path)) - {"cache", "a", "b"}
        killed_inside += bool(left)
        loaded = kvfast.Snapshot.load(path, mmap=dice.random() < 0.5)
        [which] = [i for i, snapshot in enumerate(snapshots) if loaded == snapshot]
        assert loaded.metadata == snapshots[which].metadata and set(loaded.token_ids) == {which + 1}
        seen.append(which)
        for name in left:
            shutil.rmtree(tmp_path / name)
    print(
        f"{kills} kills, {seen.count(0)} and {seen.count(1)} of each cache found, "
        f"{killed_inside} with a part of a file left behind; a save takes {500 * round_trip:.1f} ms"
    )
    assert (killed_inside or kills < 30) and len(seen) == kills


def test_parts_left_behind_do_no_harm(path, rng):
    cache = fill(make("growing"), rng, 10)
    left = [path.with_name("cache.0123.part"), path.with_name("cache.4567.part")]
    for one in left:
        one.mkdir()
        (one / "cache").write_bytes(b"half a file")
    cache.save(path)
    assert same(kvfast.load(path), cache)
    fill(cache, rng, 5).save(path)
    assert same(kvfast.load(path, mmap=True), cache)
    assert sorted(os.listdir(path.parent)) == sorted(["cache", *(one.name for one in left)])


def test_failed_save_leaves_the_old_file(path, rng, monkeypatch):
    cache = fill(make("growing"), rng, 10)
    before = saved(cache, path)

    def fail(*args):
        raise OSError("no space left")

    for name in ("replace", "fsync"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, fail)
            with pytest.raises(OSError, match="no space left"):
                fill(cache, rng, 5).save(path)
        assert path.read_bytes() == before and os.listdir(path.parent) == ["cache"]


def test_without_the_packages(path, rng, monkeypatch):
    cache = fill(make("growing"), rng, 10)
    cache.save(path)
    for name in ("xxhash", "safetensors.numpy"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, name, None)
            with pytest.raises(ModuleNotFoundError, match=r"kvfast\[files\]"):
                cache.save(path)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "safetensors", None)
        with pytest.raises(ModuleNotFoundError, match=r"kvfast\[files\]"):
            kvfast.load(path)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")
def test_bytes_that_memory_has_no_room_for():
    """The library would end the process."""
    script = (
        "import resource, numpy as np, kvfast\n"
        "def snapshot(n):\n"
        "    cache = kvfast.KVCache(1, 8, 128, dtype='float32')\n"
        "    cache.append(0, *np.ones((2, n, 8, 128), np.float32))\n"
        "    cache.advance(n)\n"
        "    return cache.snapshot()\n"
        "large = snapshot(8000)\n"
        "snapshot(3).to_bytes()\n"
        "refused = 0\n"
        "for room in range(20, 161, 20):\n"
        "    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (used + (room << 20), resource.RLIM_INFINITY))\n"
        "    try:\n"
        "        large.to_bytes()\n"
        "    except MemoryError:\n"
        "        refused += 1\n"
        "assert 1 <= refused < 8, refused\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
