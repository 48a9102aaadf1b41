"""The names that engines use besides the public ones of `kvfast`.

- Blocks in the memory of another scheduler: `buffer_layout`, `pool_over`, `TensorCalls`. The storage of a cache: `storage_in`.
- Prompts in stores: `ChunkStore` and `PromptKeeper`, the base of a cache of prompts; `new_value`, `HEADER_BYTES`, `num_tokens_of`,
  `common_length`, `Rate`, `Writer`, `Store`, `open_store`. The keys of prompts cover `FILE_VERSION`, and `files_digest`, `files_status` of weights.
- Versions of other libraries: `installed_version`, `minor_of`, `missing`, `versions_text`; `difference`, the trial of one that was not
  tested.
- Models and formats: `read_shape`, `key_bias_note`, `formats_of`, `floats_of`, `codes_alone`, `MAX_FLOAT_TOKENS`, `VLLM_FORMATS`, `VLLM_NAMES`, `vllm_format`.
- Arrays: `as_array`, `as_numpy`, `as_float32`, `aligned`. Checks: `as_integer`, `check_block_size`, `check_flag`, `check_size`,
  `checked_token_ids`, `MAX_TOKENS`. Their texts: `counted`, `each`, `needed_for`, `one_of`, `shown`, `size_text`. Threads: `Workers`, `wait_for_any`.
"""

# ruff: noqa: F401  (what a name is for stands above; here is where it lives)
from kvfast.caches.buffer_layout import buffer_layout
from kvfast.caches.foreign_memory import pool_over
from kvfast.caches.sequence_cache import storage_in
from kvfast.codec.formats import MAX_FLOAT_TOKENS, codes_alone, floats_of, formats_of
from kvfast.core.capabilities import difference, installed_version, minor_of, missing, versions_text
from kvfast.core.checks import as_integer, check_block_size, check_flag, check_size, checked_token_ids
from kvfast.core.interchange import aligned, as_array, as_float32, as_numpy
from kvfast.core.limits import MAX_TOKENS
from kvfast.core.text import counted, each, needed_for, one_of, shown, size_text
from kvfast.core.workers import Workers, wait_for_any
from kvfast.files.state import VERSION as FILE_VERSION
from kvfast.handles.tensor_calls import TensorCalls
from kvfast.planning.key_bias import key_bias_note
from kvfast.planning.model_shape import read_shape
from kvfast.planning.vllm_blocks import VLLM_FORMATS, VLLM_NAMES, vllm_format
from kvfast.prompts.chain import common_length
from kvfast.prompts.chunk_store import ChunkStore
from kvfast.prompts.envelope import HEADER_BYTES, new_value, num_tokens_of
from kvfast.prompts.prompt_keeper import PromptKeeper
from kvfast.prompts.rate import Rate
from kvfast.prompts.stores.store import Store
from kvfast.prompts.stores.urls import open_store
from kvfast.prompts.weights import files_digest, files_status
from kvfast.prompts.writer import Writer
