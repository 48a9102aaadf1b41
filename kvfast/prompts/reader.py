"""What a store has of a prompt, brought to the blocks of a cache."""

from kvfast.caches.sequence_cache import know_tokens, storage_in
from kvfast.caches.snapshot import Snapshot
from kvfast.files import chunk_bytes
from kvfast.prompts.chain import common_length
from kvfast.prompts.payloads import states_of, tails_of

FEW_LISTS = 4  # that are asked for without asking first which there are


def choices_of(cache, prompt, deadline):
    """(tokens, chunks before them, tail after those, key of its list) that the store may have, the longest first."""
    most = min(len(prompt.token_ids) - 1, len(prompt.token_ids) if cache.max_seq_len is None else cache.max_seq_len)
    count, size = most // prompt.chunk_tokens, prompt.chunk_tokens
    if prompt.form.nbytes(0):
        count = prompt.store.count_first(prompt.chunks(count), deadline)
    least = count * size if prompt.keeps_all else 0
    choices = [(least, count, None, None)] if least else []
    if prompt.has_states and least:
        least, choices = 0, [(node * size, node, None, None) for node in range(1, count + 1)]
    # Blocks whose tokens still have float rows are in no chunk, so an end may begin before the last chunk. Layers with windows
    # are in ends alone, of which any may be the longest that fits.
    first = max(count - 1, 0) if prompt.keeps_all else 0
    lists = [(node, key) for node in range(first, count + 1) for key in prompt.chain.tails(node)]
    if len(lists) > FEW_LISTS:
        here = prompt.store.contains([key for _, key in lists], deadline)
        lists = [one for one, is_here in zip(lists, here) if is_here]
    for (node, key), tails in zip(lists, prompt.store.values([key for _, key in lists], deadline, tails_of)):
        behind = prompt.token_ids[node * size : most]
        found = [(node * size + common_length(tail, behind), node, tail, key) for tail in tails or ()]
        choices += [choice for choice in found if choice[0] > least]
    if prompt.has_states:
        choices = _with_states(choices, prompt, deadline)
    return sorted(choices, key=lambda choice: choice[:2], reverse=True)


def _with_states(choices, prompt, deadline):
    """The choices after whose tokens the store has states: whole chunks, or a whole end."""
    size = prompt.chunk_tokens
    choices = [one for one in choices if one[2] is None or one[0] == one[1] * size + len(one[2])]
    keys = [prompt.chain.states(node, tail) for _, node, tail, _ in choices]
    return [one for one, is_here in zip(choices, prompt.store.contains(keys, deadline)) if is_here]


def fill(cache, prompt, num_tokens, node, tail, listed, tokens_per_second, deadline):
    """Fill an empty cache with one of `choices_of`. Returns the number of tokens that it holds then."""
    seq_len, end, used, chunks = num_tokens, None, [], range(node if prompt.form.nbytes(0) else 0)
    if is_slow(prompt, chunks, num_tokens, tokens_per_second):
        return 0
    if tail is not None:
        seq_len, used = node * prompt.chunk_tokens + len(tail), [listed, prompt.chain.end(node, tail)]
        (end,) = prompt.store.values(used[1:], deadline, lambda payload: prompt.end(payload, node, seq_len))
        if end is None:
            return 0
    if prompt.has_states:
        used = [*used, prompt.chain.states(node, tail)]
        (checkpoint,) = prompt.store.values(used[-1:], deadline, lambda payload: states_of(payload, prompt.secure))
        if checkpoint is None:
            return 0
    direct = cache.block_size == prompt.block_size and seq_len <= _room(cache)
    storage = storage_in(cache) if direct else prompt.empty()
    try:
        if end is None:
            chunk_bytes.extend(storage, seq_len)
        else:
            end.open(storage)
        good = write_chunks(storage, prompt, chunks, deadline, end=end, used=used)
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
    return len(cache)


def write_chunks(storage, prompt, indices, deadline, start=0, end=None, used=()):
    """Write chunks to the blocks of a sequence, from its block `start` on, and an end. Returns how many chunks came, one after
    another. `used` are other keys of the prompt."""
    return prompt.store.fetch(
        [(prompt.chain.chunk(i), prompt.form.nbytes(i)) for i in indices],
        deadline,
        lambda i, payload: prompt.form.write(storage, indices[i], payload, start, end is None),
        (lambda: end.write(storage)) if end else int,
        used,
    )


def is_slow(prompt, indices, num_tokens, tokens_per_second):
    return tokens_per_second is not None and prompt.store.rate.takes_longer(
        sum(map(prompt.form.nbytes, indices)), num_tokens / tokens_per_second
    )


def _room(cache):
    """Tokens that an empty cache has room for."""
    if cache.is_paged:
        return cache.pool.num_free_blocks * cache.block_size
    return 1 << 62 if cache.max_seq_len is None else cache.max_seq_len
