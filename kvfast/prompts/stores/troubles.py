"""What goes wrong in a store, told once."""

from __future__ import annotations

import math
import time
from threading import Lock
from typing import TYPE_CHECKING, Any

from kvfast.prompts.stores.store import Refusal

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kvfast.prompts.stores.store import Store

QUIET = 60.0  # seconds after a trouble in which it is not told again: a store that is nearly full takes every second value


class Troubles:
    """Tells the user of a store each trouble once, and when it is over."""

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, Lock()
        self._told: dict[Hashable, list[str]] = {}  # what lasts, by its kind
        self._quiet_until: dict[str, float] = {}

    def begin(self, kind: Hashable, text: str) -> None:
        """Tell of a trouble, unless it was told."""
        with self._lock:
            if time.monotonic() < self._quiet_until.get(text, 0.0):
                return
            was_told = text in self._quiet_until
            self._quiet_until[text] = math.inf
            self._told.setdefault(kind, []).append(text)
        self._store.tell(text, "again" if was_told else "new")

    def end(self, kind: Hashable, text: str) -> None:
        """Tell that all troubles of a kind are over, if some were told."""
        with self._lock:
            over = self._told.pop(kind, [])
            self._quiet_until.update(dict.fromkeys(over, time.monotonic() + QUIET))
        if over:
            self._store.tell(text, "over")

    def lasts(self, text: str) -> bool:
        """Whether a trouble was told, and is not over."""
        return self._quiet_until.get(text) == math.inf


def put_or_refuse(store: Store, key: str, value: Any) -> bool:
    """As `Store.put`, but a Refusal where that returns False."""
    if not store.put(key, value):
        raise Refusal("it has no room")
    return True
