"""The cache of vLLM with kvfast's formats: what the names of ``kv_cache_dtype`` store, and the memory of its blocks."""

from __future__ import annotations

from kvfast.caches.buffer_layout import buffer_layout
from kvfast.codec.formats import PRESETS, KVFormat, codes_alone, floats_of
from kvfast.core.checks import check_block_size

DEFAULTS = {"kvfast": "int4", "vllm": "auto"}
"""The format of an engine, if nobody names one."""
ENGINES = tuple(DEFAULTS)


def rotated(dtype):
    return KVFormat(dtype, rotation="kv", codebook="uniform" if dtype == "int8" else "gaussian")


VLLM_NAMES = {
    "auto": KVFormat.of("bfloat16"),  # the model's dtype
    "int8_per_token_head": KVFormat.of("int8-rotated"),
    "turboquant_k8v4": KVFormat.of("k8v4"),
    "int4_per_token_head": KVFormat.of("int4-recent"),
    "turboquant_4bit_nc": rotated("int4"),
    "turboquant_k3v4_nc": rotated("int3/int4"),
    "turboquant_3bit_nc": rotated("int3"),
}
# From vLLM 0.33 on, also presets by their names.
VLLM_FORMATS = VLLM_NAMES | {f"kvfast_{name.replace('-', '_')}": form for name, form in PRESETS.items()}
# In a turboquant mode vLLM leaves this many layers at each end in the model's dtype.
KEEPS_FIRST_AND_LAST = 2
VLLM_BLOCK_SIZE = 64
# vLLM holds a window for as many tokens more as one step may compute; this is its server's default.
STEP_TOKENS = 2048


def vllm_format(name, window, has_tail=None):
    """The KVFormat of a layer. `has_tail`: whether newest tokens are floats, None for what VLLM_FORMATS says. Layers with a window
    have blocks alone, no float rows."""
    form = KVFormat.of("int8") if has_tail and name == "int8_per_token_head" else VLLM_FORMATS[name]
    if window is None and has_tail is not False:
        return form
    codes = codes_alone(form)
    return codes if floats_of(codes) is None else rotated(codes.dtype)


class BlocksOfVLLM:
    """The blocks of one sequence, with the methods of `plan`'s own caches."""

    def __init__(self, shape, name, block_size=VLLM_BLOCK_SIZE):
        self.block_size, layers = check_block_size(block_size), shape.layers
        if any(layer.rope_dim is not None for layer in layers):
            raise ValueError("plan of engine='vllm' knows no latent rows, which the model has")
        kept = range(KEEPS_FIRST_AND_LAST, len(layers) - KEEPS_FIRST_AND_LAST) if name.startswith("turboquant") else range(len(layers))
        self.layers = []
        for index, layer in enumerate(layers):
            form = VLLM_FORMATS[name if index in kept else "auto"]  # with a window, too: vLLM needs blocks of one size
            layout = buffer_layout(1, layer.num_kv_heads, layer.head_dim, 1, block_size, form, v_head_dim=layer.v_head_dim)
            self.layers.append((layer.sliding_window, layout.nbytes))
        self.bytes_per_token = sum(size for _, size in self.layers) // block_size
        self.form = VLLM_FORMATS[name]

    def name(self, context):
        return f"vLLM, {self.form}"

    def nbytes(self, context):
        blocks = -(-context // self.block_size)
        return sum(size * min(blocks, self._window_blocks(window)) for window, size in self.layers)

    bytes_of_prompt = nbytes

    def bytes_read(self, context):
        return sum(size * min(context, window or context) // self.block_size for window, size in self.layers)

    def _window_blocks(self, window):
        if window is None:
            return float("inf")
        return -(-(window - 1 + STEP_TOKENS) // self.block_size) + 1
