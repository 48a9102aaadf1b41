"""Many streaming requests at once to an OpenAI server of vLLM with kvfast, some of them killed: texts against one at a time, and memory.

    vllm serve MODEL --kv-cache-dtype int8_per_token_head --port 8123 &
    python bench/stream_vllm.py --port 8123 --requests 64 --longest 6000

Prompts are token ids, with 500 tokens (or a tenth of the longest, if that is less) up to the longest. Every eighth client goes away
after its second token, and half as many again before the first. A text that differs from that of the same prompt alone counts as a tie
if at the first other token the two candidates' logprobs, alone, lie within --tie of each other.
"""

import argparse
import asyncio
import json
import os
import random
import time

import aiohttp


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--longest", type=int, default=6000)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=500)
    parser.add_argument("--tie", type=float, default=0.05)
    parser.add_argument("--pid", type=int, help="of a process of the server, whose resident memory is read")
    return parser.parse_args()


async def complete(session, prompt, arguments, leave_after=None):
    """[(token, {candidate: logprob})] of a prompt; None once the client has gone away after so many tokens."""
    body = {
        "model": arguments.model,
        "prompt": prompt,
        "max_tokens": arguments.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 5,
        "return_tokens_as_token_ids": True,
    }
    tokens = []
    async with session.post("/v1/completions", json=body) as answer:
        answer.raise_for_status()
        if leave_after == 0:
            return None
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            data = json.loads(line[6:])
            if "error" in data:
                raise RuntimeError(data["error"])
            for choice in data["choices"]:
                given = choice["logprobs"] or {"tokens": [], "top_logprobs": []}
                tokens += zip(given["tokens"], given["top_logprobs"])
            if leave_after is not None and len(tokens) >= leave_after:
                return None
    return tokens


def first_difference(alone, together, tie):
    """None for the same text, "tie", or what differs."""
    for i, ((token, candidates), (other, _)) in enumerate(zip(alone, together)):
        if token != other:
            gap = candidates[token] - candidates.get(other, float("-inf"))
            return "tie" if gap <= tie else f"token {i}: {other} for {token}, {gap:.3f} less likely"
    return None if len(alone) == len(together) else f"{len(together)} tokens for {len(alone)}"


def resident(pid):
    """MiB of a process, or 0."""
    if pid is None:
        return 0
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


async def main():
    arguments, draw = parsed(), random.Random(0)
    shortest = min(500, arguments.longest // 10)
    prompts = [
        [draw.randrange(3, arguments.vocabulary) for _ in range(draw.randint(shortest, arguments.longest))]
        for _ in range(arguments.requests)
    ]
    leaves = {i: 2 for i in range(0, arguments.requests, 8)} | {i: 0 for i in range(5, arguments.requests, 16)}
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{arguments.port}", timeout=timeout, connector=connector) as session:
        async with session.get("/v1/models") as answer:
            arguments.model = (await answer.json())["data"][0]["id"]
        for round_ in range(2):
            start = time.perf_counter()
            jobs = [complete(session, prompt, arguments, leaves.get(i)) for i, prompt in enumerate(prompts)]
            together = await asyncio.gather(*jobs)
            print(
                f"round {round_}: {len(prompts)} requests, {len(leaves)} of them left, in {time.perf_counter() - start:.0f} s, "
                f"server {resident(arguments.pid)} MiB",
                flush=True,
            )
        start = time.perf_counter()
        differences = []
        for i, prompt in enumerate(prompts):
            if i not in leaves:
                differences.append(first_difference(await complete(session, prompt, arguments), together[i], arguments.tie))
        wrong = [one for one in differences if one not in (None, "tie")]
        print(
            f"alone: {len(differences)} requests in {time.perf_counter() - start:.0f} s; {differences.count(None)} texts are the same, "
            f"{differences.count('tie')} differ from a tie on, {len(wrong)} are wrong; server {resident(arguments.pid)} MiB"
        )
        for one in wrong:
            print("   ", one)
        raise SystemExit(bool(wrong))


asyncio.run(main())
