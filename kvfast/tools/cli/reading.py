"""Long texts of `generate`: the one that comes with kvfast, progress while the model reads, and attention next to a float16 cache."""

import sys
import time
from functools import partial
from importlib import resources

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import kvfast
from kvfast.tools.evaluation.wrapped import TimedCache

CHUNK = 256  # tokens between two steps of the progress
COMPARED = 1024  # tokens of a cache from which on it is compared with float16
SHOWN = 400  # characters of a long text that are printed
ROUNDS = 15


def opening_text():
    """The first three chapters of *Pride and Prejudice* (Jane Austen, 1813)."""
    return (resources.files("kvfast.tools.llama") / "chapters.txt").read_text("utf-8")


def end_of(text):
    """The text, or of a long one the words at its end."""
    return text if len(text) <= SHOWN else "... " + text[-SHOWN:].partition(" ")[2]


def read_ahead(model, tokens, cache):
    """Let a model read a long prompt, with a line on the terminal that grows.

    Returns the number of tokens that were read. The rest, at least one token, is left to `generate`.
    """
    count = (len(tokens) - 1) // CHUNK * CHUNK
    if len(tokens) <= 2 * CHUNK:
        return 0
    columns = (TextColumn("reading"), BarColumn(), TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens{task.fields[rate]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task, start = bar.add_task("", total=len(tokens), rate=""), time.perf_counter()
        for at in range(0, count, CHUNK):
            model.prefill(tokens[at : at + CHUNK], cache, CHUNK)
            done = at + CHUNK
            bar.update(task, completed=done, rate=f", {done / (time.perf_counter() - start):.0f} tokens/s")
    return count


def attention_text(model, cache, token):
    """How long attention of the next token takes, in this cache and in a float16 cache with the same tokens; "" for a short text.

    The model computes the token with both caches in turns. Only the calls of `attend` are timed, on one thread, and the
    shortest times are compared.
    """
    tokens = len(cache)
    if tokens < COMPARED or cache.dtype in ("float16", "float32", "bfloat16"):
        return ""
    timed = partial(TimedCache, clock=time.thread_time, num_threads=1)  # to the time of a thread other programs add nothing
    shape = {"max_seq_len": tokens + 1}
    plain = timed(kvfast.KVCache(*model.cache_shape, dtype="float16", **shape))
    for layer in range(cache.num_layers):
        plain.append(layer, cache.k(layer), cache.v(layer))
    plain.advance(tokens)
    own = timed(kvfast.KVCache(*model.cache_shape, dtype=cache.format, **shape))
    own.restore(cache.snapshot())
    times = {own: [], plain: []}
    for _ in range(ROUNDS):
        for one, found in times.items():
            one.seconds = 0.0
            model.forward([token], one)
            found.append(one.seconds)
            one.truncate(tokens)
    ours, theirs = (1000 * min(found) for found in times.values())
    return f"{cache.dtype_name} {ours:.1f} ms, float16 {theirs:.1f} ms for a token after {tokens:,}, on one thread: {theirs / ours:.1f} times as fast"
