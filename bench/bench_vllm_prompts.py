"""Prompts of SmolLM2-135M that outlive vLLM: one engine computes a prompt, a fresh one finds it; and what the connector costs for others.

    pip install -e ".[vllm,llama,redis]"
    python bench/bench_vllm_prompts.py                                 # a redis-server of its own
    python bench/bench_vllm_prompts.py --store FOLDER --dtype int4_per_token_head --context 8192

Each engine is a process of its own. Times are those from a request to its first token.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

from bench_store import start_redis

NEW_TOKENS = 16


class Engine:
    """vLLM with or without a store.

    Parameters
    ----------
    folder : str
        The model.
    dtype : str
    longest : int
        Tokens of the longest prompt.
    store : str or None
    """

    def __init__(self, folder, dtype, longest, store):
        from vllm import LLM
        from vllm.config import KVTransferConfig

        options = {}
        if store is not None:
            extra = {"url": store, "time_limit": 30.0}
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KVFastConnector", kv_role="kv_both", kv_connector_extra_config=extra
            )
        self.llm = LLM(
            folder,
            dtype="bfloat16",
            kv_cache_dtype=dtype,
            max_model_len=longest + 2 * NEW_TOKENS,
            skip_tokenizer_init=True,
            enforce_eager=True,
            kv_cache_memory_bytes=2 << 30,
            disable_log_stats=True,
            **options,
        )
        self.has_store, self.count = store is not None, 0
        self.answer(prompt(300, -1))

    def answer(self, ids):
        """Seconds to the first token after a prompt, and the first tokens."""
        from vllm import SamplingParams, TokensPrompt

        engine, first = self.llm.llm_engine, None
        self.count += 1
        begin = time.perf_counter()
        parameters = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        engine.add_request(str(self.count), TokensPrompt(prompt_token_ids=ids), parameters)
        tokens = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                if first is None and tokens:
                    first = time.perf_counter() - begin
        return first, tokens

    def close(self):
        if self.has_store:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            get_kv_transfer_group().flush()


def prompt(num_tokens, seed):
    draw = random.Random(seed)
    return [draw.randrange(10, 40000) for _ in range(num_tokens)]


def work(arguments):
    """In a process of its own: answer the prompts of stdin, a line each."""
    engine = Engine(*arguments)
    print("ready", flush=True)
    for line in sys.stdin:
        found = engine.answer(prompt(*json.loads(line)))
        engine.close()
        print(json.dumps(found), flush=True)


@contextlib.contextmanager
def process(*arguments):
    """A function that asks a fresh engine: it takes the length and the seed of a prompt."""
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--engine", json.dumps(arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:

        def line():
            while not (found := child.stdout.readline()).startswith(("ready", "[")):
                if not found:
                    raise RuntimeError("an engine ended")
            return found

        def ask(num_tokens, seed):
            child.stdin.write(json.dumps([num_tokens, seed]) + "\n")
            child.stdin.flush()
            return json.loads(line())

        line()
        yield ask
        child.stdin.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="a folder or URL; by default a redis-server of its own")
    parser.add_argument("--dtype", default="int8_per_token_head")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9, help="of prompts that are not in the store")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        work(json.loads(given.engine))
        return
    from llama_folder import save_folder

    from kvfast import llama
    from kvfast.prompts.stores import open_store

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        save_folder(llama.load()[0], folder)
        store = given.store
        if store is None:
            server, port = start_redis(folder)
            if server is None:
                parser.error("there is no redis-server: name a --store")
            stack.callback(server.kill)
            store = f"redis://127.0.0.1:{port}"
        with process(folder, given.dtype, given.context, store) as ask:
            computed, expected = ask(given.context, 0)
        with process(folder, given.dtype, given.context, store) as ask:
            fetched, found = ask(given.context, 0)
        entries = open_store(store)
        nbytes = sum(entry.nbytes for entry in entries.entries())
        entries.close()
        print(f"{given.dtype}, {given.context:,} tokens, {nbytes / 2**20:.1f} MiB in {store.partition('://')[0]}")
        print(f"first token: computed {computed:.3f} s, from the store {fetched:.3f} s, {computed / fetched:.1f} times as fast")
        print(f"the same {NEW_TOKENS} tokens: {expected == found}")
        times = {"without a store": [], "with a store": []}
        with process(folder, given.dtype, given.context, None) as plain, process(folder, given.dtype, given.context, store) as stored:
            for seed in range(1, given.rounds + 1):
                engines = dict(zip(times, (plain, stored)))
                for name in sorted(engines, reverse=bool(seed % 2)):  # in turns
                    times[name].append(engines[name](given.context // 4, seed)[0])
        ratios = [stored / plain for plain, stored in zip(*times.values())]
        print(
            f"prompts of {given.context // 4:,} tokens that are not there: {statistics.median(ratios):.3f} times as long with a store"
        )


if __name__ == "__main__":
    main()
