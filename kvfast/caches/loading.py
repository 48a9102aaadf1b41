"""Caches from files: the class of each kind, by the name that headers have for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfast.caches.contiguous import KVCache
from kvfast.caches.mla import MLAKVCache
from kvfast.caches.multi_head import MultiHeadKVCache
from kvfast.caches.ring import RingKVCache
from kvfast.files import cache_file

if TYPE_CHECKING:
    import os

__all__ = ["load"]

CLASSES = {"full": KVCache, "ring": RingKVCache, "latent": MLAKVCache, "heads": MultiHeadKVCache}


def load(path: str | os.PathLike[str], mmap: bool = False, max_seq_len: int | None = None) -> Any:
    """Read a cache from a file that `KVCache.save` or `Snapshot.save` wrote.

    Parameters
    ----------
    path : path-like
    mmap : bool
        Do not read the blocks but map them: memory is read from the file when attention comes to it, and
        changes stay in this process. The checksums of full blocks are then not verified. The file must not be cut
        short while the cache lives; that `save` replaces it is harmless.
    max_seq_len : int, optional
        Reserve room for so many tokens, instead of what was saved.

    Returns
    -------
    KVCache, RingKVCache, MLAKVCache or MultiHeadKVCache
        Of a `Sequence`, a `KVCache` or `RingKVCache` with its block_size; ``Snapshot.load(path)`` can be restored into a sequence.

    Raises
    ------
    CorruptFileError
        If the file is truncated, damaged, or not one of kvfast.
    IncompatibleSnapshotError
        If it has a version that this kvfast does not know.
    ModuleNotFoundError
        Without the packages of ``kvfast[files]``.
    """
    return cache_file.read(path, new_cache, mmap, max_seq_len)[0]


def new_cache(settings, block_size, max_seq_len):
    """An empty cache of what a header says, its buffer, and what it writes as its settings itself."""
    others = dict(settings)
    cache = CLASSES[others.pop("kind")]._from_settings(others, block_size, max_seq_len)
    return cache, cache._buffer, cache._settings()
