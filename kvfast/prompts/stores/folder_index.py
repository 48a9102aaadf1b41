"""The index of a folder of values: sizes and uses, in SQLite."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from kvfast.core.file_lock import file_lock
from kvfast.files.cache_file import remove_file
from kvfast.prompts.stores.store import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

VERSION = 1
WAIT = 5.0  # seconds for other processes, whose transactions take milliseconds
LISTED = 10_000  # lines that are read at once
EVICTED = 200  # values that are removed at once
LATEST = 1 << 62  # nanoseconds since 1970, in the year 2116: numbers end at twice as many
_TABLES = (
    "CREATE TABLE stored (key TEXT PRIMARY KEY, nbytes INTEGER NOT NULL, used INTEGER NOT NULL, hits INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE total (nbytes INTEGER NOT NULL)",
)
# After the lines of a folder of values: one at a time, a million take minutes.
_REST = (
    "INSERT INTO total SELECT coalesce(sum(nbytes), 0) FROM stored",
    "CREATE INDEX by_use ON stored (used)",
    "CREATE TRIGGER added AFTER INSERT ON stored BEGIN UPDATE total SET nbytes = nbytes + NEW.nbytes; END",
    "CREATE TRIGGER removed AFTER DELETE ON stored BEGIN UPDATE total SET nbytes = nbytes - OLD.nbytes; END",
    "CREATE TRIGGER changed AFTER UPDATE OF nbytes ON stored BEGIN UPDATE total SET nbytes = nbytes + NEW.nbytes - OLD.nbytes; END",
    f"PRAGMA user_version = {VERSION}",
)


class FolderIndex:
    """Sizes of values, and the order of their uses. One thread may use it at a time, and any number of processes.

    A line is there before its file, and is removed after it. So what a killed process leaves is a line without a file, which does no
    harm and is removed in its turn, and never a file without a line. `files` yields (key, status) of all files, for a new index.
    """

    def __init__(self, path: Path, files: Callable[[], Iterator[tuple[str, os.stat_result]]]) -> None:
        self._path, self._process = path, os.getpid()
        if not self._connect():
            # One process makes an index, and the others wait for it.
            with file_lock(path.with_suffix(".lock")):
                if not self._connect():
                    self._create(files)
                    self._connect()

    def _connect(self):
        """Open a sound index. False if there is none."""
        if not self._path.exists():
            return False
        sqlite3 = sqlite()
        self._database, self._file = _opened(self._path), _identity(self._path)
        try:
            self._database.execute("PRAGMA synchronous = NORMAL")
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            (nbytes,) = self._database.execute("SELECT nbytes FROM total").fetchone()
            newest = self._database.execute("SELECT key, nbytes, used, hits FROM stored ORDER BY used DESC LIMIT 1").fetchone()
            if version == VERSION and isinstance(nbytes, int) and (newest is None or isinstance(newest[2], int) and newest[2] < LATEST):
                return True
        except sqlite3.OperationalError as error:
            if "no such" not in str(error):  # locked, or a folder that cannot be read
                self._database.close()
                raise
        except (sqlite3.DatabaseError, TypeError):
            pass  # damaged
        self._database.close()
        return False

    def _create(self, files):
        """Make an index of the files. It appears complete."""
        path = self._path.with_suffix(".new")
        self._remove(path)
        self._database = _opened(path)
        try:
            self._database.execute("PRAGMA journal_mode = WAL")
            with self._transaction():
                for statement in _TABLES:
                    self._database.execute(statement)
                rows = ((key, status.st_size, status.st_mtime_ns) for key, status in files())
                self._database.executemany("INSERT OR IGNORE INTO stored VALUES (?, ?, ?, 0)", rows)
                for statement in _REST:
                    self._database.execute(statement)
        finally:
            self._database.close()
        self._remove(self._path)
        os.replace(path, self._path)

    @staticmethod
    def _remove(path):
        for end in ("-wal", "-shm", ""):
            remove_file(f"{path}{end}")

    def is_foreign(self) -> bool:
        """Whether it was opened by the process that this one was forked from, and must not be used, or another file is in its place."""
        return self._process != os.getpid() or self._file != _identity(self._path)

    def discard(self) -> None:
        """Close a damaged index, so that the next one to open it makes a new one."""
        self.close()
        with file_lock(self._path.with_suffix(".lock")):
            if self._file == _identity(self._path):  # else another process was faster
                self._remove(self._path)

    def add(self, key: str, nbytes: int, max_bytes: int | None, unlink: Callable[[str], None]) -> None:
        """Add a value, after removing the least recently used others until it fits."""
        with self._transaction():
            self._database.execute(
                "INSERT INTO stored VALUES (?, ?, ?, 0) ON CONFLICT (key) DO UPDATE SET nbytes = excluded.nbytes, used = excluded.used",
                (key, nbytes, self._now()),
            )
            while max_bytes is not None and self._evict(max_bytes, key, unlink):
                pass

    def shrink(self, max_bytes: int, unlink: Callable[[str], None]) -> None:
        """Remove the least recently used values until the others have at most `max_bytes` bytes."""
        is_larger = True
        while is_larger:
            with self._transaction():  # a short one, for the sake of other processes
                is_larger = all(self._evict(max_bytes, "", unlink) for _ in range(EVICTED))

    def _evict(self, max_bytes, but, unlink):
        """Remove the least recently used value, but not the one with a key, if all have more than `max_bytes` bytes. Returns whether
        one was removed."""
        if self._database.execute("SELECT nbytes FROM total").fetchone()[0] <= max_bytes:
            return False
        oldest = self._database.execute("SELECT key FROM stored WHERE key != ? ORDER BY used LIMIT 1", (but,)).fetchone()
        if oldest is not None:
            unlink(oldest[0])
            self._database.execute("DELETE FROM stored WHERE key = ?", oldest)
        return oldest is not None

    def _now(self):
        """A time after all others in the index, whatever the clock says. It may have been set back, or be slower than another machine's."""
        (newest,) = self._database.execute("SELECT max(used) FROM stored").fetchone()
        return max(time.time_ns(), 0 if newest is None else newest + 1)

    def if_listed(self, key: str, call: Callable[[], None]) -> bool:
        """Call `call` if a key is there, while no process can remove it. Returns whether it is."""
        with self._transaction():
            is_listed = self._database.execute("SELECT 1 FROM stored WHERE key = ?", (key,)).fetchone() is not None
            if is_listed:
                call()
        return is_listed

    def touch(self, keys: Sequence[str], is_hit: bool) -> None:
        """Count each key as used now, the last of them as the newest."""
        with self._transaction():
            now = self._now()
            rows = [(now + i, is_hit, key) for i, key in enumerate(keys)]
            self._database.executemany("UPDATE stored SET used = ?, hits = hits + ? WHERE key = ?", rows)

    def remove(self, keys: Sequence[str], unlink: Callable[[str], None]) -> None:
        with self._transaction():
            for key in keys:
                unlink(key)
            self._database.executemany("DELETE FROM stored WHERE key = ?", [(key,) for key in keys])

    def entries_after(self, key: str) -> list[Entry]:
        """The next values in the order of their keys, at most `LISTED`."""
        rows = self._database.execute("SELECT key, nbytes, used, hits FROM stored WHERE key > ? ORDER BY key LIMIT ?", (key, LISTED))
        return [Entry(key, nbytes, used / 1e9, hits) for key, nbytes, used, hits in rows]

    def close(self) -> None:
        if self._process == os.getpid():
            self._database.close()

    @contextlib.contextmanager
    def _transaction(self):
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise


def sqlite() -> Any:
    """The module sqlite3, which some Pythons are built without."""
    try:
        import sqlite3
    except ImportError:
        raise ModuleNotFoundError("a folder of prompts needs Python's sqlite3", name="sqlite3") from None
    return sqlite3


def _opened(path):
    return sqlite().connect(path, timeout=WAIT, isolation_level=None, check_same_thread=False)


def _identity(path):
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
