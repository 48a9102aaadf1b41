"""The contenders of bench/peers.py, each in a process of its own.

A module per peer has `version()` and `Contender(work, name, storage)`, whose result has

- `ready(num_threads)`, if it has to build something for that number of threads first, which is not timed;
- `run(num_threads)`: the work once, over all layers;
- `check()`: after a run, the relative error against NumPy in double precision;
- `nbytes`, `layers`: what one run reads of the cache (reads and writes, when rows are quantised), in how many layers.

What a peer or this build of it cannot do is said with `Missing`. The tensors are the same for all, and every layer
holds the same ones in memory of its own.
"""

from dataclasses import dataclass

import numpy as np

DECODE, BATCH, PREFILL, QUANTISE = "decode", "batch", "prefill", "quantise"
_FAST = ["fast int8", "fast int4"]  # kvfast's caches of these formats, read in its fast precision
_ROWS = ["append int8", "append int4", "append int8-plain", "append int4-plain", "quantize int8", "quantize int4"]

# name: (module, what it stores for each kind of work); the module is imported in the contender's process only.
PEERS = {
    "kvfast": (
        "contenders.own",
        {
            DECODE: ["float32", "float16", "bfloat16", "int8", "k8v4", "int4", "int8-plain", "int4-plain", *_FAST],
            BATCH: ["float16", "bfloat16", "int8", "k8v4", "int4", *_FAST],
            PREFILL: ["float16", "int8", "int4", *_FAST],
            QUANTISE: _ROWS,
        },
    ),
    "PyTorch SDPA": ("contenders.pytorch", {DECODE: ["float32", "bfloat16"], BATCH: ["bfloat16"], PREFILL: ["bfloat16"]}),
    "PyTorch SDPA, grouped": ("contenders.pytorch", {DECODE: ["float32", "bfloat16"], BATCH: ["bfloat16"]}),
    "PyTorch matmul": ("contenders.pytorch", {DECODE: ["bfloat16"], BATCH: ["bfloat16"]}),
    # No batches: as this operation is asked there, it gives no rows for several sequences.
    "OpenVINO": ("contenders.openvino_paged", {DECODE: ["f32", "bf16", "u8", "u4"], PREFILL: ["bf16", "u8", "sage u8", "u4"]}),
    "ONNX Runtime": ("contenders.onnx_gqa", {DECODE: ["f32", "int8", "int4"], BATCH: ["f32", "int8", "int4"], PREFILL: ["int8"]}),
    "llama.cpp": (
        "contenders.ggml",
        {
            DECODE: ["f16", "q8_0", "q4_0"],
            BATCH: ["f16", "q8_0", "q4_0"],
            PREFILL: ["f16", "q8_0", "q4_0"],
            QUANTISE: ["q8_0", "q4_0", "quantize_q8_0", "quantize_q4_0"],
        },
    ),
    "ik_llama.cpp": (
        "contenders.ik_llama",
        {
            DECODE: ["f16", "bf16", "q8_0", "q8_KV", "q4_0"],
            BATCH: ["f16", "bf16", "q8_0", "q8_KV", "q4_0"],
            PREFILL: ["f16", "bf16", "q8_0", "q8_KV", "q4_0"],
        },
    ),
}

# Which of kvfast's storages one of the same width is compared with.
SAME_WIDTH = {
    "float32": "float32",
    "f32": "float32",
    "float16": "float16",
    "f16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "int8": "int8",
    "int8-plain": "int8",
    "u8": "int8",
    "sage u8": "int8",
    "q8_0": "int8",
    "q8_KV": "int8",
    "quantize_q8_0": "int8",
    "k8v4": "k8v4",
    "int4": "int4",
    "int4-plain": "int4",
    "u4": "int4",
    "q4_0": "int4",
    "quantize_q4_0": "int4",
}

# Relative error of the output that a storage may have: random rows, which nothing can predict, are the worst case,
# and llama.cpp adds values up in half precision.
TOLERANCE = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.05, "int8": 0.05, "k8v4": 0.3, "int4": 0.35}


class Missing(Exception):
    """A peer is not there, or cannot do this."""


@dataclass(frozen=True)
class Work:
    """What every contender of a cell does. In a batch there is a query for each sequence; all sequences have the same length,
    and the same keys and values in memory of their own."""

    kind: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    queries: int
    total: int  # bytes that one run has to touch at least

    def tensors(self):
        """k, v of (context, num_kv_heads, head_dim) and q of (queries, num_q_heads, head_dim), float32."""
        rng = np.random.default_rng(0)
        k, v = rng.standard_normal((2, self.context, self.num_kv_heads, self.head_dim), np.float32)
        return k, v, rng.standard_normal((self.queries, self.num_q_heads, self.head_dim), np.float32)

    @property
    def sequences(self):
        return self.queries if self.kind == BATCH else 1

    @property
    def new_tokens(self):
        """Queries of each sequence: its last tokens."""
        return self.queries // self.sequences

    def mask(self):
        """Which keys each query of a sequence sees."""
        return np.arange(self.context) <= self.context - self.new_tokens + np.arange(self.new_tokens)[:, None]

    def layers(self, nbytes):
        """How many layers of `nbytes` make `total` when decoding; a prompt's work does not hang on memory."""
        return 1 if self.kind == PREFILL else max(1, -(-self.total // nbytes))

    def error(self, *outputs):
        """The largest relative error of outputs (queries, num_q_heads, head_dim): first, middle and last query."""
        k, v, q = self.tensors()
        group, sample = self.num_q_heads // self.num_kv_heads, sorted({0, self.queries // 2, self.queries - 1})
        expected = np.empty((len(sample), self.num_q_heads, self.head_dim))
        for head in range(self.num_q_heads):
            keys, values = k[:, head // group].astype(np.float64), v[:, head // group]
            for i, query in enumerate(sample):
                seen = self.context - self.new_tokens + query % self.new_tokens + 1
                scores = keys[:seen] @ q[query, head] * self.head_dim**-0.5
                weights = np.exp(scores - scores.max())
                expected[i, head] = weights @ values[:seen] / weights.sum()
        return max(relative(np.asarray(output)[sample], expected) for output in outputs)


def relative(got, expected):
    """|got - expected| / |expected|; infinite if something is not a number."""
    error = np.linalg.norm(np.asarray(got, np.float64) - expected) / np.linalg.norm(expected)
    return float(error) if np.isfinite(error) else float("inf")


def tolerance(storage):
    """For one of the storages of PEERS."""
    return TOLERANCE[SAME_WIDTH[storage.split()[-1]]]
