"""A test for each claim of docs/threat-model.md."""

import ast
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cache_kinds import DTYPES, fill, filled, make, tokens

import kvfast
from kvfast.caches.multi_head import MultiHeadConfig

ROOT = Path(__file__).parents[2]


# Prompts of others.


def stored_prefix(token_ids, salt=b"", pool=None):
    pool = pool or kvfast.PagedKVCache(1, 1, 16, num_blocks=64, block_size=16, dtype="float32")
    sequence = pool.match_prefix(token_ids, salt)
    n = len(token_ids) - len(sequence)
    rows = np.repeat(np.asarray(token_ids[-n:], np.float32)[:, None, None], 16, 2)
    filled(sequence, rows, rows, token_ids=token_ids[-n:])
    return pool, sequence


def test_a_prefix_is_found_under_its_salt_only():
    prompt = list(range(40))
    pool, _ = stored_prefix(prompt, b"alice")
    assert len(pool.match_prefix(prompt, b"alice")) == 32
    for salt in (b"", b"bob", b"alic", b"alice\0", b"ALICE"):
        assert len(pool.match_prefix(prompt, salt)) == 0


def test_prefix_hashes_are_keyed_by_pool():
    """So that nobody can compute outside which prompts collide, nor which a pool knows."""
    indexes = [kvfast.PagedKVCache(1, 1, 16, num_blocks=4, block_size=16, dtype="int8")._batches.index for _ in range(2)]
    digests = [index.digests(np.arange(64), 16) for index in indexes]
    assert digests[0] == indexes[0].digests(np.arange(64), 16)
    assert not set(digests[0]) & set(digests[1]) and {len(one) for one in digests[0]} == {64}


def test_prompts_that_other_hashes_confuse_are_apart():
    """Numbers that Python hashes alike, that are alike in fewer bits, or whose bytes are those of other prompts."""
    base = [1 << 40] * 16
    alike = [-1, -2, 0, 1, (1 << 61) - 1, (1 << 61), (1 << 32) + 1, 1 << 32, (1 << 63) - 1, -(1 << 63), 256, 1 << 8 << 8]
    pool = None
    for token in alike:
        pool, _ = stored_prefix([token, *base, 5], pool=pool)
    for token in alike:
        found = pool.match_prefix([token, *base, 5])
        assert len(found) == 16 and found.k(0)[0, 0, 0] == np.float32(token)
    for other in ([2, *base, 5], [*base, alike[0], 5], [alike[0], *base[2:], 6, 5]):
        assert len(pool.match_prefix(other)) == 0
    with pytest.raises(ValueError, match=r"below 2\*\*63"):
        pool.match_prefix(np.array([(1 << 64) - 1, *base, 5], np.uint64))


def test_a_prefix_in_the_middle_is_not_one_at_the_start():
    """A block is known by all that leads to it, not by its own tokens."""
    pool, _ = stored_prefix([1] * 16 + [2] * 16 + [3])
    assert len(pool.match_prefix([2] * 16 + [3])) == 0
    assert len(pool.match_prefix([4] * 16 + [2] * 16 + [3])) == 0
    assert len(pool.match_prefix([1] * 16 + [2] * 16 + [3])) == 32


# Files.


def test_nothing_is_unpickled_or_executed():
    """No module of the package names what runs what it reads."""
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for path in Path(kvfast.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not banned & {name.split(".")[0] for name in names}, path
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                assert called not in ("eval", "exec") or isinstance(node.func, ast.Attribute), path
                assert not any(one.arg == "allow_pickle" for one in node.keywords), path
    for path in Path(kvfast.__file__).parent.rglob("*.pyx"):
        assert not any(f"import {name}" in path.read_text("utf-8") for name in banned), path


def test_no_cache_can_be_pickled():
    cache = fill(make("growing"), np.random.default_rng(0), 3)
    pool = kvfast.PagedKVCache(1, 1, 16, 4)
    heads = kvfast.MultiHeadKVCache(1, MultiHeadConfig(16))
    rows = np.ones((1, 20, 16), np.float32)
    compressed = kvfast.KVCacheCompressor(kvfast.Quantize(8)).compress_kv_3d(rows, rows)
    latent = kvfast.MLAKVCache(1, 16, 8)
    prefix = kvfast.PrefixKVCache([compressed])
    for one in (
        *(cache, cache.snapshot(), pool, pool.new_sequence(), heads, compressed, latent, prefix),
        kvfast.PagedMLAKVCache(1, 16, 8, 4),
    ):
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(one)


@pytest.mark.skipif(os.name != "posix", reason="rights of POSIX")
def test_file_in_writing_is_private(tmp_path, monkeypatch):
    """A part has a folder of its own that nobody else enters, with a name that nobody can guess."""
    pytest.importorskip("safetensors")
    cache, seen = fill(make("growing"), np.random.default_rng(0), 3), []
    real = os.replace

    def replace(source, target):
        folder = Path(source).parent
        seen.append((folder.name, folder.stat().st_mode & 0o777, folder.is_symlink()))
        return real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    old = os.umask(0)
    try:
        for _ in range(2):
            cache.save(tmp_path / "cache")
    finally:
        os.umask(old)
    assert [one[1:] for one in seen] == [(0o700, False)] * 2 and seen[0][0] != seen[1][0]
    assert os.listdir(tmp_path) == ["cache"]
    # Had somebody guessed the name, the folder or link that he made would not be used.
    monkeypatch.setattr(os, "urandom", lambda count: b"\0" * count)
    (tmp_path / f"cache.{'00' * 16}.part").symlink_to(tmp_path.parent)
    with pytest.raises(FileExistsError):
        cache.save(tmp_path / "cache")


# What others left in memory.


def raw(cache):
    """All bytes of a cache's blocks, as (num_blocks, bytes)."""
    pool = cache._batches.pool if hasattr(cache, "_batches") else cache._storage.tables[0].pool
    sides = [
        pool.bytes_of_head(layer, first, min(8, pool.num_blocks - first), head, values).copy()
        for first in range(0, pool.num_blocks, 8)
        for layer in range(pool.num_layers)
        for head in range(pool.num_kv_heads)
        for values in (False, True)
    ]
    per = pool.num_layers * pool.num_kv_heads * 2
    rows = [np.concatenate(sides[i : i + per], axis=1) for i in range(0, len(sides), per)]
    return np.concatenate(rows)


@pytest.fixture(params=DTYPES, ids=str)
def pool(request):
    return kvfast.PagedKVCache(2, 2, 20, num_blocks=24, dtype=request.param, secure=True)


def owned(pool):
    return pool._batches.owners() > 0


def test_freed_blocks_are_zero(pool, rng):
    a, b = fill(pool.new_sequence(), rng, 150), fill(pool.new_sequence(), rng, 40)
    kept = raw(pool)[owned(pool)].copy()
    assert kept.any()
    before = b.state_dict()
    a.free()
    assert not raw(pool)[~owned(pool)].any()
    assert all(np.array_equal(before[name], array) for name, array in b.state_dict().items())
    b.clear()
    assert not raw(pool).any()


def test_a_sequence_that_is_forgotten_leaves_nothing(pool, rng):
    fill(pool.new_sequence(), rng, 150)
    assert pool.num_free_blocks == pool.num_blocks and not raw(pool).any()


def test_truncated_tokens_are_zero(pool, rng):
    """Also the tokens of the remaining block after the last token."""
    sequence = fill(pool.new_sequence(), rng, 100)
    sequence.append(0, *tokens(rng, 5))
    sequence.truncate(70)
    other = pool.new_sequence()
    other.restore(kvfast.load(sequence.snapshot()).snapshot())  # whose last block is filled up with zeros
    mine, copy = raw(pool)[sequence.block_indices()], raw(pool)[other.block_indices()]
    if not pool.format.seals:
        assert np.array_equal(mine, copy)
    else:  # 6 of 32 or 64 tokens, and the statistics of the block
        assert np.count_nonzero(mine[-1]) * 3 < np.count_nonzero(mine[0])


def test_a_copied_block_takes_over_only_what_is_kept(pool, rng):
    """A snapshot keeps the block as it was; who goes back and writes gets a copy without the later tokens."""
    if pool.format.seals:
        pytest.skip("blocks that are encoded as a whole have no codes of single tokens")
    sequence = fill(pool.new_sequence(), rng, 30)
    snapshot = sequence.snapshot()
    sequence.truncate(3)
    fill(sequence, rng, 1)
    twin = kvfast.KVCache(2, 2, 20, dtype=pool.format, block_size=pool.block_size)
    twin.restore(sequence.snapshot())
    assert np.array_equal(raw(pool)[sequence.block_indices()], raw(twin)[twin.block_indices()])
    assert snapshot.seq_len == 30 and kvfast.load(snapshot).k(0).any()
    block = snapshot._storage.block_ids(0)
    del snapshot
    pool.new_sequence().free()  # the pool is entered again
    assert not raw(pool)[block].any()


def test_evicted_prefixes_are_zero_for_those_who_get_the_block(rng):
    pool = kvfast.PagedKVCache(2, 2, 20, num_blocks=4, block_size=32, dtype="int8", secure=True)
    old = fill(pool.new_sequence(), rng, 128, token_ids=np.arange(128))
    old.free()
    assert raw(pool).any(axis=1).all() and pool.num_cached_blocks == 4
    new = fill(pool.new_sequence(), rng, 1)
    block = new.block_indices()[0]
    twin = kvfast.KVCache(2, 2, 20, dtype="int8", block_size=32)
    twin.restore(new.snapshot())
    assert np.array_equal(raw(pool)[block], raw(twin)[0])
    new.free()
    pool.clear()
    assert not raw(pool).any()


def test_what_a_ring_drops_is_zero(rng):
    ring = fill(kvfast.RingKVCache(2, 2, 20, sliding_window=40, rollback=0, dtype="int8", secure=True), rng, 100)
    for _ in range(30):
        fill(ring, rng, 17)
    blocks = raw(ring)
    assert np.count_nonzero(blocks.any(axis=1)) <= 2 + 40 // 64


def test_memory_of_a_cache_that_is_gone_is_zero(rng):
    """A view keeps it from going back to the system, and shows what would have."""
    for secure in (True, False):
        cache = fill(kvfast.KVCache(2, 2, 20, 400, dtype="float32", secure=secure), rng, 100)
        view = cache.k(0)
        assert view.any()
        del cache
        assert view.any() != secure


def test_secure_stays_with_copies_and_snapshots(rng):
    pool = kvfast.PagedKVCache(2, 2, 20, 40, secure=True)
    sequence = fill(pool.new_sequence(), rng, 30)
    latent = kvfast.PagedMLAKVCache(1, 16, 8, 4, secure=True)
    ring = kvfast.RingKVCache(2, 2, 20, sliding_window=[16, None], secure=True)
    for one in (
        *(pool, sequence, sequence.fork(), sequence.snapshot(), kvfast.load(sequence.snapshot()), latent),
        *(latent.new_sequence(), ring, ring.copy(), kvfast.MLAKVCache(1, 16, 8, secure=True)),
    ):
        assert one.secure is True
    assert kvfast.KVCache(1, 1, 16).secure is False


def test_secure_changes_no_result(rng):
    for dtype in DTYPES:
        caches = [kvfast.KVCache(2, 2, 20, dtype=dtype, secure=secure) for secure in (False, True)]
        outputs = []
        for cache in caches:
            numbers = np.random.default_rng(1)
            fill(cache, numbers, 150)
            snapshot = cache.snapshot()
            cache.truncate(77)
            fill(cache, numbers, 90)
            q = numbers.standard_normal((3, 4, 20), np.float32)
            out = cache.attend(0, q), cache.attend(1, q, num_splits=3)
            cache.restore(snapshot)
            cache.truncate(149)
            outputs.append([*out, cache.attend(0, q), cache.k(0), cache.v(1)])
        assert all(np.array_equal(a, b) for a, b in zip(*outputs))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/mem")
def test_every_call_that_forgets_tokens_overwrites_them():
    """In every cache, also in blocks that stay and in working memory; without secure they are still there."""
    found = {}
    for secure in (True, False):
        command = [sys.executable, str(ROOT / "tests" / "support" / "forgotten_tokens.py"), str(secure)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == 0, result.stderr
        found[secure] = json.loads(result.stdout)
    assert {name: count for name, count in found[True].items() if count} == {}
    assert sum(count > 0 for count in found[False].values()) > 0.7 * len(found[False])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/mem")
@pytest.mark.parametrize(
    "kind, dtype", [("sequence", "float32"), ("growing", "open"), ("ring", "float16"), ("latent", "float32"), ("states", "float32")]
)
def test_nothing_stays_in_the_memory_of_the_process(kind, dtype):
    """Neither in blocks nor where calls work, the stacks of threads included; without secure it does."""
    found = {}
    for secure in (True, False):
        command = [sys.executable, str(ROOT / "tests" / "support" / "process_memory.py"), kind, dtype, str(secure)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == 0, result.stderr
        found[secure] = int(result.stdout)
    assert found[True] == 0 and found[False] > 0
