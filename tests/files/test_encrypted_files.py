"""Encrypted files: what is on the disk, keys that change, and files that someone has changed."""

import tracemalloc

import numpy as np
import pytest
from cache_kinds import KINDS, fill, make
from compressed_rows import correlated

import kvfast
from kvfast.files.encryption import FILE_HEAD_BYTES, PIECE_BYTES, TAG_BYTES

for package in ("cryptography", "safetensors", "xxhash"):
    pytest.importorskip(package)

OLD, NEW = bytes(range(32)), bytes(range(1, 33))
STEP = PIECE_BYTES + TAG_BYTES


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def cache(rng):
    return fill(make("growing", "float32"), rng, 1000)  # of some pieces


@pytest.mark.parametrize("kind", KINDS)
def test_comes_back_as_it_was(rng, path, kind):
    cache = fill(make(kind, "int8"), rng, 200)
    snapshot = cache.snapshot(metadata={"about": "a text that nobody shall read"})
    snapshot.save(path, key=OLD)
    first = path.read_bytes()
    snapshot.save(path, key=OLD)
    assert path.read_bytes()[FILE_HEAD_BYTES:] != first[FILE_HEAD_BYTES:]
    assert len(first) >= FILE_HEAD_BYTES + len(snapshot.to_bytes()) + TAG_BYTES and not any(
        part in first for part in (b"nobody", b"layers", snapshot.to_bytes()[-16:])
    )
    assert kvfast.Snapshot.load(path, key=OLD) == snapshot and kvfast.load(path, key=[NEW, OLD]).snapshot() == cache.snapshot()


def test_compressed_caches(rng, path):
    compressed = kvfast.KVCacheCompressor(kvfast.LowRank(16)).compress_kv_3d(*correlated(rng, 2, 1, 100, 32))
    compressed.save(path, key=OLD)
    found = kvfast.CompressedKV.load(path, key=OLD).state_dict()
    assert all(np.array_equal(one, found[name]) for name, one in compressed.state_dict().items())


def test_the_first_key_encrypts_and_all_decrypt(cache, path):
    cache.save(path, key=[NEW, OLD])
    assert kvfast.load(path, key=NEW).snapshot() == cache.snapshot()
    for key, words in ((OLD, " with another key"), (None, "")):
        with pytest.raises(kvfast.IncompatibleSnapshotError, match=f"{path}: encrypted{words}: load it with the key of `save`"):
            kvfast.load(path, key=key)
    with pytest.raises(ValueError, match="mmap must be False for an encrypted file"):
        kvfast.load(path, key=NEW, mmap=True)
    with pytest.raises(ValueError, match="key must be None for a Snapshot"):
        kvfast.load(cache.snapshot(), key=NEW)
    for key in (b"short", [], "a" * 32):
        with pytest.raises(ValueError, match=r"a key must be 32 bytes, or several of them$"):
            cache.save(path, key=key)
    cache.save(path)
    with pytest.raises(kvfast.CorruptFileError, match="not encrypted, or damaged"):
        kvfast.load(path, key=NEW)


def test_what_was_changed_is_refused(cache, path):
    cache.save(path, key=OLD)
    other = path.read_bytes()
    cache.save(path, key=OLD)
    whole = path.read_bytes()
    count, wrong = -(-(len(whole) - FILE_HEAD_BYTES) // STEP), []
    assert count > 4
    for at in (*range(FILE_HEAD_BYTES), *range(FILE_HEAD_BYTES, len(whole), 20011), len(whole) - 1):
        wrong.append(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    wrong += [whole[:at] for at in (0, 8, FILE_HEAD_BYTES, *range(FILE_HEAD_BYTES + STEP, len(whole), STEP), len(whole) - 1)]
    wrong += [whole + b"x", whole + whole[-STEP:]]
    cut = lambda n, of=whole: of[FILE_HEAD_BYTES + n * STEP :][:STEP]
    for order in ((1, 0, *range(2, count)), (0, 0, *range(2, count)), (*range(count - 3), count - 2, count - 3, count - 1)):
        wrong.append(whole[:FILE_HEAD_BYTES] + b"".join(map(cut, order)))
    wrong.append(whole[:FILE_HEAD_BYTES] + cut(0) + cut(1, other) + whole[FILE_HEAD_BYTES + 2 * STEP :])
    for data in wrong:
        path.write_bytes(data)
        with pytest.raises((kvfast.CorruptFileError, kvfast.IncompatibleSnapshotError), match=str(path)):
            kvfast.load(path, key=OLD)
    path.write_bytes(whole)
    assert kvfast.load(path, key=OLD).snapshot() == cache.snapshot()


def test_a_file_is_decrypted_in_pieces(rng, path):
    cache = fill(make("growing", "float32"), rng, 20000)
    tracemalloc.start()
    try:
        cache.save(path, key=OLD)
        kept = kvfast.load(path, key=OLD)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 1 << 23 and peak - held < 1 << 21 and len(kept) == 20000
