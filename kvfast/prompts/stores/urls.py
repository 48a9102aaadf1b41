"""Stores by their URLs."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from kvfast.core.checks import checked_path
from kvfast.files.encryption import named_keys
from kvfast.prompts.stores.encrypted import EncryptedStore, keys_of_environment
from kvfast.prompts.stores.folder import FolderStore
from kvfast.prompts.stores.tiered import TieredStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfast.prompts.stores.store import Store

FOLDER, REDIS, CLOUD = ("", "file"), ("redis", "rediss", "unix"), ("s3", "s3a", "gs", "az", "abfs", "http", "https", "memory")
_SCHEME = re.compile("([a-z][a-z0-9+.-]+):(/*)", re.IGNORECASE)  # a single letter is the drive of a path of Windows


def open_store(
    store: str | os.PathLike[str],
    max_bytes: int | None = None,
    near: str | os.PathLike[str] | None = None,
    timeout: float = 5.0,
    key: bytes | Sequence[bytes] | None = None,
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
    key : bytes or sequence of bytes, optional
        Encrypts the values; see `EncryptedStore`. By default the keys of the file that KVFAST_STORE_KEY_FILE names in the environment,
        if it does.

    Raises
    ------
    ValueError
        For an unknown scheme, or one without ``//``, as `pathlib` writes it; for a file URL with a host, or without a whole path; for
        `near` in front of a folder, or as another URL than ``file:///``.
    ModuleNotFoundError
        Without the packages of an extra, which the message names.
    """
    keys = keys_of_environment() if key is None else key
    if keys is not None:
        named_keys(keys)  # refuses wrong ones before a folder is made
    opened = _open(checked_path(store, "store"), max_bytes, near, timeout)
    return opened if keys is None else EncryptedStore(opened, keys)


def _open(text, max_bytes, near, timeout):
    scheme = _scheme_of(text, "store must be a folder or a URL")
    if scheme in FOLDER:
        if near is not None:
            raise ValueError("near is for a folder in front of a server, not in front of a folder")
        return FolderStore(_folder_of(text, scheme), max_bytes)
    if near is not None:
        near = checked_path(near, "near")
        before = _scheme_of(near, "near must be a folder")
        if before not in FOLDER:
            raise ValueError(f"near must be a folder, as a path or file:///, got {before}://")
        near = _folder_of(near, before)
    if scheme in REDIS:
        from kvfast.prompts.stores.redis import RedisStore

        far = RedisStore(text, timeout)
    elif scheme in CLOUD:
        from kvfast.prompts.stores.cloud import CloudStore

        far = CloudStore(text, timeout)
    else:
        raise ValueError(
            f"a store must be a folder or begin with one of {', '.join(f'{one}://' for one in ('file', *REDIS, *CLOUD))}, "
            f"got {scheme}://"
        )
    if near is not None:
        return TieredStore(FolderStore(near, max_bytes), far)
    if max_bytes is not None:
        raise ValueError(f"max_bytes is for a folder; {far.url} limits itself")
    return far


def _scheme_of(text, needed):
    """The scheme of a URL in small letters, or "" for a path. Errors show no more of the URL, which may have a password."""
    if not text:
        raise ValueError(f"{needed}, got an empty text: '.' is the current folder")
    found = _SCHEME.match(text)
    scheme, slashes = (found[1].lower(), found[2]) if found else ("", "")
    if scheme in (*REDIS, *CLOUD) and len(slashes) < 2:
        raise ValueError(
            f"the URL of a store must begin with {scheme}://{'/' * (scheme == 'unix')}, got {scheme}:{slashes}. Give it as a "
            "text, as pathlib leaves out a slash. A folder of such a name needs ./ before it"
        )
    return scheme if scheme == "file" or len(slashes) >= 2 else ""


def _folder_of(text, scheme):
    """The path of a folder, or that of a URL of RFC 8089."""
    if not scheme:
        return os.path.expanduser(text)
    from urllib.parse import unquote_to_bytes

    rest, host = text[5:], ""
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        rest = slash + path
    if host.lower() not in ("", "localhost") or rest[:1] != "/" or "?" in rest or "#" in rest:
        raise ValueError(
            "a file URL must be file:/// and a whole path on this machine, in which ? is %3F and # is %23; a path needs "
            "no URL, and a folder of such a name needs ./ before it"
        )
    if os.name == "nt":
        from urllib.request import url2pathname

        return url2pathname(rest)
    return os.fsdecode(unquote_to_bytes(os.fsencode(rest)))
