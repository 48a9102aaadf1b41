"""A folder of values: several processes, kills, full disks, damage, and what is not kvfast's."""

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import time
from multiprocessing import get_context

import numpy as np
import pytest
import store_processes as processes
from cache_kinds import fill, make
from store_processes import LARGEST, content, is_sound, key_of
from store_values import key, read, taken

import kvfast
from kvfast.errors import StoreError
from kvfast.prompts.stores import FolderStore, folder_index
from kvfast.prompts.stores import folder as folder_module

SPAWN = get_context("spawn")
SECONDS = float(os.environ.get("KVFAST_STORE_SECONDS", "3"))  # `make stores` lets it run for five minutes


def files_of(folder):
    return {path.name: path for path in folder.glob("??/*")}


def bytes_of(folder):
    """Bytes of all values, also of those that are being written."""
    total = 0
    for path in folder.glob("*/*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            pass
    return total


def is_consistent(folder):
    """Each file has its line in the index."""
    with sqlite3.connect(folder / "index.sqlite3") as index:
        lines = dict(index.execute("SELECT key, nbytes FROM stored"))
        (total,) = index.execute("SELECT nbytes FROM total").fetchone()
    index.close()
    files = {name: path.stat().st_size for name, path in files_of(folder).items()}
    return total == sum(lines.values()) and all(lines.get(name) == size for name, size in files.items())


def many_processes(folder, seconds, num_processes=8):
    failed, rng = SPAWN.Value("i", 0), random.Random(3)
    max_bytes, end, kills, most = 6_000_000, time.monotonic() + seconds, [], 0
    seeds = iter(range(10**9))
    start = lambda: SPAWN.Process(target=processes.work, args=(str(folder), max_bytes, end - time.monotonic(), next(seeds), failed))
    running = [start() for _ in range(num_processes)]
    for one in running:
        one.start()
    try:
        while time.monotonic() < end:
            time.sleep(0.03)
            most = max(most, bytes_of(folder) if folder.exists() else 0)
            due = end - seconds * (0.8 - 0.2 * len(kills))  # of the next kill, also where the machine is busy
            if rng.random() < 0.05 or time.monotonic() > due:
                place = rng.randrange(num_processes)
                running[place].kill()
                running[place].join()
                kills.append(time.monotonic())
                running[place] = start()
                running[place].start()
        for one in running:
            one.join(60)
        assert [one.exitcode for one in running] == [0] * num_processes
    finally:
        for one in running:
            one.kill()
    assert not failed.value and len(kills) >= 3
    assert most <= max_bytes + num_processes * (LARGEST + 64), most
    for name, path in files_of(folder).items():
        (number,) = [number for number in range(processes.KEYS) if key_of(number) == name]
        assert is_sound(number, path.read_bytes())
    assert is_consistent(folder)
    old = time.time() - 2 * folder_module.STALE
    for part in (folder / "unfinished").iterdir():
        os.utime(part, (old, old))
    store = FolderStore(folder, max_bytes)
    store.put(key_of(0), content(0, 0))
    assert not list((folder / "unfinished").iterdir()) and bytes_of(folder) <= max_bytes
    store.close()


def test_eight_processes_with_kills(tmp_path):
    many_processes(tmp_path / "values", SECONDS)


@pytest.mark.parametrize("times", range(3))
def test_processes_open_a_new_folder_at_once(tmp_path, times):
    failed, barrier = SPAWN.Value("i", 0), SPAWN.Barrier(4)
    running = [SPAWN.Process(target=processes.open_at_once, args=(str(tmp_path / "a" / "b"), barrier, failed)) for _ in range(4)]
    for one in running:
        one.start()
    for one in running:
        one.join(60)
    assert [one.exitcode for one in running] == [0] * 4 and not failed.value
    assert len(files_of(tmp_path / "a" / "b")) == 40 and is_consistent(tmp_path / "a" / "b")


def test_what_a_killed_process_leaves_is_removed(tmp_path):
    for _ in range(4):
        one = SPAWN.Process(target=processes.put_without_end, args=(str(tmp_path),))
        one.start()
        begun = time.monotonic()
        while not (tmp_path / "index.sqlite3").exists() and time.monotonic() < begun + 60:  # a busy machine starts slowly
            time.sleep(0.02)
        time.sleep(0.2 + random.random() / 10)
        os.kill(one.pid, signal.SIGKILL)
        one.join()
    part = tmp_path / "unfinished" / f"{key(1)}.0123"
    part.write_bytes(b"1" * 1000)
    mine = tmp_path / "unfinished" / "mine"
    mine.write_bytes(b"1")
    with open(tmp_path / "unfinished" / f"{key(2)}.0123", "wb") as held:
        held.write(b"2")
        held.flush()
        assert folder_module.try_lock(held.fileno())
        old = time.time() - 2 * folder_module.STALE
        for path in (tmp_path / "unfinished").iterdir():
            os.utime(path, (old, old))
        FolderStore(tmp_path).close()
        assert {path.name for path in (tmp_path / "unfinished").iterdir()} == {"mine", f"{key(2)}.0123"}
    assert is_consistent(tmp_path)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no list of the open files")
def test_a_file_is_closed_before_it_is_moved_on_windows(tmp_path, monkeypatch):
    replace = os.replace

    def of_windows(source, target):
        if os.path.realpath(source) in {os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}:
            raise PermissionError(13, "The process cannot access the file because it is being used by another process")
        replace(source, target)

    store = FolderStore(tmp_path)
    assert store.put(key(0), b"before")  # makes the index
    monkeypatch.setattr(os, "replace", of_windows)
    with pytest.raises(StoreError, match="being used"):
        store.put(key(1), b"open")
    monkeypatch.setattr(folder_module, "MOVES_OPEN_FILES", False)
    assert store.put(key(1), b"closed") and read(store.get_many([key(1)])) == [b"closed"]
    assert not list((tmp_path / "unfinished").iterdir())


def test_the_least_recently_used_go_first(tmp_path):
    store = FolderStore(tmp_path, max_bytes=1000)
    for i in range(10):
        assert store.put(key(i), bytes(100))
    store.touch([key(3), key(0)])
    assert store.put(key(10), bytes(250))
    assert [i for i in range(11) if store.contains_many([key(i)])[0]] == [0, 3, 5, 6, 7, 8, 9, 10]
    assert not taken(store, key(11), bytes(1001)) and len(files_of(tmp_path)) == 8
    assert store.put(key(12), bytes(1000)) and list(files_of(tmp_path)) == [key(12)]
    assert FolderStore(tmp_path, max_bytes=500).put(key(13), b"1") and list(files_of(tmp_path)) == [key(13)]


@pytest.mark.parametrize("damage", ["removed", "truncated", "zeros", "text", "middle", "another", "no total", "total text", "version"])
def test_a_damaged_index_is_made_again(tmp_path, damage):
    store = FolderStore(tmp_path, max_bytes=100_000)
    for i in range(200):
        store.put(key(i), bytes(100 + i))
    store.touch([key(0)])
    opened = damage in ("removed", "middle") and FolderStore(tmp_path, max_bytes=100_000)
    if opened:
        opened.touch([key(0)])
    else:
        store.close()
    path = tmp_path / "index.sqlite3"
    data = path.read_bytes()
    if damage == "removed":
        path.unlink()
    elif damage in ("another", "no total", "total text", "version"):
        index = sqlite3.connect(path)
        index.executescript(
            {
                "another": "DROP TABLE stored; CREATE TABLE mine (a INTEGER PRIMARY KEY AUTOINCREMENT); PRAGMA user_version = 7",
                "no total": "DELETE FROM total",
                "total text": "UPDATE total SET nbytes = 'many'",
                "version": "PRAGMA user_version = 99",
            }[damage]
        )
        index.close()
    elif damage == "middle":
        with sqlite3.connect(path) as index:
            index.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        index.close()
        with open(path, "r+b") as file:
            file.seek(4096)
            file.write(b"\xa5" * (len(path.read_bytes()) - 4096))
    else:
        path.write_bytes({"truncated": data[: len(data) // 2], "zeros": bytes(len(data)), "text": b"no index " * 1000}[damage])
    assert all(store.contains_many([key(i) for i in range(200)]))
    for again in (store, opened or store):
        again.touch([key(5)])
        assert again.put(key(300), bytes(50_000)) and again.put(key(301), bytes(49_000))
        assert read(again.get_many([key(301)])) == [bytes(49_000)]
    assert is_consistent(tmp_path) and sum(path.stat().st_size for path in files_of(tmp_path).values()) <= 100_000
    store.close()


def test_an_index_that_another_process_has_locked_costs_time_only(tmp_path, monkeypatch):
    from kvfast.prompts.stores import folder_index

    monkeypatch.setattr(folder_index, "WAIT", 0.2)
    store = FolderStore(tmp_path)
    store.put(key(1), b"1")
    holder = sqlite3.connect(tmp_path / "index.sqlite3", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    for one in (store, FolderStore(tmp_path)):
        for call, *arguments in ((one.put, key(2), b"2"), (one.touch, [key(1)]), (one.delete, [key(1)])):
            with pytest.raises(StoreError, match="cannot use the index of .*locked"):
                call(*arguments)
        assert read(one.get_many([key(1), key(2)])) == [b"1", None]
    holder.execute("ROLLBACK")
    holder.close()
    assert store.put(key(2), b"2") and is_consistent(tmp_path)


def test_a_full_disk_keeps_what_is_there(tmp_path):
    results = SPAWN.Queue()
    one = SPAWN.Process(target=processes.put_with_small_files, args=(str(tmp_path), 1 << 20, results))
    one.start()
    one.join(60)
    assert [results.get(timeout=10) for _ in range(4)] == [True, False, True, [True, False]] and one.exitcode == 0
    assert not list((tmp_path / "unfinished").iterdir()) and is_consistent(tmp_path)


@pytest.fixture
def mounted(tmp_path):
    """A file system of 2 MB, if this user may mount one."""
    path = tmp_path / "mounted"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path]
    if shutil.which("mount") is None or subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("needs the right to mount")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_disk_that_fills_up(mounted):
    store = FolderStore(mounted / "values")
    kept = [taken(store, key(i), os.urandom(150_000)) for i in range(20)]
    assert kept[:8] == [True] * 8 and not kept[-1]
    assert all(store.contains_many([key(i) for i in range(8)])) and not list((mounted / "values" / "unfinished").iterdir())
    with open(mounted / "rest", "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    for i in range(30):  # no room for the index, either
        try:
            store.touch([key(i % 8)] * 50)
            assert not taken(store, key(100 + i), bytes(50_000))
        except StoreError:
            pass
    assert [len(value) for value in read(store.get_many([key(0), key(7)]))] == [150_000] * 2
    (mounted / "rest").unlink()
    store.delete([key(0)])
    assert store.put(key(200), b"1") and is_consistent(mounted / "values")
    store.close()


def test_a_folder_that_cannot_be_written_is_read(mounted):
    store = FolderStore(mounted / "values")
    for i in range(3):
        store.put(key(i), b"%d" % i)
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    store = FolderStore(mounted / "values", max_bytes=100)
    assert read(store.get_many([key(1), key(5)])) == [b"1", None] and store.contains_many([key(2), key(5)]) == [True, False]
    store.touch([key(1)])
    assert not taken(store, key(7), b"7")
    assert sorted(entry.key for entry in store.entries()) == [key(i) for i in range(3)]
    with pytest.raises(StoreError, match="values cannot be written"):
        store.delete([key(1)])
    store.close()
    with pytest.raises(StoreError, match="cannot make the folder"):
        FolderStore(mounted / "new")


def test_what_is_not_kvfasts_is_left_alone(tmp_path):
    store = FolderStore(tmp_path, max_bytes=1000)
    store.put(key(1), bytes(900))
    (tmp_path / "00" / "mine").write_bytes(bytes(5000))
    (tmp_path / "mine").write_bytes(bytes(5000))
    (tmp_path / "00" / key(2)).mkdir()
    os.mkfifo(tmp_path / "00" / key(3))
    (tmp_path / "00" / key(4)).symlink_to("/etc/passwd")
    (tmp_path / "00" / key(5)).symlink_to(tmp_path / "nowhere")
    assert read(store.get_many([key(i) for i in range(6)])) == [None, bytes(900), None, None, None, None]  # and nothing hangs
    assert store.contains_many([key(3), key(5)]) == [False, False]
    (tmp_path / "index.sqlite3").unlink()
    assert store.put(key(8), bytes(900))
    assert {path.name for path in (tmp_path / "00").iterdir()} >= {"mine", key(2), key(3), key(4), key(5), key(8)}
    assert (tmp_path / "mine").stat().st_size == (tmp_path / "00" / "mine").stat().st_size == 5000


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    store = FolderStore(tmp_path / "values")
    store.put(key(1), b"1")
    shutil.rmtree(tmp_path / "values")
    assert read(store.get_many([key(1)])) == [None] and store.contains_many([key(1)]) == [False]
    assert store.put(key(1), b"1") and read(store.get_many([key(1)])) == [b"1"]
    shutil.rmtree(tmp_path / "values")
    (tmp_path / "values").write_bytes(b"")
    assert read(store.get_many([key(1)])) == [None]
    with pytest.raises(StoreError):
        store.put(key(1), b"1")
    with pytest.raises(StoreError, match="cannot make the folder"):
        FolderStore(tmp_path / "values")


def test_values_that_are_cut_while_they_are_open(tmp_path):
    store = FolderStore(tmp_path)
    store.put(key(1), bytes(1_000_000))
    (value,) = store.get_many([key(1)])
    os.truncate(files_of(tmp_path)[key(1)], 500_000)
    with value:
        assert len(value.read(0, 500_000)) == 500_000
        with pytest.raises(EOFError, match="it must have 1000000 bytes, got 500000"):
            value.read(0, 1_000_000)


def test_a_value_is_read_after_it_was_evicted(tmp_path):
    store = FolderStore(tmp_path, max_bytes=1_000_000)
    store.put(key(1), b"1" * 900_000)
    (value,) = store.get_many([key(1)])
    store.put(key(2), b"2" * 900_000)
    assert store.contains_many([key(1)]) == [False]
    with value:
        assert bytes(value.read(0, 900_000)) == b"1" * 900_000


def test_thousands_of_values_at_once_need_few_open_files(tmp_path):
    store, data = FolderStore(tmp_path), bytes(300_000)
    keys = [key(i) for i in range(1200)]
    for one in keys:
        path = store.folder / "00"
        path.mkdir(exist_ok=True)
        with open(path / one, "wb") as file:
            file.truncate(len(data))
    before = len(os.listdir("/proc/self/fd"))
    values = store.get_many(keys)
    assert len(os.listdir("/proc/self/fd")) - before <= folder_module.MOST_OPEN
    assert all(one == data for one in read(values)) and len(os.listdir("/proc/self/fd")) <= before


def test_the_order_of_uses_does_not_need_the_clock(tmp_path, monkeypatch):
    """A clock that is set back, or far ahead and then right again; two stores take turns, as two processes would."""
    now = [10**18]
    monkeypatch.setattr(folder_index.time, "time_ns", lambda: now[0])
    stores = [FolderStore(tmp_path, max_bytes=1000) for _ in range(2)]
    for i in range(10):
        assert stores[i % 2].put(key(i), bytes(100))
        now[0] += (10**9, -(10**17), 10**18, -(10**18))[i % 4]
    for i in (0, 1, 2):
        stores[i % 2].touch([key(i)])
        now[0] -= 10**12
    for i in range(10, 17):
        assert stores[i % 2].put(key(i), bytes(100))
    assert {entry.key for entry in stores[0].entries()} == {key(i) for i in (0, 1, 2, *range(10, 17))}
    stores[1].touch([key(12), key(0)])  # the last as the newest
    for most, left in ((200, {key(12), key(0)}), (100, {key(0)})):
        FolderStore(tmp_path, max_bytes=most)
        assert set(files_of(tmp_path)) == left and is_consistent(tmp_path)


def test_a_time_without_end_makes_the_index_anew(tmp_path):
    store = FolderStore(tmp_path)
    store.put(key(1), b"1")
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite3")) as database:
        database.execute("UPDATE stored SET used = ?", ((1 << 63) - 1,))
        database.commit()
    store = FolderStore(tmp_path)
    assert store.put(key(2), b"2") and [entry.key for entry in store.entries()] == [key(1), key(2)] and is_consistent(tmp_path)


@pytest.mark.parametrize("count", [10, 1000])
def test_a_smaller_folder_takes_effect_at_once(tmp_path, count):
    with contextlib.closing(FolderStore(tmp_path)) as store:
        for i in range(count):
            assert store.put(key(i), bytes(100))
        store.touch([key(0)])
    with contextlib.closing(FolderStore(tmp_path, max_bytes=350)) as store:
        assert {entry.key for entry in store.entries()} == {key(0), key(count - 1), key(count - 2)}
    assert len(files_of(tmp_path)) == 3 and is_consistent(tmp_path)
    prompts = kvfast.PromptCache(tmp_path, max_bytes=100)
    assert list(files_of(tmp_path)) == [key(0)]
    prompts.close()


def test_what_cannot_be_written_is_still_read(tmp_path, monkeypatch):
    """As on a full disk: neither values nor uses can be written."""
    cache = fill(make("growing", "int8"), np.random.default_rng(0), 200)
    with kvfast.PromptCache(tmp_path, chunk_tokens=64) as prompts:
        prompts.save(cache, range(200))

    def full(*arguments):
        raise sqlite3.OperationalError("database or disk is full")

    for name in ("add", "touch", "remove", "if_listed", "shrink"):
        monkeypatch.setattr(folder_index.FolderIndex, name, full)
    prompts = kvfast.PromptCache(tmp_path, chunk_tokens=64, max_bytes=1 << 30)
    with pytest.warns(RuntimeWarning, match="prompts are not saved, as .* fails: .*disk is full"):
        assert not save_and_wait(prompts, cache, range(1, 201))
    for i in range(2, 6):
        assert prompts.restore(make("growing", "int8"), range(200)) == 199
        assert not save_and_wait(prompts, cache, range(i, i + 200))


def save_and_wait(prompts, cache, token_ids):
    is_kept = prompts.save(cache, token_ids)
    prompts.flush()
    return is_kept
