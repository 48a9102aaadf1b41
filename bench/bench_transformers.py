"""SmolLM2-135M in Hugging Face transformers: KVFastCache compared with transformers' own caches.

    pip install -e ".[llama,transformers]" optimum-quanto hqq
    python bench/bench_transformers.py

First the tokens: greedy texts of each cache, compared with those of DynamicCache. Then the time of a token of `generate` at a long
context, in interleaved rounds, with the bytes that each cache keeps, and what the model takes without a context. Caches whose
packages are missing are left out.
"""

import argparse
import os
from itertools import takewhile
from statistics import median
from time import perf_counter

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a file

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache, logging

import kvfast.transformers
from kvfast import llama
from kvfast.tools.llama.prompts import chat_prompts

STOCK, ALONE = "DynamicCache", "no context"
AGREEMENT = ("float32", "int8", "int4")


def load(path, dtype):
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()


def bytes_of(thing):
    """Bytes of all tensors in a cache of transformers, packed ones included."""
    if isinstance(thing, torch.Tensor):
        if hasattr(thing, "__tensor_flatten__"):
            return sum(bytes_of(getattr(thing, name)) for name in thing.__tensor_flatten__()[0])
        return thing.numel() * thing.element_size()
    if isinstance(thing, dict):
        return sum(map(bytes_of, thing.values()))
    if isinstance(thing, (list, tuple)):
        return sum(map(bytes_of, thing))
    return 0


def new_cache(name, config, max_seq_len=None):
    kind, _, option = name.partition(" ")
    if kind == "kvfast":
        return kvfast.transformers.KVFastCache(config, dtype=option, max_seq_len=max_seq_len)
    if name in (STOCK, ALONE):
        return DynamicCache(config=config)
    backend, bits = option.split()
    axis = {"axis_key": 1, "axis_value": 1} if backend == "hqq" else {}
    return QuantizedCache(backend, config, nbits=int(bits), **axis)


def nbytes(cache):
    if isinstance(cache, kvfast.transformers.KVFastCache):
        return cache.nbytes
    return sum(bytes_of(vars(layer)) for layer in cache.layers)


def generate(model, name, ids, cache, n):
    model.set_attn_implementation("kvfast" if name.startswith("kvfast") else "sdpa")
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), cache=cache, do_sample=False, max_new_tokens=n, min_new_tokens=n, pad_token_id=0
    )[:, ids.shape[1] :].tolist()


def agreement(model, tokenizer, given, progress):
    """A table of greedy texts that are those of DynamicCache."""
    prompts = chat_prompts(given.prompts)
    task = progress.add_task("texts", total=len(prompts) * (1 + len(AGREEMENT)))
    same = {name: [] for name in AGREEMENT}
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt)])
        (expected,) = generate(model, STOCK, ids, new_cache(STOCK, model.config), given.new_tokens)
        progress.advance(task)
        for name in AGREEMENT:
            (tokens,) = generate(model, "kvfast", ids, new_cache(f"kvfast {name}", model.config), given.new_tokens)
            same[name].append(len(list(takewhile(lambda pair: pair[0] == pair[1], zip(tokens, expected)))))
            progress.advance(task)
    table = Table(title=f"greedy texts of {given.new_tokens} tokens for {len(prompts)} prompts, compared with {STOCK} in float32")
    for title in ("KVFastCache", "the same text", "same tokens from the start"):
        table.add_column(title, justify="left" if title == "KVFastCache" else "right")
    for name, counts in same.items():
        share = sum(counts) / len(counts) / given.new_tokens
        table.add_row(name, f"{sum(count == given.new_tokens for count in counts)}/{len(counts)}", f"{share:.1%}")
    return table


def contenders(given):
    """(model dtype, cache) of each; those whose packages are missing are left out."""
    names = [
        ALONE,
        STOCK,
        "QuantizedCache quanto 4",
        "QuantizedCache hqq 8",
        "QuantizedCache hqq 4",
        "kvfast float32",
        "kvfast int8",
        "kvfast int4",
    ]
    names = [name for name in names if given.only is None or any(part in name for part in given.only.split(","))]
    for dtype in given.dtypes.split(","):
        for name in names:
            yield dtype, name


def decoding(models, tokenizer, given, console, progress):
    """A table of times per token at a long context."""
    text = tokenizer.encode("".join(chat_prompts(64)))
    ids = torch.tensor([(text * (given.context // len(text) + 1))[: given.context + 1]])
    task = progress.add_task("prompts", total=None)
    runs = {}
    for dtype, model in models.items():
        model.set_attn_implementation("sdpa")
        prompt = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :-1], cache=prompt, logits_to_keep=1)
        for of, name in contenders(given):
            if of != dtype:
                continue
            try:
                cache = new_cache(name, model.config, ids.shape[1] + 2 + given.rounds * given.tokens)
                for index, layer in enumerate(prompt.layers if name != ALONE else ()):
                    cache.update(layer.keys.repeat(given.batch, 1, 1, 1), layer.values.repeat(given.batch, 1, 1, 1), index)
            except (ImportError, AttributeError) as error:
                console.print(f"{name} is left out: {error}")
                continue
            runs[dtype, name] = [cache, ids[:, -1:].repeat(given.batch, 1) if name == ALONE else ids.repeat(given.batch, 1), []]
    progress.update(task, total=len(runs) * (given.rounds + 1), description="tokens")
    for index in range(given.rounds + 1):
        for (dtype, name), run in runs.items():
            cache, so_far, times = run
            n = given.tokens if index else 2  # the first round warms up
            start = perf_counter()
            tokens = generate(models[dtype], name, so_far, cache, n)
            if index:
                times.append((perf_counter() - start) / n)
            run[1] = torch.cat([so_far, torch.tensor(tokens)], dim=1)
            progress.advance(task)
    title = f"a token of each of {given.batch} rows at {given.context} tokens"
    table = Table(title=f"{title}, {torch.get_num_threads()} threads, median of {given.rounds} rounds")
    for title in ("model", "cache", "ms", "KVFastCache int8 is faster by", "MB"):
        table.add_column(title, justify="left" if title in ("model", "cache") else "right")
    for (dtype, name), (cache, _, times) in runs.items():
        ours = runs.get((dtype, "kvfast int8"))
        ratio = f"{median(other / own for other, own in zip(times, ours[2])):.2f}x" if ours else ""
        table.add_row(dtype, name, f"{median(times) * 1e3:.1f}", ratio, f"{nbytes(cache) / 1e6:.1f}")
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=20, help="0 leaves the texts out")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--context", type=int, default=4096, help="0 leaves the times out")
    parser.add_argument("--batch", type=int, default=1, help="rows of the same text")
    parser.add_argument("--tokens", type=int, default=4, help="per round and cache")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of the model")
    parser.add_argument("--only", help="parts of names of caches")
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = Console()
    path = llama.fetch_model()
    tokenizer = llama.Tokenizer(path)
    models = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("models", total=None)
        for dtype in dict.fromkeys(["float32", *given.dtypes.split(",")]):
            models[dtype] = load(path, getattr(torch, dtype))
        progress.remove_task(task)
        tables = []
        if given.prompts:
            tables.append(agreement(models["float32"], tokenizer, given, progress))
        if given.context:
            wanted = {dtype: models[dtype] for dtype in given.dtypes.split(",")}
            tables.append(decoding(wanted, tokenizer, given, console, progress))
    kvfast.show_config()
    for table in tables:
        console.print(table)


if __name__ == "__main__":
    main()
