"""A ``Llama`` that answers several conversations, for a server and for a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import struct
import time
from concurrent.futures import TimeoutError as Late
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np
from llama_cpp import _internals as internals

from kvfast.engine import common_length
from kvfast.engines.llama_cpp.prompt_cache import FoundState
from kvfast.engines.llama_cpp.prompt_settings import seed_of
from kvfast.engines.llama_cpp.serving_figures import Answer

if TYPE_CHECKING:
    from fastapi import Request

# Tokens of a prompt that take long enough to compute that it is stored before its answer has ended.
MANY_TOKENS = 256
caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


@dataclass
class Caller:
    """The request that is answered, and the context that computes its answer."""

    request: Request
    loop: asyncio.AbstractEventLoop
    answer: Answer = field(default_factory=Answer)
    llm: ServedLlama | None = None

    def has_left(self):
        """Whether the client has gone. The server itself asks only between the pieces of a stream."""
        if self.loop.is_closed():
            return True
        try:
            return asyncio.run_coroutine_threadsafe(self.request.is_disconnected(), self.loop).result(1.0)
        except Late:  # the server is busy, or has ended
            return self.loop.is_closed()


class _ClientHasLeft(Exception):
    """Nobody waits for the answer."""


class ServedLlama(llama_cpp.Llama):
    """A ``Llama`` with several `contexts`, itself and others, each of which holds a conversation. It stops when its client leaves, and
    stores a long prompt before the answer, which a killed process does not end. `last` is the answer that began last. Recurrent states
    cannot go back to fewer tokens: `checkpoints` are those after some tokens, the last ones of a prompt and of its answer, and those at
    `marks`. `use_extra_bufts` is a parameter of models that ``Llama`` does not have."""

    def __init__(self, *args, parallel=1, use_extra_bufts=True, **options):
        self._use_extra_bufts = use_extra_bufts
        super().__init__(*args, **options)
        # One row, as nobody reads logits here: a state that is saved or loaded copies all rows.
        self.scores, self._num_computed, self._num_stored = np.zeros((1, self.n_vocab()), np.single), 0, 0
        self.has_states = llama_cpp.llama_model_is_recurrent(self.model) or llama_cpp.llama_model_is_hybrid(self.model)
        self.checkpoints, self.marks = {}, set()
        self.last = Answer()
        # Those of all contexts; the one that was used longest ago is the first.
        self._free, self._busy, self._lock = [self], [], Lock()
        self._free += [self._another() for _ in range(parallel - 1)]
        self.contexts = tuple(self._free)

    @property
    def model_params(self):
        return vars(self)["model_params"]

    @model_params.setter
    def model_params(self, params):
        params.use_extra_bufts = self._use_extra_bufts
        vars(self)["model_params"] = params

    def create_completion(self, prompt, *args, **options):
        """That of a free context: of the one that holds the longest beginning of the prompt, or else was used longest ago."""
        now, tokens = caller.get(), np.array(prompt if isinstance(prompt, list) else self.tokenize(prompt.encode(), special=True))
        if not len(tokens):
            raise ValueError("the prompt is empty: there is no token to start from")
        if now and not now.llm:
            now.llm = self._take(tokens)
        llm = now.llm if now else self
        llm._num_stored = 0
        llm._go_back(tokens)
        return super(ServedLlama, llm).create_completion(prompt, *args, **options)

    def held(self):
        """The tokens of the context."""
        return self.input_ids[: self.n_tokens]

    def give_back(self, now):
        """Free the context of a caller whose answer has ended."""
        if now.llm:
            with self._lock:
                self._busy.remove(now.llm)
                self._free.append(now.llm)

    def eval(self, tokens):
        while tokens:
            if caller.get() and caller.get().has_left():
                raise _ClientHasLeft
            threads = max(1, self.n_threads // max(1, len(self._busy)))  # contexts share the processors
            llama_cpp.llama_set_n_threads(self.ctx, threads, threads)
            end = self.n_batch - self.n_tokens % self.n_batch  # of a chunk of the store
            batch, tokens = tokens[:end], tokens[end:]
            super().eval(batch)
            self._num_computed += len(batch)
            if self.has_states and self.n_tokens % self.n_batch == 0 and (len(batch) == 1 or self.n_tokens in self.marks):
                self.checkpoints = {n: one for n, one in self.checkpoints.items() if n in self.marks} | {self.n_tokens: self._states()}

    def generate(self, tokens, *args, **options):
        if options.get("grammar") is not None:
            self._check_grammar(options["grammar"])
        self._num_computed, answer, num_tokens = 0, caller.get().answer if caller.get() else Answer(), len(tokens)
        if self.has_states and 0 < self.n_tokens < num_tokens:  # `_go_back` was called
            tokens, options = tokens[self.n_tokens :], options | {"reset": False}
        try:
            for token in super().generate(tokens, *args, **options):
                if not answer.num_tokens:
                    self._begin(answer, num_tokens)
                answer.num_tokens, answer.end = answer.num_tokens + 1, time.perf_counter()
                yield token
                if answer.num_tokens == 1 and self.cache and self._num_computed >= MANY_TOKENS:
                    self.cache[self.input_ids[: self.n_tokens]] = self.save_state()
        except _ClientHasLeft:  # the answer ends here, and is stored as any other
            return

    def load_state(self, state):
        self._num_stored = state.n_tokens - common_length(self.held(), state.input_ids[: state.n_tokens])
        super().load_state(state)
        self.checkpoints = {self.n_tokens: self._states()} if self.has_states else {}

    def save_state(self):
        """That of ``Llama``, which would copy its bytes four times: of the tokens that the cache has not kept, where there are no windows
        or recurrent states, and else of all, with the checkpoints."""
        is_whole = self.has_states or llama_cpp.llama_model_n_swa(self.model) or not self.cache
        start = 0 if is_whole else self.cache.num_kept(self.held())
        if start:
            data = self._state_from(start)
        else:
            data = np.empty(llama_cpp.llama_state_get_size(self.ctx), np.uint8)
            llama_cpp.llama_state_get_data(self.ctx, _pointer(data), len(data))
        states = {n: _of_context(one) for n, one in self.checkpoints.items()}
        return FoundState(self.input_ids.copy(), self.scores, self.n_tokens, data, len(data), seed_of(self), states, start)

    def close(self):
        for one in getattr(self, "contexts", ())[1:]:  # before the weights
            one.close()
        super().close()

    def _begin(self, answer, num_tokens):
        reused = num_tokens - self._num_computed
        answer.num_prompt_tokens, answer.num_reused_tokens, answer.num_stored_tokens = num_tokens, reused, min(self._num_stored, reused)
        answer.first, self.last = time.perf_counter(), answer

    def _go_back(self, tokens):
        """If a prompt does not begin with all tokens that are held, go back to full chunks, or to a checkpoint. What follows is then
        computed in the pieces, and so has the bits, of a prompt that is computed whole."""
        self.marks = {(len(tokens) - 1) // self.n_batch * self.n_batch}
        shared = max(0, min(common_length(self.held(), tokens), len(tokens) - 1))
        if shared < self.n_tokens and not self.has_states:
            self.n_tokens, self._requires_eval = shared // self.n_batch * self.n_batch, True
        elif shared < self.n_tokens:
            self.checkpoints = {n: one for n, one in self.checkpoints.items() if n <= shared}
            self.reset() if not self.checkpoints else self._restore(max(self.checkpoints))

    def _restore(self, num_tokens):
        """Go back to a checkpoint."""
        data, part = self.checkpoints[num_tokens], llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        llama_cpp.llama_state_seq_set_data_ext(self.ctx, _pointer(data), len(data), 0, part)
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.ctx), 0, num_tokens, -1)
        self.n_tokens, self._requires_eval = num_tokens, True

    def _state_from(self, start):
        """The state of the tokens from `start` on. Those before belong to another sequence meanwhile, which moves no bytes."""
        memory = llama_cpp.llama_get_memory(self.ctx)
        llama_cpp.llama_memory_seq_cp(memory, 0, 1, 0, start)
        llama_cpp.llama_memory_seq_rm(memory, 0, 0, start)
        # The head for a sequence has 8 bytes, and that for a context the architecture.
        name = self.metadata["general.architecture"].encode()
        head, size = struct.pack("<I", len(name)) + name, llama_cpp.llama_state_seq_get_size_ext(self.ctx, 0, 0)
        data = np.empty(len(head) - 8 + size, np.uint8)
        llama_cpp.llama_state_seq_get_data_ext(self.ctx, _pointer(data[len(head) - 8 :]), size, 0, 0)
        data[: len(head)] = np.frombuffer(head, np.uint8)
        llama_cpp.llama_memory_seq_cp(memory, 1, 0, 0, start)
        llama_cpp.llama_memory_seq_rm(memory, 1, -1, -1)
        return data

    def _states(self):
        """The recurrent states, by llama.cpp's format for a sequence."""
        part = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        data = np.empty(llama_cpp.llama_state_seq_get_size_ext(self.ctx, 0, part), np.uint8)
        llama_cpp.llama_state_seq_get_data_ext(self.ctx, _pointer(data), len(data), 0, part)
        return data

    def _another(self):
        """Another context of the same weights. A second ``Llama`` would lay them out in memory once more."""
        other, parts = object.__new__(type(self)), contextlib.ExitStack()
        make = lambda kind, **options: parts.enter_context(contextlib.closing(kind(verbose=self.verbose, **options)))
        vars(other).update(vars(self), _stack=parts, input_ids=self.input_ids.copy(), checkpoints={}, marks=set())
        other._ctx = make(internals.LlamaContext, model=self._model, params=self.context_params)
        other._batch = make(internals.LlamaBatch, n_tokens=self.n_batch, embd=0, n_seq_max=self.context_params.n_ctx)
        return other

    def _take(self, tokens):
        """The free context that keeps most more tokens than it loses, or else the one that was used longest ago."""
        with self._lock:
            gain = lambda llm: max(0, 2 * common_length(llm.held(), tokens) - llm.n_tokens)
            chosen = max(self._free, key=gain)  # the first of equals
            self._free.remove(chosen)
            self._busy.append(chosen)
        return chosen

    def _check_grammar(self, grammar):
        """Refuse a text that is not a grammar, which ends the process where it is used."""
        text, root = (vars(grammar)[name].encode() for name in ("_grammar", "_root"))
        sampler = llama_cpp.llama_sampler_init_grammar(self._model.vocab, text, root)
        if not sampler:
            raise ValueError("the grammar, or that of the JSON schema, cannot be read")
        llama_cpp.llama_sampler_free(sampler)


def _pointer(data):
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _of_context(states):
    """Recurrent states by the format for a context, which has the number of a sequence after the position."""
    return states[8:16].tobytes() + struct.pack("<Ii", 1, 0) + states[20:].tobytes()
