"""Stores by their URLs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvfast.prompts.stores.folder import FolderStore
from kvfast.prompts.stores.tiered import TieredStore

if TYPE_CHECKING:
    from kvfast.prompts.stores.store import Store

REDIS, CLOUD = ("redis", "rediss", "unix"), ("s3", "s3a", "gs", "az", "abfs", "http", "https", "memory")


def open_store(store: str | os.PathLike[str], max_bytes: int | None = None, near: str | os.PathLike[str] | None = None,
               timeout: float = 5.0) -> Store:
    """A store by its path or URL.

    Parameters
    ----------
    store : str or path-like
        A folder, as a path or ``file://``; a Redis or Valkey server: ``redis://``, ``rediss://`` (TLS) or ``unix://``, with
        ``?ttl=SECONDS`` for values that end; or an object store: ``s3://``, ``gs://``, ``az://``, ``memory://``.
    max_bytes : int, optional
        Of the folder, or of `near`.
    near : path-like, optional
        A folder in front of a store that is far.
    timeout : float
        Seconds for each answer of a server.

    Returns
    -------
    Store

    Raises
    ------
    ValueError
        For an unknown scheme; for `near` in front of a folder.
    ModuleNotFoundError
        Without the packages of an extra, which the message names.
    StoreError
    """
    text = os.fsdecode(store)
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    if scheme in ("", "file"):
        if near is not None:
            raise ValueError("near is for a folder in front of a server, not in front of a folder")
        return FolderStore(text.partition("://")[2] if scheme else text, max_bytes)
    if scheme in REDIS:
        from kvfast.prompts.stores.redis import RedisStore

        far: Store = RedisStore(text, timeout)
    elif scheme in CLOUD:
        from kvfast.prompts.stores.cloud import CloudStore

        far = CloudStore(text, timeout)
    else:
        raise ValueError(f"a store must be a folder or begin with one of {', '.join(f'{one}://' for one in ('file', *REDIS, *CLOUD))}, "
                         f"got {scheme}://")  # fmt: skip
    if near is not None:
        return TieredStore(FolderStore(near, max_bytes), far)
    if max_bytes is not None:
        raise ValueError(f"max_bytes is for a folder; {far.url} limits itself")
    return far
