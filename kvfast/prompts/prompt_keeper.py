"""The base of `kvfast.PromptCache`, and of the caches that keep an engine's prompts in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from kvfast.core.checks import check_size
from kvfast.prompts.chunk_store import ChunkStore
from kvfast.prompts.stats import PromptCacheStats

if TYPE_CHECKING:
    import os

    from typing_extensions import Self

    from kvfast.prompts.stores.store import Store


class PromptKeeper:
    """Keeps prompts in `chunks` of a store, a `ChunkStore`; see `kvfast.PromptCache` for the parameters."""

    way_out = "make another one of its store"  # for those who call a closed one

    def __init__(
        self,
        store: str | os.PathLike[str] | Store,
        max_bytes: int | None,
        near: str | os.PathLike[str] | None,
        chunk_tokens: int,
        secret: bytes,
        time_limit: float,
        least_tokens: int,
    ) -> None:
        self.chunk_tokens = check_size(chunk_tokens, "chunk_tokens", least_tokens, 1 << 20)
        self.max_bytes = None if max_bytes is None else check_size(max_bytes, "max_bytes", 0)
        self.stats, self._is_closed = PromptCacheStats(), False
        self.chunks = ChunkStore(store, self.max_bytes, near, secret=secret, time_limit=time_limit, stats=self.stats)
        self.store = self.chunks.store

    def flush(self) -> None:
        """Wait until the store has all that is on its way to it."""
        self.check_open()
        self.chunks.flush()

    def close(self) -> None:
        """Wait for values on their way, and close the store. A second `close` is harmless; other calls are refused."""
        self.chunks.close()
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def nbytes(self) -> int:
        """Bytes of all values, of all models. This lists the whole store."""
        self.flush()
        return sum(entry.nbytes for entry in self.store.entries())

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"a {name} has threads and connections, and cannot be copied or pickled: make another one of its store")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.store.url!r}, max_bytes={self.max_bytes})"

    def check_open(self) -> None:
        """Refuse calls after `close`."""
        if self._is_closed:
            raise ValueError(f"this {type(self).__name__} is closed: {self.way_out}")
