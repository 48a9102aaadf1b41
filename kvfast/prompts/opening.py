"""Stores as those open them who keep prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfast.core.checks import check_positive
from kvfast.files.cache_file import need_files
from kvfast.prompts.patient import PatientStore
from kvfast.prompts.stores.store import Store
from kvfast.prompts.stores.urls import open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Callable


def open_patiently(
    store: str | os.PathLike[str] | Store,
    max_bytes: int | None,
    near: str | os.PathLike[str] | None,
    secret: bytes,
    time_limit: float,
    tell: Callable[[str, str], None] | None = None,
) -> PatientStore:
    """A store by its path or URL, or one of the user, after a check of the options of `kvfast.PromptCache`. `tell` is `Store.tell`."""
    if not isinstance(secret, bytes):
        raise TypeError(f"secret must be bytes, got {type(secret).__name__}")
    if len(secret) > 64:
        raise ValueError(f"secret must be at most 64 bytes, got {len(secret)}")  # and no message shows it
    check_positive(time_limit, "time_limit", "number of seconds")
    need_files()
    if not isinstance(store, Store):
        store = open_store(store, max_bytes, near, min(5.0, time_limit))
    if tell is not None:
        store.tell = tell
    return PatientStore(store, time_limit)
