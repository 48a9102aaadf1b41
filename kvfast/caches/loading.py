"""Caches from files and snapshots: the only place that knows the class of each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfast.caches.contiguous import KVCache
from kvfast.caches.mla import MLAKVCache
from kvfast.caches.multi_head import MultiHeadKVCache
from kvfast.caches.ring import RingKVCache
from kvfast.caches.snapshot import Snapshot
from kvfast.core.checks import check_flag, checked_path
from kvfast.files import cache_file

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from kvfast.codec.calibration import Calibration, LayerCalibration

CLASSES = {"full": KVCache, "ring": RingKVCache, "latent": MLAKVCache, "heads": MultiHeadKVCache}


def load(
    source: str | os.PathLike[str] | Snapshot,
    mmap: bool = False,
    max_seq_len: int | None = None,
    calibration: Calibration | LayerCalibration | None = None,
    key: bytes | Sequence[bytes] | None = None,
) -> Any:
    """Make a cache from a file that `KVCache.save` or `Snapshot.save` wrote, or from a snapshot.

    Parameters
    ----------
    source : path-like or Snapshot
        The tokens of a snapshot are copied.
    mmap : bool
        Map the blocks of a file instead of reading them: the system reads the file when attention needs a block, and
        changes stay in this process. The checksums of full blocks are then not verified. The file must not be
        shortened while the cache exists; `save` may replace it.
    max_seq_len : int, optional
        Reserve room for this many tokens, instead of the saved `max_seq_len`. By default the cache of a snapshot grows.
    calibration : Calibration, or one of its layers, optional
        For a file whose format has one: a file holds the digests of its matrices alone. Without need it is ignored.
    key : bytes or sequence of bytes, optional
        For an encrypted file: the key of `save`, or several with it. It cannot be mapped.

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
        If this kvfast cannot read the version of the file, if the file needs another calibration (the message has the digest) or key, or
        if the tokens of a snapshot do not fit `max_seq_len`.
    ValueError
        If the tokens of a file do not fit `max_seq_len`, for a kind of cache without one, and for a snapshot with `mmap`.
    ModuleNotFoundError
        Without the packages of ``kvfast[files]``.
    """
    if isinstance(source, Snapshot):
        if check_flag(mmap, "mmap"):
            raise ValueError("mmap must be False for a Snapshot: it maps files")
        if calibration is not None:
            raise ValueError("calibration must be None for a Snapshot, which has its own")
        if key is not None:
            raise ValueError("key must be None for a Snapshot, which is not encrypted")
        settings, storage = source._settings, source._copied(max_seq_len)
    else:
        settings, storage, *_ = cache_file.read(checked_path(source, "source"), mmap, max_seq_len, calibration, key)
    return CLASSES[settings["kind"]]._over(settings, storage)
