"""What is measured: cases, by name, and the calls and arrays that they are."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

import kvfast
from kvfast.codec.dtypes import FLOATS
from kvfast.tools.cli.bench.real_rows import real_rows

LEAST_BYTES = 512 * 10**6
"""Read by one call, of as many layers as that takes: several times a processor's last-level cache."""

CHUNK = 1024
BATCH_BLOCK = 64  # tokens of a block of the pool
CACHED_BYTES = 128 * 10**6  # read by one call of the same layer again and again


@dataclass(frozen=True)
class Model:
    """Shape of a known model."""

    name: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int


SMOLLM2_135M = Model("SmolLM2-135M", 30, 9, 3, 64)
LLAMA_3_2_1B = Model("Llama-3.2-1B", 16, 32, 8, 64)
LLAMA_3_8B = Model("Llama-3-8B", 32, 32, 8, 128)
QWEN3_30B_A3B = Model("Qwen3-30B-A3B", 48, 32, 4, 128)
MODELS = {model.name: model for model in (SMOLLM2_135M, LLAMA_3_2_1B, LLAMA_3_8B, QWEN3_30B_A3B)}

FORMATS = ("int4", "k8v4", "int8", "int4-plain", "int8-plain", "float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Work:
    """A call for `count` layers or tokens, and what it is a fraction of: all bytes that it has to read and write, and the
    multiplications and additions of the scores and values that queries can see (0 where they do not count)."""

    call: Callable[[], object]
    count: int
    nbytes: int
    check: Callable[[], None]  # raises AssertionError if the results of the call are wrong
    operations: int = 0
    read_bytes: int = 0  # by the measurement of the machine before the call


@dataclass(frozen=True)
class Case:
    """One thing to measure; ``str(case)`` is its name, and `Case.parse` reads it.

    `num_tokens` are queries of `prefill`, tokens at a time of `append`, sequences of `batch`. `rows` are keys, values and queries
    of `decode` and `prefill`: random ones, the same for each layer, or those of the layers of SmolLM2-135M-Instruct ("real").
    """

    work: str
    model: Model
    format: object
    context: int
    num_tokens: int = 1
    rows: str = "random"

    @property
    def is_compute_bound(self):
        """Whether it is arithmetic that bounds it, and not memory."""
        return self.work == "prefill"

    @property
    def arithmetic(self):
        return "float32" if self.format in FLOATS else "int8"

    @property
    def label(self):
        return f"{self.format}{' real' * (self.rows == 'real')}"

    def __str__(self):
        tokens = f" {self.num_tokens}" if self.num_tokens > 1 else ""
        return f"{self.work} {self.model.name} {self.format} {self.context}{tokens}{' real' * (self.rows == 'real')}"

    @classmethod
    def parse(cls, name):
        """The case of a name; a ValueError for another text."""
        work, model, form, *rest = (*str(name).removesuffix(" real").split(), "", "", "")
        numbers = [number for number in rest if number]
        known = work in WORKS and model in MODELS and form
        if not known or len(numbers) not in (1, 2) or not all(map(str.isdecimal, numbers)):
            raise ValueError(f"{name!r} is not a case; a case has: {' or '.join(WORKS)}, a model, a format, how many tokens")
        return cls(work, MODELS[model], form, *map(int, numbers), rows="real" if str(name).endswith(" real") else "random")

    def prepare(self, least_bytes=LEAST_BYTES):
        """The `Work` of the call, with its arrays. A call of `decode` reads at least `least_bytes`."""
        if not 1 <= self.num_tokens or (self.num_tokens > self.context and self.work != "batch"):
            raise ValueError(f"{self}: {self.num_tokens} tokens do not fit {self.context}")
        work = WORKS[self.work](self, least_bytes)
        return work if work.read_bytes else replace(work, read_bytes=least_bytes // 2)

    def new_rows(self):
        """Queries, keys and values of all layers, or of one for all."""
        if self.rows == "real":
            return real_rows(self.model, self.context, self.num_tokens)
        return query(self.model, self.num_tokens)[None], *random_rows(self.model)

    def new_cache(self, num_layers=1):
        """An empty cache."""
        return kvfast.KVCache(num_layers, self.model.num_kv_heads, self.model.head_dim, self.context, self.format)


def random_rows(model):
    """Keys and values of one layer and `CHUNK` tokens: (layers, tokens, heads, head_dim) each."""
    return np.random.default_rng(0).standard_normal((2, 1, CHUNK, model.num_kv_heads, model.head_dim), np.float32)


def append(cache, n, k, v):
    """Append the next n tokens to every layer of a cache or sequence. Layers and tokens of the rows repeat."""
    at = (len(cache) + np.arange(n)) % k.shape[1]
    for layer in range(cache.num_layers):
        cache.append(layer, k[layer % len(k), at], v[layer % len(v), at])


def fill(cache, context, *rows):
    """Append tokens, random ones by default, and advance, until there are `context` of them."""
    k, v = rows or random_rows(cache)
    while (n := min(CHUNK, context - len(cache))) > 0:
        append(cache, n, k, v)
        cache.advance(n)


def filled(model, form, context, num_layers):
    """A contiguous cache full of random tokens."""
    cache = kvfast.KVCache(num_layers, model.num_kv_heads, model.head_dim, context, form)
    fill(cache, context)
    return cache


def layers_of(model, form, context, nbytes=LEAST_BYTES):
    """How many layers of `context` tokens take at least `nbytes`."""
    one = kvfast.KVCache(1, model.num_kv_heads, model.head_dim, dtype=form)
    return -(-nbytes // (one.bytes_per_token * context))


def query(model, n=1):
    return np.random.default_rng(1).standard_normal((n, model.num_q_heads, model.head_dim), np.float32)


def decode(cache, *q):
    """Attend once in every layer, with queries that repeat."""
    for layer in range(cache.num_layers):
        cache.attend(layer, q[layer % len(q)])


def check_attention(cache, q):
    """The last query's first head is right, against NumPy."""
    check_output(cache, q[-1], cache.attend(0, q)[-1])


def check_output(cache, q, out):
    """The first head of the output of one query is right, against NumPy."""
    k, v = cache.k(0)[:, 0].astype(np.float64), cache.v(0)[:, 0].astype(np.float64)
    score = k @ q[0] * k.shape[1] ** -0.5
    weight = np.exp(score - score.max())
    assert np.allclose(out[0], weight @ v / weight.sum(), atol=2e-3)


def _operations(model, context, n):
    """Multiplications and additions that n queries at the end of a context take, causally."""
    visible = n * context - n * (n - 1) // 2
    return 4 * model.head_dim * model.num_q_heads * visible


def _attention(case, cache, q):
    """The last tokens of a case attend once in every layer."""
    return Work(
        call=lambda: decode(cache, *q),
        count=cache.num_layers,
        nbytes=cache.bytes_per_token * case.context,
        operations=cache.num_layers * _operations(case.model, case.context, case.num_tokens),
        check=lambda: check_attention(cache, q[0]),
    )


def _decode(case, least_bytes):
    """One token, every layer from memory."""
    q, k, v = case.new_rows()
    cache = case.new_cache(-(-layers_of(case.model, case.format, case.context, least_bytes) // len(q)) * len(q))
    fill(cache, case.context, k, v)
    return _attention(case, cache, q)


def _cached(case, least_bytes):
    """One token, the same layer again and again, out of the processor's caches where it fits them."""
    cache, q = filled(case.model, case.format, case.context, 1), query(case.model)
    stored = cache.bytes_per_token * case.context
    times = -(-min(CACHED_BYTES, least_bytes) // stored)

    def call():
        for _ in range(times):
            cache.attend(0, q)

    return Work(
        call=call,
        count=times,
        nbytes=times * stored,
        operations=times * _operations(case.model, case.context, 1),
        read_bytes=stored,
        check=lambda: check_attention(cache, q),
    )


def _batch(case, least_bytes):
    """One token of each of several sequences of a pool, in one layer that does not fit the processor's caches."""
    model, n = case.model, case.num_tokens
    pool = kvfast.PagedKVCache(
        1, model.num_kv_heads, model.head_dim, num_blocks=n * -(-case.context // BATCH_BLOCK), block_size=BATCH_BLOCK, dtype=case.format
    )
    sequences = [pool.new_sequence() for _ in range(n)]
    for sequence in sequences:
        fill(sequence, case.context)
    q = query(model, n)
    call = partial(pool.attend_batch, 0, q, sequences)
    return Work(
        call=call,
        count=1,
        nbytes=n * pool.bytes_per_token * case.context,
        operations=n * _operations(model, case.context, 1),
        check=lambda: check_output(sequences[0], q[0], call()[0]),
    )


def _prefill(case, least_bytes):
    """The last tokens of a prompt, in each layer that has rows of its own: appended and not yet advanced, as in a model."""
    q, k, v = case.new_rows()
    cache = case.new_cache(len(q))
    fill(cache, case.context - case.num_tokens, k, v)
    append(cache, case.num_tokens, k, v)
    return _attention(case, cache, q)


def _append(case, least_bytes):
    """All tokens of one layer, num_tokens at a time, encoded and advanced."""
    n, times = case.num_tokens, case.context // case.num_tokens
    cache = case.new_cache()
    shape = (2, times, n, cache.num_kv_heads, cache.head_dim)
    k, v = np.random.default_rng(0).standard_normal(shape, np.float32)

    def call():
        cache.clear()
        for i in range(times):
            cache.append(0, k[i], v[i])
            cache.advance(n)

    def check():
        call()
        assert np.abs(cache.k(0) - k.reshape(cache.k(0).shape)).max() < 0.6

    return Work(call=call, count=times * n, nbytes=k.nbytes + v.nbytes + cache.bytes_per_token * times * n, check=check)


def _read(case, least_bytes):
    """k() and v() of one layer."""
    cache = filled(case.model, case.format, case.context, 1)

    def call():
        return cache.k(0), cache.v(0)

    def check():
        assert all(np.isfinite(array).all() and array.std() > 0.9 for array in call())

    nbytes = cache.bytes_per_token * case.context + sum(array.nbytes for array in call())
    return Work(call=call, count=case.context, nbytes=nbytes, check=check)


def _codec(case, least_bytes):
    """`kvfast.quantize` or `kvfast.dequantize` of the keys of all heads."""
    if case.format not in ("int8", "int4"):
        raise ValueError(f"{case}: the codecs are int8 and int4")
    bits, shape = int(case.format[3:]), (case.context * case.model.num_kv_heads, case.model.head_dim)
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    codes, scales = kvfast.quantize(x, bits=bits)
    out = kvfast.dequantize(codes, scales)

    def check():
        assert np.all(np.abs(out - x) <= 0.50001 * scales[:, None])

    calls = {"quantize": lambda: kvfast.quantize(x, bits=bits), "dequantize": lambda: kvfast.dequantize(codes, scales, out)}
    return Work(call=calls[case.work], count=case.context, nbytes=x.nbytes + codes.nbytes + scales.nbytes, check=check)


WORKS = {
    "decode": _decode,
    "cached": _cached,
    "batch": _batch,
    "prefill": _prefill,
    "append": _append,
    "read": _read,
    "quantize": _codec,
    "dequantize": _codec,
}
