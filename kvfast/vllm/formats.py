"""Which format of kvfast a layer of vLLM has."""

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, SlidingWindowSpec

from kvfast import KVFormat, buffer_layout
from kvfast.planning.engine import VLLM_FORMATS

BLOCK_SIZES = (32, 64, 128, 256)
FLOATS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


FORMATS = {KVQuantMode[name.upper()]: form for name, form in VLLM_FORMATS.items() if name != "auto"}
NAMES = tuple(mode.name.lower() for mode in FORMATS)  # of kv_cache_dtype


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
        return FORMATS.get(spec.kv_quant_mode)
    dtype = FLOATS.get(spec.dtype)
    return None if dtype is None else KVFormat.of(dtype)


def content_bytes(spec, fmt):
    """Bytes of a token and KV head, the same for all BLOCK_SIZES."""
    size = BLOCK_SIZES[0]
    return buffer_layout(1, 1, spec.head_size, 1, size, fmt, v_head_dim=spec.head_size_v).nbytes // size
