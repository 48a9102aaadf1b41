"""kvfast inside llama.cpp: attention, and prompts in a store.

    installed, headers -> building, loading
    prompt_states, prompt_settings -> prompt_cache

A backend of ggml is built for the ggml that is installed and loaded into it. llama.cpp keeps its caches, its models and its threads. The
backend computes one operation of its graphs, attention (``GGML_OP_FLASH_ATTN_EXT``), straight on the rows of llama.cpp's cache.

`LlamaPromptCache` keeps the prompts of llama-cpp-python in a store. ``docs/guide/llama-cpp.md`` shows how to use both.
"""

from kvfast.llama_cpp.building import build
from kvfast.llama_cpp.loading import load
from kvfast.llama_cpp.prompt_cache import LlamaPromptCache

__all__ = ["LlamaPromptCache", "build", "load"]
