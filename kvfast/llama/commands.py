"""The commands `generate`, `eval` and `serve-sim` of `python -m kvfast`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import kvfast
from kvfast import llama
from kvfast.llama.prompts import chat_prompts


def run_generate(args):
    """Continue `args.prompt`, printing the text as it comes, then speed and size.

    Parameters
    ----------
    args : argparse.Namespace
    """
    if args.compare and not args.speculative:
        raise ValueError("--compare is for --speculative")
    seed = np.random.SeedSequence().entropy if args.seed is None else args.seed  # known, to draw the same again
    sampler = llama.Sampler(args.temperature, args.top_k, args.top_p, seed)
    storage = _storage(args.dtype or "int8", args)
    _set_threads(args.threads)
    model, tokenizer = llama.load(args.model)
    session, cache, history, prompt = _open_text(args, model, tokenizer, storage)
    start = cache.snapshot()
    options = {"max_tokens": args.max_tokens, "end_ids": tokenizer.end_ids, "history": history}
    drafter, stats = _drafter(args, model), llama.SpeculationStats()
    tokens = llama.generate(model, prompt, cache, sampler=sampler, drafter=drafter, stats=stats, **options)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a console that lacks a character shows "?"
    clock = _Clock()
    print(args.prompt, end="", flush=True)
    try:
        for text in tokenizer.stream(clock.watch(tokens)):
            print(text, end="", flush=True)
        clock.stop()
    finally:  # an interrupted text can be gone on with as well
        tokens.close()
        if session:
            session.save([*history, *prompt, *clock.tokens])

    stored = cache.bytes_per_token
    print("\n")
    if history:
        print(f"session  {len(history):,} tokens of {args.session}")
    print("prefill ", _speed(len(prompt), clock.prefill))
    print("decode  ", _speed(len(clock.tokens) - 1, clock.decode))
    if drafter:
        accepted = f"{stats.num_accepted} accepted ({stats.acceptance_rate:.0%})"
        print(f"drafted  {stats.num_drafted} tokens, {accepted}, {stats.tokens_per_step:.2f} tokens per step")
    if args.compare:
        cache.restore(start)
        sampler = llama.Sampler(args.temperature, args.top_k, args.top_p, seed)
        _compare(clock, llama.generate(model, prompt, cache, sampler=sampler, **options))
    print(f"cache    {cache.dtype}: {stored:,} bytes per token; a float32 cache takes", end=" ")
    print(f"{_float_bytes(model, 4) / stored:.2f}x as much, float16 {_float_bytes(model, 2) / stored:.2f}x")


def _open_text(args, model, tokenizer, storage):
    """(session or None, cache, tokens that it holds, tokens that the model is to see next)."""
    prompt, session, history = tokenizer.encode(args.prompt), None, []
    if args.session:
        session = llama.Session(model, args.session)
        history = session.token_ids
        if history and not (args.dtype or args.k_dtype or args.v_dtype):
            storage = {}  # as in the file
        if history and prompt[:1] == [tokenizer.bos_id]:
            prompt = prompt[1:]  # stands before the text already
    total = len(history) + len(prompt)
    room = args.max_seq_len or min(total + args.max_tokens, model.config.context_length)
    if total > room:
        raise ValueError(f"the prompt has {len(prompt)} tokens and there is room for {room - len(history)}")
    if session:
        session.open(room, **storage)
    cache = session.cache if session else kvfast.KVCache(*model.cache_shape, max_seq_len=room, **storage)
    if history and not prompt:  # go on without a word: the model sees the last one again
        history, prompt = history[:-1], history[-1:]
        cache.truncate(len(history))
    return session, cache, history, prompt


class _Clock:
    """Times a stream of `tokens`: `prefill` seconds until the first, `decode` seconds for the others."""

    def __init__(self):
        self.tokens = []
        self._start = time.perf_counter()

    def watch(self, tokens):
        for token in tokens:
            if not self.tokens:
                self._first = time.perf_counter()
            self.tokens.append(token)
            yield token

    def stop(self):
        end = time.perf_counter()
        first = self._first if self.tokens else end  # no token: the model ended the text at once
        self.prefill, self.decode = first - self._start, end - first


def _speed(count, seconds):
    return f"{count} tokens in {seconds:.2f} s: {count / seconds:.1f} tokens/s" if count > 0 else "no tokens"


def _drafter(args, model):
    if args.speculative == "layers":
        return llama.SkipLayers(model, args.draft_layers, args.draft_tokens)
    return llama.PromptLookup(max_draft=args.draft_tokens) if args.speculative else None


def _compare(speculative, tokens):
    """Generate without drafts, and tell how that differs."""
    clock = _Clock()
    for _ in clock.watch(tokens):
        pass
    clock.stop()
    verdict = "the same tokens" if clock.tokens == speculative.tokens else "OTHER TOKENS"
    if len(speculative.tokens) > 1:
        verdict += f", {clock.decode / speculative.decode:.2f}x as fast with drafts"
    print("plain   ", f"{_speed(len(clock.tokens) - 1, clock.decode)}; {verdict}")


def run_eval(args):
    """Score the caches of `args.dtype` on `args.text` and print a table, or JSON.

    Parameters
    ----------
    args : argparse.Namespace
    """
    with open(args.text, encoding="utf-8") as file:
        try:
            text = file.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"{args.text} is not UTF-8 text: {error}") from None
    storages = [_storage(dtype, args) for dtype in args.dtype.split(",")]
    _set_threads(args.threads)
    model, tokenizer = llama.load(args.model)
    context = model.config.context_length
    if args.tokens > context:
        raise ValueError(f"--tokens is {args.tokens}; the model's context is {context}")
    tokens = tokenizer.encode(text)[: args.tokens]
    room = max(1, len(tokens))
    caches = [kvfast.KVCache(*model.cache_shape, max_seq_len=room, **storage) for storage in storages]
    columns = [BarColumn(), MofNCompleteColumn(), "tokens", TimeElapsedColumn(), "ETA", TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(tokens) - 1)
        scores = llama.evaluate(
            model, tokens, caches, chunk_size=args.chunk, progress=lambda count: bar.advance(task, count)
        )

    if args.json:
        results = [asdict(score) | {"nll_difference": score.nll_difference} for score in scores]
        print(json.dumps({"text": args.text, "chunk": args.chunk, "results": results}, indent=2))
        return
    print(f"{args.text}: {scores[0].num_predictions:,} tokens predicted; NLL and KL are means per token, in nats")
    # Without a terminal rich assumes 80 columns and would fold the table.
    Console(width=None if sys.stdout.isatty() else 120).print(_table(model, scores))


def run_serve_sim(args):
    """Serve prompts with a shared system prompt from one pool, and compare with each by itself.

    Parameters
    ----------
    args : argparse.Namespace
    """
    storage = _storage(args.dtype, args)
    _set_threads(args.threads)
    model, tokenizer = llama.load(args.model)
    prompts = [tokenizer.encode(prompt) for prompt in chat_prompts(args.requests)]
    longest = max(map(len, prompts)) + args.max_tokens
    blocks = args.blocks or args.max_running * -(-longest // args.block_size)
    pool = kvfast.PagedKVCache(*model.cache_shape, num_blocks=blocks, block_size=args.block_size, **storage)
    model.batch_invariant = args.check  # else rounding could tell the texts apart
    server = llama.BatchGenerator(model, pool, end_ids=tokenizer.end_ids, max_running=args.max_running)
    requests = [server.add(prompt, args.max_tokens) for prompt in prompts]
    most_used, start = 0.0, time.perf_counter()
    columns = [BarColumn(), MofNCompleteColumn(), "requests", TextColumn("{task.description}"), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(requests))
        for _ in server.run():
            most_used = max(most_used, pool.usage)
            done = sum(request.finished for request in requests)
            written = sum(len(request.output) for request in requests)
            speed = written / (time.perf_counter() - start)
            bar.update(task, completed=done, description=f"{speed:.0f} tokens/s, {pool.usage:.0%} of blocks")
    seconds = time.perf_counter() - start
    written = sum(len(request.output) for request in requests)
    found = sum(request.num_cached_tokens for request in requests)
    given = sum(map(len, prompts))

    for request in requests[: args.show]:
        print(f"> {tokenizer.decode(request.output).strip()}\n")
    print(f"served   {len(requests)} requests, {written} tokens in {seconds:.2f} s: {written / seconds:.1f} tokens/s")
    print(f"prefix   {found:,} of {given:,} prompt tokens found in the pool ({found / given:.0%})")
    print(f"pool     {pool.dtype}, {most_used:.0%} of {pool.num_blocks} blocks of {pool.block_size} tokens at most, ", end="")
    print(f"{server.num_preemptions} preemptions")
    if args.check:
        _check_served(model, tokenizer, requests, storage)


def _check_served(model, tokenizer, requests, storage):
    """Run each request by itself, and tell which texts differ."""
    different = []
    for number, request in enumerate(requests):
        room = len(request.prompt) + request.max_tokens
        cache = kvfast.KVCache(*model.cache_shape, max_seq_len=room, **storage)
        alone = list(llama.generate(model, request.prompt, cache, max_tokens=request.max_tokens, end_ids=tokenizer.end_ids))
        if alone != request.output:
            different.append(number)
    same = len(requests) - len(different)
    print(f"alone    {same} of {len(requests)} texts the same" + (f", not {different}" if different else ""))


def _table(model, scores):
    table = Table(box=SIMPLE_HEAD)
    for heading in ("cache", "NLL", "- float32", "KL", "top-1", "bytes/token", "float32 takes", "float16 takes"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")

    def add_row(dtype, nll, quality, stored):
        ratios = (f"{_float_bytes(model, itemsize) / stored:.2f}x" for itemsize in (4, 2))
        table.add_row(dtype, f"{nll:.5f}", *quality, f"{stored:,}", *ratios)

    add_row("float32", scores[0].nll_float32, ("", "", ""), _float_bytes(model, 4))
    for score in scores:
        quality = (f"{score.nll_difference:+.5f}", f"{score.kl:.6f}", f"{score.top1:.2%}")
        add_row(score.dtype, score.nll, quality, score.bytes_per_token)
    return table


def _storage(dtype, args):
    """Read `dtype`, one name or two with a slash, into the dtype arguments of a cache."""
    for_k, _, for_v = dtype.strip().partition("/")
    storage = {"k_dtype": args.k_dtype or for_k, "v_dtype": args.v_dtype or for_v or for_k}
    kvfast.KVCache(1, 1, 1, max_seq_len=1, **storage)  # refuses an unknown name before any model is fetched
    return storage


def _set_threads(count):
    """Limit kvfast's threads and, through threadpoolctl, those of the BLAS under NumPy."""
    if count is None:
        return
    kvfast.set_num_threads(count)
    try:
        import threadpoolctl
    except ImportError:
        print("note: without threadpoolctl, --threads does not limit NumPy's matrix products", file=sys.stderr)
    else:
        threadpoolctl.threadpool_limits(count, user_api="blas")


def _float_bytes(model, itemsize):
    """Bytes per token of a cache of plain floats."""
    num_layers, num_kv_heads, head_dim = model.cache_shape
    return 2 * num_layers * num_kv_heads * head_dim * itemsize
