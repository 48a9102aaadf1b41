"""What a store has of a prompt, brought to the blocks of a cache."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvfast.caches.sequence_cache import know_tokens, storage_in
from kvfast.caches.snapshot import Snapshot
from kvfast.files import chunk_bytes
from kvfast.prompts.chain import common_length, key_of
from kvfast.prompts.envelope import HEADER_BYTES
from kvfast.prompts.fetching import fetch_chunks
from kvfast.prompts.payloads import states_of, tails_of

if TYPE_CHECKING:
    from kvfast.prompts.patient import PatientStore
    from kvfast.prompts.stats import PromptCacheStats

FEW_LISTS = 4  # that are asked for without asking first which there are


class Reader:
    """Finds prompts in a store, and fills caches with them.

    Parameters
    ----------
    store : PatientStore
    secret : bytes
    stats : PromptCacheStats
        Gets the bytes that are fetched added.
    """

    def __init__(self, store: PatientStore, secret: bytes, stats: PromptCacheStats) -> None:
        self._store, self._secret, self._stats = store, secret, stats

    def choices(self, cache, prompt, deadline):
        """(tokens, chunks before them, tail after those, digest of its list) that the store may have, the longest first."""
        most = min(len(prompt.token_ids) - 1, len(prompt.token_ids) if cache.max_seq_len is None else cache.max_seq_len)
        count, size = most // prompt.chunk_tokens, prompt.chunk_tokens
        if prompt.form.nbytes(0):
            keys = [key_of("c", one) for one in prompt.chunks(count)]
            count = (*self._store.contains_many(keys, deadline), False).index(False)
        least = count * size if prompt.keeps_all else 0
        choices = [(least, count, None, None)] if least else []
        if prompt.has_states and least:
            least, choices = 0, [(node * size, node, None, None) for node in range(1, count + 1)]
        # Blocks whose tokens still have float rows are in no chunk, so an end may begin before the last chunk. Layers with windows
        # are in ends alone, of which any may be the longest that fits.
        first = max(count - 1, 0) if prompt.keeps_all else 0
        lists = [(node, digest) for node in range(first, count + 1) for digest in prompt.chain.tails(node)]
        if len(lists) > FEW_LISTS:
            here = self._store.contains_many([key_of("t", digest) for _, digest in lists], deadline)
            lists = [one for one, is_here in zip(lists, here) if is_here]
        for (node, digest), tails in zip(lists, self.values("t", [digest for _, digest in lists], deadline, tails_of)):
            behind = prompt.token_ids[node * size : most]
            found = [(node * size + common_length(tail, behind), node, tail, digest) for tail in tails or ()]
            choices += [choice for choice in found if choice[0] > least]
        if prompt.has_states:
            choices = self._with_states(choices, prompt, deadline)
        return sorted(choices, key=lambda choice: choice[:2], reverse=True)

    def _with_states(self, choices, prompt, deadline):
        """The choices after whose tokens the store has states: whole chunks, or a whole end."""
        size = prompt.chunk_tokens
        choices = [one for one in choices if one[2] is None or one[0] == one[1] * size + len(one[2])]
        keys = [key_of("s", prompt.chain.states(node, tail)) for _, node, tail, _ in choices]
        return [one for one, is_here in zip(choices, self._store.contains_many(keys, deadline)) if is_here]

    def fill(self, cache, prompt, num_tokens, node, tail, listed, tokens_per_second, deadline):
        """Fill an empty cache with one of `choices`. Returns the number of tokens that it holds then."""
        seq_len, end, chunks = num_tokens, None, prompt.chunks(node)
        if self.is_slow(prompt, range(len(chunks)), num_tokens, tokens_per_second):
            return 0
        if tail is not None:
            seq_len, digest = node * prompt.chunk_tokens + len(tail), prompt.chain.end(node, tail)
            (end,) = self.values("e", [digest], deadline, lambda payload: prompt.end(payload, node, seq_len))
            if end is None:
                return 0
        if prompt.has_states:
            states = prompt.chain.states(node, tail)
            (checkpoint,) = self.values("s", [states], deadline, lambda payload: states_of(payload, prompt.secure))
            if checkpoint is None:
                return 0
        direct = cache.block_size == prompt.block_size and seq_len <= _room(cache)
        storage = storage_in(cache) if direct else prompt.empty()
        try:
            if end is None:
                chunk_bytes.extend(storage, seq_len)
            else:
                end.open(storage)
            good = self.write_chunks(storage, prompt, range(len(chunks)), deadline, end=end)
            if good < len(chunks):
                num_tokens = 0 if prompt.has_states else good * prompt.chunk_tokens
            if prompt.has_states and num_tokens:
                storage.checkpoints = storage.checkpoints.plus(num_tokens, checkpoint)
            target = cache if direct else storage  # a Sequence cuts its token ids as well
            try:
                target.truncate(num_tokens)
            except ValueError:  # a ring that cannot go back that far
                target.truncate(0)
            if not direct and storage.length:
                cache.restore(Snapshot(prompt.settings, storage))
            know_tokens(cache, prompt.token_ids[: len(cache)], prompt.salt)
        except BaseException:
            cache.clear()
            raise
        used = [key_of("c", one) for one in reversed(chunks[:good])]
        used = [key_of("s", states), *used] if prompt.has_states and len(cache) else used
        self._store.touch(used if end is None else [key_of("t", listed), key_of("e", digest), *used])
        return len(cache)

    def write_chunks(self, storage, prompt, indices, deadline, start=0, end=None):
        """Write chunks to the blocks of a sequence, from its block `start` on, and an end. Returns how many chunks came, one after
        another."""
        nbytes, begin = sum(map(prompt.form.nbytes, indices)), time.perf_counter()
        good = fetch_chunks(
            self._store,
            [(i, prompt.chain.chunk(i), prompt.form.nbytes(i)) for i in indices],
            self._secret,
            deadline,
            lambda i, payload: prompt.form.write(storage, i, payload, start, end is None),
            (lambda: end.write(storage)) if end else int,
        )
        if good == len(indices) and nbytes:
            self._store.measured(nbytes, time.perf_counter() - begin)
        self._stats.bytes_fetched += sum(map(prompt.form.nbytes, indices[:good]))
        return good

    def is_slow(self, prompt, indices, num_tokens, tokens_per_second):
        return tokens_per_second is not None and self._store.takes_longer(
            sum(map(prompt.form.nbytes, indices)), num_tokens / tokens_per_second
        )

    def values(self, kind, digests, deadline, parse):
        """What `parse` makes of the payloads of some keys; None for one that is not there or not sound."""

        def use(payload):
            self._stats.bytes_fetched += HEADER_BYTES + len(payload)
            return parse(payload)

        keys = [key_of(kind, digest) for digest in digests]
        found = zip(keys, self._store.get_many(keys, deadline), digests)
        return [self._store.take(*one, self._secret, use) for one in found]


def _room(cache):
    """Tokens that an empty cache has room for."""
    if cache.is_paged:
        return cache.pool.num_free_blocks * cache.block_size
    return 1 << 62 if cache.max_seq_len is None else cache.max_seq_len
