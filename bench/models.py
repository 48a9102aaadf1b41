"""Shapes of known models."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    name: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int


SMOLLM2_135M = Model("SmolLM2-135M", 30, 9, 3, 64)
LLAMA_3_2_1B = Model("Llama-3.2-1B", 16, 32, 8, 64)
LLAMA_3_8B = Model("Llama-3-8B", 32, 32, 8, 128)
QWEN3_30B_A3B = Model("Qwen3-30B-A3B", 48, 32, 4, 128)
