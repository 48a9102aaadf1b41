"""kvfast's attention inside llama.cpp: a backend of ggml, built for the ggml that is installed and loaded into it.

llama.cpp keeps its caches, its models and its threads. The backend computes one operation of its graphs, attention
(``GGML_OP_FLASH_ATTN_EXT``), straight on the rows of llama.cpp's cache. ``docs/guide/llama-cpp.md`` shows how to use it.
"""

from kvfast.llama_cpp.building import build
from kvfast.llama_cpp.loading import load

__all__ = ["build", "load"]
