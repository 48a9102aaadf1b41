"""Caches of prompts, in a folder or on a server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvfast.caches.sequence_cache import SequenceCache, know_tokens, storage_in
from kvfast.core.checks import check_flag, check_positive, checked_token_ids
from kvfast.errors import CacheFullError
from kvfast.files import chunk_bytes
from kvfast.prompts.envelope import HEADER_BYTES
from kvfast.prompts.payloads import End, states_value, tails_of, tails_value
from kvfast.prompts.prompt import Prompt
from kvfast.prompts.prompt_keeper import PromptKeeper
from kvfast.prompts.reader import choices_of, fill, is_slow, write_chunks

if TYPE_CHECKING:
    import os

    from numpy.typing import ArrayLike

    from kvfast.prompts.stores.store import Store

CHUNK_TOKENS = 128


class PromptCache(PromptKeeper):
    """Caches of prompts in a store, found again by their tokens.

    A prompt is kept in chunks of `chunk_tokens` tokens. The key of a chunk is a digest of all tokens up to its end, the model, and
    the settings of the cache. So prompts with the same beginning share chunks, and a search for the longest prefix costs one look-up
    per chunk, however large the store is. The rest of a prompt, after its last chunk, is a separate value.

    Any number of processes may share a store. A missing, damaged or foreign value ends the match, and the chunks before it
    are used. A store that is slow or gone costs time and a warning, and the runtime computes the prompt. A store that cannot be
    written, for example on a full disk, is still read.

    Parameters
    ----------
    store : str, path-like or Store
        A folder, which is created if it does not exist; a URL such as ``"redis://..."`` or ``"s3://..."``, see
        `kvfast.prompts.stores.open_store`; or a store of your own.
    max_bytes : int, optional
        Largest number of bytes in the folder; for a far store, in the folder `near`. The least recently used values are removed first,
        at once if the folder holds more. Their order does not depend on the clock.
    near : path-like, optional
        A folder in front of a far store.
    chunk_tokens : int
        A multiple of the block size of every cache. Larger chunks need fewer look-ups, smaller ones share more.
    secret : bytes
        At most 64 bytes. Separates tenants: without the secret, nobody finds a value, or makes a value that is found.
    time_limit : float
        Seconds that the calls of the store may take for one prompt. Values that arrive later are not used.
    background : bool
        Let `save` return before the store has the values; see `flush`.

    Examples
    --------
    >>> import kvfast, numpy as np, tempfile
    >>> prompts = kvfast.PromptCache(tempfile.mkdtemp(), max_bytes=1 << 30)
    >>> cache = kvfast.KVCache(1, 2, 64)
    >>> k = v = np.ones((3, 2, 64), np.float32)
    >>> cache.append(0, k, v)
    >>> cache.advance(3)
    >>> prompts.save(cache, [5, 6, 7], model="smollm2")
    True
    >>> other = kvfast.KVCache(1, 2, 64)
    >>> prompts.restore(other, [5, 6, 8, 9], model="smollm2")
    2
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store,
        max_bytes: int | None = None,
        *,
        near: str | os.PathLike[str] | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
        secret: bytes = b"",
        time_limit: float = 5.0,
        background: bool = False,
    ) -> None:
        super().__init__(store, max_bytes, near, chunk_tokens, secret, time_limit, 16)
        self.background = check_flag(background, "background")

    def save(
        self,
        cache: Any,
        token_ids: ArrayLike,
        model: str = "",
        *,
        salt: bytes | None = None,
        uncounted: Literal["raise", "drop"] = "raise",
    ) -> bool:
        """Save the complete tokens of a cache. Values that the store already has are not written again.

        Parameters
        ----------
        cache : KVCache, RingKVCache, MLAKVCache or Sequence
        token_ids : integers of shape (len(cache),)
        model : str
            Fingerprint of the model that computed the cache: its name and version, or a checksum of its weights.
        salt : bytes, optional
            A part of the keys, as in `PagedKVCache.match_prefix`. By default the salt of a `Sequence`, and no salt for other caches.
        uncounted : {"raise", "drop"}
            As in `KVCache.snapshot`.

        Returns
        -------
        bool
            Whether the store has the prompt, or, with `background`, will write it. False if the cache is empty, if it alone exceeds
            `max_bytes`, or if the store does not take it: a warning says why.
        """
        return self._save(cache, token_ids, model, salt, uncounted, True)

    def save_chunks(
        self,
        cache: Any,
        token_ids: ArrayLike,
        model: str = "",
        *,
        salt: bytes | None = None,
        uncounted: Literal["raise", "drop"] = "raise",
    ) -> bool:
        """Save only the full chunks of a prompt: few other prompts share the rest after the last chunk.

        Parameters and result are those of `save`.
        """
        return self._save(cache, token_ids, model, salt, uncounted, False)

    def _save(self, cache, token_ids, model, salt, uncounted, with_end):
        if token_ids is None:
            raise TypeError("token_ids must be integers of shape (num_tokens,), got None")
        snapshot = _checked_cache(cache).snapshot(token_ids, uncounted=uncounted)
        if not len(snapshot):
            return False
        prompt, deadline = self._prompt(cache, snapshot.token_ids, model, salt), self.chunks.deadline()
        storage, form, chain = prompt.storage_with(snapshot), prompt.form, prompt.chain
        # An end has one token at least, so that the same prompt, whose last token is never restored, looks for it.
        node = min(chunk_bytes.count_chunk_blocks(storage) // form.blocks, (len(snapshot) - 1) // self.chunk_tokens)
        chunks, tail = prompt.chunks(node), prompt.token_ids[node * self.chunk_tokens :]
        end, (*_, listed) = chain.end(node, tail), chain.tails(node, len(tail))
        (known,) = self.chunks.values([listed], deadline, tails_of) if with_end else (None,)
        others = [one for one in known or () if not np.array_equal(one, tail)]
        # The same prompt, or one that goes on, may be there already. One that goes on has its states after its own end.
        longer = [one for one in others if len(one) > len(tail) and np.array_equal(one[: len(tail)], tail) and not prompt.has_states]
        ends = [end, *(chain.end(node, one) for one in longer)] if with_end else []
        states = prompt.states(snapshot, node, tail if with_end else None)
        keys = [*chunks, *states, *ends]
        here = dict(zip(keys, self.chunks.contains(keys, deadline)))
        kept = next((key for key in ends if here[key]), None)
        used = [*states][::-1] + chunks[::-1]
        if self.chunks.is_paused and not (all(here[key] for key in used) and (kept or not with_end)):
            return False
        values = {key: (states_value(one), n) for key, (n, one) in states.items() if not here[key]}
        if with_end:
            # In this order the chunks, which the others need, are removed last.
            used = [listed, kept or end, *used]
            if kept is None:
                values[end] = End.read(storage, node * form.blocks), storage.length
            if kept is None or kept == end and len(others) == len(known or ()):  # its list was lost, or damaged
                values[listed] = tails_value([tail, *others]), 0
        total = sum(HEADER_BYTES + form.nbytes(i) for i in range(len(chunks))) + sum(len(value) for value, _ in values.values())
        if self.max_bytes is not None and total > self.max_bytes:
            self.chunks.warn(f"a prompt is not saved in {self.store.url}: it is larger than max_bytes={self.max_bytes}")
            return False
        # All bytes are read now, as the cache may change when this returns.
        new = [i for i, key in enumerate(chunks) if not here[key]]
        calls = [self.chunks.put(chunks[i], form.read(storage, i), (i + 1) * self.chunk_tokens) for i in new]
        calls += [self.chunks.put(key, *value) for key, value in values.items()]
        done = self.chunks.after(calls, used)
        return self.background or done.result()

    def restore(
        self, cache: Any, token_ids: ArrayLike, model: str = "", *, salt: bytes | None = None, tokens_per_second: float | None = None
    ) -> int:
        """Fill an empty cache with the longest saved prefix of a prompt.

        Parameters
        ----------
        cache : KVCache, RingKVCache, MLAKVCache or Sequence
            Empty.
        token_ids : integers of shape (num_tokens,)
            The prompt. Its last token is never restored, so at least one token remains to be computed.
        model, salt
            As in `save`.
        tokens_per_second : float, optional
            Tokens of a prompt that the runtime computes in a second. Chunks that would take longer to fetch than to compute, at the
            rate of earlier fetches, are not fetched.

        Returns
        -------
        int
            Tokens that the cache now holds; 0 if nothing was found. CacheFullError if the pool of a `Sequence` has too few blocks.
        """
        if len(_checked_cache(cache)):
            raise ValueError(f"the cache must be empty, it holds {len(cache)} tokens")
        token_ids = checked_token_ids(token_ids)
        begin, found = time.perf_counter(), 0
        prompt, deadline = self._prompt(cache, token_ids, model, salt, tokens_per_second), self.chunks.deadline()
        if len(token_ids) > 1:
            for choice in choices_of(cache, prompt, deadline):
                found = fill(cache, prompt, *choice, tokens_per_second, deadline)
                if found:
                    break
        self._count(len(token_ids), found, begin)
        return found

    def extended(
        self, sequence: Any, token_ids: ArrayLike, model: str = "", *, salt: bytes | None = None, tokens_per_second: float | None = None
    ) -> Any:
        """Extend a sequence by the tokens of a prompt that the store has; see `PagedKVCache.use_prompt_cache`.

        Parameters
        ----------
        sequence : Sequence
            Holds the first tokens of the prompt, in full blocks: a result of `PagedKVCache.match_prefix`.
        token_ids, model, salt, tokens_per_second
            As in `restore`.

        Returns
        -------
        Sequence
            `sequence` itself; or, if its blocks cannot be continued with chunks, another one in its place.
        """
        if not _checked_cache(sequence).is_paged:
            raise TypeError(f"sequence must be one of a pool, got {type(sequence).__name__}; restore() fills other caches")
        token_ids, held = checked_token_ids(token_ids), len(sequence)
        begin, prompt = time.perf_counter(), self._prompt(sequence, token_ids, model, salt, tokens_per_second)
        if not prompt.keeps_all or prompt.has_states or sequence.block_size != prompt.block_size:
            other = sequence.fork()  # of the same tenant
            other.clear()
            try:
                better = self.restore(other, token_ids, model, salt=prompt.salt, tokens_per_second=tokens_per_second) > held
            except CacheFullError:
                better = False
            (sequence if better else other).free()
            return other if better else sequence
        deadline, first = self.chunks.deadline(), held // self.chunk_tokens
        room = held + sequence.pool.num_free_blocks * sequence.block_size
        keys = prompt.chunks(max(min(len(token_ids) - 1, room), 0) // self.chunk_tokens)[first:]
        count = self.chunks.count_first(keys, deadline)
        indices, length = range(first, first + count), (first + count) * self.chunk_tokens
        if length > held and not is_slow(prompt, indices, length - held, tokens_per_second):
            chunk_bytes.extend(storage_in(sequence), length)
            try:
                good = write_chunks(storage_in(sequence), prompt, indices, deadline, held // sequence.block_size)
            except BaseException:
                sequence.truncate(held)
                raise
            sequence.truncate(max(held, (first + good) * self.chunk_tokens))
            know_tokens(sequence, token_ids[: len(sequence)], prompt.salt)
        self._count(len(token_ids), len(sequence) - held, begin)
        return sequence

    def clear(self) -> None:
        """Remove all values, of all models. This lists the whole store."""
        self.flush()
        self.store.delete([entry.key for entry in self.store.entries()])

    def __len__(self) -> int:
        """Number of prompts, of all models. This lists the whole store."""
        self.flush()
        return sum(entry.key.startswith("e-") for entry in self.store.entries())

    def _prompt(self, cache, token_ids, model, salt, tokens_per_second=None):
        self.check_open()
        if tokens_per_second is not None:
            check_positive(tokens_per_second, "tokens_per_second")
        return Prompt(cache, token_ids, model, salt, self.chunk_tokens, self.chunks)

    def _count(self, num_tokens, found, begin):
        seconds = time.perf_counter() - begin
        self.stats.add(num_prompts=1, num_hits=found > 0, num_tokens=num_tokens, num_restored_tokens=found, seconds=seconds)


def _checked_cache(cache):
    if not isinstance(cache, SequenceCache):
        raise TypeError(f"cache must be a KVCache, RingKVCache, MLAKVCache or Sequence, got {type(cache).__name__}")
    return cache
