"""A model of `kvfast.llama` as a folder in Hugging Face's layout, for engines that read only those."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def save_folder(model, folder):
    """Write ``config.json`` and ``model.safetensors``, in float32. Needs the package safetensors.

    Parameters
    ----------
    model : kvfast.llama.Model
        Of the architecture llama, without scaled rotary embeddings.
    folder : path-like
    """
    from safetensors.numpy import save_file

    config, weights = model.config, model.weights
    frequencies = weights.rope_frequencies
    theta = float(frequencies[1]) ** (-config.rope_dims / 2)
    even = theta ** (-np.arange(0, config.rope_dims, 2) / config.rope_dims)
    if config.architecture != "llama" or config.rope_dims != config.head_dim or not np.allclose(frequencies, even):
        raise ValueError(f"the model must be a llama without scaled rotary embeddings, got {config.architecture}")
    q, kv = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.output_norm}
    is_tied = weights.output is weights.embedding
    if not is_tied:
        tensors["lm_head.weight"] = weights.output
    for index, layer in enumerate(weights.layers):
        parts = {
            "input_layernorm": layer.attn_norm,
            "self_attn.q_proj": layer.qkv[:q],
            "self_attn.k_proj": layer.qkv[q : q + kv],
            "self_attn.v_proj": layer.qkv[q + kv :],
            "self_attn.o_proj": layer.attn_output,
            "post_attention_layernorm": layer.ffn_norm,
            "mlp.gate_proj": layer.gate_up[: config.ffn_size],
            "mlp.up_proj": layer.gate_up[config.ffn_size :],
            "mlp.down_proj": layer.ffn_down,
        }
        tensors |= {f"model.layers.{index}.{name}.weight": array for name, array in parts.items()}
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": round(theta, 3),
        "tie_word_embeddings": is_tied,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    Path(folder, "config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    save_file(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()}, Path(folder, "model.safetensors"), {"format": "pt"}
    )
