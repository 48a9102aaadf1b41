"""What every store does: a folder, Redis, S3, memory, a folder in front of Redis; each with a real server."""

import contextlib
import math
import os
import pathlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import redis_server, s3_server
from store_values import key, read, shown

from kvfast.prompts.stores import EncryptedStore, FolderStore, TieredStore, open_store

KINDS = ["folder", "redis", "redis with ttl", "unix", "memory", "s3", "tiered", "encrypted"]


@contextlib.contextmanager
def servers_of(kind, folder, monkeypatch):
    """A call that opens a store of a kind; all that it opens have the same values."""
    with contextlib.ExitStack() as stack:
        if "redis" in kind or kind in ("unix", "tiered"):
            pytest.importorskip("redis", reason="needs the extra redis")
            server = stack.enter_context(redis_server(folder, "--unixsocket", str(folder / "socket")))
        if kind in ("memory", "s3"):
            pytest.importorskip("obstore", reason="needs the extra cloud")
        if kind == "encrypted":
            pytest.importorskip("cryptography", reason="needs the extra encrypted")
        if kind == "s3":
            stack.enter_context(s3_server(monkeypatch))
        opened = []

        def make():
            if kind == "encrypted":
                url, more = folder / "values", {"key": bytes(32)}
            elif kind == "tiered":
                url, more = f"redis://127.0.0.1:{server.port}/0", {"near": folder / "near"}
            else:
                url, more = (
                    {
                        "folder": lambda: folder / "values",
                        "redis": lambda: f"redis://127.0.0.1:{server.port}/0",
                        "redis with ttl": lambda: f"redis://127.0.0.1:{server.port}/2?ttl=60",
                        "unix": lambda: f"unix://{folder}/socket",
                        "memory": lambda: f"memory://{folder.name}",
                        "s3": lambda: "s3://prompts/some/folder",
                    }[kind](),
                    {},
                )
            opened.append(open_store(url, **more))
            return opened[-1]

        yield make
        for store in opened:
            store.close()


@pytest.fixture(params=KINDS)
def make(request, tmp_path, monkeypatch):
    with servers_of(request.param, tmp_path, monkeypatch) as make:
        yield make


def test_values_come_back_in_the_order_of_their_keys(make):
    store = make()
    sizes = (0, 1, 100, 300_000, 3_000_000)
    data = [os.urandom(size) for size in sizes]
    keys = [key(i) for i in range(len(data))]
    assert read(store.get_many(keys)) == [None] * len(data) and store.contains_many(keys) == [False] * len(data)
    for one, form in zip(zip(keys, data), (bytes, bytearray, memoryview, memoryview, bytearray)):
        assert store.put(one[0], form(one[1])) is True
    for opened in (store, make()):
        asked = [keys[4], key(99), keys[0], keys[1], keys[4], keys[3], keys[2]]
        assert read(opened.get_many(asked)) == [data[4], None, data[0], data[1], data[4], data[3], data[2]]
        assert list(opened.contains_many(asked)) == [True, False, True, True, True, True, True]
        assert read(opened.get_many([])) == [] == list(opened.contains_many([]))
    store.put(keys[1], b"another")
    assert read(store.get_many(keys[1:2])) == [b"another"]
    store.delete([keys[1], key(99)])
    store.delete([keys[1]])
    assert list(store.contains_many(keys)) == [True, False, True, True, True]


def test_part_of_a_value(make):
    store, data = make(), os.urandom(400_000)
    store.put(key(1), data)
    (value,) = store.get_many([key(1)])
    with value:
        memory = bytearray(1000)
        assert value.read(399_000, 1000, memoryview(memory)) == data[-1000:] and len(value) == len(data)
        assert value.read(5, 0) == b""
        for start, count in ((399_001, 1000), (400_000, 1), (0, 400_001), (0, 1 << 60)):
            with pytest.raises(EOFError, match="it must have"):
                value.read(start, count)


def test_lists_values_with_their_uses(make):
    store = make()
    for i in range(25):
        store.put(key(i, "e"), bytes(i + 1))
    store.touch([key(3, "e"), key(4, "e")])
    store.touch([key(4, "e")])
    store.touch([key(5, "e")], False)
    store.touch([key(77, "e")])  # is not there
    entries = {entry.key: entry for entry in make().entries()}
    more = 64 * isinstance(store, EncryptedStore)
    assert {name: entry.nbytes for name, entry in entries.items()} == {key(i, "e"): i + 1 + more for i in range(25)}
    if entries[key(0, "e")].hits != -1:
        assert [entries[key(i, "e")].hits for i in (3, 4, 5, 6)] == [1, 2, 0, 0]
    assert all(abs(entry.last_used - time.time()) < 60 for entry in entries.values())
    for entry in store.entries():
        store.delete([entry.key])
    assert list(store.entries()) == []


@pytest.mark.parametrize(
    "hostile",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "",
        "c-",
        f"c-{1:064X}A",
        f"c-{1:063x}",
        f"c-{1:065x}",
        f"c-{1:064x}/..",
        f"c-{1:064x}\n",
        f"../c-{1:064x}",
        f"C-{1:064x}",
        f"c\0-{1:064x}",
        "c-" + "\u0664" * 64,
        5,
        b"c-" + b"0" * 64,
        None,
    ],
)
@pytest.mark.parametrize("make", ["folder", "redis", "memory"], indirect=True)
def test_hostile_keys_are_refused(make, hostile):
    store = make()
    for call in (
        lambda: store.get_many([key(1), hostile]),
        lambda: store.put(hostile, b"1"),
        lambda: store.contains_many([hostile]),
        lambda: store.touch([hostile]),
        lambda: store.delete([hostile]),
    ):
        with pytest.raises(ValueError, match="a key must be like"):
            call()
    assert list(store.entries()) == []


def test_threads_use_one_store(make):
    store = make()
    data = {key(i): os.urandom(50_000 + i) for i in range(24)}

    def work(one):
        assert store.put(one, data[one])
        store.touch([one])
        return read(store.get_many([one, key(1000)])) == [data[one], None] and list(store.contains_many([one])) == [True]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, data))
    assert read(store.get_many(list(data))) == list(data.values())


def test_closing_twice_is_harmless(make):
    store = make()
    store.put(key(1), b"1")
    for _ in range(2):
        store.close()
    assert read(make().get_many([key(1)])) == [b"1"]


@pytest.mark.parametrize("make", ["folder", "redis", "tiered"], indirect=True)
def test_a_forked_process_uses_the_store_of_its_parent(make):
    store = make()
    store.put(key(1), b"1" * 300_000)
    store.touch([key(1)])
    child = os.fork()
    if not child:  # never comes back
        try:
            good = all(read(store.get_many([key(1)])) == [b"1" * 300_000] for _ in range(50)) and store.put(key(2), b"2")
            os._exit(not good)
        finally:
            os._exit(9)
    for _ in range(50):
        assert read(store.get_many([key(1)])) == [b"1" * 300_000]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read(store.get_many([key(2)])) == [b"2"]


@pytest.mark.parametrize(
    "url, message",
    [
        ("ftp://server/x", "must be a folder or begin with one of file://, redis://"),
        ("redis://:hunter2@[::1", "must be like redis://user:password@host"),
        ("redis://:hun/ter2@h:5", "must be like redis://user:password@host"),
        ("redis://h:hunter2", "must be like redis://user:password@host"),
        ("redis://:hunter2@h/0?bogus=hunter2", r"redis://h/0 may have the options ttl, db.*got bogus"),
        ("redis://h/0?password=hunter2", "got password"),
        ("redis://h/0?ttl=hunter2", "must be like redis://"),
        ("redis://:hunter2@h/0?ttl=-5", "ttl must be a number of seconds from 1, got -5"),
        ("redis://:hunter2@h/hunter2", "must be like redis://"),
        ("s3://access:hunter2@bucket", "without credentials or options, which come from the environment"),
        ("s3://bucket/x?secret=hunter2", "without credentials or options"),
        ("https://hunter2@server/x", "without credentials or options"),
        ("az://container", "cannot open az://container"),
        (pathlib.PurePosixPath("s3://hunter2/prompts"), r"must begin with s3://, got s3:/\. Give it as a text"),
        ("redis:/:hunter2@h", "must begin with redis://, got redis:/"),
        ("S3:hunter2", "must begin with s3://, got s3:"),
        ("memory:", "must begin with memory://"),
        ("file:hunter2", "a path needs no URL, and a folder of such a name needs ./ before it"),
        ("https:/hunter2/x", "must begin with https://"),
        ("unix:/run/redis.sock", "must begin with unix:///, got unix:/"),
        ("unix://run/redis.sock", "must be like unix:///run/redis.sock"),
        ("unix://", "must be like unix:///run/redis.sock"),
    ],
)
def test_bad_urls(url, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("redis")
    pytest.importorskip("obstore")
    with pytest.raises(ValueError, match=message) as caught:
        open_store(url)
    assert "hunter2" not in shown(caught.value) and "ter2" not in shown(caught.value) and not os.listdir(tmp_path)


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan, "5", True, None])
@pytest.mark.parametrize("url", ["redis://h", "memory://x"])
def test_bad_timeouts(url, timeout):
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
        open_store(url, timeout=timeout)


def test_max_bytes_and_near_need_a_folder(tmp_path):
    with pytest.raises(ValueError, match="max_bytes is for a folder"):
        open_store("redis://127.0.0.1", max_bytes=1000)
    with pytest.raises(ValueError, match="near is for a folder in front of a server"):
        open_store(tmp_path, near=tmp_path)
    for near, message in (("s3://b", "got s3://"), ("redis:/h", "must begin with redis://"), ("", "got an empty text")):
        with pytest.raises(ValueError, match=message):
            open_store("redis://127.0.0.1", near=near)
    store = open_store("redis://127.0.0.1", max_bytes=1000, near=tmp_path)
    assert isinstance(store, TieredStore) and store.near.max_bytes == 1000
    assert isinstance(open_store(f"file://{tmp_path}"), FolderStore)


def test_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    open_store("~/prompts").close()
    assert (tmp_path / "home" / "prompts").is_dir() and not (tmp_path / "~").exists()


def test_a_relative_folder_stays_where_it_was_opened(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    stores = FolderStore("file:x"), open_store("./file:x"), open_store("redis://127.0.0.1", near="./file:x").near
    monkeypatch.chdir(tmp_path / "b")
    for i, store in enumerate(stores):
        assert store.put(key(i), b"value") and store.contains_many([key(0), key(i)]) == [True, True]
        assert store.url == str(tmp_path / "a" / "file:x")
        store.close()
    assert os.listdir(tmp_path / "b") == []


@pytest.mark.skipif(os.name == "nt", reason="Windows goes up a link by its name")
def test_a_folder_above_a_link_is_that_of_the_system(tmp_path):
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "sub")
    store = FolderStore(tmp_path / "link" / ".." / "prompts")
    store.put(key(0), b"value")
    store.close()
    assert (tmp_path / "real" / "prompts").is_dir() and not (tmp_path / "prompts").exists()


@pytest.mark.parametrize("name", ["my prompts", "100 %25 of ä#?&+", "%41"])
def test_file_urls(name, tmp_path, monkeypatch):
    """As pathlib and RFC 8089 write them; a path is taken as it is."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / name
    quoted = folder.as_uri().removeprefix("file://")
    for url in (folder.as_uri(), f"file://localhost{quoted}", f"FILE://LocalHost{quoted}", f"file:{quoted}", str(folder), name):
        open_store(url).close()
        assert os.listdir(tmp_path) == [name]
    raw = tmp_path / "raw ä"
    open_store(f"file://{raw}").close()
    near = open_store("redis://127.0.0.1", near=folder.as_uri()).near
    assert near.folder == folder and sorted(os.listdir(tmp_path)) == sorted([name, "raw ä"])


@pytest.mark.parametrize(
    "url",
    [
        "file:prompts",
        "FILE:",
        "file://server/x",
        "file://prompts",
        "file://",
        "file://../x",
        "file:///x?a=b",
        "file:///x#a",
        "file://user@localhost/x",
    ],
)
def test_file_urls_that_name_no_folder_here(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="must be file:/// and a whole path"):
        open_store(url)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("url, package, extra", [("redis://h", "redis", "redis"), ("s3://b", "obstore", "cloud")])
def test_missing_packages_are_named(url, package, extra, monkeypatch):
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf'the package {package}: pip install "kvfast\[{extra}\]"'):
        open_store(url)
