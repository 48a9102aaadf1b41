"""llama.cpp with and without kvfast's attention: tokens a second of one model, in interleaved rounds of one process.

    python -m kvfast llama-cpp build
    python bench/bench_llama_cpp.py MODEL.gguf --types f16,q8_0,q4_0 --contexts 128,4096,8192

The contexts without kvfast are opened before `kvfast.llama_cpp.load()`, those with it afterwards; both are of the same weights. A
prompt is computed once with kvfast, and its state copied, so that both decode from the same cache. Prompts are timed on their own.
The weights are read as they are in the file (`use_extra_bufts=False`): ggml's layout for AMX crashes on some machines.
"""

import argparse
import ctypes
import json
import time
from statistics import median

import llama_cpp
import numpy as np

import kvfast.llama_cpp

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
BATCH = 512


class Session:
    """A context of a model with its cache, and the tokens in it. `storage` is the type of K and V, or two of them: ``q8_0/f16``."""

    def __init__(self, model, storage, size, num_threads, flash=True):
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = size, BATCH, BATCH
        settings.n_threads = settings.n_threads_batch = num_threads
        settings.type_k, settings.type_v = (TYPES[one] for one in (storage.split("/") * 2)[:2])
        settings.flash_attn_type = int(flash)
        self.context = llama_cpp.llama_init_from_model(model, settings)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context of {size} tokens in {storage}")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.length = 0

    def clear(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        self.length = 0

    def cut(self, length):
        """Forget the tokens from `length` on."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), 0, length, -1)
        self.length = length

    def append(self, tokens, every=False):
        """Compute tokens; returns the logits of the last one, or of each."""
        found = []
        for start in range(0, len(tokens), BATCH):
            part = tokens[start : start + BATCH]
            self.batch.n_tokens = len(part)
            for i, token in enumerate(part):
                self.batch.token[i], self.batch.pos[i], self.batch.n_seq_id[i] = int(token), self.length + i, 1
                self.batch.seq_id[i][0] = 0
                self.batch.logits[i] = every or start + i == len(tokens) - 1
            if llama_cpp.llama_decode(self.context, self.batch) != 0:
                raise RuntimeError("llama_decode failed")
            self.length += len(part)
            rows = range(len(part)) if every else [len(part) - 1] if start + BATCH >= len(tokens) else []
            for i in rows:
                found.append(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, i), (self.vocabulary,)).copy())
        return np.stack(found)

    def copy_from(self, other):
        size = llama_cpp.llama_state_get_size(other.context)
        state = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_get_data(other.context, state, size)
        if llama_cpp.llama_state_set_data(self.context, state, size) == 0:
            raise RuntimeError("llama_state_set_data failed")
        self.length = other.length

    def free(self):
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)


def open_model(path):
    settings = llama_cpp.llama_model_default_params()
    settings.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    if not model:
        raise RuntimeError(f"llama.cpp cannot read {path}")
    return model


def tokens_of(model, text, count):
    data, vocabulary = text.encode(), llama_cpp.llama_model_get_vocab(model)
    found = (ctypes.c_int32 * (len(data) + 8))()
    number = llama_cpp.llama_tokenize(vocabulary, data, len(data), found, len(found), True, False)
    return np.resize(np.array(found[:number]), count)


def seconds(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def decoding(sessions, tokens, given):
    """Seconds per token, of rounds in which each session decodes a few tokens after the same cache."""
    length, taken = sessions["kvfast"].length, {name: [] for name in sessions}
    for number in range(given.rounds + 1):
        for name, session in sessions.items():
            session.append(tokens[:1])  # wakes the threads
            spent = sum(seconds(session.append, tokens[i : i + 1]) for i in range(given.tokens))
            session.cut(length)
            if number:
                taken[name].append(spent / given.tokens)
    return taken


def prompts(sessions, tokens, given):
    """Seconds per prompt."""
    taken = {name: [] for name in sessions}
    for _ in range(given.prompt_rounds):
        for name, session in sessions.items():
            session.clear()
            taken[name].append(seconds(session.append, tokens))
    return taken


def log_likelihood(session, tokens):
    """Mean log probability of each token after those before it."""
    session.clear()
    total = 0.0
    for start in range(0, len(tokens) - 1, BATCH):
        part = tokens[start : start + BATCH + 1]
        logits = session.append(part[:-1], every=True).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        total += (logits[np.arange(len(part) - 1), part[1:]] - np.log(np.exp(logits).sum(axis=1))).sum()
    return total / (len(tokens) - 1)


def cells(model, opened, text, given):
    for storage in given.types:
        if given.perplexity:
            tokens = tokens_of(model, text, given.perplexity + 1)
            found = {name: float(np.exp(-log_likelihood(session, tokens))) for name, session in opened[storage].items()}
            yield {
                "kind": "perplexity",
                "type": storage,
                "tokens": given.perplexity,
                **found,
                "ratio": found["kvfast"] / found["llama.cpp"],
            }
        for kind, contexts in (("prompt", given.prompts), ("decode", given.contexts)):
            for context in contexts:
                tokens = tokens_of(model, text, context)
                if kind == "prompt":
                    taken, per = prompts(opened[storage], tokens, given), context
                else:
                    opened[storage]["kvfast"].clear()
                    opened[storage]["kvfast"].append(tokens)
                    opened[storage]["llama.cpp"].copy_from(opened[storage]["kvfast"])
                    taken, per = decoding(opened[storage], tokens, given), 1
                ratio = median(a / b for a, b in zip(taken["llama.cpp"], taken["kvfast"]))
                rates = {name: per / median(values) for name, values in taken.items()}
                yield {"kind": kind, "type": storage, "context": context, "threads": given.threads, **rates, "ratio": ratio}


def main(arguments=None):
    def numbers(text):
        return [int(one) for one in text.split(",") if one]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--types", type=lambda text: text.split(","), default=["f16", "q8_0", "q4_0"], help=", ".join(TYPES))
    parser.add_argument("--contexts", type=numbers, default=[128, 4096, 8192], help="at which tokens are decoded")
    parser.add_argument("--prompts", type=numbers, default=[4096], help="tokens of prompts")
    parser.add_argument("--perplexity", type=int, default=0, metavar="N", help="also the perplexity of N tokens of --text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-rounds", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8, help="that a round decodes")
    parser.add_argument("--text", default=__file__, help="a file whose text is the prompt")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args(arguments)
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = open_model(given.model)
    size = max([*given.contexts, *given.prompts, given.perplexity]) + given.tokens + 256
    own = {storage: Session(model, storage, size, given.threads) for storage in given.types}
    kvfast.llama_cpp.load()
    opened = {storage: {"llama.cpp": own[storage], "kvfast": Session(model, storage, size, given.threads)} for storage in given.types}
    with open(given.text) as file:
        text = file.read()
    found = []
    for cell in cells(model, opened, text, given):
        found.append(cell)
        print(
            " ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in cell.items()),
            flush=True,
        )
        if given.json:
            with open(given.json, "w") as file:
                json.dump(found, file, indent=1)
    for sessions in opened.values():
        for session in sessions.values():
            session.free()
    llama_cpp.llama_model_free(model)


if __name__ == "__main__":
    main()
