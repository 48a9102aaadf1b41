"""A model of Hugging Face where the evaluation takes a `LlamaModel`: transformers computes it, and attention reads kvfast's codes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import transformers
from transformers.utils import cached_file

from kvfast.engines.transformers.versions import cache_argument
from kvfast.tools.evaluation.wrapped import WrappedCache
from kvfast.tools.llama.fetch import file_sha256
from kvfast.transformers import KVFastCache


@dataclass(frozen=True)
class Config:
    """The sizes of a model: of its layers with keys and values, where they differ as a list."""

    architecture: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int | tuple[int, ...]
    head_dim: int | tuple[int, ...]
    hidden_size: int
    vocab_size: int
    context_length: int | None


class HuggingFaceModel:
    """A causal model, in float32: in fewer bits its own rounding would hide that of a format."""

    versions: ClassVar = {"torch": torch.__version__, "transformers": transformers.__version__}

    def __init__(self, model):
        self._model, config = model.eval(), model.config.get_text_config(decoder=True)
        cache = self.new_cache(1, dtype="float32")
        self.forward_each([0], [cache])  # tells the sizes of what it stores
        self.cache_shape = 1, 1, cache.bytes_per_token // 8  # of one layer with as many elements: the real ones may differ
        sizes = config.num_attention_heads, cache.num_kv_heads, cache.head_dim, config.hidden_size, config.vocab_size
        self.config = Config(config.model_type, cache.num_layers, *sizes, getattr(config, "max_position_embeddings", None))

    def new_cache(self, room, **storage):
        """An empty cache; it grows, as layers with windows need no room."""
        return _Row(KVFastCache(self._model.config, **storage))

    @torch.no_grad()
    def forward_each(self, tokens, caches):
        """The logits after each token with each cache, which `logits` returns as they are."""
        ids, name = torch.as_tensor(np.asarray(tokens))[None], cache_argument()
        return np.stack([self._model(input_ids=ids, **{name: one.whole}).logits[0].numpy() for one in caches])

    @staticmethod
    def logits(hidden):
        """What `forward_each` returned."""
        return hidden

    @staticmethod
    def sha256(source):
        """The checksum of all weights, file after file: of a single file its own."""
        folder = Path(cached_file(source, "config.json")).parent
        return file_sha256(*(sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))))


class _Row(WrappedCache):
    """The one row of a `KVFastCache`, which transformers fills."""

    def __init__(self, whole):
        self.whole = whole

    @property
    def cache(self):
        """The row, once there are tokens."""
        return self.whole.rows[0]


def load(source, num_threads=None):
    """Model and tokenizer of a folder, or of a name like owner/name."""
    if num_threads:
        torch.set_num_threads(num_threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="kvfast")
    return HuggingFaceModel(model), transformers.AutoTokenizer.from_pretrained(source)
