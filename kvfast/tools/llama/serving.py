"""Continuous batching: many requests share the model's steps and one paged pool.

Every step runs one token of each request that is generating, and as much of the waiting prompts as fits
with them (Orca, OSDI 2022; chunked prefill as in Sarathi, arXiv 2308.16369). Prompts start from the blocks
that the pool still has of their prefix; when the pool is full the youngest request gives way and starts again
later.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from kvfast import CacheFullError
from kvfast.engine import check_size
from kvfast.tools.llama.generation import Sampler


@dataclass(eq=False)
class Request:
    """One text to continue, and its tokens so far. `num_cached_tokens` of the prompt were found in the pool when it last started."""

    prompt: list
    max_tokens: int
    output: list = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    _sequence: object = None

    @property
    def _pending(self):
        """Tokens that the cache does not have yet."""
        return (self.prompt + self.output)[len(self._sequence) :]


class BatchGenerator:
    """Generates for many requests at once.

    Parameters
    ----------
    model : LlamaModel
    pool : kvfast.PagedKVCache
        Made with `model.cache_shape`.
    sampler, end_ids
        As in `generate`.
    max_running : int
        Requests in one step.
    max_batch_tokens : int
        Tokens in one step.
    salt : bytes
        Prefixes are shared among generators with the same salt only.
    """

    def __init__(self, model, pool, *, sampler=None, end_ids=(), max_running=16, max_batch_tokens=512, salt=b""):
        self.model, self.pool = model, pool
        self.sampler, self.end_ids, self.salt = sampler or Sampler(), end_ids, salt
        self.max_running = check_size(max_running, "max_running", 1)
        self.max_batch_tokens = check_size(max_batch_tokens, "max_batch_tokens", 1)
        self.waiting, self.running = deque(), []
        self.num_preemptions = 0

    def add(self, prompt, max_tokens):
        """Queue a prompt, and return its `Request`.

        ValueError if the prompt is empty or has tokens that the model does not know, or prompt and text do not fit the pool even alone.
        """
        if not len(prompt):
            raise ValueError("the prompt is empty: there is no token to start from")
        prompt, max_tokens = self.model.checked(prompt), check_size(max_tokens, "max_tokens", 1)
        if len(prompt) + max_tokens > self.pool.capacity():
            raise ValueError(f"{len(prompt)} tokens and {max_tokens} more do not fit a pool of {self.pool.capacity()}")
        request = Request(prompt.tolist(), max_tokens)
        self.waiting.append(request)
        return request

    def step(self):
        """Run the model once. Returns the requests that got a token, or ended. CacheFullError if sequences of others have left the pool no
        room for a request alone; it goes on when they are freed."""
        batch = self._next_batch()
        if not batch:
            return []
        requests, counts = zip(*batch, strict=True)
        tokens = [token for request, count in batch for token in request._pending[:count]]
        complete = [count == len(request._pending) for request, count in batch]
        hidden = self.model.forward_batch(tokens, [request._sequence for request in requests], list(counts))
        last = np.cumsum(counts) - 1
        logits = iter(self.model.logits(hidden[last[np.array(complete)]]) if any(complete) else ())
        advanced = []
        for request, is_complete in zip(requests, complete, strict=True):
            if not is_complete:
                continue  # a prompt of which more is to come
            token = self.sampler(next(logits))
            if token not in self.end_ids:
                request.output.append(token)
            if token in self.end_ids or len(request.output) == request.max_tokens:
                request.finished = True
                self.running.remove(request)
                request._sequence.free()
            advanced.append(request)
        return advanced

    def run(self):
        """Step until nothing is left; yields what `step` returns."""
        while self.waiting or self.running:
            yield self.step()

    def _next_batch(self):
        """(request, number of tokens) of the next step; its blocks are there."""
        self._admit()
        while True:
            room, batch = self.max_batch_tokens, []
            for request in sorted(self.running, key=lambda request: len(request._pending)):  # generating ones first
                count = min(len(request._pending), room)
                if count:
                    batch.append((request, count))
                    room -= count
            needed = sum(self._blocks(request, count) for request, count in batch)
            if needed <= self.pool.num_free_blocks:
                return batch
            if len(self.running) == 1:
                free = self.pool.num_free_blocks
                raise CacheFullError(f"a request needs {needed} blocks, and others than requests leave {free}: free some", needed, free)
            self._preempt(self.running[-1])

    def _admit(self):
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            sequence = self.pool.match_prefix(request.prompt + request.output, self.salt)
            missing = len(request.prompt) + len(request.output) - len(sequence)
            comes_soon = any(self._shared(request, other) > len(sequence) for other in self.running)
            if comes_soon or self.running and not sequence.can_append(missing + self.pool.block_size):
                sequence.free()
                return
            self.waiting.popleft()
            request._sequence, request.num_cached_tokens = sequence, min(len(sequence), len(request.prompt))
            self.running.append(request)

    def _shared(self, request, other):
        """Tokens in full blocks that a request will find once another's prompt is through the model."""
        if len(other._sequence) >= len(other.prompt):
            return 0
        same = takewhile(lambda pair: pair[0] == pair[1], zip(request.prompt[:-1], other.prompt, strict=False))
        return sum(1 for _ in same) // self.pool.block_size * self.pool.block_size

    def _blocks(self, request, count):
        size, held = self.pool.block_size, len(request._sequence)
        return -(-(held + count) // size) - -(-held // size)

    def _preempt(self, request):
        request._sequence.free()
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1
