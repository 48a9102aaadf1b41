"""Caches of prompts in a folder."""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfast.caches.snapshot import Snapshot
from kvfast.caches.stored_sequence import StoredSequence
from kvfast.core.checks import check_size, checked_token_ids
from kvfast.errors import CorruptFileError, IncompatibleSnapshotError
from kvfast.files import cache_file
from kvfast.files.state import json_of

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["PromptCache"]

_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.safetensors")
_STALE = 3600  # seconds after which an unfinished file counts as left by a killed process


class PromptCache:
    """Caches of prompts in a folder, found again by their tokens.

    An entry is a file of `KVCache.save`. Its key is the model, the settings of the cache, and the token ids. When the
    folder grows beyond `max_bytes`, the least recently used entries are removed. Any number of processes may share a
    folder: files appear complete, and a missing or damaged file counts as no entry.

    Parameters
    ----------
    folder : path-like
        Created if it does not exist. Other files in it are left alone.
    max_bytes : int, optional
        Largest number of bytes of all entries together.

    Examples
    --------
    >>> import kvfast, numpy as np, tempfile
    >>> prompts = kvfast.PromptCache(tempfile.mkdtemp(), max_bytes=1 << 30)
    >>> cache = kvfast.KVCache(1, 2, 64)
    >>> k = v = np.ones((3, 2, 64), np.float32)
    >>> cache.append(0, k, v)
    >>> cache.advance(3)
    >>> prompts.save(cache, [5, 6, 7], model="smollm2")
    True
    >>> other = kvfast.KVCache(1, 2, 64)
    >>> prompts.restore(other, [5, 6, 8, 9], model="smollm2")
    2
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int | None = None) -> None:
        from pathlib import Path

        self.folder = Path(folder)
        self.max_bytes = None if max_bytes is None else check_size(max_bytes, "max_bytes", 0)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._token_ids = {}  # of files, by their names: a name identifies the contents

    def save(self, cache: Any, token_ids: ArrayLike, model: str = "") -> bool:
        """Save the complete tokens of a cache.

        Parameters
        ----------
        cache : KVCache, RingKVCache or Sequence
        token_ids : integers of shape (len(cache),)
        model : str
            Fingerprint of the model that computed the cache: its name and version, or a checksum of its weights.

        Returns
        -------
        bool
            False if the cache is empty, or larger than `max_bytes` by itself; it is then not saved.
        """
        snapshot = _checked_cache(cache).snapshot(token_ids, {"model": model})
        if not len(snapshot) or self.max_bytes is not None and len(snapshot) * cache.bytes_per_token > self.max_bytes:
            return False
        token_ids = snapshot.token_ids
        for common, name in self._matches(cache, token_ids, model):
            if common == len(token_ids) and self._touch(name):
                return True  # saved already, perhaps with more tokens after these
        name = f"{_key(cache, model)}-{_digest(token_ids.tobytes())}.safetensors"
        snapshot.save(self.folder / name)
        with contextlib.suppress(FileNotFoundError):  # another process may have evicted it
            # Float rows and headers come on top of the bytes per token.
            if self.max_bytes is not None and os.stat(self.folder / name).st_size > self.max_bytes:
                self._remove(name)
                return False
        self._token_ids[name] = token_ids
        self._evict(name)
        return True

    def restore(self, cache: Any, token_ids: ArrayLike, model: str = "") -> int:
        """Fill an empty cache with the longest saved prefix of a prompt.

        Parameters
        ----------
        cache : KVCache, RingKVCache or Sequence
            Empty.
        token_ids : integers of shape (num_tokens,)
            The prompt. Its last token is never restored, so at least one token remains to be computed.
        model : str
            As in `save`.

        Returns
        -------
        int
            Tokens that the cache now holds; 0 if nothing was found.
        """
        if len(_checked_cache(cache)):
            raise ValueError(f"the cache must be empty, it holds {len(cache)} tokens")
        token_ids = checked_token_ids(token_ids)
        most = len(token_ids) - 1 if cache.max_seq_len is None else min(len(token_ids) - 1, cache.max_seq_len)
        for common, name in self._matches(cache, token_ids, model):
            common = min(common, most)
            if common <= 0:
                break
            try:
                snapshot = Snapshot.load(self.folder / name)
            except FileNotFoundError:
                continue
            except (CorruptFileError, IncompatibleSnapshotError):
                self._remove(name)
                continue
            with contextlib.suppress(ValueError):  # a ring that cannot go back that far
                cache.restore(snapshot.truncated(common))
                self._touch(name)
                return common
        return 0

    def clear(self) -> None:
        """Remove all entries."""
        for name, _ in self._entries():
            self._remove(name)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(status.st_size for _, status in self._entries())

    def __len__(self) -> int:
        """Number of entries, of all models."""
        return len(self._entries())

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"PromptCache({str(self.folder)!r}, max_bytes={self.max_bytes})"

    def _matches(self, cache, token_ids, model):
        """(tokens in common, name) of the entries for this model and these cache settings, best first."""
        key, matches = _key(cache, model), []
        for name, _ in self._entries():
            if not name.startswith(key):
                continue
            try:
                known = self._token_ids.get(name)
                if known is None:
                    known = self._token_ids[name] = cache_file.read_token_ids(self.folder / name)
            except FileNotFoundError:
                continue
            except (CorruptFileError, IncompatibleSnapshotError):
                self._remove(name)
                continue
            matches.append((_common(known, token_ids), name))
        return sorted(matches, reverse=True)

    def _entries(self):
        """(name, status) of all entries."""
        entries = []
        for entry in os.scandir(self.folder):
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    entries.append((entry.name, entry.stat()))
        return entries

    def _touch(self, name):
        """Mark an entry as just used. Returns whether it still exists."""
        try:
            os.utime(self.folder / name)
        except FileNotFoundError:
            return False
        return True

    def _remove(self, name):
        self._token_ids.pop(name, None)
        # Another process may have removed it already; some systems do not remove a file that is open.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.unlink(self.folder / name)

    def _evict(self, newest):
        """Remove the least recently used entries until the rest fits, and the files that killed processes have left."""
        for part in self.folder.glob("*.part"):
            with contextlib.suppress(FileNotFoundError):
                if _NAME.match(part.name) and time.time() - part.stat().st_mtime > _STALE:
                    cache_file.remove_folder(part)
        if self.max_bytes is None:
            return
        entries = sorted(self._entries(), key=lambda entry: entry[1].st_mtime_ns)
        total = sum(status.st_size for _, status in entries)
        for name, status in entries:
            if total <= self.max_bytes:
                break
            if name != newest:
                self._remove(name)
                total -= status.st_size


def _checked_cache(cache):
    if not isinstance(cache, StoredSequence):
        raise TypeError(f"cache must be a KVCache, RingKVCache, MLAKVCache or Sequence, got {type(cache).__name__}")
    return cache


def _key(cache, model):
    """Digest of everything that must be equal for an entry to be usable."""
    if not isinstance(model, str):
        raise TypeError(f"model must be a str, got {model!r}")
    settings = json_of([model, cache._settings()])
    return _digest(settings.encode())


def _digest(data):
    from hashlib import blake2b

    return blake2b(data, digest_size=16).hexdigest()


def _common(a, b):
    """Length of the prefix that two arrays share."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n
