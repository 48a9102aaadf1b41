"""Locks of files, by each of the two modules that systems have, and where a system has neither."""

import os
import types

import pytest

from kvfast.core import file_lock as module
from kvfast.core.file_lock import file_lock, is_locked, try_lock


@pytest.fixture
def as_windows(monkeypatch):
    """Its `msvcrt.locking`, as its documentation says: it locks bytes from where the file is, also beyond its end, and fails if
    another has them."""
    held = {}

    def locking(descriptor, mode, count):
        assert mode == "LK_NBLCK" and count == 1
        place = os.fstat(descriptor).st_ino, os.lseek(descriptor, 0, os.SEEK_CUR)
        for other in [held.get(place)]:
            if other is not None and other != descriptor and is_open(other):
                raise PermissionError(13, "Permission denied")
        held[place] = descriptor

    monkeypatch.setattr(module, "fcntl", None)
    monkeypatch.setattr(module, "msvcrt", types.SimpleNamespace(locking=locking, LK_NBLCK="LK_NBLCK"))
    return held


def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def check_locks(path):
    with file_lock(path):
        assert is_locked(path)
        descriptor = os.open(path, os.O_RDWR)
        assert not try_lock(descriptor)
        os.close(descriptor)
    assert not is_locked(path)
    with open(path, "wb", buffering=0) as file:
        assert try_lock(file.fileno())
        file.write(b"from the start")
    assert path.read_bytes() == b"from the start"


@pytest.mark.skipif(module.fcntl is None, reason="this system has no fcntl")
def test_locks_of_fcntl(tmp_path):
    check_locks(tmp_path / "lock")


def test_locks_of_msvcrt(tmp_path, as_windows):
    check_locks(tmp_path / "lock")
    assert {at for _, at in as_windows} == {1 << 30}  # bytes of values stay readable


def test_without_locks_nobody_knows(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "fcntl", None)
    monkeypatch.setattr(module, "msvcrt", None)
    with file_lock(tmp_path / "lock"), file_lock(tmp_path / "lock"):
        assert is_locked(tmp_path / "lock")
