"""Prompts of llama-cpp-python that outlive the process, in a store of kvfast."""

from __future__ import annotations

import json
import os
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfast.engine import HEADER_BYTES, PromptKeeper, Workers, Writer, checked_token_ids, common_length, new_value
from kvfast.engines.llama_cpp.prompt_settings import prompt_rate, refusal, seed_of, settings_of, weights_of
from kvfast.engines.llama_cpp.prompt_states import JoinedState, WholeState, forms_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvfast.engine import Store
    from kvfast.engines.llama_cpp.prompt_states import Forms

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
    states: dict[int, bytes] = field(default_factory=dict)  # recurrent ones, by the number of tokens before
    start: int = 0  # the first token that `llama_state` has


class LlamaPromptCache(PromptKeeper):
    """Prompts of a ``Llama`` of llama-cpp-python in a store, in the place of its ``LlamaDiskCache``.

    A prompt and its answer are kept in chunks of `chunk_tokens` tokens, as `kvfast.PromptCache` does: prompts with the same beginning
    share chunks, any number of processes may share a store, and a fresh process finds what another has stored. A chunk has the bytes of
    llama.cpp, of any type, with values transposed or not. Only chunks that the store does not have are written, in the background.
    What a store does not give, because it is slow, full, gone or damaged, is computed: a failure costs time and a warning.

    Recurrent models, and prompts with images, are refused with a warning, and computed: llama-cpp-python does so itself.

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

    way_out = "llm.set_cache(None) does without one"

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
        super().__init__(store, max_bytes, near, chunk_tokens, secret, time_limit, 1)
        self._llm, self._saving = weakref.ref(llm), Writer(1)  # one after another, as each holds the chunks of those before
        self._forms: Forms | None = None
        self._kept = np.empty(0, np.int64)  # the last tokens that were found or saved, for `num_kept`
        self._rate, self._is_refused = 0.0, False  # tokens per second that are computed
        # It reads all weights of the model. A prompt waits for it as long as for the store.
        settings, path = settings_of(llm), os.path.join(os.getcwd(), llm.model_path)
        self._settings = Workers(1, "kvfast-weights").submit(
            lambda: json.dumps([weights_of(path) if model is None else model, settings])
        )

    def of(self, llm: Any) -> LlamaPromptCache:
        """This cache for another context of the same model, with the same parameters. The first one is closed for all."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), _llm=weakref.ref(llm))
        return other

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
                self.chunks.warn(f"prompts are computed, as they cannot be looked up: {error}")
        restored, seconds = (found.n_tokens - held if found else 0), time.perf_counter() - begin
        self.chunks.count(
            num_prompts=1, num_hits=restored > 0, num_tokens=len(token_ids) - held, num_restored_tokens=restored, seconds=seconds
        )
        if found is None:
            raise KeyError("the store has no more of this prompt than the model holds")
        return found

    def __contains__(self, key: Sequence[int]) -> bool:
        """Whether the store has a beginning of a prompt."""
        self.check_open()
        return self._there(checked_token_ids(key), self.chunks.deadline())[1] > 0

    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        """Store the full chunks of a ``LlamaState`` in the background. It tells itself which tokens it has; `key` is not used."""
        llm, data = self._model(), value.llama_state
        token_ids = np.array(value.input_ids[: value.n_tokens], np.int64)
        if len(token_ids) < self.chunk_tokens or self._refuses(llm) or self.chunks.is_paused:
            return
        self._rate = prompt_rate(llm) or self._rate
        if not np.array_equal(token_ids, llm.input_ids[: value.n_tokens]):
            self._refused("this cache is another Llama's, and each needs one of its own")
            return
        states, start, before = getattr(value, "states", {}), getattr(value, "start", 0), self._kept
        if states or not _has_states(llm):
            self._kept = token_ids
            # With `waits`, the model would be as slow as a slow store.
            if self._saving.begin(lambda: self._save(token_ids, data, states, start), len(data), waits=False) is None:
                self._kept = before

    def num_kept(self, token_ids: NDArray[np.integer]) -> int:
        """The tokens of full chunks that a state needs not have, as they were found in the store or saved before."""
        return common_length(self._kept, token_ids) // self.chunk_tokens * self.chunk_tokens

    @property
    def cache_size(self) -> int:
        """`nbytes`, as llama-cpp-python calls it."""
        return self.nbytes

    def flush(self) -> None:
        """Wait until the store has all that is on its way to it."""
        self.check_open()
        self._saving.flush()
        super().flush()

    def close(self) -> None:
        """As `kvfast.PromptCache.close`."""
        self._saving.close()
        super().close()

    def _model(self):
        """The Llama, of which this is the cache."""
        self.check_open()
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
            self.chunks.warn(f"prompts of this model are computed, and not stored: {why}")

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
        chain = self.chunks.chain(text, token_ids[: count * self.chunk_tokens], self.chunk_tokens)
        return chain, self.chunks.count_first(chain.chunks(count), deadline)

    def _found(self, llm, token_ids, held):
        """The state of the longest beginning, or None if the store has no more than the first `held` tokens."""
        deadline, size = self.chunks.deadline(), self.chunk_tokens
        chain, count = self._there(token_ids, deadline)
        if _has_states(llm):
            llm.marks.add(count * size)  # another prompt parts from this one here, and so may the next
            here = self.chunks.contains([chain.states(i + 1) for i in range(count)], deadline)
            count = max((i + 1 for i, is_here in enumerate(here) if is_here), default=0)
        if count * size <= held or self._takes_longer(count, count * size - held):
            return None
        state = self._fetched(chain, count, deadline, _has_states(llm))
        num_tokens = 0 if state is None else state.num_tokens
        if num_tokens <= held:
            return None
        self._kept = token_ids[:num_tokens]
        input_ids = np.full(len(llm.input_ids), -1, np.intc)  # no token where there are none
        input_ids[:num_tokens] = token_ids[:num_tokens]
        scores = np.zeros((1, llm.scores.shape[1]), np.single)  # for all tokens, as nobody reads them
        return FoundState(input_ids, scores, num_tokens, state.data, len(state.data), seed_of(llm))

    def _takes_longer(self, count, num_tokens):
        """Whether chunks take longer to fetch than to compute, as far as is known."""
        if self._forms is None or not self._rate:
            return False
        return self.chunks.rate.takes_longer(count * self._forms.nbytes(self.chunk_tokens), num_tokens / self._rate)

    def _fetched(self, chain, count, deadline, has_states):
        """The state of the first chunks: of as many as come, or with recurrent states of all. None if none can be had."""
        size, keys, used = self.chunk_tokens, chain.chunks(count), [chain.states(count)] if has_states else []
        forms = self._forms or self.chunks.values(keys[:1], deadline, forms_of)[0]
        (states,) = self.chunks.values(used, deadline, bytes) or (b"",)
        if forms is None or states is None:
            return None
        self._forms, state, nbytes = forms, JoinedState(forms, count * size, states), forms.nbytes(size)
        chunks = [(key, nbytes) for key in keys]
        good = self.chunks.fetch(chunks, deadline, lambda i, payload: state.take_chunk(payload, i * size), used=used)
        return state.first(good * size) if good and (good == count or not has_states) else None

    def _save(self, token_ids, data, states, start):
        """Store the chunks that are not there, in the background. The data begin with the token `start`."""
        size, count = self.chunk_tokens, len(token_ids) // self.chunk_tokens
        try:
            state = WholeState(data, start, len(token_ids), max(map(len, states.values()), default=0))
            self._forms, nbytes = state.forms, state.forms.nbytes(size)
            if self.max_bytes is not None:
                count = min(count, self.max_bytes // (HEADER_BYTES + nbytes))
            chain = self.chunks.chain(self._settings.result(), token_ids[: count * size], size)
            states = {n // size: one for n, one in states.items() if n % size == 0 and n <= count * size}
            self.chunks.flush()  # the chunks of the answer before, which this state holds too
            keys = [*chain.chunks(count), *(chain.states(node) for node in states)]
            ends, calls = [*range(1, count + 1), *states], []
            for i, is_here in enumerate(self.chunks.contains(keys, self.chunks.deadline())):
                if i * size < start and not is_here:
                    self._kept = self._kept[:0]  # the store has lost it; the next state is a whole one
                if is_here or self.chunks.is_paused or i * size < start:
                    continue
                value, payload = new_value(nbytes if i < count else len(states[ends[i]]))
                if i < count:
                    state.write_chunk(payload, i * size, (i + 1) * size)
                else:
                    payload[:] = states[ends[i]]
                calls.append(self.chunks.put(keys[i], value, ends[i] * size))
            self.chunks.after(calls, keys[::-1])  # in this order the first chunks, which the others need, are removed last
        except ValueError as error:
            self._refused(str(error))
        except (MemoryError, OSError) as error:
            self.chunks.warn(f"prompts are not saved: {error}")


def _has_states(llm):
    """Whether a Llama has recurrent states, and those after some of its tokens; see `refusal`."""
    return getattr(llm, "has_states", False)
