"""Values in a folder."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from kvfast.core.checks import check_size
from kvfast.errors import StoreError
from kvfast.files.cache_file import remove_file
from kvfast.prompts.stores.folder_index import FolderIndex
from kvfast.prompts.stores.store import Entry, Store, Value, check_key, is_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STALE = 3600  # seconds after which an unfinished file counts as left by a killed process
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FolderStore(Store):
    """Values in the files of a folder, for any number of processes at once.

    A file appears complete. It is not forced to the disk: readers verify what they read. Sizes, uses and the order of eviction are in
    an index (SQLite), so no call lists the folder; the files are the truth, and a lost index is made again from them. Other files are
    left alone.

    Parameters
    ----------
    folder : path-like
        Created if it does not exist. On one machine: several machines need a server, or a tier in front of one.
    max_bytes : int, optional
        Largest number of bytes of all values. The least recently used ones are removed before others are written. What a process is
        writing comes on top.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int | None = None) -> None:
        self.folder = Path(os.fsdecode(folder))
        self.url = str(self.folder)
        self.max_bytes = None if max_bytes is None else check_size(max_bytes, "max_bytes", 0)
        self._lock, self._open = Lock(), None
        try:
            self._parts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if not self.folder.is_dir():  # what cannot be written may still be read
                raise StoreError(f"cannot make the folder {self.url}: {error}") from None
        self._remove_stale()

    def get_many(self, keys: Sequence[str]) -> list[Value | None]:
        values: list[Value | None] = []
        try:
            for key in keys:
                values.append(_open(self._path(key)))
        except OSError as error:
            for value in values:
                if value is not None:
                    value.__exit__()
            raise StoreError(f"cannot read {self.url}: {error}") from None
        return values

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        return [self._path(key).exists() for key in keys]

    def put(self, key: str, value: Any) -> bool:
        path, data = self._path(key), memoryview(value).cast("B")
        if self.max_bytes is not None and len(data) > self.max_bytes:
            return False
        part = self._parts / f"{key}.{os.urandom(8).hex()}"
        try:
            with open(part, "xb", buffering=0) as file:
                at = 0
                while at < len(data):
                    at += file.write(data[at:])
            with self._index() as index:
                index.add(key, len(data), self.max_bytes, self._unlink)
                path.parent.mkdir(exist_ok=True)
                os.replace(part, path)
        except OSError as error:
            remove_file(part)
            if error.errno in _NO_ROOM:
                return False
            raise error if isinstance(error, StoreError) else StoreError(f"cannot write to {self.url}: {error}") from None
        return True

    def touch(self, keys: Sequence[str], is_hit: bool = True) -> None:
        with self._index() as index:
            index.touch([check_key(key) for key in keys], is_hit)

    def delete(self, keys: Sequence[str]) -> None:
        with self._index() as index:
            index.remove([check_key(key) for key in keys], self._unlink)

    def entries(self) -> Iterator[Entry]:
        with self._index() as index:
            yield from index.entries()

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
        # Another process may have removed it; some systems do not remove a file that is open.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.unlink(self._path(key))

    @contextlib.contextmanager
    def _index(self):
        """The index, for one thread at a time."""
        with self._lock:
            try:
                if self._open is None or self._open.is_foreign():
                    self._open = FolderIndex(self.folder / "index.sqlite3", self._files)
                yield self._open
            except OSError:
                raise
            except Exception as error:
                if type(error).__module__ != "sqlite3":
                    raise
                raise StoreError(f"cannot use the index of {self.url}: {error}") from None

    def _files(self):
        """(key, status) of all files."""
        for folder in os.scandir(self.folder):
            if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False):
                for entry in os.scandir(folder):
                    if is_key(entry.name):
                        with contextlib.suppress(FileNotFoundError):
                            yield entry.name, entry.stat()

    def _remove_stale(self):
        """Remove what killed processes have left."""
        with contextlib.suppress(OSError):
            for part in os.scandir(self._parts):
                if is_key(part.name.partition(".")[0]) and time.time() - part.stat().st_mtime > STALE:
                    remove_file(part.path)


class _FileValue(Value):
    """An open file."""

    def __init__(self, descriptor):
        self._descriptor, self._nbytes = descriptor, os.fstat(descriptor).st_size

    def __len__(self):
        return self._nbytes

    def read(self, start, count, memory=None):
        memory = memoryview(bytearray(count)) if memory is None else memory[:count]
        at = 0
        while at < count:
            if hasattr(os, "preadv"):
                got = os.preadv(self._descriptor, [memory[at:]], start + at)
            else:
                os.lseek(self._descriptor, start + at, os.SEEK_SET)
                data = os.read(self._descriptor, count - at)
                got = len(data)
                memory[at : at + got] = data
            if not got:
                raise EOFError(f"it must have {start + count} bytes, got {start + at}")
            at += got
        return memory

    def __exit__(self, *exception):
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _open(path):
    try:
        return _FileValue(os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0)))
    except FileNotFoundError:
        return None
