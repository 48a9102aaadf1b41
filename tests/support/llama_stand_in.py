"""What kvfast uses of llama-cpp-python, with a model whose keys and values are digests of all tokens up to theirs.

Its states are made here by llama.cpp's format. A wrong byte in a state that was loaded changes all tokens that follow.
"""

import hashlib
import struct
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

__version__ = "0.3.36"
SIZES = {1: 64, 8: 34, 2: 18}  # bytes of the rows of 32 elements, by the numbers of ggml's types
VOCABULARY = 1000
perf = SimpleNamespace(n_p_eval=0, t_p_eval_ms=0.0)


def llama_model_is_recurrent(model):
    return model == "recurrent"


def llama_model_is_hybrid(model):
    return model == "hybrid"


def llama_model_has_encoder(model):
    return model == "encoder"


def llama_get_causal_attn(ctx):
    return ctx != "not causal"


def llama_perf_context(ctx):
    return perf


@dataclass
class LlamaState:
    input_ids: np.ndarray
    scores: np.ndarray
    n_tokens: int
    llama_state: bytes
    llama_state_size: int
    seed: int


def context_params(type_k, type_v, flash_attn):
    rest = "attention_type swa_full rope_scaling_type rope_freq_base rope_freq_scale yarn_orig_ctx"
    rest += " yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow"
    return SimpleNamespace(type_k=type_k, type_v=type_v, flash_attn_type=int(flash_attn), **dict.fromkeys(rest.split(), 0))


@dataclass
class Llama:
    model_path: str
    type_k: int = 1
    type_v: int = 1
    flash_attn: bool = False
    layers: int = 2
    context: int = 2048
    model: str = ""
    ctx: str = ""
    kv_overrides: dict | None = None
    lora_path: str | None = None
    lora_scale: float = 1.0
    metadata: dict = field(default_factory=lambda: {"general.architecture": "llama"})
    caches: int = 1  # of each token, all the same
    more: bytes = b""  # of something else, at the end of a state
    _logits_all: bool = False
    _seed: int = 3
    __hash__ = object.__hash__

    def __post_init__(self):
        self.cache = self.chat_handler = None
        self.n_tokens, self.num_computed = 0, 0
        self.input_ids = np.full(self.context, 77, np.intc)
        self.scores = np.zeros((8, VOCABULARY), np.single)
        self.context_params = context_params(self.type_k, self.type_v, self.flash_attn)
        self.rows = []  # of each token: bytes of the keys of all layers, then of the values

    def __getstate__(self):
        return {"seed": self._seed, "logits_all": self._logits_all}

    def n_ctx(self):
        return self.context

    def set_cache(self, cache):
        self.cache = cache

    def save_state(self):
        data = state_bytes(self)
        return LlamaState(self.input_ids.copy(), self.scores[: self.n_tokens].copy(), self.n_tokens, data, len(data), self._seed)

    def load_state(self, state):
        self.scores[: state.n_tokens, :] = state.scores.copy()
        self.input_ids = state.input_ids.copy()
        self.n_tokens, self._seed = state.n_tokens, state.seed
        assert state.llama_state_size == len(state.llama_state)
        self.rows = rows_of(self, bytes(state.llama_state))
        assert len(self.rows) == self.n_tokens

    def complete(self, prompt, count=8):
        """As ``Llama.create_completion``: the answer to a prompt of token ids."""
        if self.cache:
            try:
                item = self.cache[prompt]
                if common(item.input_ids.tolist(), prompt) > common(self.input_ids[: self.n_tokens].tolist(), prompt):
                    self.load_state(item)
            except KeyError:
                pass
        held = min(common(self.input_ids[: self.n_tokens].tolist(), prompt), len(prompt) - 1)
        self.n_tokens, self.rows, self.num_computed = held, self.rows[:held], 0
        answer, given = [], prompt[held:]
        while True:
            for token in given:
                self.evaluate(token)
            if len(answer) == count:
                break
            digest = hashlib.blake2b(b"".join(self.rows), digest_size=4).digest()
            answer.append(int.from_bytes(digest, "little") % VOCABULARY)
            given = answer[-1:] if len(answer) < count else []
        if self.cache:
            self.cache[prompt + answer] = self.save_state()
        return answer

    def evaluate(self, token):
        self.num_computed += 1
        self.input_ids[self.n_tokens] = token
        before = self.rows[-1] if self.rows else b""
        size = self.layers * (SIZES[self.type_k] + SIZES[self.type_v])
        self.rows.append(hashlib.shake_128(before + struct.pack("<q", token)).digest(size))
        self.n_tokens += 1


@dataclass
class Served(Llama):
    """What kvfast adds in `ServedLlama`: states of the tokens that the cache has not kept; those of a recurrent model, which are digests of
    all rows, after some chunks."""

    has_states: bool = False
    chunk: int = 16

    def __post_init__(self):
        super().__post_init__()
        self.checkpoints, self.marks = {}, set()
        self.num_saved = 0  # tokens of the state that was saved last

    def complete(self, prompt, count=8):
        if self.has_states and self.input_ids[: self.n_tokens].tolist() != prompt[: self.n_tokens]:
            self.n_tokens, self.rows, self.checkpoints = 0, [], {}
        self.marks = {(len(prompt) - 1) // self.chunk * self.chunk}
        return super().complete(prompt, count)

    def evaluate(self, token):
        super().evaluate(token)
        if self.has_states and self.n_tokens in self.marks:
            self.checkpoints[self.n_tokens] = states_of(self.rows)

    def save_state(self):
        state, start = (
            super().save_state(),
            0 if self.has_states or not self.cache else self.cache.num_kept(self.input_ids[: self.n_tokens]),
        )
        state.states, state.start, self.num_saved = dict(self.checkpoints), start, self.n_tokens - start
        state.llama_state = state_bytes(self, range(start, self.n_tokens)) + (states_of(self.rows) if self.has_states else b"")
        return state

    def load_state(self, state):
        if self.has_states:
            size = len(states_of([]))
            state.llama_state, states = state.llama_state[:-size], bytes(state.llama_state[-size:])
            state.llama_state_size -= size
        super().load_state(state)
        assert not self.has_states or states == states_of(self.rows)


def states_of(rows):
    return hashlib.shake_128(b"".join(rows)).digest(100)


def common(a, b):
    return next((i for i, (one, other) in enumerate(zip(a, b)) if one != other), min(len(a), len(b)))


def state_bytes(llm, positions=None, sequence=0, streams=1):
    """``llama_state_get_data``, with cells in the order of `positions`."""
    positions = list(range(len(llm.rows))) if positions is None else positions
    count = len(positions)
    parts = [struct.pack("<II", streams, count)]
    if count:
        parts += [struct.pack("<iIi", one, 1, sequence) for one in positions]
        parts.append(struct.pack("<II", not llm.flash_attn, llm.layers))
        at = 0
        for kind, is_transposed in [(llm.type_k, False)] * llm.layers + [(llm.type_v, not llm.flash_attn)] * llm.layers:
            rows = [llm.rows[one][at : at + SIZES[kind]] for one in positions]
            if is_transposed:
                width = SIZES[kind] // 2
                parts.append(struct.pack("<iII", kind, 2, width))
                parts += [row[2 * j : 2 * j + 2] for j in range(width) for row in rows]
            else:
                parts.append(struct.pack("<iQ", kind, SIZES[kind]))
                parts += rows
            at += SIZES[kind]
    return struct.pack("<I", 5) + b"llama" + llm.caches * b"".join(parts) + llm.more


def rows_of(llm, data):
    """The rows of each token of a state, all of whose other bytes are as `state_bytes` writes them."""
    count, at, found = struct.unpack_from("<I", data, 13)[0], 17, []
    at += 12 * count + 8
    for kind, is_transposed in [(llm.type_k, False)] * llm.layers + [(llm.type_v, not llm.flash_attn)] * llm.layers:
        at += 12
        size = SIZES[kind]
        block = np.frombuffer(data, np.uint8, count * size, at)
        if is_transposed:
            block = np.ascontiguousarray(block.reshape(size // 2, count, 2).transpose(1, 0, 2))
        found.append(block.reshape(count, size))
        at += count * size
    rows = [b"".join(part[i].tobytes() for part in found) for i in range(count)]
    twin = Llama(llm.model_path, llm.type_k, llm.type_v, llm.flash_attn, llm.layers, caches=llm.caches)
    twin.rows = rows
    assert state_bytes(twin) == data
    return rows
