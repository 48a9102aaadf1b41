"""Values in a folder."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any

from kvfast.core.checks import check_size, checked_path
from kvfast.core.file_lock import is_locked, try_lock
from kvfast.errors import StoreError
from kvfast.files.cache_file import read_at, remove_file
from kvfast.prompts.stores.folder_index import FolderIndex, sqlite
from kvfast.prompts.stores.store import Entry, Refusal, Store, Value, check_key, is_key

STALE = 10  # seconds after which an unfinished file that no process has locked is one of a killed process
STALE_WITHOUT_LOCKS = 3600
MOVES_OPEN_FILES = os.name != "nt"
# Bytes of a value that are read at once; larger ones stay in the page cache until they are asked for, in at most MOST_OPEN open files of a call.
SMALL, MOST_OPEN = 32 << 10, 256
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_VALUE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)  # of something else than a file


class FolderStore(Store):
    """Values in the files of a folder, for any number of processes at once.

    A file appears complete. It is not forced to the disk: readers verify what they read. Sizes, uses and the order of eviction are in
    an index (SQLite), so no call lists the folder; the files are the truth, and a lost or damaged index is made again from them, with
    all uses at 0. Other files are left alone. A folder that cannot be written is read: `put` raises a Refusal, and `touch` does nothing.

    Parameters
    ----------
    folder : path-like
        Created if it does not exist. On one machine: several machines need a server, or a tier in front of one.
    max_bytes : int, optional
        Largest number of bytes of all values. The least recently used ones are removed at once, and before others are written. While
        processes write, each may be beyond it by one value.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int | None = None) -> None:
        from pathlib import Path  # `import kvfast` shall not load it

        self.folder = Path(checked_path(folder, "folder")).absolute()  # a program may change its directory
        self.url = str(self.folder)
        self.max_bytes = None if max_bytes is None else check_size(max_bytes, "max_bytes", 0)
        self._lock, self._open = Lock(), None
        try:
            self._parts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if not self.folder.is_dir():  # what cannot be written may still be read
                raise StoreError(f"cannot make the folder {self.url}: {error}") from None
        self._remove_stale()
        if self.max_bytes is not None and not self._is_read_only():
            with contextlib.suppress(StoreError):  # as on a full disk: the next value that is written does it
                self._in_index(lambda index: index.shrink(self.max_bytes, self._unlink))

    def get_many(self, keys: Sequence[str]) -> list[Value | None]:
        values: list[Value | None] = []
        num_open = 0
        try:
            for key in keys:
                values.append(_open(self._path(key), num_open < MOST_OPEN))
                num_open += isinstance(values[-1], _FileValue)
        except BaseException as error:
            for value in values:
                if value is not None:
                    value.__exit__()
            if not isinstance(error, OSError):
                raise
            raise StoreError(f"cannot read {self.url}: {error}") from None
        return values

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        return [os.path.isfile(self._path(key)) for key in keys]

    def put(self, key: str, value: Any) -> bool:
        path, data = self._path(key), memoryview(value).cast("B")
        if self.max_bytes is not None and len(data) > self.max_bytes:
            raise Refusal(f"a value is larger than max_bytes={self.max_bytes}", is_general=False)
        if self._is_read_only():
            raise Refusal("it cannot be written")
        part = self._parts / f"{key}.{os.urandom(8).hex()}"
        try:
            self._parts.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
            # Room is made before it is taken, and the line of the index comes before the file.
            self._in_index(lambda index: index.add(key, len(data), self.max_bytes, self._unlink))
            with open(part, "xb") as file:
                try_lock(file.fileno())
                with contextlib.suppress(FileNotFoundError):
                    if hasattr(os, "fchmod"):  # a value that is replaced keeps its mode
                        os.fchmod(file.fileno(), stat.S_IMODE(os.stat(path, follow_symlinks=False).st_mode))
                file.write(data)
                file.flush()
                path.parent.mkdir(exist_ok=True)
                if not MOVES_OPEN_FILES:
                    file.close()
                # Since then other processes may have written until this was the next to go.
                for _ in range(3):
                    if self._in_index(lambda index: index.if_listed(key, lambda: os.replace(part, path))):
                        return True
                    self._in_index(lambda index: index.add(key, len(data), self.max_bytes, self._unlink))
        except OSError as error:
            with contextlib.suppress(OSError):
                remove_file(part)
                self.delete([key])
            why = str(error) if isinstance(error, StoreError) else f"cannot write to {self.url}: {error.strerror}"
            if error.errno in _NO_ROOM:
                raise Refusal(f"it is full, {why}") from None
            raise StoreError(why) from None
        remove_file(part)
        self.delete([key])
        raise Refusal(f"other processes have filled its max_bytes={self.max_bytes}")

    def touch(self, keys: Sequence[str], is_hit: bool = True) -> None:
        keys = [check_key(key) for key in keys]
        if not self._is_read_only():
            self._in_index(lambda index: index.touch(keys, is_hit))

    def delete(self, keys: Sequence[str]) -> None:
        keys = [check_key(key) for key in keys]
        if self._is_read_only():
            raise StoreError(f"{self.url} cannot be written")
        self._in_index(lambda index: index.remove(keys, self._unlink))

    def entries(self) -> Iterator[Entry]:
        if self._is_read_only():
            for key, status in self._files():
                yield Entry(key, status.st_size, status.st_mtime, -1)
            return
        last = ""
        while page := self._in_index(lambda index, last=last: index.entries_after(last)):
            yield from page
            last = page[-1].key

    def close(self) -> None:
        with self._lock:
            if self._open is not None:
                self._open.close()
                self._open = None
        self._remove_stale()

    @property
    def _parts(self):
        return self.folder / "unfinished"

    def _path(self, key):
        digest = check_key(key).partition("-")[2]
        return self.folder / digest[:2] / key

    def _unlink(self, key):
        # Another process may have removed it, or put a folder in its place; some systems do not remove a file that is open.
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError):
            os.unlink(self._path(key))

    def _in_index(self, call: Callable[[FolderIndex], Any]) -> Any:
        """Call with the index, for one thread at a time."""
        errors = sqlite()
        try:
            with self._lock:
                for is_first in (True, False):
                    try:
                        if self._open is None or self._open.is_foreign():
                            if self._open is not None:
                                self._open.close()
                                self._open = None
                            self._open = FolderIndex(self.folder / "index.sqlite3", self._files)
                        return call(self._open)
                    except (errors.OperationalError, errors.ProgrammingError):  # locked, no room, closed
                        raise
                    except errors.DatabaseError:  # damaged
                        if not is_first:
                            raise
                        if self._open is not None:
                            self._open.discard()
                            self._open = None
        except (errors.Error, OSError) as error:
            failure = StoreError(f"cannot use the index of {self.url}: {error}")
            failure.errno = errno.ENOSPC if "disk is full" in str(error) else getattr(error, "errno", None)
        raise failure

    def _is_read_only(self):
        return self.folder.is_dir() and not os.access(self.folder, os.W_OK)

    def _files(self):
        """(key, status) of all files, nearly in the order of their keys, in which an index is made soonest."""
        for folder in sorted(os.scandir(self.folder), key=lambda entry: entry.name):
            if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False):
                for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        if is_key(entry.name) and entry.is_file(follow_symlinks=False):
                            yield entry.name, entry.stat()

    def _remove_stale(self):
        """Remove what killed processes have left."""
        with contextlib.suppress(OSError):
            for part in os.scandir(self._parts):
                with contextlib.suppress(OSError):
                    age = time.time() - part.stat().st_mtime if is_key(part.name.partition(".")[0]) else 0
                    if age > STALE_WITHOUT_LOCKS or (age > STALE and not is_locked(part.path)):
                        remove_file(part.path)


class _FileValue(Value):
    """An open file."""

    def __init__(self, descriptor, nbytes):
        self._descriptor, self._nbytes = descriptor, nbytes

    def __len__(self):
        return self._nbytes

    def read(self, start, count, memory=None):
        if start + count > self._nbytes:
            raise EOFError(f"it must have {start + count} bytes, got {self._nbytes}")
        memory = memoryview(bytearray(count)) if memory is None else memory[:count]
        try:
            got = read_at(self._descriptor, memory, start)
        except OSError as error:
            raise EOFError(f"it cannot be read: {error}") from None
        if got < count:
            raise EOFError(f"it must have {start + count} bytes, got {start + got}")
        return memory

    def __exit__(self, *exception):
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self):
        self.__exit__()


def _open(path, may_stay_open):
    """The value of a file; None if there is none. A pipe or a link in its place is not read."""
    flags = os.O_RDONLY
    for name in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK", "O_NOFOLLOW"):
        flags |= getattr(os, name, 0)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in _NO_VALUE:
            return None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        if may_stay_open and status.st_size > SMALL:
            value, descriptor = _FileValue(descriptor, status.st_size), None
            return value
        return Value(os.read(descriptor, status.st_size))
    finally:
        if descriptor is not None:
            os.close(descriptor)
