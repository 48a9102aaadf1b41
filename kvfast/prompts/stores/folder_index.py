"""The index of a folder of values: sizes and uses, in SQLite."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from kvfast.files.cache_file import remove_file
from kvfast.prompts.stores.store import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

VERSION = 1
WAIT = 5.0  # seconds for other processes, whose transactions take milliseconds
_TABLES = """
CREATE TABLE stored (key TEXT PRIMARY KEY, nbytes INTEGER NOT NULL, used INTEGER NOT NULL, hits INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX by_use ON stored (used);
CREATE TABLE total (nbytes INTEGER NOT NULL);
INSERT INTO total VALUES (0);
CREATE TRIGGER added AFTER INSERT ON stored BEGIN UPDATE total SET nbytes = nbytes + NEW.nbytes; END;
CREATE TRIGGER removed AFTER DELETE ON stored BEGIN UPDATE total SET nbytes = nbytes - OLD.nbytes; END;
CREATE TRIGGER changed AFTER UPDATE OF nbytes ON stored BEGIN UPDATE total SET nbytes = nbytes + NEW.nbytes - OLD.nbytes; END;
"""


class FolderIndex:
    """Sizes and uses of values. One thread may use it at a time, and any number of processes.

    Parameters
    ----------
    path : Path
    files : callable
        Yields (key, status) of all files, for a new index.
    """

    def __init__(self, path: Path, files: Callable[[], Iterator[tuple[str, os.stat_result]]]) -> None:
        self._path, self._process = path, os.getpid()
        try:
            import sqlite3
        except ImportError:  # some Pythons are built without it
            raise ModuleNotFoundError("a folder of prompts needs Python's sqlite3", name="sqlite3") from None
        try:
            self._connect(files)
        except sqlite3.OperationalError:  # locked, or a folder that cannot be written
            raise
        except sqlite3.DatabaseError:  # damaged
            for end in ("", "-wal", "-shm"):
                remove_file(f"{path}{end}")
            self._connect(files)

    def _connect(self, files):
        import sqlite3

        self._database = sqlite3.connect(self._path, timeout=WAIT, isolation_level=None, check_same_thread=False)
        try:
            if self._version() != VERSION:
                self._database.execute("PRAGMA journal_mode = WAL")
                with self._transaction():
                    if self._version() != VERSION:  # else another process was faster
                        for (name,) in self._database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                            self._database.execute(f'DROP TABLE "{name}"')
                        for statement in _TABLES.split(";\n"):
                            self._database.execute(statement)
                        rows = ((key, status.st_size, status.st_mtime_ns) for key, status in files())
                        self._database.executemany("INSERT INTO stored VALUES (?, ?, ?, 0)", rows)
                        self._database.execute(f"PRAGMA user_version = {VERSION}")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute("SELECT * FROM total").fetchone()
        except BaseException:
            self._database.close()
            raise

    def _version(self):
        return self._database.execute("PRAGMA user_version").fetchone()[0]

    def is_foreign(self) -> bool:
        """Whether it was opened by the process that this one was forked from, and must not be used, or its file is gone."""
        return self._process != os.getpid() or not self._path.exists()

    def add(self, key: str, nbytes: int, max_bytes: int | None, unlink: Callable[[str], None]) -> None:
        """Add a value, after removing the least recently used others until it fits."""
        with self._transaction():
            self._database.execute("INSERT INTO stored VALUES (?, ?, ?, 0) ON CONFLICT (key) DO UPDATE SET nbytes = excluded.nbytes, "
                                   "used = excluded.used", (key, nbytes, time.time_ns()))  # fmt: skip
            while max_bytes is not None and self._database.execute("SELECT nbytes FROM total").fetchone()[0] > max_bytes:
                oldest = self._database.execute("SELECT key FROM stored WHERE key != ? ORDER BY used LIMIT 1", (key,)).fetchone()
                if oldest is None:
                    break
                # The file first: if this process ends here, a line without a file is left, which does no harm.
                unlink(oldest[0])
                self._database.execute("DELETE FROM stored WHERE key = ?", oldest)

    def touch(self, keys: Sequence[str], is_hit: bool) -> None:
        """Count each key as used now, the last of them as the newest."""
        now = time.time_ns()
        with self._transaction():
            rows = [(now + i, is_hit, key) for i, key in enumerate(keys)]
            self._database.executemany("UPDATE stored SET used = ?, hits = hits + ? WHERE key = ?", rows)

    def remove(self, keys: Sequence[str], unlink: Callable[[str], None]) -> None:
        with self._transaction():
            for key in keys:
                unlink(key)
            self._database.executemany("DELETE FROM stored WHERE key = ?", [(key,) for key in keys])

    def entries(self) -> list[Entry]:
        rows = self._database.execute("SELECT key, nbytes, used, hits FROM stored").fetchall()
        return [Entry(key, nbytes, used / 1e9, hits) for key, nbytes, used, hits in rows]

    def close(self) -> None:
        if self._process == os.getpid():
            self._database.close()

    @contextlib.contextmanager
    def _transaction(self):
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")
