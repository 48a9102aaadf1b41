"""Engines of vLLM over tiny random models, with kvfast and without."""

import gc
import os
import random
import sys
import warnings
from unittest import mock

# Before vLLM is imported: one process, where a failure has its traceback, little memory, and nothing that asks a network.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM imports parts of PyTorch that are deprecated
    import tokenizers
    import torch
    import transformers
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.config import KVTransferConfig
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

import kvfast.vllm
from kvfast.engines.vllm import registration

SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
MODELS = {
    "llama": ("Llama", {}),
    "deep": ("Llama", {"num_hidden_layers": 6}),
    "shallow": ("Llama", {"num_hidden_layers": 1}),
    "mistral": ("Mistral", {"sliding_window": 70}),
    "gemma2": (
        "Gemma2",
        {"sliding_window": 70, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
    # In these heads, codes alone need fewer bytes than int4 without a window.
    "gemma3": ("Gemma3", {"head_dim": 64, "sliding_window": 70, "sliding_window_pattern": 2, "tie_word_embeddings": True}),
    "gpt_oss": ("GptOss", {"sliding_window": 70, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "deepseek": (
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "head_dim": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 3,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 8,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
            "linear_num_value_heads": 1,
            "linear_num_key_heads": 1,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention"] * 2,
            # As in the files of such models; transformers has no defaults for them.
            "conv_dim": 128,
            "block_dim": 128,
            "block_ff_dim": 256,
        },
    ),
    "granite": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 64,
            "shared_intermediate_size": 64,
            "num_local_experts": 0,
        },
    ),
    "nemotron": (
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention"] * 2,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 64,
            "n_groups": 1,
        },
    ),
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 4, "tie_word_embeddings": True}),
}


def save_model(name, folder):
    """Such a model of MODELS with random weights, float32, in a folder."""
    kind, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind + ("TextConfig" if kind == "Gemma3" else "Config"))(**SMALL | options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():  # biases and sinks, which are zero at first
        if parameter.ndim == 1 and not parameter.any():
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)


def save_tokenizer(folder):
    """One whose words are the numbers of tokens, for what vLLM does not without: beams, embeddings and servers."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(SMALL["vocab_size"])}, unk_token="0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="2", pad_token="0", unk_token="0").save_pretrained(folder)


def in_engine(folder, use, **options):
    """What `use` returns of an LLM of vLLM over a model, with kvfast as KVFAST_VLLM is set now. Nobody may keep the LLM: it ends the
    process group, which is the next engine's then. Garbage is collected once: vLLM does so nine times, most of a tiny engine's time.
    Nor is the whole of VLLM_CPU_KVCACHE_SPACE filled with zeros."""
    # vLLM looks for its kernels in vars() of all that modules hold. That of llvmlite's library, which drafts of n-grams import, is not a dict.
    if "llvmlite.binding.ffi" in sys.modules:
        sys.modules["llvmlite.binding.ffi"]._lib_fn_wrapper.get = lambda self, name: None
    for part in registration.BACKENDS.values():
        for name in part:
            AttentionBackendEnum[name].clear_override()
    selector._cached_get_attn_backend.cache_clear()
    kvfast.vllm.register()
    options = {
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": 200,
    } | options
    gc.collect()
    with mock.patch.multiple(gc, collect=mock.DEFAULT, freeze=mock.DEFAULT, unfreeze=mock.DEFAULT):
        try:
            llm = LLM(str(folder), seed=0, **options)
        except BaseException:
            ensure_kv_transfer_shutdown()  # vLLM leaves it to the next engine
            cleanup_dist_env_and_memory()
            raise
        try:
            return use(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()  # now, as pytest keeps what was logged, and that keeps the engine
            del llm
            cleanup_dist_env_and_memory()


def generate(llm, prompts, most=24, **options):
    """The tokens that follow each prompt, greedily."""
    parameters = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False, **options)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], parameters, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in outputs]


def texts(llm, prompts, most, **options):
    """(tokens, log-probability of each) of the text after each prompt, greedily."""
    parameters = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False, logprobs=0, **options)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=list(ids)) for ids in prompts], parameters, use_tqdm=False)
    found = [output.outputs[0] for output in outputs]
    return [(list(one.token_ids), [step[token].logprob for token, step in zip(one.token_ids, one.logprobs)]) for one in found]


def same_rows(llm, count=16):
    """Let the engine's matrix products take `count` rows at a time, the last filled up with zeros. Else the bits of a row may depend on the
    number of rows of a step."""

    def in_parts(linear):
        def product(x, weight, bias):
            rows = x.reshape(-1, x.shape[-1])
            whole = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % count))
            parts = [linear(part.contiguous(), weight, bias) for part in whole.split(count)]
            return torch.cat(parts)[: len(rows)].reshape(*x.shape[:-1], -1)

        return product

    for module in _runner_of(llm).model.modules():
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = in_parts(module.cpu_linear)


def _runner_of(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def layers_of(llm):
    """The attention layers of an engine, by name."""
    return {name: layer for name, layer in _runner_of(llm).compilation_config.static_forward_context.items() if hasattr(layer, "impl")}


def stored(url, connector="KVFastConnector", **more):
    """The configuration of a store for prompts."""
    return KVTransferConfig(kv_connector=connector, kv_role="kv_both", kv_connector_extra_config={"url": str(url), **more})


def settle(llm):
    """Wait for what is stored in the background, and let vLLM forget its own prefixes."""
    get_kv_transfer_group().flush()
    assert llm.reset_prefix_cache()


LENGTHS = 40, 300, 513, 700


def prompts(lengths=LENGTHS, seed=0):
    """Random ones, of these numbers of tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 500) for _ in range(n)] for n in lengths]


def answers(folder, url=None, given=None, times=1, most=24, **options):
    """What an engine says to each prompt, alone: as often as asked."""

    def use(llm):
        return [[generate(llm, [one], most)[0] for one in given or prompts()] for _ in range(times)]

    options = {"max_num_batched_tokens": 256} | options
    return in_engine(folder, use, **options, **({} if url is None else {"kv_transfer_config": stored(url)}))


def values(folder):
    """The files of a store."""
    return sorted(folder.glob("??/*"))
