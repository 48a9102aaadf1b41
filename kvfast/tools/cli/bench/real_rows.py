"""Rows of a model on a text, for `--rows real`: computed once, and kept in the user's cache folder."""

import os
import tempfile
from hashlib import sha256
from importlib import resources

import numpy as np

import kvfast
from kvfast.tools.evaluation.wrapped import WrappedCache
from kvfast.tools.llama.fetch import SMOLLM2, cache_dir

# A novel, then declarations of C with comments, of more tokens than the model's longest context; and the checksums of model and text.
TEXT = "".join((resources.files("kvfast") / name).read_text("utf-8") for name in ("tools/llama/chapters.txt", "kvfast.h"))
NAME = f"rows-{SMOLLM2.sha256[:12]}-{sha256(TEXT.encode()).hexdigest()[:12]}"


def real_rows(model, context, num_queries):
    """The last queries of a context, and its keys and values, as attention sees them: (layers, tokens, heads, head_dim) each."""
    path = cache_dir() / f"{NAME}.npy"
    if not path.exists() or np.load(path, mmap_mode="r").shape[1] < context:
        rows = _computed(context)  # fetches the model, which makes the folder
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # no process sees a part of the file
            np.save(f"{folder}/{NAME}.npy", rows)
            os.replace(f"{folder}/{NAME}.npy", path)
    q, k, v = np.split(np.load(path, mmap_mode="r")[:, :context], np.cumsum([model.num_q_heads, model.num_kv_heads]), axis=2)
    return q[:, context - num_queries :].astype(np.float32), k, v


def _computed(num_tokens):
    """The rows of the first tokens, in float16: heads of queries, then of keys, then of values."""
    from kvfast import llama  # needs extra packages, which random rows do without
    from kvfast.tools.cli.reading import read_ahead

    model, tokenizer = llama.load()
    tokens = tokenizer.encode(TEXT)[: min(num_tokens, model.config.context_length)]
    if num_tokens > len(tokens):
        raise ValueError(f"--rows real has contexts of up to {len(tokens):,} tokens, got {num_tokens:,}")
    cache = kvfast.KVCache(*model.cache_shape, num_tokens, "float32")
    observed, queries = WrappedCache(cache), [[] for _ in range(cache.num_layers)]
    observed.attend = lambda layer, q: queries[layer].append(q.astype(np.float16)) or cache.attend(layer, q)
    model.prefill(tokens[read_ahead(model, tokens, observed) :], observed)
    rows = ((np.concatenate(chunks), cache.k(layer), cache.v(layer)) for layer, chunks in enumerate(queries))
    return np.stack([np.concatenate(of_layer, axis=1, dtype=np.float16) for of_layer in rows])
