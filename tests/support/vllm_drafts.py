"""Tiny random models that draft for one of `vllm_engines`, one of each kind."""

import json

import torch
import transformers
from safetensors.torch import load_file, save_file
from vllm_engines import MODELS, SMALL


def save_drafts(kind, target, folder):
    """The speculative_config for a Llama in a folder, for which it makes a model of another folder."""
    if kind == "ngram":
        return {"method": kind, "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    tensors, size = load_file(target / "model.safetensors"), SMALL["hidden_size"]
    torch.manual_seed(1)
    ones, folder = torch.ones(size), folder / kind
    layers = {name.removeprefix("model."): one for name, one in tensors.items() if name.startswith("model.layers.0.")}
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
    if kind == "eagle":
        config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        del layers["layers.0.input_layernorm.weight"]  # which its first layer lacks
        draft = layers | {"fc.weight": torch.randn(size, 2 * size) * 0.1, "embed_tokens.weight": tensors["model.embed_tokens.weight"]}
    elif kind == "eagle3":
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": SMALL["vocab_size"]}
        config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
        draft = {name.replace("layers.0", "midlayer"): one for name, one in layers.items()}
        for name in "qkv":  # of the embedding and of hidden states
            draft[f"midlayer.self_attn.{name}_proj.weight"] = draft[f"midlayer.self_attn.{name}_proj.weight"].repeat(1, 2)
        more = {"midlayer.hidden_norm.weight": ones, "norm.weight": ones.clone(), "fc.weight": torch.randn(size, 3 * size) * 0.1}
        draft |= more | {"lm_head.weight": tensors["lm_head.weight"]}
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL | {"num_hidden_layers": 1}))
        places = {"target_layer_ids": [0, 2], "mask_token_id": SMALL["vocab_size"] - 1}
        more = {"architectures": ["DFlashDraftModel"], "block_size": 4, "num_target_layers": 4, "dflash_config": places}
        config = model.config.to_dict() | more
        draft = {name: one for name, one in model.model.state_dict().items() if not name.startswith("embed_tokens")}
        draft |= {"hidden_norm.weight": ones, "fc.weight": torch.randn(size, 2 * size) * 0.1}
    folder.mkdir()
    save_file({name: one.contiguous() for name, one in draft.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return {"method": kind, "model": str(folder), "num_speculative_tokens": 3}


def save_own_drafts(folder):
    """A DeepSeek V3 whose own last layer drafts, with random weights, in a folder. Returns its speculative_config."""
    torch.manual_seed(0)
    options = MODELS["deepseek"][1] | {"topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "first_k_dense_replace": 4}
    config = transformers.DeepseekV3Config(**SMALL | options)
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors, size, last = load_file(path), SMALL["hidden_size"], config.num_hidden_layers
    before, after = f"layers.{last - 1}.", f"layers.{last}."
    layer = {name.replace(before, after): one.clone() for name, one in tensors.items() if before in name}
    own = {"enorm.weight": torch.ones(size), "hnorm.weight": torch.ones(size), "eh_proj.weight": torch.randn(size, 2 * size) * 0.1}
    own |= {"shared_head.norm.weight": torch.ones(size), "shared_head.head.weight": tensors["lm_head.weight"].clone()}
    own |= {"embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | layer | {f"model.{after}{name}": one for name, one in own.items()}, path, {"format": "pt"})
    return {"method": "mtp", "num_speculative_tokens": 1}
