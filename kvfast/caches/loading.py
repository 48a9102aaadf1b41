"""Reading caches from files, and the class for each kind that a header can name."""

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
        Map the blocks instead of reading them: the system reads the file when attention needs a block, and
        changes stay in this process. The checksums of full blocks are then not verified. The file must not be
        shortened while the cache exists; `save` may replace it.
    max_seq_len : int, optional
        Reserve room for this many tokens, instead of the saved `max_seq_len`.

    Returns
    -------
    KVCache, RingKVCache, MLAKVCache or MultiHeadKVCache
        A saved `Sequence` comes back as a `KVCache` or `RingKVCache` with the same block_size; ``Snapshot.load(path)``
        can be restored into a sequence.

    Raises
    ------
    CorruptFileError
        If the file is truncated or damaged, or kvfast did not write it.
    IncompatibleSnapshotError
        If this kvfast cannot read the version of the file.
    ModuleNotFoundError
        Without the packages of ``kvfast[files]``.
    """
    return cache_file.read(path, new_cache, mmap, max_seq_len)[0]


def new_cache(settings, block_size, max_seq_len):
    """An empty cache with the settings of a header, its buffer, and the settings that it would write itself."""
    others = dict(settings)
    cache = CLASSES[others.pop("kind")]._from_settings(others, block_size, max_seq_len)
    return cache, cache._buffer, cache._settings()
