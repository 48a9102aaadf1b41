"""The quality that a model loses when its prompt is compressed, measured against a float32 cache."""

from dataclasses import dataclass

import numpy as np

import kvfast
from kvfast.compression.compressor import square_sum
from kvfast.tools.evaluation.perplexity import CacheScore, compare, predictor
from kvfast.tools.evaluation.wrapped import WrappedCache

# What `python -m kvfast eval --compress all` stands for.
METHODS = (
    "int8-plain",
    "int4-plain",
    "int8",
    "int4",
    "hybrid:8",
    "hybrid:4",
    "hybrid:56:4",
    "hybrid:48:4",
    "pq:256:32",
    "pq:256:16",
    "pq:16:64",
    "pq:16:32",
    "lowrank:56",
    "lowrank:0.95",
)

# Queries of the end of the prompt whose outputs are compared.
_QUERIES = 64


@dataclass(frozen=True)
class CompressionScore(CacheScore):
    """Results of one method on a text whose beginning it compressed.

    Attributes
    ----------
    k_error, v_error : float
        `CompressedKV.reconstruction_error`, over all layers.
    output_error : float
        ``norm(output - exact) / norm(exact)`` of the attention of the prompt's last tokens, over all layers.
    """

    k_error: float = 0.0
    v_error: float = 0.0
    output_error: float = 0.0


def parse_methods(text):
    """Methods of a list with commas, by name, each once.

    A name is ``lowrank:RANK`` or ``lowrank:ENERGY`` (a fraction), ``hybrid:BITS`` or ``hybrid:RANK:BITS``,
    ``pq:CENTROIDS:SUBVECTORS``, or a format; ``all`` stands for `METHODS`.
    """
    names = [name.strip() for name in text.split(",")]
    names = dict.fromkeys(known for name in names for known in (METHODS if name == "all" else [name]))
    return {name: _method(name) for name in names}


def _method(name):
    kind, *numbers = name.split(":")
    try:
        if kind == "lowrank" and len(numbers) == 1:
            (number,) = numbers
            return kvfast.LowRank(energy=float(number)) if "." in number else kvfast.LowRank(rank=int(number))
        numbers = [int(number) for number in numbers]
        if kind == "hybrid" and len(numbers) in (1, 2):
            return kvfast.Hybrid(*numbers[:-1], quant_bits=numbers[-1])
        if kind == "pq" and len(numbers) == 2:
            return kvfast.VectorQuantization(*numbers)
        if not numbers:
            return kvfast.Quantize(name)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    raise ValueError(f"{name}: a method is lowrank:RANK, hybrid:BITS, hybrid:RANK:BITS, pq:CENTROIDS:SUBVECTORS, or a format")


def evaluate_compressed(model, tokens, prompt_len, methods, *, chunk_size=128, progress=None):
    """Compress the keys and values of a prompt with each method, and predict the tokens after the prompt.

    Tokens after the prompt are float32 for all, so that only the prompt differs.

    Parameters
    ----------
    model : LlamaModel
    tokens : sequence of int
    prompt_len : int
        Number of tokens to compress; at least two tokens must be left.
    methods : dict of str to method
        See `parse_methods`.
    chunk_size, progress
        As in `evaluate`.

    Returns
    -------
    list of CompressionScore
        One per method.
    """
    exact = kvfast.KVCache(*model.cache_shape, max_seq_len=len(tokens), dtype="float32")
    recorder = _Recorder(exact)
    for start in range(0, prompt_len, chunk_size):
        chunk = tokens[start : min(start + chunk_size, prompt_len)]
        model.forward(chunk, recorder)
        if progress is not None:
            progress(len(chunk))
    measured = [_Measured(method, recorder, len(tokens)) for method in methods.values()]
    predict = predictor(model, [exact, *(one.cache for one in measured)])
    found = compare(tokens[prompt_len:], predict, chunk_size=chunk_size, progress=progress)
    return [
        CompressionScore(
            dtype=name,
            bytes_per_token=round(one.nbytes / prompt_len),
            bits_per_element=8 * one.nbytes / (2 * exact.num_layers * exact.entry_size * prompt_len),
            k_error=one.errors[0],
            v_error=one.errors[1],
            output_error=one.errors[2],
            **scores,
        )
        for name, one, scores in zip(methods, measured, found, strict=True)
    ]


class _Recorder(WrappedCache):
    """A cache that keeps the last queries of every layer."""

    def __init__(self, cache):
        super().__init__(cache)
        self.queries = [None] * cache.num_layers

    def write(self, layer, qkv, **options):
        q = self.cache.write(layer, qkv, **options)
        before = self.queries[layer]
        self.queries[layer] = (q if before is None else np.concatenate([before, q]))[-_QUERIES:]
        return q


class _Measured:
    """A prompt that one method compressed, and the errors of the method."""

    def __init__(self, method, recorder, max_seq_len):
        exact = recorder.cache
        self.cache = kvfast.PrefixKVCache.compress(exact, kvfast.KVCacheCompressor(method), max_seq_len, "float32")
        self.nbytes = sum(layer.nbytes for layer in self.cache.prefix)
        squares = np.zeros((3, 2))  # of keys, values and outputs: errors, and numbers
        for layer, compressed in enumerate(self.cache.prefix):
            numbers = [square_sum(exact.k(layer)), square_sum(exact.v(layer))]
            for sums, error, number in zip(squares, compressed.reconstruction_error, numbers):
                sums += error**2 * number, number
            q = recorder.queries[layer]
            output = exact.attend(layer, q)
            squares[2] += square_sum(compressed.attend(q) - output), square_sum(output)
        self.errors = np.sqrt(squares[:, 0] / squares[:, 1]).tolist()
