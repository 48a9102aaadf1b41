"""What the config.json of some models says of their caches."""

CONFIGS = {
    "Llama-3.2-1B": {
        "model_type": "llama", "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "hidden_size": 2048, "max_position_embeddings": 131072,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "hidden_size": 2048, "max_position_embeddings": 40960, "sliding_window": None,
        "use_sliding_window": False, "max_window_layers": 48,
    },
    "Mistral-7B-v0.1": {
        "model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_size": 4096, "max_position_embeddings": 32768, "sliding_window": 4096,
    },
    "Falcon-7B": {
        "model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "num_kv_heads": 71, "multi_query": True,
        "hidden_size": 4544,
    },
    "Gemma-2-2B": {
        "model_type": "gemma2", "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "hidden_size": 2304, "max_position_embeddings": 8192, "sliding_window": 4096,
    },
    "Gemma-3-1B": {
        "model_type": "gemma3_text", "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "hidden_size": 1152, "max_position_embeddings": 32768, "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "Gemma-3-4B": {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024},
        "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27, "num_attention_heads": 16},
    },
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2", "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "hidden_size": 2048, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "max_position_embeddings": 163840,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "max_position_embeddings": 163840,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "hidden_size": 2880, "max_position_embeddings": 131072, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
}  # fmt: skip

# Models of which some layers keep no keys and values of their own, by the fields that say so; and how many do.
GQA = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
HYBRIDS = {
    "Qwen3-Next-80B-A3B": (12, {
        "model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "hidden_size": 2048, "full_attention_interval": 4,
    }),
    "Jamba-v0.1": (4, GQA | {"model_type": "jamba", "num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4}),
    "Bamba-9B": (3, GQA | {"model_type": "bamba", "num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27]}),
    "Nemotron-H-8B": (4, GQA | {
        "model_type": "nemotron_h", "num_hidden_layers": 52, "attention_head_dim": 128,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    }),
    "LFM2-1.2B": (6, GQA | {
        "model_type": "lfm2", "num_hidden_layers": 16, "hidden_size": 2048, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    }),
    "Kimi-Linear-48B-A3B": (7, LATENTS | {
        "model_type": "kimi_linear", "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 2304,
        "head_dim": 72, "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "kda_layers": [i for i in range(1, 27) if i % 4], "head_dim": 128,
            "num_heads": 32, "short_conv_kernel_size": 4,
        },
    }),
    "RecurrentGemma-2B": (8, {
        "model_type": "recurrent_gemma", "num_hidden_layers": 26, "num_attention_heads": 10, "num_key_value_heads": 1, "hidden_size": 2560,
        "attention_window_size": 2048, "block_types": ["recurrent", "recurrent", "attention"],
    }),
    "Zamba-7B-v1": (13, {
        "model_type": "zamba", "num_hidden_layers": 76, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 3712,
        "attention_hidden_size": 7424, "attn_layer_period": 6, "attn_layer_offset": 4,
    }),
    "Zamba2-1.2B": (6, {
        "model_type": "zamba2", "num_hidden_layers": 38, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 2048,
        "attention_hidden_size": 4096, "attention_head_dim": 128,
        "layers_block_type": ["hybrid" if i % 6 == 5 else "mamba" for i in range(38)],
    }),
    "Granite-4.0-H-Tiny": (4, {
        "model_type": "granitemoehybrid", "num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4,
        "hidden_size": 1536, "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    }),
    "Falcon-H1-1.5B": (24, {
        "model_type": "falcon_h1", "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
        "hidden_size": 2048, "mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64,
    }),
    "LongCat-Flash": (56, LATENTS | {"model_type": "longcat_flash", "num_layers": 28, "num_attention_heads": 64, "hidden_size": 6144}),
    "Llama-3.2-11B-Vision": (32, {
        "model_type": "mllama", "vision_config": {"model_type": "mllama_vision_model", "num_hidden_layers": 32},
        "text_config": GQA | {"model_type": "mllama_text_model", "num_hidden_layers": 40, "cross_attention_layers": [*range(3, 40, 5)]},
    }),
    "distilbart-cnn-12-6": (6, {
        "model_type": "bart", "num_hidden_layers": 12, "encoder_layers": 12, "decoder_layers": 6, "encoder_attention_heads": 16,
        "decoder_attention_heads": 16, "d_model": 1024, "is_encoder_decoder": True,
    }),
}  # fmt: skip
