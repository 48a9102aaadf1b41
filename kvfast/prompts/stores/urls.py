"""Stores by their URLs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvfast.core.checks import checked_path
from kvfast.prompts.stores.folder import FolderStore
from kvfast.prompts.stores.tiered import TieredStore

if TYPE_CHECKING:
    from kvfast.prompts.stores.store import Store

REDIS, CLOUD = ("redis", "rediss", "unix"), ("s3", "s3a", "gs", "az", "abfs", "http", "https", "memory")


def open_store(
    store: str | os.PathLike[str], max_bytes: int | None = None, near: str | os.PathLike[str] | None = None, timeout: float = 5.0
) -> Store:
    """A store by its path or URL.

    Parameters
    ----------
    store : str or path-like
        A folder, as a path (``~`` is the home folder) or ``file:///``; a Redis or Valkey server: ``redis://``, ``rediss://`` (TLS) or ``unix://``, with
        ``?ttl=SECONDS`` for values that end; or an object store: ``s3://``, ``gs://``, ``az://``, ``memory://``.
    max_bytes : int, optional
        Of the folder, or of `near`.
    near : str or path-like, optional
        A folder, as a path or ``file:///``, in front of a store that is far.
    timeout : float
        Seconds for each answer of a server.

    Returns
    -------
    Store

    Raises
    ------
    ValueError
        For an unknown scheme; for a file URL with a host, or without a whole path; for `near` in front of a folder.
    ModuleNotFoundError
        Without the packages of an extra, which the message names.
    StoreError
    """
    text = checked_path(store, "store")
    if not text:
        raise ValueError("store must be a folder or a URL, got an empty text: '.' is the current folder")
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    if scheme in ("", "file") or _is_file_url(text):
        if near is not None:
            raise ValueError("near is for a folder in front of a server, not in front of a folder")
        return FolderStore(_folder_of(text), max_bytes)
    if scheme in REDIS:
        from kvfast.prompts.stores.redis import RedisStore

        far: Store = RedisStore(text, timeout)
    elif scheme in CLOUD:
        from kvfast.prompts.stores.cloud import CloudStore

        far = CloudStore(text, timeout)
    else:
        raise ValueError(
            f"a store must be a folder or begin with one of {', '.join(f'{one}://' for one in ('file', *REDIS, *CLOUD))}, "
            f"got {scheme}://"
        )
    if near is not None:
        return TieredStore(FolderStore(_folder_of(checked_path(near, "near")), max_bytes), far)
    if max_bytes is not None:
        raise ValueError(f"max_bytes is for a folder; {far.url} limits itself")
    return far


def _is_file_url(text):
    return text[:6].lower() == "file:/"


def _folder_of(text):
    """The path of a folder, or that of a URL of RFC 8089."""
    if not _is_file_url(text):
        return os.path.expanduser(text)
    from urllib.parse import unquote_to_bytes

    rest, host = text[5:], ""
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        rest = slash + path
    if host.lower() not in ("", "localhost") or not rest or "?" in rest or "#" in rest:
        raise ValueError(
            "a file URL must be file:/// and a whole path on this machine, in which ? is %3F and # is %23; a path needs no URL"
        )
    if os.name == "nt":
        from urllib.request import url2pathname

        return url2pathname(rest)
    return os.fsdecode(unquote_to_bytes(os.fsencode(rest)))
