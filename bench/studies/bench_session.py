"""Time to the first token of SmolLM2-135M with a prompt of 4,096 tokens: computed, or brought back from a file.

python bench/studies/bench_session.py

Belongs to the commit e75990d, "load: mapped files with max_seq_len, one snapshot for a pool; type stubs".
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import kvfast
from kvfast import llama
from kvfast.tools.llama.prompts import chat_prompts


def timed(call):
    start = perf_counter()
    result = call()
    return perf_counter() - start, result


def table(path, num_tokens, dtype, rounds, folder):
    model, tokenizer = llama.load(path)
    prompt = np.resize(tokenizer.encode("".join(chat_prompts(32))), num_tokens)
    question = tokenizer.encode("<|im_start|>user\nWhat was the first question?<|im_end|>\n<|im_start|>assistant\n")

    def compute():
        cache = kvfast.KVCache(*model.cache_shape, max_seq_len=num_tokens + 512, dtype=dtype)
        hidden = model.prefill(np.concatenate([prompt, question]), cache)
        return int(model.logits(hidden).argmax())

    def answer(cache):
        return int(model.logits(model.prefill(question, cache)).argmax())

    def from_prompts():
        cache = kvfast.KVCache(*model.cache_shape, max_seq_len=num_tokens + 512, dtype=dtype)
        assert prompts.restore(cache, np.concatenate([prompt, question])) == num_tokens
        return answer(cache)

    cache = kvfast.KVCache(*model.cache_shape, max_seq_len=num_tokens + 512, dtype=dtype)
    model.prefill(prompt, cache)
    path, prompts = Path(folder, "session.safetensors"), kvfast.PromptCache(Path(folder, "prompts"))
    seconds, _ = timed(lambda: cache.save(path))
    prompts.save(cache, prompt)
    print(
        f"tier {kvfast.active_isa()}; {cache!r}; saved {path.stat().st_size:,} bytes in {seconds * 1e3:.0f} ms; then {len(question)} tokens more"
    )
    ways = {
        "computed": compute,
        "load": lambda: answer(kvfast.load(path)),
        "load, mmap": lambda: answer(kvfast.load(path, mmap=True)),
        "PromptCache": from_prompts,
    }
    times, answers = {name: [] for name in ways}, set()
    for _ in range(rounds):
        for name, way in ways.items():
            seconds, token = timed(way)
            times[name].append(seconds)
            answers.add(token)
    print(f"first tokens: {[tokenizer.decode([token]) for token in answers]}")
    for name in ways:
        ratio = median(first / own for first, own in zip(times["computed"], times[name]))
        print(f"{name:<12}{median(times[name]) * 1e3:>9.0f} ms{ratio:>8.1f}x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (default: SmolLM2-135M-Instruct)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table(given.model, given.tokens, given.dtype, given.rounds, folder)
