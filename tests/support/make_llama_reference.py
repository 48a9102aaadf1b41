"""Writes tests/data/smollm2_logits.npz: what PyTorch and transformers compute on SmolLM2's weights.

    python tests/support/make_llama_reference.py

Needs `torch` and `transformers`. The weights are read here from the GGUF file without kvfast, so
that the two sides share nothing but the file.
"""

from pathlib import Path

import numpy as np

REFERENCE = Path(__file__).parents[1] / "data" / "smollm2_logits.npz"
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must "
    "be in want of a wife. However little known the feelings or views of such a man may be on his "
    "first entering a neighbourhood, this truth is so well fixed in the minds of the surrounding "
    "families, that he is considered as the rightful property of some one or other of their "
    'daughters. "My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield '
    'Park is let at last?" Mr. Bennet replied that he had not. "But it is," returned she; "for Mrs. '
    'Long has just been here, and she told me all about it." Mr. Bennet made no answer. "Do not you '
    'want to know who has taken it?" cried his wife impatiently. "You want to tell me, and I have no '
    'objection to hearing it." This was invitation enough.'
)
POSITIONS = [0, 1, 17, 64, 127, -1]


def transformers_model(path):
    """SmolLM2 in transformers, float32, with the dequantised weights of the GGUF file at `path`."""
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(path)
    meta = {key.removeprefix("llama."): field.contents() for key, field in reader.fields.items()}
    heads, kv_heads = meta["attention.head_count"], meta["attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=meta["vocab_size"],
        hidden_size=meta["embedding_length"],
        intermediate_size=meta["feed_forward_length"],
        num_hidden_layers=meta["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=meta["context_length"],
        rms_norm_eps=meta["attention.layer_norm_rms_epsilon"],
        rope_theta=meta["rope.freq_base"],
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in reader.tensors:
        weight = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part = tensor.name.removesuffix(".weight").split(".")
        if part[0] != "blk":
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[part[0]]
        else:
            name = f"model.layers.{part[1]}.{names[part[2]]}"
            if part[2] in ("attn_q", "attn_k"):  # the converter's permutation, backwards
                groups = heads if part[2] == "attn_q" else kv_heads
                rows, columns = weight.shape
                weight = weight.reshape(groups, rows // groups // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        state[name + ".weight"] = torch.from_numpy(np.ascontiguousarray(weight))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    model.load_state_dict(state)
    return model


def transformers_logits(model, tokens, positions):
    """Logits at some positions, (len(positions), vocab_size) float32."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, positions].numpy()


def main():
    from kvfast import llama

    path = llama.fetch_model()
    tokens = llama.Tokenizer(path).encode(TEXT)
    logits = transformers_logits(transformers_model(path), tokens, POSITIONS)
    REFERENCE.parent.mkdir(exist_ok=True)
    np.savez_compressed(REFERENCE, tokens=tokens, positions=np.array(POSITIONS), logits=logits)
    print(f"{REFERENCE}: {len(tokens)} tokens, {REFERENCE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
