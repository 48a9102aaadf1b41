"""Which format of kvfast a layer of vLLM has."""

import os
from types import SimpleNamespace

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MLAAttentionSpec, SlidingWindowSpec, get_kv_quant_mode

from kvfast import KVFormat
from kvfast.engine import VLLM_FORMATS, VLLM_NAMES, buffer_layout, vllm_format
from kvfast.engines.vllm import by_layer, versions

TAIL = "KVFAST_TAIL"
BLOCK_SIZES = (32, 64, 128, 256)
FLOATS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def _own_mode(number, name):
    """A member of KVQuantMode that stands for a name of kvfast alone; vLLM's CUSTOM is one for all, and in 0.33 also OCTAVE_K3V4."""
    mode = int.__new__(KVQuantMode, number)
    vars(mode).update(_name_=name.upper(), _value_=number)
    vars(KVQuantMode)["_value2member_map_"][number] = mode  # for specs that come from another process
    return mode


OWN_MODES = {_own_mode(1000 + i, name): name for i, name in enumerate(VLLM_FORMATS) if name not in VLLM_NAMES}
MODES = {KVQuantMode[name.upper()]: name for name in VLLM_NAMES if name != "auto"} | OWN_MODES
NAMES = tuple(MODES.values())  # of kv_cache_dtype
LATENT_MODES = {
    mode: dtype for mode, name in MODES.items() for dtype in ("int8", "int4") if name in (f"{dtype}_per_token_head", f"kvfast_{dtype}")
}
LATENT_NAMES = tuple(MODES[mode] for mode in LATENT_MODES)  # of kv_cache_dtype
SMALLEST_LATENT_BLOCK = 16  # what vLLM sets as block size where it would use its own CPU_MLA


class Directions:
    """Directions of attention in the models of this process. Their configurations set them when layers are made; specs do not have them."""

    sees_later_tokens = False


def has_tail():
    """Whether layers read the newest tokens of a text as floats, as KVFAST_TAIL asks; None if it is not set."""
    value = os.environ.get(TAIL, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{TAIL} must be 0 or 1, got {value!r}")
    return bool(int(value)) if value else None


def register_names():
    """Let vLLM take the names of kvfast, from 0.33 on. Earlier versions, and one without kvfast, refuse them."""
    if not versions.takes_names():
        return
    from vllm.config import cache

    for mode, name in OWN_MODES.items():
        if not cache.is_known_kv_cache_dtype(name):  # vLLM calls this more than once in a process
            handler = SimpleNamespace(name=name, torch_dtype=lambda: torch.uint8, quant_mode=lambda mode=mode: mode)
            cache.register_kv_cache_dtype(name)(lambda handler=handler: handler)


def format_of(spec):
    """The KVFormat of a layer's KVCacheSpec, or None for what vLLM's own backend carries: fp8, layers that are neither causal nor
    windowed self-attention, and windows of models whose queries also see later tokens: those of vLLM then have two sides. Nothing is
    carried after a trial that failed."""
    if versions.Untested.is_off or type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
        return None
    if type(spec) is SlidingWindowSpec and Directions.sees_later_tokens:
        return None
    if spec.kv_quant_mode is not KVQuantMode.NONE:
        name = MODES.get(spec.kv_quant_mode)
        window = spec.sliding_window if type(spec) is SlidingWindowSpec else None
        return None if name is None else vllm_format(name, window, has_tail())
    dtype = FLOATS.get(spec.dtype)
    return None if dtype is None else KVFormat.of(dtype)


def block_sizes(fmt):
    """Block sizes to offer to vLLM for a format."""
    return list(BLOCK_SIZES) if fmt.block_size is None else [fmt.block_size]


def block_sizes_of_all():
    """Block sizes to offer when vLLM does not name the layers."""
    config = None if versions.tells_specs() else get_current_vllm_config_or_none()
    if config is None:
        return list(BLOCK_SIZES)
    return block_sizes(VLLM_FORMATS[MODES.get(get_kv_quant_mode(config.cache_config.cache_dtype), "auto")])


def content_bytes(spec, fmt):
    """Bytes of a token and KV head, the same for all block sizes. Layers with a window and those without have blocks of one size."""
    widest = VLLM_FORMATS.get(MODES.get(spec.kv_quant_mode), fmt)
    size = block_sizes(widest)[0]
    return max(buffer_layout(1, 1, spec.head_size, 1, size, one, v_head_dim=spec.head_size_v).nbytes // size for one in (fmt, widest))


def latent_format_of(spec):
    """The KVFormat of the latent rows of a KVCacheSpec; ValueError for what kvfast does not carry."""
    if by_layer.asked():
        raise ValueError(
            f"kvfast keeps latent rows of all layers in one format: leave {by_layer.FORMATS} and {by_layer.CALIBRATION} out"
        )
    if type(spec) is MLAAttentionSpec:
        fmt = FLOATS.get(spec.dtype) if spec.kv_quant_mode is KVQuantMode.NONE else LATENT_MODES.get(spec.kv_quant_mode)
        if fmt is not None:
            return KVFormat.of(fmt)
    raise ValueError(
        f"kvfast keeps latent rows as auto, float16, bfloat16, {' or '.join(LATENT_NAMES)}, got {type(spec).__name__} with "
        f"kv_cache_dtype={spec.cache_dtype_str}; KVFAST_VLLM=0 leaves them to vLLM's own backend"
    )


def latent_block_sizes(spec):
    """Block sizes to offer for latent rows."""
    if spec is None and not versions.tells_specs():
        return SMALLEST_LATENT_BLOCK, *BLOCK_SIZES
    return BLOCK_SIZES if spec is None or spec.block_size % BLOCK_SIZES[0] == 0 else (SMALLEST_LATENT_BLOCK,)


def latent_content_bytes(spec, fmt, latent_dim, rope_dim):
    """Bytes of a token's latent row, the same for all `latent_block_sizes`."""
    size = latent_block_sizes(spec)[0]
    return buffer_layout(1, 1, latent_dim, 1, size, fmt, rope_dim=rope_dim).nbytes // size
