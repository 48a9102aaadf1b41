"""Prompts kept in a folder."""

import contextlib
import os
import time

import numpy as np
import pytest
from cache_kinds import CENTRED, seals
from prompt_tokens import extend, filled, holds, resembles

import kvfast
from kvfast.prompts import weights

pytest.importorskip("safetensors")


def test_finds_the_longest_prefix(tmp_path):
    prompts = kvfast.PromptCache(tmp_path / "new" / "folder")
    for token_ids in ([1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 9], [7] * 100):
        assert prompts.save(filled(token_ids), token_ids)
    assert len(prompts) == 4
    for prompt, found in [([1, 2, 3, 4, 8], 4), ([1, 2, 9, 9], 3), ([1, 2], 1), ([7] * 300, 100), ([7] * 100, 99), ([5, 1], 0)]:
        for opened in (prompts, kvfast.PromptCache(tmp_path / "new" / "folder")):
            cache = kvfast.KVCache(2, 2, 20, dtype="int8-rotated")
            assert opened.restore(cache, prompt) == found
            assert holds(cache, prompt[:found])
            extend(cache, prompt[found:])
            assert holds(cache, prompt)


def test_what_is_there_is_not_saved_again(tmp_path):
    prompts = kvfast.PromptCache(tmp_path)
    prompts.save(filled([1, 2, 3, 4]), [1, 2, 3, 4])
    assert prompts.save(filled([1, 2, 3, 4]), np.array([1, 2, 3, 4], np.int32))
    assert prompts.save(filled([1, 2]), [1, 2]) and len(prompts) == 1
    assert prompts.save(filled([1, 2, 3, 4, 5]), [1, 2, 3, 4, 5]) and len(prompts) == 2


def test_models_and_settings_are_kept_apart(tmp_path):
    prompts = kvfast.PromptCache(tmp_path)
    prompts.save(filled([1, 2, 3]), [1, 2, 3], model="a")
    for model, settings in [("b", {}), ("a", {"dtype": "int4"}), ("a", {"dtype": "int8-plain"}), ("a", {"v_dtype": "float16"})]:
        assert prompts.restore(kvfast.KVCache(2, 2, 20, **({"dtype": "int8-rotated"} | settings)), [1, 2, 3, 4], model=model) == 0
    assert prompts.restore(kvfast.KVCache(3, 2, 20, dtype="int8-rotated"), [1, 2, 3, 4], model="a") == 0
    assert prompts.restore(kvfast.RingKVCache(2, 2, 20, sliding_window=5, dtype="int8-rotated"), [1, 2, 3, 4], model="a") == 0
    assert prompts.restore(kvfast.KVCache(2, 2, 20, dtype="int8-rotated"), [1, 2, 3, 4], model="a") == 3


def test_sequences_share_entries_with_contiguous_caches(tmp_path):
    prompts = kvfast.PromptCache(tmp_path)
    token_ids = list(range(70))
    prompts.save(filled(token_ids), token_ids)
    pool = kvfast.PagedKVCache(2, 2, 20, num_blocks=16, block_size=16, dtype="int8-rotated")
    sequence = pool.new_sequence()
    assert prompts.restore(sequence, token_ids + [1]) == 70 and holds(sequence, token_ids)
    assert len(pool.match_prefix(token_ids + [1])) == 64  # its blocks are known by their tokens
    small = kvfast.PagedKVCache(2, 2, 20, num_blocks=2, block_size=16, dtype="int8-rotated").new_sequence()
    with pytest.raises(kvfast.CacheFullError):
        prompts.restore(small, token_ids + [1])
    assert len(small) == 0


def test_room_limits_what_is_restored(tmp_path):
    prompts = kvfast.PromptCache(tmp_path)
    token_ids = list(range(200))
    prompts.save(filled(token_ids), token_ids)
    cache = kvfast.KVCache(2, 2, 20, max_seq_len=150, dtype="int8-rotated")
    assert prompts.restore(cache, token_ids) == 150 and holds(cache, token_ids[:150])


@pytest.mark.parametrize("dtype", ["k8v4-rotated", "int4", CENTRED])
def test_every_format(tmp_path, dtype):
    """Where tokens of a longer entry have lost their float rows, the prompt goes on from what their codes tell."""
    prompts = kvfast.PromptCache(tmp_path, chunk_tokens=256)
    token_ids = list(range(200))
    assert prompts.save(filled(token_ids, dtype), token_ids)
    for found in (199, 192, 150, 128, 70, 17):
        for cache in (
            kvfast.KVCache(2, 2, 20, dtype=dtype),
            kvfast.KVCache(2, 2, 20, 250, dtype=dtype),
            kvfast.PagedKVCache(2, 2, 20, num_blocks=16, dtype=dtype).new_sequence(),
        ):
            assert prompts.restore(cache, token_ids[:found] + [500]) == found
            assert resembles(cache, token_ids[:found])
            if found >= 192 or not seals(dtype):
                assert holds(cache, token_ids[:found])
            extend(cache, token_ids[found:])
            assert holds(cache, token_ids)  # the same tokens: the same bytes


def test_a_ring_goes_back_only_as_far_as_it_can(tmp_path):
    prompts = kvfast.PromptCache(tmp_path)
    make = lambda: kvfast.RingKVCache(2, 2, 20, sliding_window=20, num_sink_tokens=2, rollback=10)
    token_ids = list(range(100))
    for end in (30, 100):
        prompts.save(extend(make(), token_ids[:end]), token_ids[:end])
    for found in (99, 92, 30):
        cache, fresh = make(), extend(make(), token_ids[:found])
        # 60 tokens are the same as in the longer entry, which has dropped the window before them.
        same = token_ids[: 60 if found == 30 else found]
        assert prompts.restore(cache, same + [500]) == found
        assert np.array_equal(cache.k(1), fresh.k(1)) and np.array_equal(cache.v(0), fresh.v(0))


def test_the_least_recently_used_go_first(tmp_path):
    size = kvfast.PromptCache(tmp_path / "one")
    size.save(filled([1] * 50), [1] * 50)
    prompts = kvfast.PromptCache(tmp_path / "all", max_bytes=3 * size.nbytes + 100)
    for token in (1, 2, 3):
        prompts.save(filled([token] * 50), [token] * 50)
        time.sleep(0.01)
    assert prompts.restore(kvfast.KVCache(2, 2, 20, dtype="int8-rotated"), [1] * 51) == 50
    prompts.flush()  # `restore` does not wait until its prompt is marked as used
    prompts.save(filled([4] * 50), [4] * 50)
    assert prompts.nbytes <= prompts.max_bytes and len(prompts) == 3
    found = [prompts.restore(kvfast.KVCache(2, 2, 20, dtype="int8-rotated"), [token] * 51) for token in (1, 2, 3, 4)]
    assert found == [50, 0, 50, 50]
    large = list(range(2000))
    with pytest.warns(RuntimeWarning, match="a prompt .* is larger than max_bytes"):
        assert not prompts.save(filled(large), large)
    assert len(prompts) == 3
    prompts.clear()
    assert len(prompts) == prompts.nbytes == 0


@pytest.mark.parametrize("dtype", ["int8-rotated", "int4"])
def test_what_is_larger_than_all_room_is_not_kept(tmp_path, dtype):
    """Also if that are float rows and headers, not codes."""
    cache, token_ids = filled([1] * 50, dtype), [1] * 50
    alone = kvfast.PromptCache(tmp_path / "alone")
    alone.save(cache, token_ids)
    for room, kept in ((alone.nbytes, True), (alone.nbytes - 1, False), (100, False)):
        prompts = kvfast.PromptCache(tmp_path / str(room), max_bytes=room)
        with contextlib.nullcontext() if kept else pytest.warns(RuntimeWarning, match=f"a prompt .* is larger than max_bytes={room}"):
            assert prompts.save(cache, token_ids) == kept
        assert len(prompts) == kept and prompts.nbytes <= room


def values_in(folder):
    return [path for path in folder.rglob("?-*") if path.is_file()]


def test_damaged_and_foreign_files_do_no_harm(tmp_path):
    prompts = kvfast.PromptCache(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    prompts.save(filled([1, 2, 3]), [1, 2, 3])
    prompts.save(filled([1, 2, 3, 4, 5]), [1, 2, 3, 4, 5])
    longest = max(tmp_path.rglob("e-*"), key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(longest.read_bytes())
    data[-30] ^= 4
    longest.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="cannot be used .its checksum is wrong"):
        assert prompts.restore(kvfast.KVCache(2, 2, 20, dtype="int8-rotated"), [1, 2, 3, 4, 5, 6]) == 3  # the next best
    assert not longest.exists() and len(prompts) == 1
    for path in values_in(tmp_path):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(RuntimeWarning, match="must have a header of 128 bytes, got 100"):
        assert kvfast.PromptCache(tmp_path).restore(kvfast.KVCache(2, 2, 20, dtype="int8-rotated"), [1, 2, 3, 4]) == 0
    prompts.clear()
    assert not values_in(tmp_path) and (tmp_path / "notes.txt").read_text() == "mine"


def test_what_killed_processes_left_is_cleared_away(tmp_path):
    prompts = kvfast.PromptCache(tmp_path)
    prompts.save(filled([1]), [1])
    (name,) = (path.name for path in tmp_path.rglob("e-*"))
    old, new, other = (tmp_path / "unfinished" / one for one in (f"{name}.0", f"{name}.1", "notes.txt"))
    for part in (old, new, other):
        part.write_bytes(b"unfinished")
    for part in (old, other):
        os.utime(part, (0, 0))
    kvfast.PromptCache(tmp_path)
    assert not old.exists() and new.exists() and other.exists() and len(prompts) == 1


def test_bad_input(tmp_path):
    prompts = kvfast.PromptCache(tmp_path)
    cache = filled([1, 2])
    for token_ids in ([1], [1, 2, 3], [0.5, 1.0], [[1, 2]]):
        with pytest.raises(ValueError, match="token_ids must be 2 integers"):
            prompts.save(cache, token_ids)
    with pytest.raises(ValueError, match="must be empty, it holds 2"):
        prompts.restore(cache, [1, 2, 3])
    with pytest.raises(ValueError, match="token_ids must be integers"):
        prompts.restore(kvfast.KVCache(2, 2, 20, dtype="int8-rotated"), [0.5])
    with pytest.raises(TypeError, match="str"):
        prompts.save(cache, [1, 2], model=3)
    with pytest.raises(ValueError, match="max_bytes"):
        kvfast.PromptCache(tmp_path, max_bytes=-1)
    assert prompts.restore(kvfast.KVCache(2, 2, 20, dtype="int8-rotated"), []) == 0
    assert not prompts.save(kvfast.KVCache(2, 2, 20, dtype="int8-rotated"), [])


@pytest.mark.parametrize("kind", ["t", "e", "c"])
def test_what_was_damaged_is_saved_again(tmp_path, kind):
    cache, ids = kvfast.KVCache(1, 2, 64, dtype="int8-rotated"), np.arange(400)
    cache.append(0, *np.random.default_rng(0).standard_normal((2, 400, 2, 64), np.float32))
    cache.advance(400)
    with kvfast.PromptCache(tmp_path) as prompts:

        def restored():
            return prompts.restore(kvfast.KVCache(1, 2, 64, dtype="int8-rotated"), ids)

        assert prompts.save(cache, ids) and restored() == 399
        (path, *_) = tmp_path.glob(f"*/{kind}-*")
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.warns(RuntimeWarning, match="cannot be used"):
            assert restored() < 399
        assert prompts.save(cache, ids) and restored() == 399


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_digest_of_files_is_of_what_they_hold_now(tmp_path, monkeypatch, is_settled):
    """Files that were replaced under their names, also at once, and with the size and the time of those before."""
    if is_settled:
        monkeypatch.setattr(weights, "SETTLED", -1)
    path, found = tmp_path / "adapter_model.safetensors", set()
    assert weights.files_digest(tmp_path) is None
    for i in range(20):
        if i % 2:
            (tmp_path / "new").write_bytes(b"%4d" % i)
            os.replace(tmp_path / "new", path)
        else:
            path.write_bytes(b"%4d" % i)
        os.utime(path, (0, 0))
        found.add(weights.files_digest(tmp_path))
        time.sleep(0.02 * is_settled)
    (tmp_path / "adapter_config.json").write_text("{}")  # its scale
    assert weights.files_digest(tmp_path) not in found and len(found) == 20
    digest, read, reads = weights.files_digest(path), weights._read, []
    monkeypatch.setattr(weights, "_read", lambda file: reads.append(file) or read(file))
    assert weights.files_digest(path) == digest and len(reads) == (not is_settled)
