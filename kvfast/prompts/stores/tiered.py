"""A folder in front of a far store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfast.errors import StoreError
from kvfast.prompts.stores.store import Entry, Store, Value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class TieredStore(Store):
    """Two stores. What is read from the far one is kept in the near one; what is written goes to both.

    If the far store fails, what the near one has is still found.

    Parameters
    ----------
    near, far : Store
    """

    def __init__(self, near: Store, far: Store) -> None:
        self.near, self.far = near, far
        self.url = f"{near.url} in front of {far.url}"

    def get_many(self, keys: Sequence[str]) -> list[Value | None]:
        values = list(self.near.get_many(keys))
        missing = [i for i, value in enumerate(values) if value is None]
        if missing:
            for i, value in zip(missing, self.far.get_many([keys[i] for i in missing])):
                values[i] = value
                if value is not None:
                    self._keep(keys[i], value)
        return values

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        here = self.near.contains_many(keys)
        missing = [i for i, is_here in enumerate(here) if not is_here]
        if missing:
            try:
                for i, is_there in zip(missing, self.far.contains_many([keys[i] for i in missing])):
                    here[i] = is_there
            except StoreError:
                if not any(here):
                    raise
        return here

    def put(self, key: str, value: Any) -> bool:
        kept = self.near.put(key, value)
        return self.far.put(key, value) or kept

    def touch(self, keys: Sequence[str], is_hit: bool = True) -> None:
        self.near.touch(keys, is_hit)
        self.far.touch(keys, is_hit)

    def delete(self, keys: Sequence[str]) -> None:
        self.near.delete(keys)
        self.far.delete(keys)

    def entries(self) -> Iterator[Entry]:
        return self.far.entries()

    def cancel(self) -> None:
        self.far.cancel()

    def close(self) -> None:
        self.near.close()
        self.far.close()

    def _keep(self, key, value):
        try:
            self.near.put(key, value.read(0, len(value)))
        except StoreError:
            pass  # a full disk; what was asked for is here
