"""One prompt, as a store keeps it for a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfast.caches.sequence_cache import salt_of, settings_of, storage_in
from kvfast.codec.formats import block_size_of
from kvfast.core.checks import checked_salt
from kvfast.core.text import shown
from kvfast.files import chunk_bytes, state
from kvfast.prompts.payloads import ChunkForm, End
from kvfast.storage.kinds import BLOCK_SIZE, storage_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvfast.prompts.chunk_store import ChunkStore


class Prompt:
    """The keys of a prompt, and the form of its values.

    Chunks have blocks of 64 tokens, or of what the format requires. So caches with other blocks share them too, by a copy. A salt of None
    is that of the cache. Unless `keeps_all` layers keep all tokens, a prefix can only be restored with the end of a prompt; with
    `has_states`, only where the store has the recurrent states after it.
    """

    def __init__(
        self, cache: Any, token_ids: NDArray[np.int64], model: str, salt: bytes | None, chunk_tokens: int, chunks: ChunkStore
    ) -> None:
        if not isinstance(model, str):
            raise TypeError(f"model must be a str, got {shown(model)}")
        salt = salt_of(cache) if salt is None else checked_salt(salt)
        if salt is None:
            raise ValueError("the sequence is of a file that does not tell its salt: pass the salt")
        self.settings, self.token_ids, self.chunk_tokens = settings_of(cache), token_ids, chunk_tokens
        self.salt, self.store = salt, chunks
        self.block_size = block_size_of(storage_in(cache).formats, None, BLOCK_SIZE)
        if chunk_tokens % self.block_size:
            raise ValueError(f"chunk_tokens must be a multiple of the {self.block_size} tokens of a block, got {chunk_tokens}")
        self.secure, self.has_states = cache.secure, "has_states" in self.settings
        self.template = storage_in(cache) if cache.block_size == self.block_size else self.empty()
        self.form = ChunkForm(self.template, chunk_tokens)
        self.keeps_all = chunk_bytes.keeps_everything(self.template)
        text = state.json_of([state.VERSION, model, salt.hex(), self.settings, self.block_size], sort_keys=True)
        self.chain = chunks.chain(text, token_ids, chunk_tokens)

    def chunks(self, count: int) -> list[str]:
        """The keys of the first `count` chunks; none if no layer keeps all tokens."""
        return self.chain.chunks(count if self.form.nbytes(0) else 0)

    def states(self, snapshot: Any, node: int, tail: NDArray[np.int64] | None) -> dict[str, tuple[int, Any]]:
        """The checkpoints of a snapshot that a store takes, with their positions and by their keys: those after chunks up to a node,
        and with `tail` that after the end."""
        held, size = storage_in(snapshot).checkpoints.held if self.has_states else {}, self.chunk_tokens
        found = {self.chain.states(n // size): (n, one) for n, one in held.items() if n % size == 0 and n // size <= node}
        if tail is not None and len(snapshot) in held:
            found[self.chain.states(node, tail)] = len(snapshot), held[len(snapshot)]
        return found

    def end(self, payload: memoryview, node: int, seq_len: int) -> End:
        """The end of a prompt of `seq_len` tokens after a node; CorruptFileError."""
        return End(payload, self.template, node * self.form.blocks, seq_len)

    def empty(self) -> Any:
        """The storage of an empty cache with the settings, and with the blocks of chunks."""
        return storage_of(self.settings, self.block_size, secure=self.secure)

    def storage_with(self, snapshot: Any) -> Any:
        """The storage of a snapshot, with the blocks of chunks."""
        if snapshot.block_size == self.block_size:
            return storage_in(snapshot)
        other = self.empty()
        other.restore(storage_in(snapshot))
        return other
