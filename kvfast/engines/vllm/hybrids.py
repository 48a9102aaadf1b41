"""Models that mix attention with recurrent states: faults of vLLM that they meet, and short blocks for them.

In vLLM a block of one layer must be as large as one layer's state. In a small format it therefore spans many tokens, and prefix hits get
rare, because the prefix cache keeps states at the ends of blocks. In the layout BLHNC a block holds the keys and values of all layers, and
the whole block must be as large as one layer's state.
"""

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

from kvfast.engines.vllm import by_layer, versions
from kvfast.engines.vllm.formats import content_bytes, format_of

_MAMBA = {"MAMBA1", "MAMBA2"}  # vLLM 0.32 does not find their states next to other layers in a block, and so has no operator for them
_ZEROS = "_zero_block_ids"  # vLLM has no public name for it
_TOKENS = 128  # of a block on CPUs, if no state makes it longer


class Hybrids:
    """The model of this process, which sets it when its layers are made; vLLM does not say it where it asks for sizes."""

    config = None


def mend():
    """Step around three faults of vLLM on CPUs, which change texts. Where a backend has cut blocks into parts, it clears the parts that
    have the numbers of new blocks. Where layers have the same memory, it copies as much of a block as the first of them has, which may
    be a state. And Mamba-2 is said to save states within a step, but its operator for CPUs does not."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.v1.worker import cpu_model_runner, gpu_model_runner

    setattr(cpu_model_runner.CPUModelRunner, _ZEROS, _zero_blocks)
    gpu_model_runner.copy_kv_cache_blocks_inplace = _copy_blocks
    if "get_kv_cache_spec" in vars(MambaMixer2):
        del MambaMixer2.get_kv_cache_spec


def _zero_blocks(runner, block_ids):
    config, layers = runner.kv_cache_config, runner.compilation_config.static_forward_context
    for group in config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            for name in group.layer_names:
                cache = getattr(layers.get(name), "kv_cache", None)
                if isinstance(cache, torch.Tensor):
                    cache.unflatten(0, (config.num_blocks, -1))[block_ids] = 0


def _copy_blocks(caches, num_blocks, copies):
    from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

    copy_kv_cache_blocks_inplace(sorted(caches, key=lambda one: -one.nbytes), num_blocks, copies)


def layers_of_block():
    """How many layers have their keys and values side by side in one block. 1 where blocks are of one layer, as vLLM has them, and
    where vLLM does not say for which layers it asks for sizes of blocks."""
    config = Hybrids.config
    if (
        config is None
        or not versions.tells_specs()
        or not config.model_config.is_hybrid
        or get_kv_quant_mode(config.cache_config.cache_dtype).is_turboquant  # vLLM computes its bytes without asking the plugin
    ):
        return 1
    if (
        config.cache_config.kv_cache_dtype_skip_layers
        or config.parallel_config.pipeline_parallel_size > 1  # each process would count its own layers
        or config.scheduler_config.disable_hybrid_kv_cache_manager
        or config.speculative_config is not None  # a draft model has layers of its own
        or by_layer.asked_formats()
    ):
        return 1
    layers = [one for one in get_layers_from_vllm_config(config, Attention).values() if one.kv_sharing_target_layer_name is None]
    states = [one.get_kv_cache_spec(config) for one in get_layers_from_vllm_config(config, MambaBase).values()]
    specs = {_of_one_token(one) for one in layers}
    if len(specs) != 1 or None in specs or not states or {one.mamba_type.name for one in states} & _MAMBA:
        return 1
    spec = specs.pop()
    largest = max(one.state_content_size_bytes for one in states)
    return len(layers) if largest > _TOKENS * spec.num_kv_heads * content_bytes(spec, format_of(spec)) else 1


def _of_one_token(layer):
    """The spec of a layer, or None if kvfast does not carry it or if it has a window."""
    if layer.sliding_window is not None:
        return None
    spec = FullAttentionSpec(
        block_size=1,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        head_size_v=layer.head_size_v,
        dtype=layer.kv_cache_torch_dtype,
        kv_quant_mode=get_kv_quant_mode(layer.kv_cache_dtype),
    )
    return None if format_of(spec) is None else spec


def interleaved(tensors, block_size):
    """The tensors of the layers of a block, cut into blocks of `block_size` tokens: in each of vLLM's blocks, the first such block of
    all layers, then the second, and so on. So these are equally far apart within vLLM's blocks and from one to the next."""
    num_blocks, num_heads, tokens, width = tensors[0].shape
    part, size = tensors[0][0].numel(), num_heads * block_size * width
    offsets = [one.storage_offset() for one in tensors]
    first = min(offsets)
    if tensors[0].stride(0) != len(tensors) * part or sorted(offsets) != [first + i * part for i in range(len(tensors))]:
        raise ValueError(
            f"the layers of a block must fill it, {part} elements each, got blocks of {tensors[0].stride(0)} elements with layers at "
            f"{sorted(offsets)}; KVFAST_VLLM=0 leaves them to vLLM's own backend"
        )
    shape = num_blocks * (tokens // block_size), num_heads, block_size, width
    strides = len(tensors) * size, block_size * width, width, 1
    return [torch.as_strided(one, shape, strides, first + (at - first) // part * size) for one, at in zip(tensors, offsets)]


def finer(block_table, each):
    """A table of blocks that `interleaved` has cut into `each` blocks."""
    return (block_table[:, :, None] * each + np.arange(each, dtype=block_table.dtype)).reshape(len(block_table), -1)
