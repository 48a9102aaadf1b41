"""Prompts of SmolLM2-135M that outlive vLLM: one engine computes a prompt, a fresh one finds it; and what the connector costs for others.

    pip install -e ".[vllm,llama,redis]"
    python bench/bench_vllm_prompts.py                                 # a redis-server of its own
    python bench/bench_vllm_prompts.py --store FOLDER --dtype int4_per_token_head --context 8192

Each engine is a process of its own. Times are those from a request to its first token.
"""

import argparse
import json
import os
import random
import statistics
import time

from engine_process import process, serve, store_of

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
        self.answer(300, -1)

    def answer(self, num_tokens, seed):
        """Seconds to the first token after a prompt, and the first tokens."""
        from vllm import SamplingParams, TokensPrompt

        ids = prompt(num_tokens, seed)
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

    def flush(self):
        if self.has_store:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            get_kv_transfer_group().flush()


def prompt(num_tokens, seed):
    draw = random.Random(seed)
    return [draw.randrange(10, 40000) for _ in range(num_tokens)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="a folder or URL; by default a redis-server of its own")
    parser.add_argument("--dtype", default="int8_per_token_head")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9, help="of prompts that are not in the store")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        serve(Engine(*json.loads(given.engine)))
        return
    from llama_folder import save_folder

    from kvfast import llama
    from kvfast.prompts.stores import open_store

    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    with store_of(parser, given.store) as (store, folder):
        save_folder(llama.load()[0], folder)

        def engine(store):
            return process(__file__, [folder, given.dtype, given.context, store], env=environment)

        with engine(store) as ask:
            computed, expected = ask(given.context, 0)
        with engine(store) as ask:
            fetched, found = ask(given.context, 0)
        entries = open_store(store)
        nbytes = sum(entry.nbytes for entry in entries.entries())
        entries.close()
        print(f"{given.dtype}, {given.context:,} tokens, {nbytes / 2**20:.1f} MiB in {store.partition('://')[0]}")
        print(f"first token: computed {computed:.3f} s, from the store {fetched:.3f} s, {computed / fetched:.1f} times as fast")
        print(f"the same {NEW_TOKENS} tokens: {expected == found}")
        if not given.rounds:
            return
        times = {"without a store": [], "with a store": []}
        with engine(None) as plain, engine(store) as stored:
            for seed in range(1, given.rounds + 1):
                engines = dict(zip(times, (plain, stored)))
                for name in sorted(engines, reverse=bool(seed % 2)):  # in turns
                    times[name].append(engines[name](given.context // 4, seed)[0])
        ratio = statistics.median(stored / plain for plain, stored in zip(*times.values()))
        print(f"prompts of {given.context // 4:,} tokens that are not there: {ratio:.3f} times as long with a store")


if __name__ == "__main__":
    main()
