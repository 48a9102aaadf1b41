"""One attention call on a version of vLLM that was not tested: kvfast's result against that of vLLM's own backend."""

import copy

import torch
from vllm.config import get_current_vllm_config, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvfast.engine import difference
from kvfast.engines.vllm import versions

logger = init_logger("vllm.kvfast")

LAYER = "kvfast.trial"
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 64
_BLOCK_SIZE, _BLOCKS_EACH = 64, 2
# Two prompts, one of which needs two blocks, and then a token of each.
_STEPS = [((70, 5), (70, 5)), ((1, 1), (71, 6))]
_ROUNDINGS = 8  # of the model's dtype, by which two ways to compute attention may differ


def hold(backend):
    """Try a backend, in the process that makes a model. Say whether it is used; if not, `Untested.is_off`."""
    versions.Untested.needs_trial = False
    why = _difference(backend)
    versions.Untested.is_off = why is not None
    found = versions.tested_text(), versions.installed_version()
    if why is None:
        logger.info(
            "kvfast was tested with vLLM %s, and %s is installed: one attention call gave vLLM's own result, it is used", *found
        )
    else:
        logger.warning("kvfast switched itself off: %s; it was tested with vLLM %s, and %s is installed", why, *found)


def _difference(backend):
    """Why a backend cannot be used, or None."""
    dtype, steps = torch.get_default_dtype(), []
    draw = torch.Generator().manual_seed(0)
    for counts, _ in _STEPS:
        sizes = [(sum(counts), heads * _HEAD_DIM) for heads in (_HEADS, _KV_HEADS, _KV_HEADS)]
        steps.append([torch.randn(size, generator=draw, dtype=torch.float32).to(dtype) for size in sizes])

    def calls():
        config = copy.copy(get_current_vllm_config())
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.cache_dtype = "auto"  # the one that both have
        with set_current_vllm_config(config), torch.inference_mode():
            return [_attended(one, steps, config) for one in (CPUAttentionBackend, backend)]

    return difference(calls, "vLLM's", max(1e-3, _ROUNDINGS * torch.finfo(dtype).eps))


def _attended(backend, steps, config):
    """What a layer of vLLM with this backend returns for some steps."""
    layers = config.compilation_config.static_forward_context
    layer = Attention(_HEADS, _HEAD_DIM, _HEAD_DIM**-0.5, _KV_HEADS, prefix=LAYER, attn_backend=backend)
    try:
        spec = backend.customize_spec(
            FullAttentionSpec(block_size=_BLOCK_SIZE, num_kv_heads=_KV_HEADS, head_size=_HEAD_DIM, dtype=layer.kv_cache_torch_dtype)
        )
        width = spec.page_size_bytes // (_KV_HEADS * _BLOCK_SIZE * spec.dtype.itemsize)
        # vLLM gives block 0 to nobody.
        layer.kv_cache = torch.zeros(1 + 2 * _BLOCKS_EACH, _KV_HEADS, _BLOCK_SIZE, width, dtype=spec.dtype)
        builder, results = backend.get_builder_cls()(spec, [LAYER], config, torch.device("cpu")), []
        for (counts, lengths), rows in zip(_STEPS, steps):
            common = _metadata(counts, lengths)
            metadata = {LAYER: builder.build(0, common)}
            with set_forward_context(metadata, config, num_tokens=sum(counts), slot_mapping={LAYER: common.slot_mapping}):
                results.append(layer(*rows).float())
        return torch.cat(results)
    finally:
        layers.pop(LAYER, None)


def _metadata(counts, lengths):
    """vLLM's description of a step that computes the last tokens of two sequences."""
    table = 1 + torch.arange(2 * _BLOCKS_EACH, dtype=torch.int32).reshape(2, _BLOCKS_EACH)
    positions = [torch.arange(length - count, length) for count, length in zip(counts, lengths)]
    slots = [table[i, at // _BLOCK_SIZE].long() * _BLOCK_SIZE + at % _BLOCK_SIZE for i, at in enumerate(positions)]
    starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=2,
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=torch.cat(slots),
        positions=torch.cat(positions),
    )
