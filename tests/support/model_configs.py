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
        "model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": True, "hidden_size": 4544,
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
