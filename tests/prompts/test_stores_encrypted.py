"""Stores whose values are encrypted: what is on the disk, keys that change, and values that someone has changed."""

import numpy as np
import pytest
from command_line import run_here
from dict_store import DictStore
from store_values import key, read

import kvfast
from kvfast.errors import CorruptFileError
from kvfast.prompts.stores import EncryptedStore, open_store

pytest.importorskip("cryptography", reason="needs the extra encrypted")
pytest.importorskip("safetensors")
pytest.importorskip("xxhash")

OLD, NEW = bytes(range(32)), bytes(range(1, 33))
TEXT = b"a text that nobody shall read " * 20


def stored(keys=OLD):
    inner = DictStore()
    store = EncryptedStore(inner, keys)
    assert store.put(key(1), TEXT)
    return inner, store


def test_values_are_encrypted_and_no_two_are_the_same():
    inner, store = stored()
    first = inner.values[key(1)]
    store.put(key(1), TEXT)
    store.put(key(2), TEXT)
    values = [first, *inner.values.values()]
    assert len({value[64:] for value in values}) == 3 and not any(b"nobody" in value or TEXT[:8] in value for value in values)
    assert {len(value) for value in values} == {len(TEXT) + 64}
    (value,) = store.get_many([key(2)])
    with value:
        assert len(value) == len(TEXT) and bytes(value.read(2, 4)) == TEXT[2:6] and bytes(value.read(0, len(TEXT))) == TEXT
        with pytest.raises(EOFError):
            value.read(1, len(TEXT))


def test_each_bit_and_the_name_are_authenticated():
    inner, store = stored()
    whole = inner.values[key(1)]
    for at in (*range(16), 16, 47, 48, 60, len(whole) - 17, len(whole) - 1):
        inner.values[key(1)] = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        refuse(store, key(1))
    for cut in (whole[:-1], whole[:64], whole[:10], b"", whole + b"x"):
        inner.values[key(1)] = cut
        refuse(store, key(1))
    inner.values = {key(2): whole}
    refuse(store, key(2))
    inner.values = {key(1): whole}
    assert read(EncryptedStore(inner, OLD).get_many([key(1)])) == [TEXT]


def refuse(store, name):
    """It is not found, or refused when it is read."""
    store.tell = lambda text, kind: None
    (value,) = store.get_many([name])
    if value is not None:
        with value, pytest.raises(CorruptFileError, match="changed, cut, or moved"):
            value.read(0, max(1, len(value)))


def test_a_new_key_reads_what_the_old_one_wrote():
    inner, _ = stored()
    both = EncryptedStore(inner, [NEW, OLD])
    assert read(both.get_many([key(1)])) == [TEXT]
    both.put(key(2), TEXT)
    assert read(EncryptedStore(inner, NEW).get_many([key(2)])) == [TEXT]


def test_another_key_finds_nothing_and_warns_once():
    inner, _ = stored()
    inner.values[key(2)] = TEXT  # which is not encrypted
    store, told = EncryptedStore(inner, NEW), []
    store.tell = lambda text, kind: told.append((text, kind))
    for _ in range(2):
        assert store.get_many([key(1), key(2), key(3)]) == [None] * 3
    assert [kind for _, kind in told] == ["new"] and "another key, or none" in told[0][0]
    assert store.contains_many([key(1), key(2), key(3)]) == [False] * 3  # so that they are written again
    store.put(key(1), b"new")
    assert store.contains_many([key(1)]) == [True] and read(store.get_many([key(1)])) == [b"new"]


def prompts(folder, **options):
    return kvfast.PromptCache(open_store(folder, **options), chunk_tokens=64)


def cache_of(rows):
    cache = kvfast.KVCache(1, 2, 64, max_seq_len=256, dtype="int8")
    if len(rows):
        cache.append(0, rows, -rows)
        cache.advance(len(rows))
    return cache


def test_prompts_are_found_with_their_key_alone(tmp_path, rng, monkeypatch):
    rows, ids = rng.standard_normal((200, 2, 64)).astype(np.float32), list(range(200))
    with prompts(tmp_path, key=OLD) as kept:
        assert kept.save(cache_of(rows), ids)
    for keys, found in ((OLD, 199), ([NEW, OLD], 199)):
        with prompts(tmp_path, key=keys) as kept:
            assert kept.restore(cache := cache_of(rows[:0]), ids) == found
            assert np.array_equal(cache.k(0), cache_of(rows).k(0)[:found])
    (tmp_path / "keys").write_text(f"{NEW.hex()}\n{OLD.hex()}\n")
    monkeypatch.setenv("KVFAST_STORE_KEY_FILE", str(tmp_path / "keys"))
    with kvfast.PromptCache(tmp_path, chunk_tokens=64) as kept:
        assert kept.restore(cache_of(rows[:0]), ids) == 199
    pytest.importorskip("rich")
    assert run_here("store", tmp_path)[0] == 0
    monkeypatch.delenv("KVFAST_STORE_KEY_FILE")
    with prompts(tmp_path, key=NEW) as kept:
        with pytest.warns(RuntimeWarning, match="another key") as caught:
            assert kept.restore(cache_of(rows[:0]), ids) == 0
        assert len(caught) == 1 and kept.save(cache_of(rows), ids)
        assert kept.restore(cache_of(rows[:0]), ids) == 199


@pytest.mark.parametrize("wrong", [b"", bytes(31), [], [bytes(32), b"hunter2"], "hunter2" * 4, ["x" * 32]])
def test_keys_that_are_none(tmp_path, wrong):
    with pytest.raises(ValueError, match="must be 32 bytes") as caught:
        open_store(tmp_path / "store", key=wrong)
    assert "hunter2" not in str(caught.value) and not (tmp_path / "store").exists()


@pytest.mark.parametrize("wrong", ["", "hunter2", OLD.hex()[:-1], f"{OLD.hex()} hunter2", "\xff"])
def test_files_that_have_no_keys(tmp_path, monkeypatch, wrong):
    (tmp_path / "keys").write_text(wrong, "utf-8")
    monkeypatch.setenv("KVFAST_STORE_KEY_FILE", str(tmp_path / "keys"))
    with pytest.raises(ValueError, match="must have keys of 64 hexadecimal digits") as caught:
        open_store(tmp_path / "store")
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("KVFAST_STORE_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        open_store(tmp_path / "store")
