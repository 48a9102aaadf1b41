"""Which format of kvfast a layer of vLLM has."""

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, SlidingWindowSpec

from kvfast import KVFormat, buffer_layout
from kvfast.planning.engine import VLLM_FORMATS, vllm_format

BLOCK_SIZES = (32, 64, 128, 256)
FLOATS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

MODES = {KVQuantMode[name.upper()]: name for name in VLLM_FORMATS if name != "auto"}
NAMES = tuple(MODES.values())  # of kv_cache_dtype


class Directions:
    """What the models of this process ask of attention. Their configurations set it when their layers are made; specs do not have it."""

    sees_later_tokens = False


def format_of(spec):
    """The KVFormat of a layer's KVCacheSpec, or None for what vLLM's own backend carries: fp8, layers that are neither causal nor
    windowed self-attention, and windows of models whose queries also see later tokens: those of vLLM then have two sides."""
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
        return None
    if type(spec) is SlidingWindowSpec and Directions.sees_later_tokens:
        return None
    if spec.kv_quant_mode is not KVQuantMode.NONE:
        name = MODES.get(spec.kv_quant_mode)
        return None if name is None else vllm_format(name, spec.sliding_window if type(spec) is SlidingWindowSpec else None)
    dtype = FLOATS.get(spec.dtype)
    return None if dtype is None else KVFormat.of(dtype)


def block_sizes(fmt):
    """Those that vLLM may choose from."""
    return list(BLOCK_SIZES) if fmt.block_size is None else [fmt.block_size]


def content_bytes(spec, fmt):
    """Bytes of a token and KV head, the same for all block sizes. Layers with a window and those without have blocks of one size."""
    widest = VLLM_FORMATS.get(MODES.get(spec.kv_quant_mode), fmt)
    size = block_sizes(widest)[0]
    return max(buffer_layout(1, 1, spec.head_size, 1, size, one, v_head_dim=spec.head_size_v).nbytes // size for one in (fmt, widest))
