"""Texts that change runtime: a prompt in llama.cpp goes on in kvfast, and the other way round.

``python bench/studies/llama_cpp_state.py`` (extras ``llama`` and ``llama-cpp``), for SmolLM2-135M-Instruct with weights in float32.

Belongs to the commit 30a5a0b, "llama_cpp_state: sequences move between llama.cpp and kvfast".
"""

import argparse
import ctypes
import time

from rich.console import Console
from rich.progress import track
from rich.table import Table

import kvfast
from kvfast import llama
from kvfast.llama_cpp import read_state, write_state
from kvfast.tools.evaluation.llama_cpp_caches import CacheTypes, LlamaCpp, _Context

PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune,",
    "To make bread you need flour, water, salt and",
    "Water boils at a temperature of one hundred degrees",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=24, help="that follow each prompt (default: 24)")
    parser.add_argument("--types", default="f32,f16,q8_0,q4_0", help="of llama.cpp's caches (default: %(default)s)")
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (default: SmolLM2-135M-Instruct)")
    args = parser.parse_args()
    path = args.model or llama.fetch_model()
    model, tokenizer = llama.load(path)
    rows = Table("llama.cpp's cache", "to kvfast", "to llama.cpp", "bytes of a token", "read, us a token", "written, us a token")
    with LlamaCpp(path, model.cache_shape) as runtime:
        for kind in args.types.split(","):
            counts, seconds, size = [0, 0], [0.0, 0.0], 0
            total = 0
            for prompt in track(PROMPTS, kind):
                tokens = tokenizer.encode(prompt)
                same, took, size = moved(runtime, model, kind, tokens, args.tokens)
                total += len(tokens)
                counts = [a + b for a, b in zip(counts, same)]
                seconds = [a + b for a, b in zip(seconds, took)]
            most = len(PROMPTS) * args.tokens
            rows.add_row(
                kind, *(f"{count}/{most}" for count in counts), f"{size:,.0f}", *(f"{1e6 * one / total:.0f}" for one in seconds)
            )
    Console().print(rows, "Tokens that are the same as in the runtime where the text began, each predicted after its text.")


def moved(runtime, model, kind, prompt, num_tokens):
    """Tokens that agree with those of the first runtime, either way; seconds to read and to write; bytes of a token."""
    api, rope_dims = runtime._api, model.config.rope_dims
    room = len(prompt) + num_tokens + 1
    contexts = [_Context(api, runtime._model, CacheTypes(kind, kind), room, room) for _ in range(2)]
    there, back = contexts
    try:
        token = int(there(prompt)[-1].argmax())
        size = api.llama_state_seq_get_size(there._context, 0)
        buffer = (ctypes.c_uint8 * size)()
        api.llama_state_seq_get_data(there._context, buffer, size, 0)
        cache, own = (kvfast.KVCache(*model.cache_shape, dtype="float32") for _ in range(2))
        start = time.perf_counter()
        read_state(bytes(buffer)).append_to(cache, rope_dims=rope_dims)
        read = time.perf_counter() - start

        ours = int(model.logits(model.forward(prompt, own))[-1].argmax())
        start = time.perf_counter()
        data = write_state(own, kind, rope_dims=rope_dims, transposed=kind == "f32")
        written = time.perf_counter() - start
        if api.llama_state_seq_set_data(back._context, (ctypes.c_uint8 * len(data)).from_buffer_copy(data), len(data), 0) == 0:
            raise RuntimeError("llama.cpp refuses the state")
        back._length = len(prompt)
        same = [0, 0]
        for _ in range(num_tokens):
            first, second = int(there([token])[-1].argmax()), int(model.logits(model.forward([token], cache))[-1].argmax())
            same[0] += first == second
            token = first
            first, second = int(model.logits(model.forward([ours], own))[-1].argmax()), int(back([ours])[-1].argmax())
            same[1] += first == second
            ours = first
        return same, (read, written), size / len(prompt)
    finally:
        for context in contexts:
            context.close()


if __name__ == "__main__":
    main()
