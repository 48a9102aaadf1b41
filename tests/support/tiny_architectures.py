"""Every causal architecture of transformers as a tiny model with random weights, and whether kvfast gives its tokens.

    python tests/support/tiny_architectures.py [--write] [NAMES...]

tries those of NAMES, or all, and tells what came of each; with ``--write`` it keeps that in ``tests/support/architectures.json``,
from which the guide has its table.
"""

import argparse
import dataclasses
import functools
import json
import time
import traceback
from pathlib import Path

from tiny_transformers import KVFastCache, prompt, torch, transformers

KEPT = Path(__file__).with_name("architectures.json")
NAMES = list(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
PROMPT, PADDING, NEW_TOKENS, CHUNK = 27, 5, 6, 8  # over the edges of windows of 16, and of blocks
MOST_PARAMETERS = 100_000_000
LIMIT = 1e-3  # of the logits' difference, relative

# Sizes by the names that configurations have for them: a field that is a number becomes as small as this.
SIZES = {
    **dict.fromkeys(("vocab_size", "n_vocab", "vocab_size_per_layer_input"), 97),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "n_embed", "emb_dim", "dim_model", "embedding_size"), 64),
    **dict.fromkeys(
        (
            *("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "decoder_ffn_dim"),
            *("encoder_ffn_dim", "dff", "dim_ff", "intermediate_size_mlp", "dense_intermediate_size"),
            "num_centroids",
        ),
        96,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "expert_ffn_hidden_size",
            "router_hidden_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
            "shared_experts_intermediate_size",
        ),
        32,
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(
        (
            *("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
            *("encoder_attention_heads", "swa_num_attention_heads", "num_decoder_attention_heads"),
            "num_encoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    "swa_num_key_value_heads": 4,
    **dict.fromkeys(("head_dim", "swa_head_dim", "dim_head"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    "zero_expert_num": 2,
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "num_selected_experts"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 512),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size", "sliding_window_size", "attention_chunk_size"), 16),
    **dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(
        (
            *("qk_rope_head_dim", "index_topk", "mamba_d_state", "state_size", "ssm_state_size", "mamba_n_groups"),
            "hidden_size_per_layer_input",
        ),
        8,
    ),
    "index_n_heads": 2,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    # Random weights say little: larger ones keep the best token apart from the second best.
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
}
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
# Keys and values of two widths, as unabsorbed latent attention has them; its rotary part is what these call head_dim.
LATENT = {"num_key_value_heads": 4, "head_dim": 8}
HALF = ["linear_attention", "full_attention"] * 2
GATED = {"head_dim": 16, "num_key_value_heads": 2, "num_experts_per_tok": 2}
OTHERS = {
    "axk1": LATENT,
    "axk2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "longcat_flash": LATENT,
    "minicpm3": LATENT,
    "youtu": LATENT,
    "deepseek_v2": LATENT | {"num_experts_per_tok": 2},
    "bailing_hybrid": LATENT | {"layer_group_size": 2, "head_dim": 16},
    "kimi_linear": LATENT | {"layer_types": HALF},
    "dots3_note_text": LATENT
    | {"swa_" + name: 4 for name in ("num_attention_heads", "num_key_value_heads")}
    | {"swa_" + name: 32 for name in ("q_lora_rank", "kv_lora_rank")}
    | {"swa_" + name: 16 for name in ("qk_nope_head_dim", "v_head_dim")}
    | {"swa_head_dim": 24},
    "hy_v4": LATENT,
    "hy_v4_vl_text": LATENT | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}},
    "mistral_large4_text": LATENT,
    "bamba": {"attn_layer_indices": [1, 3], "mamba_d_head": 32, "mamba_n_heads": 4, "mamba_n_groups": 1},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16, "mamba_n_heads": 4, "mamba_n_groups": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
        "intermediate_size": 96,
    },
    "gemma4_text": {"num_kv_shared_layers": 2, "global_head_dim": 32, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": HALF, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1},
    "hunyuan_v1_dense": GATED,
    "hunyuan_v1_moe": GATED,
    "ministral": GATED,
    "nemotron": GATED,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "mimo_v2_flash": {"head_dim": 24},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "attention"], "n_groups": 1, "mamba_num_heads": 8},
    "olmo_hybrid": {"layer_types": HALF},
    "xmod": {"default_language": "en_XX"},
    "qwen4_exp_text": GATED
    | {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_embed_dim": 64,
        "ngram_vocab_size_base": 97,
    },
    "reformer": {"is_decoder": True},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1, "cca_time0": 2},
}


def small_config(config_class):
    """A configuration with the sizes above; those that it holds have them too."""
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    own = OTHERS.get(config_class.model_type, {})
    values = {name: size for name, size in SIZES.items() if type(defaults.get(name)) in (int, float)}
    values |= {name: value for name, value in TOKEN_IDS.items() if name in defaults}
    for name, inner in config_class.sub_configs.items():
        if dataclasses.is_dataclass(inner):
            values[name] = small_config(inner)
    return config_class(**values | own)


class NotTriedError(Exception):
    """An architecture of which no small model can be made here, or that transformers itself does not generate with."""


@functools.lru_cache(maxsize=1)
def small_model(name):
    """A model with random weights, the same each time."""
    try:
        config = small_config(transformers.models.auto.configuration_auto.CONFIG_MAPPING[name])
        if hasattr(config, "is_decoder"):
            config.is_decoder = True
        config.use_cache = True
        with torch.device("meta"):
            size = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
        if size > MOST_PARAMETERS:
            raise NotTriedError(f"a small configuration still has {size:,} parameters")
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except NotTriedError:
        raise
    except Exception as error:
        raise NotTriedError(f"cannot be built small: {_text(error)}") from error


def _text(error):
    return " ".join(f"{type(error).__name__}: {error}".split())


def _generate(model, implementation, cache, ids, mask, **options):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        found = model.generate(
            ids,
            attention_mask=mask,
            cache=cache,
            use_cache=True,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
    return found.sequences[:, ids.shape[1] :], torch.stack(found.logits)


def _runs(model):
    """What is generated: a prompt in one piece, and the same with padding in a batch with a longer one, in chunks where transformers
    can; with the tokens and logits of transformers itself."""

    def run(ids, mask, **options):
        return (ids, mask, options), _generate(model, "eager", transformers.DynamicCache(config=model.config), ids, mask, **options)

    ids, mask = prompt(2, PROMPT + PADDING, (0, PADDING))
    try:
        alone = run(ids[1:, PADDING:], mask[1:, PADDING:])
    except Exception as error:
        raise NotTriedError(f"transformers cannot generate with it and a DynamicCache: {_text(error)}") from error
    for options in ({"prefill_chunk_size": CHUNK}, {}):
        try:
            padded = run(ids, mask, **options)
        except Exception:  # noqa: BLE001, S112  (of transformers alone, which then has one run less)
            continue
        # Padding leaves traces in some models, for which nothing else can be blamed.
        if _difference(padded[1][1][:, 1:], alone[1][1]) < LIMIT:
            return [alone, padded]
    return [alone]


def _difference(logits, expected):
    return ((logits - expected).norm() / expected.norm()).item()


def _tokens(model, implementation, runs):
    """What came of generating with a KVFastCache: how, or why not."""
    for (ids, mask, options), (tokens, logits) in runs:
        try:
            cache = KVFastCache(model.config, "float32")
            found, others = _generate(model, implementation, cache, ids, mask, **options)
        except Exception as error:  # noqa: BLE001  (the worst of them is told, and fails the test)
            refused = Path(traceback.extract_tb(error.__traceback__)[-1].filename).parts[-3:-1] == ("engines", "transformers")
            return f"{'refused' if refused else 'fails'}: {_text(error)}"
        if not cache.is_initialized or cache.get_seq_length() != ids.shape[1] + NEW_TOKENS - 1:
            return "unused: the model keeps what it needs elsewhere"
        difference = _difference(others, logits)
        if not found.equal(tokens) or not difference < LIMIT:
            return f"differs: {(found == tokens).sum()} of {tokens.numel()} tokens, logits by {difference:.1e}"
    used = model.config.get_text_config(decoder=True)._attn_implementation
    return "same" if used == "kvfast" else "same, decoded at each step"


def try_architecture(name):
    """What came of an architecture.

    Returns
    -------
    dict
        ``{"not tried": why}``, or of attention by kvfast and, with the same cache, by transformers: ``"same"``,
        ``"same, decoded at each step"``, ``"refused: ..."``, ``"unused: ..."``, ``"fails: ..."`` or ``"differs: ..."``.
    """
    try:
        model = small_model(name)
        runs = _runs(model)
    except NotTriedError as error:
        return {"not tried": str(error)}
    return {"kvfast": _tokens(model, "kvfast", runs), "eager": _tokens(model, "eager", runs[:1])}


def kept_layers(model):
    """What transformers' own cache keeps of a prompt.

    Returns
    -------
    list of tuple
        KV heads, the widths of keys and values, and the window of each layer that keeps some.
    """
    ids, mask = prompt(1, PROMPT)
    model.set_attn_implementation("eager")
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        if model.config.model_type == "minimax":  # which takes its own cache alone
            cache = model(ids, attention_mask=mask, use_cache=True).cache
        else:
            model(ids, attention_mask=mask, use_cache=True, cache=cache)
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None and layer.keys.numel()]
    return [
        (layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], getattr(layer, "sliding_window", None)) for layer in layers
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of CONFIG_MAPPING; all by default")
    parser.add_argument("--write", action="store_true", help=f"keep what came of them in {KEPT.name}")
    arguments = parser.parse_args()
    found, start = {}, time.perf_counter()
    for name in arguments.names or NAMES:
        begun = time.perf_counter()
        found[name] = try_architecture(name)
        print(f"{name}: {found[name]}, {time.perf_counter() - begun:.1f} s", flush=True)
    print(f"{len(found)} in {time.perf_counter() - start:.0f} s")
    if arguments.write:
        before = json.loads(KEPT.read_text())["architectures"] if arguments.names else {}
        kept = {"transformers": transformers.__version__, "architectures": dict(sorted((before | found).items()))}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
