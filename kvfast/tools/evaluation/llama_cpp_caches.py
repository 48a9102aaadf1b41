"""llama.cpp's KV caches on the same text, through llama-cpp-python (extra ``llama-cpp``).

The model's weights are converted to float32 first. Otherwise llama.cpp rounds to 8 bits all numbers that it
multiplies with quantised weights. That changes predictions more than a cache of 8 bits does. With weights in
float32 both runtimes predict the same, and only the cache differs.
"""

import contextlib
import ctypes
import functools
import math
import os
import re
import tempfile
from typing import NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

import kvfast
from kvfast.tools.evaluation.perplexity import CacheScore, compare
from kvfast.tools.evaluation.retrieval import retrieve

# Those that llama.cpp's own command line knows.
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")

_DEBUG = 4  # ggml's level of messages that users need not see: thousands of lines for each cache
_log: list[str] = []  # what else llama.cpp had to say since the last cache was made


class CacheTypes(NamedTuple):
    """The types of keys and values that one of llama.cpp's caches stores, by ggml's names."""

    k: str
    v: str

    def __str__(self):
        return self.k if self.k == self.v else f"{self.k}/{self.v}"

    @property
    def bits(self):
        """Bits per element of keys and of values, scales included."""
        return tuple(8 * size / block for block, size in (GGML_QUANT_SIZES[_ggml_type(name)] for name in self))


REFERENCE = CacheTypes("f32", "f32")


def parse_cache_types(text):
    """Read a list of types with commas, with a slash between K and V, each once: ``"f16,q8_0/q4_0"``."""
    names = [[side.strip() for side in name.split("/")] for name in text.split(",")]
    for sides in names:
        if len(sides) > 2 or not set(sides) <= set(CACHE_TYPES):
            known = ", ".join(CACHE_TYPES)
            raise ValueError(f"llama.cpp has no cache of type {'/'.join(sides)!r}; its types: {known}, or two as K/V")
    return list(dict.fromkeys(CacheTypes(sides[0], sides[-1]) for sides in names))


class LlamaCpp:
    """A GGUF model in llama.cpp, on the CPU, with its weights in float32; a context manager.

    The float32 weights lie in a file in the temporary folder until `close`. `rotated` are the evaluated types that llama.cpp
    rotates before it quantises, according to its log.
    """

    def __init__(self, path, cache_shape):
        self._api = _library()
        self._cache_shape = cache_shape
        self._folder = tempfile.TemporaryDirectory(prefix="kvfast-")
        self._model = None
        self.rotated = []
        try:
            self._model = self._load(os.fspath(path))
        except BaseException:
            self.close()
            raise

    def _load(self, path):
        api, copy = self._api, os.path.join(self._folder.name, "float32.gguf")
        options = api.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize = api.LLAMA_FTYPE_ALL_F32, True
        if api.llama_model_quantize(os.fsencode(path), os.fsencode(copy), ctypes.byref(options)):
            raise _failure(f"could not read {path}")
        options = api.llama_model_default_params()
        options.n_gpu_layers = 0
        options.use_extra_bufts = False  # weights stay as they are, not repacked for other instructions
        model = api.llama_model_load_from_file(os.fsencode(copy), options)
        if not model:
            raise _failure(f"could not load {path}")
        return model

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        """Free the model."""
        if self._model is not None:
            self._api.llama_model_free(self._model)
        self._model = None
        self._folder.cleanup()

    def evaluate(self, tokens, types, *, chunk_size=512, progress=None):
        """Predict every token of a text with each type of cache; see `kvfast.evaluation.evaluate`. The reference is llama.cpp's
        own float32 cache. Each cache holds the logits of one chunk, `chunk_size` times the vocabulary."""
        with self._predictor(types, len(tokens), chunk_size) as predict:
            found = compare(tokens, predict, chunk_size=chunk_size, progress=progress)
        return [self._score(pair, scores) for pair, scores in zip(types, found)]

    def retrieve(self, task, types, *, chunk_size=512, progress=None):
        """`kvfast.tools.evaluation.retrieval.retrieve` with llama.cpp's own float32 cache and with each type of cache."""
        with self._predictor(types, len(task.tokens), chunk_size) as predict:
            return retrieve(task, predict, chunk_size=chunk_size, progress=progress)

    @contextlib.contextmanager
    def _predictor(self, types, room, chunk_size):
        """The function that `compare` calls, for caches of llama.cpp: the reference, and the caches of `types`."""
        contexts = []

        def predict(chunk):
            logits = [context(chunk) for context in contexts]
            return lambda rows: [one[rows] for one in logits]

        try:
            for pair in (REFERENCE, *types):
                contexts.append(_Context(self._api, self._model, pair, room, min(chunk_size, room)))
            yield predict
        finally:
            for context in contexts:
                context.close()
        found = [str(pair) for pair, context in zip(types, contexts[1:]) if context.rotates]
        self.rotated = list(dict.fromkeys(self.rotated + found))

    def _score(self, types, scores):
        bits = sum(types.bits) / 2
        for part in scores["lengths"]:
            part["bits_per_element"] = bits
        size = int(math.prod(self._cache_shape) * sum(types.bits) / 8)
        return CacheScore(str(types), bytes_per_token=size, bits_per_element=bits, runtime="llama.cpp", **scores)


class _Context:
    """One of llama.cpp's caches. A call with the next tokens returns their logits, which are valid until the next call."""

    def __init__(self, api, model, types, room, chunk_size):
        self._api = api
        self._length = 0
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = max(1, room), max(1, chunk_size), max(1, chunk_size)
        options.n_threads = options.n_threads_batch = kvfast.get_num_threads()
        options.type_k, options.type_v = (int(_ggml_type(name)) for name in types)
        # Quantised values need flash attention; with it llama.cpp rounds a float32 cache to float16.
        options.flash_attn_type = int(types != REFERENCE)
        _log.clear()
        self._context = api.llama_init_from_model(model, options)
        if not self._context:
            raise _failure(f"could not make a cache of {types}")
        self.rotates = re.search(r"attn_rot_[kv] = 1", "".join(_log)) is not None
        self._batch = api.llama_batch_init(options.n_batch, 0, 1)

    def __call__(self, chunk):
        batch = self._batch
        batch.n_tokens = len(chunk)
        for index, token in enumerate(chunk):
            batch.token[index], batch.pos[index] = int(token), self._length + index
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, True
        if status := self._api.llama_decode(self._context, batch):
            raise _failure(f"stopped with status {status} after {self._length} tokens")
        self._length += len(chunk)
        shape = (len(chunk), self._vocab_size)
        return np.ctypeslib.as_array(self._api.llama_get_logits(self._context), shape=shape)

    def close(self):
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)


def _ggml_type(name):
    return GGMLQuantizationType[name.upper()]


@functools.cache
def _library():
    """llama-cpp-python's bindings, writing their log to `_log`."""
    import llama_cpp

    @llama_cpp.llama_log_callback
    def keep(level, text, data):
        if level != _DEBUG:
            _log.append(text.decode(errors="replace"))

    llama_cpp.kvfast_log = keep  # llama.cpp calls it for as long as the process lives
    llama_cpp.llama_log_set(keep, None)
    llama_cpp.llama_backend_init()
    return llama_cpp


def _failure(what):
    lines = [line.strip() for line in "".join(_log).splitlines() if line.strip()]
    return RuntimeError(f"llama.cpp {what}" + (f": {lines[-1]}" if lines else ""))
