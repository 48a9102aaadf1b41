"""Prompts of SmolLM2-135M in a store: one process computes a prompt, another takes it; and what sharing saves.

    python bench/bench_prompt_cache.py                         # a redis-server of its own, or a folder without one
    python bench/bench_prompt_cache.py --store redis://host    # or s3://..., or a folder

Each process is a fresh one with its own model. The second part keeps 1,000 prompts, which begin with 20 system prompts, in a folder.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_store import start_redis

import kvfast
from kvfast import llama
from kvfast.tools.llama.prompts import chat_prompts

NEW_TOKENS = 16


def answer(store, path, dtype, num_tokens, save):
    """Seconds to the first token of a prompt, and the first tokens: restored as far as the store has it."""
    model, tokenizer = llama.load(path)
    prompt = [int(token) for token in np.resize(tokenizer.encode("".join(chat_prompts(32))), num_tokens)]
    cache = kvfast.KVCache(*model.cache_shape, max_seq_len=num_tokens + NEW_TOKENS, dtype=dtype)
    with kvfast.PromptCache(store, time_limit=30) as prompts:
        prompts.restore(kvfast.KVCache(*model.cache_shape, dtype=dtype), [1, 2])  # connects
        begin = time.perf_counter()
        found = prompts.restore(cache, prompt, model.fingerprint)
        restored = time.perf_counter() - begin
        hidden = model.prefill(prompt[found:], cache)
        first = time.perf_counter() - begin
        saved = None
        if save:
            begin = time.perf_counter()
            prompts.save(cache, prompt, model.fingerprint)
            saved = time.perf_counter() - begin
        tokens = [int(model.logits(hidden).argmax())]
        tokens += llama.generate(model, tokens, cache, max_tokens=NEW_TOKENS - 1)
        fetched = prompts.stats.bytes_fetched
    return {"found": found, "restored": restored, "first": first, "saved": saved, "tokens": tokens, "fetched": fetched}


def in_a_process(*arguments):
    command = [sys.executable, __file__, "--answer", json.dumps(arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


@contextlib.contextmanager
def redis_server():
    """The URL of a redis-server on a free port; None without the program."""
    with tempfile.TemporaryDirectory() as folder:
        server, port = start_redis(folder)
        try:
            yield server and f"redis://127.0.0.1:{port}"
        finally:
            if server:
                server.terminate()
                server.wait()


def two_processes(store, path, dtype, num_tokens, rounds):
    first = in_a_process(store, path, dtype, num_tokens, True)
    print(f"{store.partition('?')[0]}, {dtype}, {num_tokens:,} tokens")
    print(f"  process A computes it   {first['first']:8.3f} s to the first token, and saves it in {first['saved']:.3f} s")
    for _ in range(rounds):
        other = in_a_process(store, path, dtype, num_tokens, False)
        same = "the same" if other["tokens"] == first["tokens"] else "OTHER"
        print(
            f"  a fresh process B       {other['first']:8.3f} s ({first['first'] / other['first']:.0f}x sooner), {other['found']:,} tokens and "
            f"{other['fetched'] / 1e6:.1f} MB restored in {other['restored']:.3f} s; {same} {NEW_TOKENS} tokens"
        )


def sharing(num_prompts, num_systems, dtype, chunk_tokens):
    """Bytes of prompts that share system prompts, over the bytes of the same prompts stored one by one."""
    rng, shape = np.random.default_rng(0), (4, 3, 64)
    systems = [rng.integers(0, 49152, 1000) for _ in range(num_systems)]
    with tempfile.TemporaryDirectory() as folder, kvfast.PromptCache(folder, chunk_tokens=chunk_tokens) as prompts:
        alone = kvfast.PromptCache(Path(folder, "alone"), chunk_tokens=chunk_tokens)
        shared = 0.0
        for i in range(num_prompts):
            token_ids = np.concatenate([systems[i % num_systems], rng.integers(0, 49152, 150)])
            cache = kvfast.KVCache(*shape, dtype=dtype)
            found = prompts.restore(cache, token_ids)
            rows = np.random.default_rng(i % num_systems).standard_normal((len(token_ids), *shape[1:])).astype(np.float32)
            for layer in range(shape[0]):
                cache.append(layer, rows[found:], rows[found:])
            cache.advance(len(token_ids) - found)
            prompts.save(cache, token_ids)
            if i < num_systems:
                alone.clear()
                alone.save(cache, token_ids)
                shared += alone.nbytes / num_systems
        alone.close()
        total = prompts.nbytes
        chunks = sum(entry.nbytes for entry in prompts.store.entries() if entry.key.startswith("c"))
    print(
        f"{num_prompts:,} prompts of 1,150 tokens with {num_systems} system prompts of 1,000, chunks of {chunk_tokens}: {total / 1e6:,.1f} MB, "
        f"{total / (shared * num_prompts):.2f} of what they take without sharing; {chunks / 1e6:,.1f} MB in chunks, the rest in ends"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store")
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer:
        print(json.dumps(answer(*json.loads(given.answer))))
        sys.exit()
    with contextlib.ExitStack() as stack:
        store = given.store or stack.enter_context(redis_server()) or stack.enter_context(tempfile.TemporaryDirectory())
        two_processes(store, given.model, given.dtype, given.tokens, given.rounds)
    for chunk_tokens in (64, 128, 256):
        sharing(given.prompts, 20, given.dtype, chunk_tokens)
