"""vLLM's attention backend of latent rows (DeepSeek) on CPUs: multi-head latent attention on the stored bytes."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from kvfast import PagedMLAKVCache
from kvfast.engine import as_numpy
from kvfast.engines.vllm.formats import LATENT_NAMES, SMALLEST_LATENT_BLOCK, latent_block_sizes, latent_content_bytes, latent_format_of
from kvfast.engines.vllm.memory import GroupMemory, arrays_of

logger = init_logger("vllm.kvfast")


class KVFastMLABackend(CPUMLABackend):
    """In place of CPU_MLA, and of AMX_MLA on CPUs with AMX."""

    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16", *LATENT_NAMES]

    @classmethod
    def get_supported_head_sizes(cls):
        return []  # any

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return list(latent_block_sizes(kv_cache_spec))

    @classmethod
    def supports_block_size(cls, block_size):
        return block_size is None or block_size % SMALLEST_LATENT_BLOCK == 0

    @classmethod
    def customize_spec(cls, spec):
        if spec.state_content_bytes is not None:
            return spec
        fmt = latent_format_of(spec)
        return replace(spec, state_content_bytes=latent_content_bytes(spec, fmt, *KVFastMLAImpl.parts[spec.head_size]))

    @staticmethod
    def get_impl_cls():
        return KVFastMLAImpl

    @staticmethod
    def get_builder_cls():
        return KVFastMLAMetadataBuilder


@dataclass
class KVFastMLAMetadata:
    """One step of all layers of a group. vLLM calls all its tokens decoded, also those of prompts: their queries come with the projection
    absorbed, as attention in latents takes them."""

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    tables: list[np.ndarray]  # block_table, seq_lens and cu_seqlens_q
    slots: np.ndarray
    num_prefills: int = 0
    prefill: object = None
    decode: object = True


class KVFastMLAMetadataBuilder(AttentionMetadataBuilder):
    """Prepares tables, lengths and bounds once a step, for all layers of a group."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        named = get_layers_from_vllm_config(vllm_config, MLAAttention, layer_names)
        layers, fmt = [named[name] for name in layer_names], latent_format_of(kv_cache_spec)

        def new_pool(buffer):
            num_blocks, block_size, _ = buffer[0].shape
            return PagedMLAKVCache(
                len(buffer), layers[0].kv_lora_rank, layers[0].qk_rope_head_dim, num_blocks, block_size, fmt, buffer=buffer
            )

        self._memory = GroupMemory(layers, new_pool, vllm_config.scheduler_config.max_num_seqs)
        logger.info_once(
            "kvfast keeps latent rows as %s, %d bytes per token (kv_cache_dtype=%s)",
            str(fmt),
            latent_content_bytes(kv_cache_spec, fmt, *KVFastMLAImpl.parts[kv_cache_spec.head_size]),
            vllm_config.cache_config.cache_dtype,
        )

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        if common_attn_metadata.causal is not True:
            raise NotImplementedError("kvfast has causal attention only in latents: set KVFAST_VLLM=0")
        self._memory.bind()
        return KVFastMLAMetadata(
            common_attn_metadata.num_actual_tokens,
            common_attn_metadata.num_reqs,
            common_attn_metadata.num_actual_tokens,
            *arrays_of(common_attn_metadata),
        )


class KVFastMLAImpl(CPUMLAImpl):
    parts: ClassVar = {}  # (latent_dim, rope_dim) of rows of some length: specs only have their sum
    memory = None  # GroupMemory, once its tensors are bound
    number = None  # of the layer in it

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        parts = self.kv_lora_rank, self.qk_rope_head_dim
        if self.parts.setdefault(self.head_size, parts) != parts:
            raise NotImplementedError(
                f"kvfast has one way to divide latent rows of {self.head_size} elements, got {parts} and "
                f"{self.parts[self.head_size]} (latent_dim, rope_dim): set KVFAST_VLLM=0"
            )

    def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale=False):
        if self.memory is None:
            return  # a dummy run: every step of requests has built its metadata before
        slots = slot_mapping.numpy()
        rows = torch.cat((kv_c_normed[: len(slots)], k_pe[: len(slots)].flatten(1)), 1)
        self.memory.pool.append_batch(self.number, as_numpy(rows), slots)

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        q = torch.cat(q, -1) if isinstance(q, tuple) else q
        out = q.new_empty((*q.shape[:2], self.kv_lora_rank))
        self.memory.pool.attend_batch(
            self.number, as_numpy(q), self.memory.batch_of(attn_metadata), out=as_numpy(out), scale=self.scale
        )
        return out, None
