"""How many answers of vLLM depend on how they were computed: 40 prompts, each alone, and then in five other ways.

    python bench/studies/vllm_same_answers.py int8_per_token_head turboquant_k8v4
    python bench/studies/vllm_same_answers.py auto --own          # vLLM's own backend, for reference
    python bench/studies/vllm_same_answers.py --model llama       # a tiny one with random weights, of tests/support

An answer is the greedy text and the log-probabilities of its tokens, bit by bit. vLLM's own matrix products depend on the number of rows
of a step. The study gives them the same number of rows in each step. Then only attention and the cache can differ. `--any-rows` leaves
the products as they are.

Belongs to the commit that tests answers of vLLM for the same bits.
"""

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path
from unittest import mock

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests" / "support")]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from llama_folder import save_folder
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_engines import MODELS, in_engine, same_rows, save_model, settle, stored, texts

from kvfast import llama
from kvfast.engines.vllm.prompts.figures import Figures
from kvfast.engines.vllm.prompts.transfers import Transfers


def prompts(count, most_tokens):
    """Random tokens of different numbers. Two of each three prompts begin with parts of a common text."""
    draw = random.Random(0)
    common = [draw.randrange(3, 500) for _ in range(most_tokens)]
    made = []
    for i in range(count):
        length = draw.randrange(10, most_tokens)
        shared = draw.randrange(length) if i % 3 else 0
        made.append(common[:shared] + [draw.randrange(3, 500) for _ in range(length - shared)])
    return made


def ways(folder, asked, given, dtype):
    """(name, what happened besides, answers) of each way, the first alone and cold."""

    def engine(use, **options):
        def with_rows(llm):
            if not given.any_rows:
                same_rows(llm)
            return use(llm)

        options = {
            "dtype": given.dtype,
            "kv_cache_dtype": dtype,
            "num_gpu_blocks_override": 1200,
            "block_size": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 2048,
        } | options
        return in_engine(folder, with_rows, **options)

    def alone_and_again(llm):
        yield "alone", "", [texts(llm, [one], given.tokens, skip_reading_prefix_cache=True)[0] for one in asked]
        yield "from the prefix cache", "", texts(llm, asked, given.tokens)
        yield "in a batch", "", texts(llm, asked[::-1], given.tokens, skip_reading_prefix_cache=True)[::-1]

    def from_store(llm):
        texts(llm, asked, 1)
        settle(llm)
        counted = []
        with mock.patch.object(Figures, "add", lambda self, **counts: counted.append(counts.get("num_restored_tokens", 0))):
            found = texts(llm, asked, given.tokens)
        return [("from a store", f"{sum(counted)} tokens", found)]

    def preempted(llm):
        original, count = Scheduler._preempt_request, []
        with mock.patch.object(Scheduler, "_preempt_request", lambda *all_, **more: count.append(1) or original(*all_, **more)):
            found = texts(llm, asked, given.tokens)
        return [("preempted", f"{len(count)} times", found)]

    longest = given.longest + given.tokens
    blocks = 3 * longest // 64  # enough for one request, also where windows have blocks of their own
    yield from engine(lambda llm: list(alone_and_again(llm)))
    yield (
        "in chunks",
        "",
        engine(lambda llm: texts(llm, asked, given.tokens), max_num_batched_tokens=100, max_num_seqs=16, enable_prefix_caching=False),
    )
    yield from engine(preempted, num_gpu_blocks_override=blocks, max_model_len=longest, max_num_seqs=16)
    if not given.own:
        with tempfile.TemporaryDirectory() as store, mock.patch.object(Transfers, "rates", lambda self: None):
            yield from engine(from_store, kv_transfer_config=stored(store))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", default=["int8_per_token_head"], help="kv_cache_dtype of each")
    parser.add_argument("--model", default="SmolLM2", choices=["SmolLM2", *MODELS])
    parser.add_argument("--dtype", default="float32", help="of the model")
    parser.add_argument("--own", action="store_true", help="vLLM's own backend")
    parser.add_argument("--any-rows", action="store_true")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--longest", type=int, default=600, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    given = parser.parse_args()
    os.environ["KVFAST_VLLM"] = "0" if given.own else "1"
    asked = prompts(given.prompts, given.longest)
    with tempfile.TemporaryDirectory() as folder:
        if given.model == "SmolLM2":
            save_folder(llama.load()[0], folder)
        else:
            save_model(given.model, folder)
        for dtype in given.formats:
            print(f"{dtype}, {given.model}", flush=True)
            first = total = compared = 0
            for name, note, found in ways(folder, asked, given, dtype):
                first = first or found
                differ = sum(one != other for one, other in zip(first, found, strict=True))
                others = sum(one[0] != other[0] for one, other in zip(first, found))
                print(f"  {name:24} {note:14} {differ:4} of {len(found)} differ, {others} in their texts", flush=True)
                total, compared = total + differ, compared + len(found) * (found is not first)
            print(f"  {total} of {compared} answers differ", flush=True)


if __name__ == "__main__":
    main()
