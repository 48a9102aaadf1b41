"""A small llama-style runtime on kvfast: GGUF models, in NumPy, with a compressed KV cache.

>>> import kvfast
>>> from kvfast import llama
>>> model, tokenizer = llama.load()                      # SmolLM2-135M, fetched once
>>> cache = kvfast.KVCache(*model.cache_shape, max_seq_len=1024)
>>> tokens = tokenizer.encode("It is a truth universally acknowledged")
>>> for text in tokenizer.stream(llama.generate(model, tokens, cache, end_ids=tokenizer.end_ids)):
...     print(text, end="", flush=True)

Needs the extra packages of `pip install "kvfast[llama]"`.
"""

from kvfast.engine import needed_for

with needed_for("kvfast.llama needs", "llama"):
    from kvfast.planning.gguf_file import GGUFFile, ModelFileError
    from kvfast.tools.llama.tokenizer import Tokenizer

from kvfast.tools.llama.documents import compute_document, shift_context, splice_documents
from kvfast.tools.llama.fetch import FetchError, fetch_model
from kvfast.tools.llama.generation import Sampler, generate
from kvfast.tools.llama.model import LlamaModel
from kvfast.tools.llama.serving import BatchGenerator, Request
from kvfast.tools.llama.session import Session
from kvfast.tools.llama.speculative import PromptLookup, SpeculationStats
from kvfast.tools.llama.trees import DraftTree, TreeLookup
from kvfast.tools.llama.weights import LlamaConfig

__all__ = [
    "BatchGenerator",
    "DraftTree",
    "FetchError",
    "GGUFFile",
    "LlamaConfig",
    "LlamaModel",
    "ModelFileError",
    "PromptLookup",
    "Request",
    "Sampler",
    "Session",
    "SpeculationStats",
    "Tokenizer",
    "TreeLookup",
    "compute_document",
    "fetch_model",
    "generate",
    "load",
    "shift_context",
    "splice_documents",
]


def load(path=None):
    """Read a model and its tokenizer from one GGUF file.

    Parameters
    ----------
    path : path-like, optional
        SmolLM2-135M-Instruct when omitted, fetched on first use.

    Returns
    -------
    (LlamaModel, Tokenizer)
    """
    file = GGUFFile(fetch_model() if path is None else path)
    tokenizer = Tokenizer(file)
    model = LlamaModel.from_gguf(file)
    if len(tokenizer.tokens) != model.config.vocab_size:
        counts = f"{len(tokenizer.tokens)} tokens, its model {model.config.vocab_size}"
        raise ModelFileError(f"{file.path}: the tokenizer has {counts}")
    return model, tokenizer
