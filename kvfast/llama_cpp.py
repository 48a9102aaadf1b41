"""kvfast inside llama.cpp: attention, and prompts in a store.

A backend of ggml is built for the ggml that is installed and loaded into it. llama.cpp keeps its caches, its models and its threads. The
backend computes one operation of its graphs, attention (``GGML_OP_FLASH_ATTN_EXT``), straight on the rows of llama.cpp's cache.

`export_layer` and `import_layer` convert a cache's rows to blocks of ggml and back, `write_state` and `read_state` its tokens to a state of
llama.cpp. `LlamaPromptCache` keeps the prompts of llama-cpp-python in a store. ``docs/guide/llama-cpp.md`` shows how to use both.
"""

from kvfast.engines.llama_cpp.building import build
from kvfast.engines.llama_cpp.ggml import export_layer, from_ggml, import_layer, to_ggml
from kvfast.engines.llama_cpp.loading import load
from kvfast.engines.llama_cpp.prompt_cache import LlamaPromptCache
from kvfast.engines.llama_cpp.state import read_state, write_state

__all__ = ["LlamaPromptCache", "build", "export_layer", "from_ggml", "import_layer", "load", "read_state", "to_ggml", "write_state"]
