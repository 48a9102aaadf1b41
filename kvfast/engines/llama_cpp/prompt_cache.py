"""Prompts of llama-cpp-python that outlive the process, in a store of kvfast."""

from __future__ import annotations

import json
import os
import time
import weakref
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from kvfast.core.checks import check_size, checked_token_ids
from kvfast.core.workers import Workers
from kvfast.engines.llama_cpp.prompt_settings import prompt_rate, refusal, seed_of, settings_of, weights_of
from kvfast.engines.llama_cpp.prompt_states import JoinedState, WholeState, form_of
from kvfast.prompts.chain import Chain, common_length, key_of
from kvfast.prompts.envelope import HEADER_BYTES, complete, new_value
from kvfast.prompts.fetching import fetch_chunks
from kvfast.prompts.opening import open_patiently
from kvfast.prompts.stats import PromptCacheStats
from kvfast.prompts.writer import MOST_PENDING, Writer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from typing_extensions import Self

    from kvfast.engines.llama_cpp.form import Form
    from kvfast.prompts.stores.store import Store

CHUNK_TOKENS = 64  # what follows the last chunk is computed, which takes a processor long


@dataclass
class FoundState:
    """The first tokens of a prompt, with the attributes of ``llama_cpp.LlamaState``."""

    input_ids: NDArray[np.intc]
    scores: NDArray[np.single]
    n_tokens: int
    llama_state: bytearray
    llama_state_size: int
    seed: int


class LlamaPromptCache:
    """Prompts of a ``Llama`` of llama-cpp-python in a store, in the place of its ``LlamaDiskCache``.

    A prompt and its answer are kept in chunks of `chunk_tokens` tokens, as `kvfast.PromptCache` does: prompts with the same beginning
    share chunks, any number of processes may share a store, and a fresh process finds what another has stored. A chunk has the bytes of
    llama.cpp, of any type, with values transposed or not. Only chunks that the store does not have are written, in the background.
    What a store does not give, because it is slow, full, gone or damaged, is computed: a failure costs time and a warning.

    States of recurrent models and of those with windows, and prompts with images, are refused with a warning, and computed.

    Parameters
    ----------
    store : str, path-like or Store
        As in `kvfast.PromptCache`.
    llm : llama_cpp.Llama
        The only one that may have this cache.
    max_bytes, near, chunk_tokens, secret, time_limit
        As in `kvfast.PromptCache`. `chunk_tokens` may be any positive number.
    model : str, optional
        A name for the weights. By default all bytes of the files of the model are read once, in the background, for a digest. Choose
        another name if you change the model by other means than the arguments of ``Llama``, such as a control vector.

    Attributes
    ----------
    stats : PromptCacheStats
        `num_tokens` counts tokens that `llm` did not hold already.

    Examples
    --------
    ::

        llm = llama_cpp.Llama("model.gguf", n_ctx=8192, flash_attn=True, type_k=8, type_v=8)
        llm.set_cache(kvfast.llama_cpp.LlamaPromptCache("redis://127.0.0.1", llm))
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store,
        llm: Any,
        max_bytes: int | None = None,
        *,
        near: str | os.PathLike[str] | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
        secret: bytes = b"",
        time_limit: float = 5.0,
        model: str | None = None,
    ) -> None:
        for name in ("context_params", "input_ids", "load_state"):
            if not hasattr(llm, name):
                raise TypeError(f"llm must be a llama_cpp.Llama, got {type(llm).__name__}")
        self.chunk_tokens = check_size(chunk_tokens, "chunk_tokens", 1, 1 << 20)
        self.max_bytes = None if max_bytes is None else check_size(max_bytes, "max_bytes", 0)
        self._patient = open_patiently(store, self.max_bytes, near, secret, time_limit)
        self.store, self.stats = self._patient.store, PromptCacheStats()
        self._secret, self._is_closed = secret, False
        self._writer, self._saving = Writer(self._patient, self.stats), Workers(1, "kvfast-states")
        self._llm, self._pending, self._lock = weakref.ref(llm), 0, Lock()  # bytes of states that wait
        self._form: Form | None = None
        self._rate, self._is_refused = 0.0, False  # tokens per second that are computed
        # It reads all weights of the model. A prompt waits for it as long as for the store.
        settings, path = settings_of(llm), os.path.join(os.getcwd(), llm.model_path)
        self._settings = Workers(1, "kvfast-weights").submit(
            lambda: json.dumps([weights_of(path) if model is None else model, settings])
        )

    def __getitem__(self, key: Sequence[int]) -> FoundState:
        """The state of the longest beginning of a prompt that the store has, without its last token.

        Raises
        ------
        KeyError
            If the store has no more than the model holds already.
        """
        begin, token_ids, llm, found = time.perf_counter(), checked_token_ids(key), self._model(), None
        held = common_length(llm.input_ids[: llm.n_tokens], token_ids)
        if not self._refuses(llm):
            try:
                found = self._found(llm, token_ids, held)
            except (MemoryError, OSError, ValueError) as error:
                self._patient.warn(f"prompts are computed, as they cannot be looked up: {error}")
        self.stats.num_prompts += 1
        self.stats.num_tokens += len(token_ids) - held
        self.stats.seconds += time.perf_counter() - begin
        if found is None:
            raise KeyError("the store has no more of this prompt than the model holds")
        self.stats.num_hits += 1
        self.stats.num_restored_tokens += found.n_tokens - held
        return found

    def __contains__(self, key: Sequence[int]) -> bool:
        """Whether the store has a beginning of a prompt."""
        self._check_open()
        return self._there(checked_token_ids(key), self._patient.deadline())[1] > 0

    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        """Store the full chunks of a ``LlamaState`` in the background. It tells itself which tokens it has; `key` is not used."""
        llm, data = self._model(), value.llama_state
        token_ids = np.array(value.input_ids[: value.n_tokens], np.int64)
        if len(token_ids) < self.chunk_tokens or self._refuses(llm) or self._patient.is_paused:
            return
        self._rate = prompt_rate(llm) or self._rate
        if not np.array_equal(token_ids, llm.input_ids[: value.n_tokens]):
            self._refused("this cache is another Llama's, and each needs one of its own")
            return
        with self._lock:
            if self._pending and self._pending + len(data) > MOST_PENDING:
                return  # the store is slower than the model
            self._pending += len(data)
        self._saving.submit(lambda: self._save(token_ids, data))

    @property
    def cache_size(self) -> int:
        """Bytes of all values, of all models. This lists the whole store."""
        self.flush()
        return sum(entry.nbytes for entry in self.store.entries())

    def flush(self) -> None:
        """Wait until the store has all that is on its way."""
        self._check_open()
        self._saving.submit(int).result()
        self._writer.flush()
        self._patient.settle()

    def close(self) -> None:
        """Wait for what is on its way, and close the store. A second `close` is harmless; other calls are refused."""
        self._saving.close()
        self._writer.close()
        self._patient.close()
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a LlamaPromptCache has threads and connections, and cannot be copied or pickled: make another one of its store"
        )

    def __repr__(self) -> str:
        return f"LlamaPromptCache({self.store.url!r}, max_bytes={self.max_bytes})"

    def _check_open(self):
        if self._is_closed:
            raise ValueError("this LlamaPromptCache is closed: llm.set_cache(None) does without one")

    def _model(self):
        """The Llama, of which this is the cache."""
        self._check_open()
        llm = self._llm()
        if llm is None:
            raise ValueError("the Llama of this LlamaPromptCache is gone: another one needs a cache of its own")
        return llm

    def _refuses(self, llm):
        why = refusal(llm)
        if why is not None:
            self._refused(why)
        return why is not None

    def _refused(self, why):
        """Warn, once."""
        if not self._is_refused:
            self._is_refused = True
            self._patient.warn(f"prompts of this model are computed, and not stored: {why}")

    def _there(self, token_ids, deadline):
        """The chain of a prompt without its last token, and how many of its first chunks the store has."""
        count = max(0, len(token_ids) - 1) // self.chunk_tokens
        if not count:
            return None, 0
        from concurrent.futures import TimeoutError as Late

        try:
            text = self._settings.result(deadline - time.monotonic())
        except Late:
            return None, 0
        chain = Chain(text, token_ids[: count * self.chunk_tokens], self.chunk_tokens, self._secret)
        here = self._patient.contains_many([key_of("c", chain.chunk(i)) for i in range(count)], deadline)
        return chain, (*here, False).index(False)

    def _found(self, llm, token_ids, held):
        """The state of the longest beginning, or None if the store has no more than the first `held` tokens."""
        deadline, size = self._patient.deadline(), self.chunk_tokens
        chain, count = self._there(token_ids, deadline)
        if count * size <= held or self._takes_longer(count, count * size - held):
            return None
        state = self._fetched(chain, count, deadline)
        num_tokens = 0 if state is None else state.num_tokens
        if num_tokens <= held:
            return None
        input_ids = np.full(len(llm.input_ids), -1, np.intc)  # no token where there are none
        input_ids[:num_tokens] = token_ids[:num_tokens]
        scores = np.zeros((1, llm.scores.shape[1]), np.single)  # for all tokens, as nobody reads them
        return FoundState(input_ids, scores, num_tokens, state.data, len(state.data), seed_of(llm))

    def _takes_longer(self, count, num_tokens):
        """Whether chunks take longer to fetch than to compute, as far as is known."""
        if self._form is None or not self._rate:
            return False
        return self._patient.takes_longer(count * self._form.nbytes(self.chunk_tokens), num_tokens / self._rate)

    def _fetched(self, chain, count, deadline):
        """The state of the first chunks: of as many as come. None if the first one does not come."""
        begin, size = time.perf_counter(), self.chunk_tokens
        first = self._first(chain, deadline) if self._form is None else None
        if self._form is None:
            return None
        state, nbytes = JoinedState(self._form, count * size), self._form.nbytes(size)
        if first is not None:
            state.take_chunk(first, 0)
        start = int(first is not None)
        chunks = [(i, chain.chunk(i), nbytes) for i in range(start, count)]
        good = start + fetch_chunks(
            self._patient, chunks, self._secret, deadline, lambda i, payload: state.take_chunk(payload, i * size), int
        )
        self.stats.bytes_fetched += good * nbytes
        if good == count:
            self._patient.measured(count * nbytes, time.perf_counter() - begin)
        self._patient.touch([key_of("c", chain.chunk(i)) for i in reversed(range(good))])
        return state.first(good * size) if good else None

    def _first(self, chain, deadline):
        """The payload of the first chunk, whose form becomes known; None if it does not come."""
        key = key_of("c", chain.chunk(0))
        (value,) = self._patient.get_many([key], deadline)

        def use(payload):
            self._form = form_of(payload)
            return payload

        return self._patient.take(key, value, chain.chunk(0), self._secret, use)

    def _save(self, token_ids, data):
        """Store the chunks that are not there, in the background."""
        size, count = self.chunk_tokens, len(token_ids) // self.chunk_tokens
        try:
            state = WholeState(data, len(token_ids))
            self._form, nbytes = state.form, state.form.nbytes(size)
            if self.max_bytes is not None:
                count = min(count, self.max_bytes // (HEADER_BYTES + nbytes))
            chain = Chain(self._settings.result(), token_ids[: count * size], size, self._secret)
            keys, calls = [key_of("c", chain.chunk(i)) for i in range(count)], []
            self._writer.flush()  # the chunks of the answer before, which this state holds too
            for i, is_here in enumerate(self._patient.contains_many(keys, self._patient.deadline())):
                if is_here or self._patient.is_paused:
                    continue
                value, payload = new_value(nbytes)
                state.write_chunk(payload, i * size, (i + 1) * size)
                complete(value, chain.chunk(i), self._secret, (i + 1) * size)
                calls.append(self._writer.put(keys[i], value))
            # In this order the first chunks, which the others need, are removed last.
            self._writer.after(calls, lambda: self._patient.touch(keys[::-1], is_hit=False))
        except ValueError as error:
            self._refused(str(error))
        except (MemoryError, OSError) as error:
            self._patient.warn(f"prompts are not saved: {error}")
        finally:
            with self._lock:
                self._pending -= len(data)
