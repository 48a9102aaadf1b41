"""An attention backend of vLLM for CPUs: kvfast for the layers that it carries, vLLM's own backend for all others."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.forward_context import is_forward_context_available
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import KVCacheLayout, SlidingWindowSpec

from kvfast import NonFiniteInputError, PagedKVCache
from kvfast.engine import buffer_layout, key_bias_note
from kvfast.engines.vllm import by_layer, trial, versions
from kvfast.engines.vllm.formats import MODES, NAMES, TAIL, Directions, block_sizes, block_sizes_of_all, content_bytes, format_of
from kvfast.engines.vllm.hybrids import Hybrids, finer, interleaved, layers_of_block, mend
from kvfast.engines.vllm.memory import GroupMemory, arrays_of, without_gaps
from kvfast.engines.vllm.registration import CONNECTOR

logger = init_logger("vllm.kvfast")

OWN_DTYPES = "float16", "bfloat16", *NAMES
SLOTS_ALONE = "dflash", "dspark"  # drafts that store keys and values between steps


class KVFastBackend(CPUAttentionBackend):
    supported_kv_cache_dtypes: ClassVar = [*CPUAttentionBackend.supported_kv_cache_dtypes, *OWN_DTYPES]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype):
        # vLLM's own answer may need AVX-512 for all but auto.
        return kv_cache_dtype in OWN_DTYPES or super().supports_kv_cache_dtype(kv_cache_dtype)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        if kv_cache_spec is None and not versions.Untested.is_off:
            return block_sizes_of_all()
        fmt = format_of(kv_cache_spec)
        if fmt is not None and layers_of_block() > 1 and kv_cache_spec.block_size % block_sizes(fmt)[0] == 0:
            return [kv_cache_spec.block_size]  # vLLM cuts no blocks that layers share, the pool does
        if fmt is not None:
            return block_sizes(fmt)
        return versions.own_block_sizes(CPUAttentionBackend, kv_cache_spec)

    @classmethod
    def get_supported_head_sizes(cls):
        return []  # any

    @classmethod
    def supports_sink(cls):
        return True

    @classmethod
    def customize_spec(cls, spec):
        fmt = format_of(spec)
        if fmt is None or spec.state_content_bytes is not None:
            return spec
        spec = replace(spec, state_content_bytes=content_bytes(spec, fmt))
        # vLLM asks for one token where it makes blocks large enough for a state.
        padded = layers_of_block() * spec.page_size_bytes if spec.block_size == 1 and layers_of_block() > 1 else None
        return replace(spec, page_size_padded=padded)

    @classmethod
    def supported_kv_cache_layouts(cls):
        return (KVCacheLayout.BLHNC,) if layers_of_block() > 1 else super().supported_kv_cache_layouts()

    @staticmethod
    def get_impl_cls():
        return KVFastImpl

    @staticmethod
    def get_builder_cls():
        return KVFastMetadataBuilder


@dataclass
class KVFastMetadata:
    """The arguments of one step, for all layers of a group."""

    num_actual_tokens: int
    tables: list[np.ndarray]  # block_table, seq_lens and cu_seqlens_q
    slots: np.ndarray
    rows: torch.Tensor | None  # of queries that these are for, None for all
    causal: bool | list[bool]  # of all requests, or of each
    spans: list[list[tuple[int, int]] | None] | None = None  # of each request: tokens of an image, which see each other
    clamp_spans: bool = False  # within their windows


def warn_of_spans(common_attn_metadata):
    """Warn that attention reads the tokens of an image in causal order, although they should see each other. vLLM's own backend for
    CPUs does so without a warning."""
    if any((common_attn_metadata.mm_req_doc_ranges or {}).values()):
        logger.warning_once(
            "the tokens of an image should see each other in this model, and some of its layers read them in causal order: texts about "
            "images may differ from what the model means"
        )


def spans_of(common_attn_metadata):
    """For each request, the spans whose tokens see each other and that have queries in this step; None if no request has one."""
    ranges = common_attn_metadata.mm_req_doc_ranges
    if not ranges or not any(ranges.values()):
        return None
    lengths, starts = common_attn_metadata.seq_lens.tolist(), common_attn_metadata.query_start_loc.tolist()
    spans = []
    for i, length in enumerate(lengths):
        first = length - (starts[i + 1] - starts[i])
        found = [(start, last + 1) for start, last in ranges.get(i, ()) if start < length and last >= first]
        if any(stop > length for _, stop in found):
            logger.warning_once("a step ends inside of an image whose tokens see each other: pass --disable-chunked-mm-input")
        spans.append([(start, min(stop, length)) for start, stop in found] or None)
    return spans if any(spans) else None


class KVFastMetadataBuilder(CPUAttentionMetadataBuilder):
    """Prepares tables, lengths and bounds once a step, for all layers of a group."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        fmt, dtype = format_of(kv_cache_spec), MODES.get(kv_cache_spec.kv_quant_mode)  # drafts may have another one than their target
        if fmt is None:
            self._memory = None
            if dtype is not None:
                raise ValueError(
                    f"kvfast leaves {type(kv_cache_spec).__name__} of this model to vLLM's own backend, which has no "
                    f"kv_cache_dtype={dtype}: choose auto or fp8"
                )
            logger.warning_once(
                "kvfast leaves %s with kv_cache_dtype=%s to vLLM's own backend",
                type(kv_cache_spec).__name__,
                vllm_config.cache_config.cache_dtype,
            )
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            return
        transfer = vllm_config.kv_transfer_config
        cache, drafts = vllm_config.cache_config, vllm_config.speculative_config
        is_like_drafts = drafts is not None and dtype == (getattr(drafts, "kv_cache_dtype", None) or cache.cache_dtype)
        refused = None
        if transfer is not None and transfer.kv_connector != CONNECTOR:
            refused = f"{transfer.kv_connector} would not send: choose {CONNECTOR}"
        elif cache.mamba_cache_mode == "align" and cache.prefix_match_unit not in (None, cache.block_size):
            refused = f"vLLM would not copy with the first tokens of a block: leave prefix_match_unit={cache.prefix_match_unit} out"
        elif is_like_drafts and drafts.method in SLOTS_ALONE:
            refused = (
                f"{drafts.method} does not know: choose another kv_cache_dtype for the drafts: --speculative-config "
                '\'{"kv_cache_dtype": "int8_per_token_head", ...}\''
            )
        if fmt.num_first_float_tokens and refused:
            raise ValueError(
                f"kv_cache_dtype={dtype} keeps some tokens as floats outside vLLM's blocks, which {refused}, or set {TAIL}=0"
            )
        if fmt.num_first_float_tokens and cache.enable_prefix_caching:
            logger.warning_once(
                "kv_cache_dtype=%s reads the newest tokens as floats. After a beginning of another text that the prefix cache has, it reads "
                "codes, so that the tokens of a prompt may differ from those without the prefix cache; %s",
                dtype,
                "KVFAST_TAIL=0 gives the same" if "int8" in dtype else "int8_per_token_head gives the same",
            )
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        named = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        layers = [named[name] for name in layer_names]
        for layer in layers:
            layer.impl.is_carried = True
        # As in Gemma 4: a token of an image sees no token before its window, and all after it in the image.
        self._clamps_spans = any(getattr(layer, "mm_prefix_clamp_sliding_window", False) for layer in layers)

        self._blocks_each, cut = 1, None  # blocks of the pool for one of vLLM's
        if layers_of_block() > 1:
            size = max(one for one in block_sizes(fmt) if kv_cache_spec.block_size % one == 0)
            self._blocks_each, cut = kv_cache_spec.block_size // size, partial(interleaved, block_size=size)

        calibrated = {name: by_layer.calibrated(fmt, name, kv_cache_spec, vllm_config) for name in layer_names}

        def new_pool(buffer):
            num_blocks, heads, block_size, _ = buffer[0].shape
            dim, v_dim = kv_cache_spec.head_size, kv_cache_spec.head_size_v
            # Codes alone, of a layer with a window, may need fewer bytes than the blocks have.
            size = buffer_layout(1, heads, dim, 1, block_size, fmt, v_head_dim=v_dim).nbytes
            buffer = [one.view(np.uint8).reshape(num_blocks, -1)[:, :size] for one in buffer]
            of_layers = {layer.impl.number: calibrated[layer.layer_name] for layer in reversed(layers)}  # the first of those that share
            formats = [of_layers[i] for i in range(len(buffer))]
            return PagedKVCache(len(buffer), heads, dim, num_blocks, block_size, formats, v_head_dim=v_dim, buffer=buffer)

        self._memory = GroupMemory(layers, new_pool, vllm_config.scheduler_config.max_num_seqs, cut)
        if trial.LAYER not in layer_names:
            self._say(fmt)

    def _say(self, fmt):
        """Say how the cache is kept, and warn where that is unwise."""
        dtype = self.vllm_config.cache_config.cache_dtype
        bias = key_bias_note(self.vllm_config.model_config.hf_text_config.model_type, {dtype: fmt}, "int4_per_token_head")
        if bias is not None:
            logger.warning_once("%s", bias)
        size = content_bytes(self.kv_cache_spec, fmt)
        logger.info_once("kvfast keeps the KV cache as %s, %d bytes per token and KV head (kv_cache_dtype=%s)", str(fmt), size, dtype)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        if self._memory is None:
            warn_of_spans(common_attn_metadata)
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        causal = common_attn_metadata.causal
        if not isinstance(causal, bool):  # of each request
            causal = causal.bool().tolist()
            causal = causal[0] if len(set(causal)) == 1 else causal
        if causal is not True and isinstance(self.kv_cache_spec, SlidingWindowSpec):
            raise NotImplementedError(
                "kvfast has no windows with two sides, and this model did not ask for them when its layers were made: set KVFAST_VLLM=0"
            )
        self._memory.bind()
        spans = spans_of(common_attn_metadata) if causal is True else None
        tables, slots, rows = without_gaps(*arrays_of(common_attn_metadata))
        if self._blocks_each > 1:
            tables[0] = finer(tables[0], self._blocks_each)
        return KVFastMetadata(common_attn_metadata.num_actual_tokens, tables, slots, rows, causal, spans, self._clamps_spans)


class KVFastImpl(CPUAttentionBackendImpl):
    is_carried = False  # by kvfast, as its builder has found
    memory = None  # GroupMemory, once its tensors are bound
    number = None  # of the layer in it
    _options = None

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        mend()
        by_layer.let_layers_differ()
        if versions.Untested.needs_trial:
            trial.hold(KVFastBackend)
        if versions.Untested.is_off and self.kv_cache_dtype not in CPUAttentionBackend.supported_kv_cache_dtypes:
            raise ValueError(
                f"vLLM's own backend has no kv_cache_dtype={self.kv_cache_dtype}, and kvfast switched itself off, as the log says: choose "
                f"another, or vLLM {versions.tested_text()}, which kvfast was tested with"
            )
        config = Hybrids.config = get_current_vllm_config()
        # Only a layer with a window says so: the drafts of DFlash may lack windows where their model has some.
        if self.sliding_window >= 0 and (config.attention_config.use_non_causal or config.diffusion_config is not None):
            Directions.sees_later_tokens = True

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        if not self.is_carried:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        if self.memory is None:
            return  # a dummy run: every step of requests has built its metadata before
        n = slot_mapping.shape[0]
        if key.shape[0] != n:
            key, value = key[:n], value[:n]
        batch, rows = self._place_of(layer, slot_mapping.numpy())
        if rows is not None:
            key, value = key[rows], value[rows]
        append = self.memory.pool.append_batch
        try:
            append(self.number, key, value, batch)
        except NonFiniteInputError as error:
            logger.warning_once(
                "kvfast stores zeros for keys and values that are not finite; the texts they belong to are wrong: %s", error
            )
            append(self.number, key, value, batch, zero_nonfinite=True)

    def _place_of(self, layer, slots):
        """The batch of the step, checked once for all layers, if its slots are these, and its rows. Formats with first floats always take
        it: they need its lengths. DFlash writes between steps, where slots are all there is."""
        metadata = get_attention_context(layer.layer_name)[0] if is_forward_context_available() else None
        has_them = metadata is not None and (self.memory.pool.first_float_rows_nbytes or np.array_equal(metadata.slots, slots))
        return (self.memory.batch_of(metadata), metadata.rows) if has_them else (slots, None)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None):
        if not isinstance(attn_metadata, KVFastMetadata):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kvfast has no fused quantization of outputs")
        n, out = attn_metadata.num_actual_tokens, output
        if query.shape[0] != n:
            query, out = query[:n], output[:n]
        attend = partial(self.memory.pool.attend_batch, self.number, **(self._options or self._set_options()))
        if attn_metadata.rows is None:
            self._attend(attend, query, attn_metadata, out)
        else:
            found = out[attn_metadata.rows]
            self._attend(attend, query[attn_metadata.rows], attn_metadata, found)
            out[attn_metadata.rows] = found
        return output

    def _attend(self, attend, query, attn_metadata, out):
        if not isinstance(attn_metadata.causal, bool):
            self._attend_one_by_one(attend, query, attn_metadata, out)
            return
        try:
            attend(
                query,
                self.memory.batch_of(attn_metadata),
                out=out,
                causal=attn_metadata.causal,
                spans=attn_metadata.spans,
                clamp_spans=attn_metadata.clamp_spans,
            )
        except NonFiniteInputError as error:
            logger.warning_once("kvfast returns NaN for requests whose queries are not finite: %s", error)
            self._attend_one_by_one(attend, query, attn_metadata, out)

    def _attend_one_by_one(self, attend, query, attn_metadata, out):
        """Return NaN for requests whose queries are not finite, as vLLM's own backend does. Compute each other request alone."""
        batch, causal, spans = self.memory.batch_of(attn_metadata), attn_metadata.causal, attn_metadata.spans
        for i, (first, last) in enumerate(pairwise(attn_metadata.tables[2].tolist())):
            if first == last:
                continue
            try:
                attend(
                    query[first:last],
                    batch.only(i),
                    out=out[first:last],
                    causal=causal if isinstance(causal, bool) else causal[i],
                    spans=spans and [spans[i]],
                    clamp_spans=attn_metadata.clamp_spans,
                )
            except NonFiniteInputError:
                out[first:last] = float("nan")

    def _set_options(self):
        """Set the options of this layer's attention, after its weights are loaded."""
        self._options = {
            "scale": self.scale,
            "softcap": self.logits_soft_cap or None,
            "sliding_window": None if self.sliding_window < 0 else self.sliding_window,
            "sinks": None if self.sinks is None else self.sinks.detach().float().numpy(),
            "alibi_slopes": None if self.alibi_slopes is None else self.alibi_slopes.numpy(),
        }
        return self._options
