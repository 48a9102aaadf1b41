"""Files that are written under another name and appear complete."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator

from kvfast.core.file_lock import try_lock

_MOST_NAME = 120  # bytes of a file's name that those of its parts begin with; a system's names may have 143 bytes, or 255
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_replaceable(path: str) -> None:
    """Raise OSError if something other than a regular file is at a path: it would be gone once a file is in its place."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # whatever is wrong, the first write will say
    if not stat.S_ISREG(mode):
        kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "no file")
        error = IsADirectoryError if stat.S_ISDIR(mode) else OSError
        raise error(
            errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL,
            f"{kind} cannot be replaced by a file; save to another name, or send to_bytes() there",
            path,
        )


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """The path of a file to be written, which takes the place of the one at `path` in the end, with its mode or that of the umask.

    It lies in a folder that only its owner can enter and that is locked. What killed processes left of files of this name is removed.
    """
    check_replaceable(path)
    start = _start_of(path)
    _remove_parts(start)
    part, lock = _new_part(start)
    try:
        new = os.path.join(part, "new")
        os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = stat.S_IMODE(os.stat(new).st_mode)  # by the umask, which cannot be read without changing it
        yield new
        check_replaceable(path)
        with contextlib.suppress(FileNotFoundError):
            mode = stat.S_IMODE(os.stat(path).st_mode)
        with open(new, "r+b") as file:
            if hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        _remove(part)
        if lock is not None:
            os.close(lock)
    if os.name == "posix":
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _start_of(path):
    """The beginning of the paths of parts of a file."""
    folder, name = os.path.split(path)
    if len(os.fsencode(name)) > _MOST_NAME:
        from hashlib import blake2b  # slow to import, and few names need it

        name = blake2b(os.fsencode(name), digest_size=16).hexdigest()
    return os.path.join(folder, f"{name}.")


def _new_part(start):
    """A new folder, and a descriptor that holds its lock, or None where folders have no locks."""
    while True:
        part = f"{start}{os.urandom(16).hex()}.part"
        os.mkdir(part, 0o700)  # fails if the path exists, even as a link; other users cannot write into the folder
        # Before it is locked, another process may take it for one of a killed process.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            lock = _locked(part)
            if os.path.isdir(part):
                return part, lock


def _locked(part):
    """A descriptor that holds the lock of a folder, or None where folders have no locks; BlockingIOError if another holds it."""
    if os.name != "posix":
        return None
    descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        is_locked = try_lock(descriptor)
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    if not is_locked:
        os.close(descriptor)
        raise BlockingIOError(f"another process writes to {part}")
    return descriptor


def _remove_parts(start):
    """Remove the folders of processes that were killed: those that nobody has locked."""
    folder, name = os.path.split(start)
    with contextlib.suppress(OSError):
        for one in os.listdir(folder or "."):
            if not one.endswith(".part") or not one.startswith(name) or not re.fullmatch(r"[0-9a-f]{32}\.part", one[len(name) :]):
                continue
            part = os.path.join(folder, one)
            with contextlib.suppress(OSError):  # also for a link, or something else than a folder
                lock = _locked(part)
                if lock is not None:
                    _remove(part)
                    os.close(lock)


def _remove(part):
    from shutil import rmtree

    rmtree(part, ignore_errors=True)
