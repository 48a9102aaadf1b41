"""Values in an object store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from kvfast.core.text import needed_for
from kvfast.core.workers import Workers
from kvfast.errors import StoreError
from kvfast.prompts.stores.store import Entry, Store, Value, check_key, check_timeout, is_key

REQUESTS = 16  # at once
_memory: dict[str, Any] = {}  # stores of this process by their names
_lock = Lock()


class CloudStore(Store):
    """Values in an object store: S3 and what speaks its protocol, Google Cloud Storage, Azure, WebDAV, or the memory of this process.

    By the package obstore, which is faster than fsspec with s3fs: it waits without Python, and is quick to import.

    The store keeps what it is given: a rule of the bucket's life cycle removes old values. Credentials, regions and endpoints come from
    the environment, as ``AWS_ACCESS_KEY_ID`` and ``AWS_ENDPOINT_URL``. Do not use it in a forked process.

    The URL is like ``s3://bucket/folder``, ``gs://bucket``, ``az://container`` or ``https://server/folder``; ``memory://name`` is shared by
    all stores of this name in the process. `timeout` are seconds for connecting, and for each request with its answer. What failed is
    not tried again.
    """

    def __init__(self, url: str, timeout: float = 5.0) -> None:
        timeout = check_timeout(timeout)
        self.url = _checked(url)
        self._store = _opened(self.url, timeout)
        self._threads = Workers(REQUESTS, "kvfast-requests")

    def get_many(self, keys: Sequence[str]) -> list[Value | None]:
        obstore = _obstore()
        values = self._for_each(keys, lambda key: obstore.get(self._store, key).bytes())
        return [None if value is None else Value(value) for value in values]

    def put(self, key: str, value: Any) -> bool:
        key, data = check_key(key), memoryview(value).cast("B")
        # One request: an upload in parts would leave parts if this process is killed.
        if self._asked(lambda: _obstore().put(self._store, key, data, use_multipart=False)) is None:
            raise StoreError(f"{self.url}: there is no such bucket or container")
        return True

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        obstore = _obstore()
        return [found is not None for found in self._for_each(keys, lambda key: obstore.head(self._store, key))]

    def touch(self, keys: Sequence[str], is_hit: bool = True) -> None:
        """Do nothing: an object store counts no uses."""
        for key in keys:
            check_key(key)

    def delete(self, keys: Sequence[str]) -> None:
        obstore = _obstore()
        self._for_each(keys, lambda key: obstore.delete(self._store, key))

    def entries(self) -> Iterator[Entry]:
        pages = iter(_obstore().list(self._store))
        while (page := self._asked(lambda: next(pages, None))) is not None:
            for one in page:
                if is_key(one["path"]):
                    yield Entry(one["path"], one["size"], one["last_modified"].timestamp(), -1)

    def close(self) -> None:
        self._threads.close(wait=False)

    def _for_each(self, keys: Sequence[str], request: Callable[[str], Any]) -> list[Any]:
        """The results for some keys, None where there is no such key."""
        keys = [check_key(key) for key in keys]
        if len(keys) == 1:
            return [self._asked(lambda: request(keys[0]))]
        return self._threads.results(lambda key: self._asked(lambda: request(key)), zip(keys))

    def _asked(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except FileNotFoundError:
            return None
        except (_obstore().exceptions.BaseError, OSError, RuntimeError) as error:
            # The first line, up to what a server answered: after it may come anything.
            why = f"{type(error).__name__}: {error}".partition("\n")[0].partition("<")[0].strip()
        raise StoreError(f"{self.url}: {why}")


def _obstore():
    with needed_for("object stores need", "cloud"):
        import obstore
        import obstore.exceptions
    return obstore


def _checked(url):
    """The URL, if it has no credentials. Errors show nothing of it, as it may have them."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = None
    # Before the @ of Azure's abfs:// is the name of a container.
    if (
        parts is None
        or parts.password is not None
        or parts.query
        or parts.fragment
        or (parts.username is not None and parts.scheme not in ("abfs", "abfss"))
    ):
        raise ValueError(
            "the URL of an object store must be like s3://bucket/folder, without credentials or options, which come from "
            "the environment"
        )
    return url


def _opened(url, timeout):
    errors = _obstore().exceptions
    from obstore.store import MemoryStore, from_url

    if url.startswith("memory://"):
        with _lock:
            return _memory.setdefault(url.rstrip("/"), MemoryStore())
    limit = f"{timeout * 1000:.0f}ms"
    options: dict[str, Any] = {"timeout": limit, "connect_timeout": limit}
    # Without TLS if the URL says so, or the environment: options that are given hide what obstore reads there.
    if url.startswith("http://") or any(os.environ.get(f"{one}_ALLOW_HTTP", "").lower() in ("1", "true") for one in ("AWS", "AZURE")):
        options["allow_http"] = True
    try:
        return from_url(url, client_options=options, retry_config={"max_retries": 0})
    except (errors.BaseError, ValueError) as error:
        why = str(error).partition("\n")[0]
    raise ValueError(f"cannot open {url}: {why}")
