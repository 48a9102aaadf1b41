"""Writes a random model of a few thousand weights as GGUF, for tests that should not download one."""

import gguf
import numpy as np

SIZES = {"layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 12, "hidden": 32, "ffn": 48}
CONTEXT, NORM_EPS, ROPE_BASE = 65536, 1e-5, 10000.0
STATE = {"conv_kernel": 4, "inner_size": 64, "state_size": 16, "time_step_rank": 4}  # of recurrent layers
WINDOW = 32
# Every byte, as GPT-2 spells it, some merged words, and a control token.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
ALPHABET = [chr(byte) for byte in PRINTABLE] + [chr(256 + index) for index in range(256 - len(PRINTABLE))]
MERGES = ["t h", "th e", "Ġ the", "1 2"]
TOKENS = ALPHABET + [merge.replace(" ", "") for merge in MERGES] + ["<|endoftext|>"]


def write_model(path, arch="llama", *, tied=True, rope_factors=False, seed=0, drop=(), extra=(), metadata=None):
    """Write the model; returns its tensors, {name: float32 array}, as they are in the file.

    `drop` and `extra` name tensors to leave out and to add; `metadata` overrides values by key, None
    leaves the key out.
    """
    tensors = random_tensors(arch, tied, rope_factors, seed)
    for name in drop:
        del tensors[name]
    for name in extra:
        tensors[name] = np.zeros(4, np.float32)
    values = {
        f"{arch}.block_count": SIZES["layers"],
        f"{arch}.context_length": CONTEXT,
        f"{arch}.embedding_length": SIZES["hidden"],
        f"{arch}.feed_forward_length": SIZES["ffn"],
        f"{arch}.attention.head_count": SIZES["q_heads"],
        f"{arch}.attention.head_count_kv": SIZES["kv_heads"],
        f"{arch}.attention.key_length": SIZES["head_dim"],
        f"{arch}.attention.value_length": SIZES["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": NORM_EPS,
        f"{arch}.rope.freq_base": ROPE_BASE,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 1) + [3],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": len(TOKENS) - 1,
    }
    if arch == "gemma2":
        values["gemma2.attention.sliding_window"] = WINDOW
    if arch in ("mamba", "jamba"):
        values |= {f"{arch}.ssm.{name}": value for name, value in STATE.items()}
    if arch == "jamba":  # layers are recurrent where they have no KV heads, and heads as wide as the model
        values |= {"jamba.attention.head_count_kv": [0, SIZES["kv_heads"]], "jamba.attention.key_length": 8}
        values |= {"jamba.attention.value_length": 8}
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (values | (metadata or {})).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            add.get(type(value), writer.add_array)(key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def random_tensors(arch, tied, rope_factors, seed):
    random = np.random.default_rng(seed)
    hidden, ffn, head_dim = SIZES["hidden"], SIZES["ffn"], 8 if arch == "jamba" else SIZES["head_dim"]
    q_rows, kv_rows = SIZES["q_heads"] * head_dim, SIZES["kv_heads"] * head_dim

    def matrix(rows, columns):
        return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def near_one(size):
        return (1 + 0.1 * random.standard_normal(size)).astype(np.float32)

    tensors = {"token_embd.weight": matrix(len(TOKENS), hidden), "output_norm.weight": near_one(hidden)}
    if not tied:
        tensors["output.weight"] = matrix(len(TOKENS), hidden)
    if rope_factors:
        tensors["rope_freqs.weight"] = np.linspace(1, 8, head_dim // 2, dtype=np.float32)
    for layer in range(SIZES["layers"]):
        parts = {
            "attn_norm.weight": near_one(hidden),
            "attn_q.weight": 3 * matrix(q_rows, hidden),  # 3: attention that is far from uniform
            "attn_k.weight": 3 * matrix(kv_rows, hidden),
            "attn_v.weight": matrix(kv_rows, hidden),
            "attn_output.weight": matrix(hidden, q_rows),
            "ffn_norm.weight": near_one(hidden),
            "ffn_gate.weight": matrix(ffn, hidden),
            "ffn_up.weight": matrix(ffn, hidden),
            "ffn_down.weight": matrix(hidden, ffn),
        }
        if arch == "qwen2":
            rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
            parts |= {f"attn_{name}.bias": near_one(size) for name, size in rows.items()}
        if arch == "qwen3":
            parts |= {"attn_q_norm.weight": near_one(head_dim), "attn_k_norm.weight": near_one(head_dim)}
        if arch == "gemma2":
            parts |= {f"post_{name}.weight": near_one(hidden) for name in ("attention_norm", "ffw_norm")}
        if arch == "mamba" or arch == "jamba" and layer == 0:
            kept = "attn_norm" if arch == "mamba" else ("attn_norm", "ffn")
            parts = {name: array for name, array in parts.items() if name.startswith(kept)} | recurrent_parts(arch, matrix, near_one)
        tensors |= {f"blk.{layer}.{name}": array for name, array in parts.items()}
    return tensors


def recurrent_parts(arch, matrix, near_one):
    hidden, (conv, inner, state, rank) = SIZES["hidden"], STATE.values()
    parts = {
        "ssm_in.weight": matrix(2 * inner, hidden),
        "ssm_conv1d.weight": matrix(inner, conv),
        "ssm_conv1d.bias": near_one(inner),
        "ssm_x.weight": matrix(rank + 2 * state, inner),
        "ssm_dt.weight": matrix(inner, rank),
        "ssm_dt.bias": near_one(inner),
        "ssm_a": -np.exp(matrix(inner, state)),
        "ssm_d": near_one(inner),
        "ssm_out.weight": matrix(hidden, inner),
    }
    if arch == "jamba":
        parts |= {f"ssm_{name}_norm.weight": near_one(size) for name, size in (("dt", rank), ("b", state), ("c", state))}
    return parts
