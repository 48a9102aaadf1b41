"""The commands `generate` and `serve-sim` of `python -m kvfast`."""

import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import kvfast
from kvfast import llama
from kvfast.engine import size_text
from kvfast.tools.cli.reading import attention_text, end_of, opening_text, read_ahead
from kvfast.tools.cli.settings import set_threads, storage_of
from kvfast.tools.evaluation.report import memory_text
from kvfast.tools.llama.prompts import chat_prompts


def run_generate(args):
    """Continue a text, printing it as it comes, then speed and size. The text is `args.prompt`, the file `args.text`, or
    `opening_text`."""
    if args.compare and not args.speculative:
        raise ValueError("--compare is for --speculative")
    if args.keep is not None and args.session:
        raise ValueError("--keep is not for --session: a text with dropped tokens cannot be written")
    if args.session and args.prompt_cache:
        raise ValueError("--session has all of its text in a file: leave out --prompt-cache")
    seed = np.random.SeedSequence().entropy if args.seed is None else args.seed  # known, to draw the same again
    text = _text_to_continue(args)
    sampling = _sampling(args, text, seed)
    sampler = llama.Sampler(*sampling)
    storage = storage_of(args.dtype or "int4", args)
    set_threads(args.threads)
    model, tokenizer = llama.load(args.model)
    prompts = _open_prompts(args)
    session, cache, history, prompt = _open_text(args, text, model, tokenizer, storage)
    num_known = len(history)
    if prompts:
        found = prompts.restore(cache, prompt, model.fingerprint)
        history, prompt = prompt[:found], prompt[found:]
    clock, num_new = _Clock(), len(prompt)
    read = read_ahead(model, prompt, cache)
    history, prompt = [*history, *prompt[:read]], prompt[read:]
    start = cache.snapshot()
    options = {"max_tokens": args.max_tokens, "end_ids": tokenizer.end_ids, "history": history, "keep": args.keep}
    drafter, stats = _drafter(args), llama.SpeculationStats()
    tokens = llama.generate(model, prompt, cache, sampler=sampler, drafter=drafter, stats=stats, **options)
    if prompts:
        tokens = _saving(prompts, cache, [*history, *prompt], model.fingerprint, tokens)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a console that lacks a character shows "?"
    print(end_of(text), end="", flush=True)
    try:
        for piece in tokenizer.stream(clock.watch(tokens)):
            print(piece, end="", flush=True)
        clock.stop()
    finally:  # an interrupted text can be gone on with as well
        tokens.close()
        if session:
            session.save([*history, *prompt, *clock.tokens])

    taken = memory_text(cache)  # before it is used again
    print("\n")
    if session and num_known:
        print(f"session  {num_known:,} tokens of {args.session}")
    _report_prompts(prompts)
    print("prefill ", _speed(num_new, clock.prefill))
    print("decode  ", _speed(len(clock.tokens) - 1, clock.decode))
    if drafter:
        accepted = f"{stats.num_accepted} accepted ({stats.acceptance_rate:.0%})"
        print(f"drafted  {stats.num_drafted} tokens, {accepted}, {stats.tokens_per_step:.2f} tokens per step")
    if args.compare:
        cache.restore(start)
        sampler = llama.Sampler(*sampling)
        _compare(clock, llama.generate(model, prompt, cache, sampler=sampler, **options))
    print("cache   ", taken)
    if clock.tokens and args.keep is None and (attention := attention_text(model, cache, clock.tokens[-1])):
        print("attention", attention)


def _text_to_continue(args):
    if args.prompt is not None and args.text:
        raise ValueError("give a text or --text, not both")
    if args.prompt is not None or args.session and not args.text:
        return args.prompt or ""
    return Path(args.text).read_text("utf-8") if args.text else opening_text()


def _sampling(args, text, seed):
    """What a Sampler takes. The novel of `opening_text` is drawn, as the likeliest tokens of a small model repeat themselves."""
    if args.temperature is None and text == opening_text():
        return 1.0, args.top_k, min(args.top_p, 0.9), 1 if args.seed is None else seed
    return args.temperature or 0.0, args.top_k, args.top_p, seed


def _open_text(args, text, model, tokenizer, storage):
    """(session or None, cache, tokens that it holds, tokens that the model is to see next)."""
    prompt, session, history = tokenizer.encode(text), None, []
    if args.prompt is None:  # the end of a text that is too long
        prompt = prompt[-max(1, (args.max_seq_len or model.config.context_length) - args.max_tokens) :]
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
    if args.keep is not None and args.keep >= room:
        raise ValueError(f"--keep is {args.keep}, and there is room for {room} tokens")
    if session:
        session.open(room, **storage)
    cache = session.cache if session else kvfast.KVCache(*model.cache_shape, max_seq_len=room, **storage)
    if history and not prompt:  # go on without a word: the model sees the last one again
        history, prompt = history[:-1], history[-1:]
        cache.truncate(len(history))
    return session, cache, history, prompt


def _open_prompts(args, **options):
    """The PromptCache of --prompt-cache, or None."""
    return kvfast.PromptCache(args.prompt_cache, background=True, **options) if args.prompt_cache else None


def _saving(prompts, cache, prompt, fingerprint, tokens):
    """The tokens; before the first of them the cache holds the prompt, which is then saved."""
    is_new = True
    try:
        for token in tokens:
            if is_new:
                prompts.save(cache, prompt, fingerprint)
            is_new = False
            yield token
    finally:
        tokens.close()


def _report_prompts(prompts):
    """Wait for what is being written, and report what a PromptCache was good for."""
    if not prompts:
        return
    prompts.close()
    did = prompts.stats
    fetched, written, refused = (size_text(nbytes) for nbytes in (did.bytes_fetched, did.bytes_written, did.bytes_refused))
    print(
        f"prompts  {did.num_restored_tokens:,} of {did.num_tokens:,} tokens restored ({did.num_hits} of {did.num_prompts} prompts), "
        f"{fetched} read in {did.seconds:.3f} s, {written} written{f', {refused} refused' * (did.num_refused > 0)}: {prompts.store.url}"
    )


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


def _drafter(args):
    if args.speculative == "tree":
        return llama.TreeLookup(max_draft=args.draft_tokens)
    return llama.PromptLookup(max_draft=args.draft_tokens) if args.speculative else None


def _compare(speculative, tokens):
    """Generate without drafts, and report how that differs."""
    clock = _Clock()
    for _ in clock.watch(tokens):
        pass
    clock.stop()
    verdict = "the same tokens" if clock.tokens == speculative.tokens else "OTHER TOKENS"
    if len(speculative.tokens) > 1:
        verdict += f", {clock.decode / speculative.decode:.2f}x as fast with drafts"
    print("plain   ", f"{_speed(len(clock.tokens) - 1, clock.decode)}; {verdict}")


def run_serve_sim(args):
    """Serve prompts with a shared system prompt from one pool, and compare with each by itself."""
    storage = storage_of(args.dtype, args)
    set_threads(args.threads)
    model, tokenizer = llama.load(args.model)
    prompts = [tokenizer.encode(prompt) for prompt in chat_prompts(args.requests)]
    longest = max(map(len, prompts)) + args.max_tokens
    size = kvfast.PagedKVCache(1, 1, 1, num_blocks=1, block_size=args.block_size, **storage).block_size
    blocks = args.blocks or args.max_running * -(-longest // size)
    pool = kvfast.PagedKVCache(*model.cache_shape, num_blocks=blocks, block_size=size, **storage)
    prompt_cache = _open_prompts(args, chunk_tokens=max(64, size))  # these prompts are short
    pool.use_prompt_cache(prompt_cache, model.fingerprint)
    model.batch_invariant = args.check  # else rounding could make the texts differ
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
    stored = f" and {prompt_cache.store.url}" if prompt_cache else ""
    print(f"prefix   {found:,} of {given:,} prompt tokens found in the pool{stored} ({found / given:.0%})")
    _report_prompts(prompt_cache)
    print(f"pool     {pool.dtype}, {most_used:.0%} of {pool.num_blocks} blocks of {pool.block_size} tokens at most, ", end="")
    print(f"{server.num_preemptions} preemptions")
    if args.check:
        _check_served(model, tokenizer, requests, storage)


def _check_served(model, tokenizer, requests, storage):
    """Run each request by itself, and report which texts differ."""
    different = []
    for number, request in enumerate(requests):
        room = len(request.prompt) + request.max_tokens
        cache = kvfast.KVCache(*model.cache_shape, max_seq_len=room, **storage)
        alone = list(llama.generate(model, request.prompt, cache, max_tokens=request.max_tokens, end_ids=tokenizer.end_ids))
        if alone != request.output:
            different.append(number)
    same = len(requests) - len(different)
    print(f"alone    {same} of {len(requests)} texts the same" + (f", not {different}" if different else ""))
