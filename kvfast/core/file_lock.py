"""Locks of files, which end with their process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import msvcrt
except ImportError:  # all others
    msvcrt = None  # type: ignore[assignment]

_LOCKED_BYTE = 1 << 30  # on Windows, where a byte that one process has locked is read by no other: one beyond the ends of files
WAIT = 60.0  # seconds for a process that lists a folder of a million files


@contextlib.contextmanager
def file_lock(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock of a file, which is created. TimeoutError if another process holds it for a minute."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        end = time.monotonic() + WAIT
        while not try_lock(descriptor):
            if time.monotonic() > end:
                raise TimeoutError(f"another process holds {path}")
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed. False if another process has. Where the system has no such locks, they are not taken."""
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    elif msvcrt is not None:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
    return True


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Whether a process holds the lock of a file that exists; True where nobody can know."""
    if fcntl is None and msvcrt is None:
        return True
    descriptor = os.open(path, os.O_RDWR)
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)
