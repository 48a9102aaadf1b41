"""Prompts of SmolLM2-135M that outlive llama-cpp-python: one process computes a text, a fresh one finds it; compared with its own disk cache.

    pip install -e ".[llama-cpp,llama,redis]" diskcache
    python bench/bench_llama_cpp_prompts.py                               # a redis-server of its own
    python bench/bench_llama_cpp_prompts.py --store FOLDER --types q8_0 --context 8192

Each model is in a process of its own. Times are those from a request to its first token, and to its end, when the state was taken.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import time

from engine_process import process, serve, store_of

import kvfast
from kvfast.prompts.stores import open_store

NEW_TOKENS = 16
TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}
OWN = "llama-cpp-python"


class Engine:
    """A Llama with a store of kvfast, with its own disk cache, or with neither.

    Parameters
    ----------
    types : str
    flash_attn : bool
    longest : int
        Tokens of the longest prompt.
    store : str or None
        For its own disk cache, a folder after "llama-cpp-python:".
    """

    def __init__(self, types, flash_attn, longest, store):
        from llama_cpp import Llama, LlamaDiskCache

        from kvfast import llama
        from kvfast.llama_cpp import LlamaPromptCache

        kind = TYPES[types]
        path = str(llama.fetch_model())
        self.llm = Llama(path, n_ctx=longest + 2 * NEW_TOKENS, verbose=False, flash_attn=flash_attn, type_k=kind, type_v=kind)
        with open(os.path.join(os.path.dirname(kvfast.__file__), "tools/llama/chapters.txt"), "rb") as text:
            self.ids = self.llm.tokenize(text.read())
        self.answer(min(200, longest), 1000)
        self.cache = None
        if store is not None and store.startswith(OWN):
            self.llm.set_cache(LlamaDiskCache(store.partition(":")[2], 1 << 40))
        elif store is not None:
            self.cache = LlamaPromptCache(store, self.llm, time_limit=30.0)
            self.llm.set_cache(self.cache)

    def answer(self, num_tokens, start=0):
        """Seconds to the first token after a prompt and to the end, and the text that follows."""
        ids = (self.ids * (2 + num_tokens // len(self.ids)))[start : start + num_tokens]
        self.llm.reset()
        first, texts, begin = None, [], time.perf_counter()
        for part in self.llm.create_completion(ids, max_tokens=NEW_TOKENS, temperature=0, stream=True):
            first = first or time.perf_counter() - begin
            texts.append(part["choices"][0]["text"])
        return first, time.perf_counter() - begin, "".join(texts)

    def flush(self):
        if self.cache is not None:
            self.cache.flush()


def size_of(store):
    """Bytes of all that a store has."""
    if store.startswith(OWN):
        folder = store.partition(":")[2]
        return sum(os.path.getsize(os.path.join(path, name)) for path, _, names in os.walk(folder) for name in names)
    with contextlib.closing(open_store(store)) as entries:
        return sum(entry.nbytes for entry in entries.entries())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="a folder or URL; by default a redis-server of its own")
    parser.add_argument("--types", choices=TYPES, default="f16")
    parser.add_argument("--no-flash-attention", action="store_true")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9, help="of prompts that are not in the store")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        serve(Engine(*json.loads(given.engine)))
        return

    def engine(store):
        options = [given.types, not given.no_flash_attention, given.context, store]
        return process(__file__, options, stderr=subprocess.DEVNULL)

    with store_of(parser, given.store) as (store, folder):
        print(f"{given.types}, {given.context:,} tokens: seconds to the first token, to the end; MiB")
        expected = None
        for name, one in {f"kvfast, {store.partition('://')[0]}": store, OWN: f"{OWN}:{folder}/own"}.items():
            with engine(one) as ask:
                computed, computed_end, text = ask(given.context)
            expected = expected or text
            with engine(one) as ask:
                found, found_end, again = ask(given.context)
            same = "the same text" if text == again == expected else "ANOTHER TEXT"
            print(f"{name:24} computed {computed:.3f}, {computed_end:.3f}; in a fresh process {found:.3f}, {found_end:.3f}:", end=" ")
            print(f"{computed / found:.1f} times as soon, {same}; {size_of(one) / 2**20:.1f} MiB", flush=True)
        times = {"without a store": [], "with a store": []}
        with engine(None) as plain, engine(store) as stored:
            for seed in range(1, given.rounds + 1):
                engines = dict(zip(times, (plain, stored)))
                for name in sorted(engines, reverse=bool(seed % 2)):  # in turns
                    times[name].append(engines[name](given.context // 4, 7 * seed)[0])
        if given.rounds:
            ratio = statistics.median(stored / plain for plain, stored in zip(*times.values()))
            print(f"prompts of {given.context // 4:,} tokens that are not there: {ratio:.3f} times as long with a store")


if __name__ == "__main__":
    main()
