"""What a saved file replaces, its mode and its name, and what a killed save leaves."""

import errno
import os
import signal
import socket
import stat
import subprocess
import sys

import numpy as np
import pytest
from cache_kinds import fill, make
from compressed_rows import correlated

import kvfast

pytest.importorskip("safetensors")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes and special files of POSIX")


def cache_of(n=100):
    return fill(make("growing", "int8"), np.random.default_rng(0), n)


def compressed():
    return kvfast.KVCacheCompressor(kvfast.LowRank(16)).compress_kv_3d(*correlated(np.random.default_rng(0), 2, 1, 100, 32))


def calibration():
    return kvfast.calibrate(*np.random.default_rng(0).standard_normal((2, 1, 200, 1, 16), np.float32))


SAVED = {"cache": cache_of, "snapshot": lambda: cache_of().snapshot(), "compressed": compressed, "calibration": calibration}


@pytest.fixture(params=SAVED)
def one(request):
    return SAVED[request.param]()


def device(path):
    if os.geteuid():
        pytest.skip("only root makes devices")
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("this container makes no devices")


def listening(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))  # the path of a socket is short


@pytest.mark.parametrize(
    ("make_it", "words"), [(os.mkfifo, "a pipe"), (os.mkdir, "a folder"), (device, "a device"), (listening, "a socket")]
)
@pytest.mark.parametrize("is_link", [False, True])
def test_only_files_are_replaced(one, make_it, words, is_link, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_it(tmp_path / "it")
    before, path = os.lstat(tmp_path / "it"), tmp_path / "it"
    if is_link:
        path = tmp_path / "link"
        path.symlink_to("it")
    with pytest.raises(OSError, match=f"{words} cannot be replaced by a file") as raised:
        one.save(path)
    assert isinstance(raised.value, IsADirectoryError) == (words == "a folder")
    after = os.lstat(tmp_path / "it")
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino) and len(os.listdir(tmp_path)) == 1 + is_link


def test_a_link_to_a_file_stays(one, tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    one.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").stat().st_size > 3


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_modes(one, umask, tmp_path):
    """A new file's mode is that of the umask, and a replaced one's stays."""
    path, old = tmp_path / "one", os.umask(umask)
    try:
        one.save(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
        for mode in (0o664, 0o600, 0o640):
            path.chmod(mode)
            one.save(path)
            assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(old)
    assert os.listdir(tmp_path) == ["one"]


def test_modes_in_a_store(tmp_path):
    """Values and index, by the umask; a value that is written again keeps its own."""
    key, old = "c-" + "ab" * 32, os.umask(0o022)
    try:
        store = kvfast.prompts.stores.FolderStore(tmp_path)
        assert store.put(key, b"value")
        (file,) = tmp_path.rglob(key)
        assert stat.S_IMODE(file.stat().st_mode) == 0o644 == stat.S_IMODE((tmp_path / "index.sqlite3").stat().st_mode)
        file.chmod(0o664)
        assert store.put(key, b"another") and file.read_bytes() == b"another"
        assert stat.S_IMODE(file.stat().st_mode) == 0o664
    finally:
        os.umask(old)


@pytest.mark.parametrize("name", ["x" * 232, "x" * 255, "é" * 127, "ü" * 60 + ".safetensors", "...x"])
def test_every_name_that_the_system_takes(one, name, tmp_path):
    for _ in range(2):
        one.save(tmp_path / name)
        assert os.listdir(tmp_path) == [name]


def test_names_that_it_does_not_take(one, tmp_path):
    for name in ("x" * 256, "é" * 128):
        with pytest.raises(OSError) as raised:
            one.save(tmp_path / name)
        assert raised.value.errno == errno.ENAMETOOLONG and not os.listdir(tmp_path)


STOPPED = """
import os, sys, kvfast, numpy as np
cache = kvfast.KVCache(1, 1, 16, dtype="int8")
cache.append(0, *np.ones((2, 30, 1, 16), np.float32)); cache.advance(30)
fsync = os.fsync
def stop(descriptor):
    print("saving", flush=True)
    sys.stdin.read()
    fsync(descriptor)
os.fsync = stop
cache.save(sys.argv[1])
"""


@pytest.mark.parametrize("name", ["talk", "x" * 250])
def test_what_a_killed_save_leaves_goes_with_the_next(name, tmp_path):
    """But nothing that a living process writes, and nothing of another name."""
    path, others = tmp_path / name, {f"{name[:100]}.{'0' * 31}.part", f"{name[:100]}x.{'0' * 32}.part"}
    for other in others:
        (tmp_path / other).mkdir()
    process = subprocess.Popen([sys.executable, "-c", STOPPED, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"saving\n"
    (part,) = set(os.listdir(tmp_path)) - others
    assert part.endswith(".part")
    cache_of().save(path)
    assert set(os.listdir(tmp_path)) == {name, part, *others}
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert part in os.listdir(tmp_path)
    cache_of(30).save(tmp_path / "another")
    assert part in os.listdir(tmp_path)
    cache_of(50).save(path)
    assert set(os.listdir(tmp_path)) == {name, "another", *others} and len(kvfast.load(path)) == 50


def test_a_living_save_ends_well_beside_others(tmp_path):
    path = tmp_path / "talk"
    process = subprocess.Popen([sys.executable, "-c", STOPPED, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"saving\n"
    cache_of(50).save(path)
    process.communicate(b"")
    assert process.returncode == 0 and len(kvfast.load(path)) == 30 and os.listdir(tmp_path) == ["talk"]
