"""Arguments that fit: for every parameter of every public name of kvfast a function that makes one.

A parameter is looked up as ``Class.method.parameter``, ``method.parameter`` and ``parameter``, so that what is new without
a recipe is found by `parameters_without_recipe`.
"""

import copy
import mmap
import pickle
from importlib.util import find_spec

import numpy as np
from cache_kinds import DTYPES
from fuzz_names import RECORDS, parameters, public_names

import kvfast

# What every object answers to.
PROTOCOL = {
    "repr": repr,
    "len": len,
    "bool": bool,
    "hash": hash,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "equal": lambda one: one == copy.copy(one),
    "iterate": lambda one: next(iter(one), None),
}
FORMATS = [*DTYPES, "int8/int4", "float16/int8"]


def recipe_of(name, parameter):
    """The function that makes a fitting argument, or None."""
    owner, _, method = name.rpartition(".")
    for key in (f"{owner}.{method}.{parameter}", f"{method}.{parameter}", parameter):
        if key in RECIPES:
            return RECIPES[key]
    return None


def parameters_without_recipe():
    return [
        f"{name}({parameter})"
        for name, (function, _) in public_names().items()
        if function is not None and name not in RECORDS
        for parameter in parameters(function)
        if recipe_of(name, parameter) is None
    ]


class Call:
    """One call that is made up: what fits `target`, an object of the world, or None."""

    def __init__(self, world, target):
        self.world, self.target, self.rng = world, target, world.rng
        self.tokens = self.rng.choice([1, 1, 1, 2, 3, 17, 40])
        self.batch = self.chosen(target)
        self.given = None  # sequences or a plain table
        layout = getattr(target, "layout", None)
        self.heads = getattr(target, "num_kv_heads", getattr(layout, "num_heads", getattr(target, "num_heads", 2)))
        self.dim = getattr(target, "head_dim", getattr(layout, "head_dim", 20))
        self.v_dim = getattr(target, "v_head_dim", self.dim)
        self.latent = getattr(target, "latent_dim", 20)
        self.group = self.rng.choice([1, 2, 3])
        self.bits = self.rng.choice([8, 4])

    def pick(self, *options):
        return self.rng.choice(options)

    def floats(self, *shape):
        values = self.world.numbers.standard_normal(shape, np.float32)
        return values if self.rng.random() < 0.8 else values.astype(np.float16)

    def integers(self, most, *shape):
        return self.world.numbers.integers(0, most, shape)

    def any(self, *kinds):
        return self.world.any(self.rng, *kinds)

    def chosen(self, pool):
        """Some sequences of a pool."""
        mine = [one for one in self.world.objects if getattr(one, "_pool", None) is pool and pool is not None]
        return self.rng.sample(mine, min(len(mine), self.rng.choice([1, 2, 3])))

    def layer(self):
        return self.rng.randrange(getattr(self.target, "num_layers", 1))

    def num_queries(self):
        """At most the tokens that a layer of the target holds, most of the time."""
        held = getattr(self.target, "layer_length", None)
        try:
            return max(1, min(self.tokens, held(0)))
        except (TypeError, ValueError):
            return self.tokens

    def queries(self):
        name = type(self.target).__name__
        if name == "CompressedKV" and self.target.layout.is_batched:
            return self.floats(self.target.layout.batch, 1, self.heads * self.group, self.dim)
        if name in ("PagedKVCache", "PagedMLAKVCache"):
            return self.floats(max(1, len(self.batch)), self.heads * self.group, self.dim)
        if self.target is None:
            return self.floats(min(self.tokens, 3), 2 * self.group, 20)
        return self.floats(self.num_queries(), self.heads * self.group, self.dim)

    def out(self):
        shape = list(self.queries().shape)
        shape[-1] = getattr(self.target, "v_head_dim", shape[-1])
        return np.zeros(shape, self.pick(np.float32, np.float16))

    def slots(self):
        try:
            return self.target.slot_mapping(self.batch, self.tokens)[: self.tokens]
        except (ValueError, RuntimeError):
            return np.arange(self.tokens)

    def path(self):
        return str(self.world.folder / self.pick("a", "b", "folder"))

    def codes(self):
        if self.bits == 8:
            return self.integers(100, 3, 2, 20).astype(np.int8)
        return self.integers(256, 3, 2, 10).astype(np.uint8)

    def config(self):
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_size": 64,
            "max_position_embeddings": 128,
        }

    def state(self):
        """What `state_dict` tells, a little changed at times."""
        one = self.any("KVCache", "RingKVCache", "Sequence", "MLAKVCache", "Snapshot", "CompressedKV")
        arrays = one.state_dict() if one is not None else {}
        if arrays and self.rng.random() < 0.5:
            name = self.rng.choice(sorted(arrays))
            arrays[name] = self.world.hostile(arrays[name])
        return arrays


def small(*sizes):
    return lambda call: call.rng.choice(sizes)


def fmt(call):
    return call.rng.choice(FORMATS)


def none_or(*values):
    return lambda call: None if call.rng.random() < 0.5 else call.rng.choice(values)


CACHES = "KVCache", "RingKVCache", "Sequence", "MLAKVCache", "MLASequence"
RECIPES = {
    # sizes
    "num_layers": small(1, 2, 3),
    "num_kv_heads": lambda c: c.heads if c.target is None else c.pick(1, 2),
    "num_heads": small(1, 2, 3),
    "head_dim": small(1, 15, 16, 20, 20, 20, 64, 512),
    "latent_dim": small(1, 20, 32, 512),
    "rope_dim": small(0, 8, 128),
    "v_head_dim": none_or(1, 16, 20, 64),
    "max_seq_len": none_or(1, 64, 300),
    "block_size": none_or(16, 32, 64),
    "num_blocks": small(1, 3, 20),
    "batch": none_or(1, 2),
    "seq_len": small(1, 40),
    "RingKVCache.sliding_window": small(1, 30, 100, [30, None], [16, 40]),
    "rollback": small(0, 10, 64),
    "num_sink_tokens": small(0, 1, 5),
    "rotary_dim": none_or(16, 20),
    "num_q_heads": lambda c: c.heads * c.group,
    # formats
    "dtype": fmt,
    "k_dtype": none_or("int8", "int4", "float32"),
    "v_dtype": none_or("int8", "int4", "float16"),
    "bits": lambda c: c.pick(c.bits, 4, 8, 2, (3, 5)),
    "quantize.bits": lambda c: c.bits,
    "Quantize.bits": small(8, 4, "k8v4", None),
    "rotation": small("", "k", "kv"),
    "MultiHeadConfig.rotation": small(True, False),
    "codebook": small("uniform", "gaussian"),
    "centring": small(True, False),
    "per_channel": small(True, False),
    "block": none_or(32, 64),
    "num_first_float_tokens": small(0, 16),
    "num_recent_float_tokens": small(0, 16, 64),
    "recent_by_query": small(True, False),
    "clip_search": small(True, False),
    "value": fmt,
    "formats": lambda c: [fmt(c), fmt(c)],
    "explain.dtype": small("float32", "float16"),
    "explain_batch.dtype": small("float32", "bfloat16"),
    "LowRank.dtype": small("float16", "int8"),
    "plan.dtype": fmt,
    "secure": small(False, True),
    "convert": small(False, True),
    "buffer": lambda c: c.pick(None, None, np.frombuffer(mmap.mmap(-1, 1 << 22), np.uint8)),
    "data": lambda c: c.any("Snapshot").to_bytes() if c.any("Snapshot") is not None else b"",
    # rope
    "RingKVCache.rope": lambda c: c.pick(None, kvfast.Rope(), kvfast.Rope(1.5, rotary_dim=16, interleaved=True)),
    "splice.rope": lambda c: c.pick(None, kvfast.Rope(), kvfast.Rope(rotary_dim=16)),
    "drop.rope": lambda c: c.pick(None, kvfast.Rope()),
    "theta": small(10000.0, 1.5),
    "frequencies": none_or([1.0, 0.1]),
    "recomputed": small(0, 0, 1),
    "parts": lambda c: [one for one in (c.any(*CACHES, "Snapshot") for _ in range(c.pick(1, 2))) if one is not None],
    "first": small(0, 3, 20),
    "last": small(5, 20, 40),
    "cos": lambda c: c.floats(400, 8),
    "sin": lambda c: c.floats(400, 8),
    "positions": lambda c: c.integers(400, c.tokens),
    "q_norm": lambda c: c.floats(c.dim),
    "k_norm": lambda c: c.floats(c.dim),
    "eps": small(1e-6, 0.0),
    "interleaved": small(True, False),
    # tokens
    "layer": Call.layer,
    "k": lambda c: c.floats(c.tokens, c.heads, c.dim),
    "v": lambda c: c.floats(c.tokens, c.heads, c.v_dim),
    "q": Call.queries,
    "explain.q": lambda c: c.pick(1, (1, c.heads * c.group, c.dim), c.floats(1, c.heads, c.dim)),
    "explain_batch.q": lambda c: c.pick(1, (1, c.heads * c.group, c.dim), c.floats(1, c.heads, c.dim)),
    "attention.q": lambda c: c.floats(1, 2 * c.group, 20),
    "latent": lambda c: c.floats(c.tokens, c.dim),
    "MLAKVCache.append_kv.k": lambda c: np.repeat(c.floats(c.tokens, 1, 9 + c.target.rope_dim), 2, 1),
    "MLASequence.append_kv.k": lambda c: np.repeat(c.floats(c.tokens, 1, 9 + c.target.rope_dim), 2, 1),
    "append_kv.v": lambda c: c.floats(c.tokens, 2, 5),
    "down_k": lambda c: c.floats(2, 9, c.latent),
    "down_v": lambda c: c.floats(2, 5, c.latent),
    "up_k": lambda c: c.floats(c.latent, 2, 9),
    "up_v": lambda c: c.floats(c.latent, 2, 5),
    "qkv": lambda c: c.floats(c.tokens, (c.heads * c.group + c.heads) * c.dim + c.heads * c.v_dim),
    "x": lambda c: c.floats(3, 2, 20),
    "split_qkv_norm_rope.head_dim": lambda c: 20,
    "keys": lambda c: c.floats(c.heads, c.dim),
    "values": lambda c: c.floats(c.heads, c.dim),
    "push_tokens.keys": lambda c: c.floats(c.tokens, c.heads, c.dim),
    "push_tokens.values": lambda c: c.floats(c.tokens, c.heads, c.dim),
    "from_arrays.keys": lambda c: [c.floats(c.tokens, 2 * 20)] * 2,
    "from_arrays.values": lambda c: [c.floats(c.tokens, 2 * 20)] * 2,
    "from_arrays.num_kv_heads": small(1, 2, 4),
    "compress_kv.k": lambda c: c.floats(2, 2, c.tokens, 20),
    "compress_kv.v": lambda c: c.floats(2, 2, c.tokens, 20),
    "compress_kv_3d.k": lambda c: c.floats(2, c.tokens, 20),
    "compress_kv_3d.v": lambda c: c.floats(2, c.tokens, 20),
    "codes": Call.codes,
    "scales": lambda c: c.floats(3, 2),
    "dequantize.head_dim": none_or(20, 19),
    "dequantize.out": lambda c: np.zeros((3, 2, 20), np.float32),
    "n": lambda c: c.tokens if c.rng.random() < 0.6 else c.rng.randrange(200),
    "keep": small([], [0], [0, 1], [1], [0, 2, 5], [40], None),
    "num_tokens": lambda c: c.tokens,
    "queries": lambda c: c.floats(c.target.num_q_heads, c.dim),
    "token_ids": lambda c: c.integers(3, c.tokens),
    "snapshot.token_ids": lambda c: c.integers(3, len(c.target)),
    "save.token_ids": lambda c: c.integers(3, len(c.target)),
    "PromptCache.save.token_ids": lambda c: c.integers(3, c.tokens),
    "metadata": lambda c: {"model": "m"},
    "salt": small(b"", b"a"),
    "max_state_bytes": none_or(1, 1 << 16),
    "states": lambda c: {"a": c.floats(3, 5), "b": c.integers(9, 7)},
    "checkpoints": small(0, 2),
    "uncounted": small("raise", "drop"),
    "out_a": lambda c: np.ones((3, 4, 20), np.float32),
    "out_b": lambda c: c.floats(3, 4, 20),
    "lse_a": lambda c: c.floats(3, 4),
    "lse_b": lambda c: c.floats(3, 4),
    "i": small(0, 1),
    "start": small(0),
    "stop": small(2),
    # attention
    "out": Call.out,
    "scale": small(0.1, -1.0),
    "causal": small(True, False),
    "softcap": small(30.0, 0.5),
    "sliding_window": small(1, 16, 100),
    "attention_chunk_size": small(1, 16, 100),
    "spans": small([(0, 1)], [(0, 3), (5, 9)], [(0, 100)], []),
    "clamp_spans": small(True, False),
    "tree_parents": small([-1], [-1, 0], [-1, -1, 0, 1], []),
    "indices": lambda c: np.array([[c.rng.randrange(3), -1]] * c.rng.choice([1, c.tokens, 2])),
    "index_block": small(1, 16),
    "precision": small("exact", "fast", "invariant", None),
    "top_k.q": lambda c: c.floats(1, 4, c.target.latent_dim),
    "top_k.weights": lambda c: c.floats(1, 4),
    "top_k.k": small(1, 3, 100),
    "top_k_batch.q": lambda c: c.floats(len(c.batch), 4, c.target.latent_dim),
    "top_k_batch.weights": lambda c: c.floats(len(c.batch), 4),
    "top_k_batch.k": small(1, 3, 100),
    "sinks": lambda c: c.floats(c.heads * c.group),
    "alibi_slopes": lambda c: c.floats(c.heads * c.group),
    "return_lse": small(True, False),
    "softmax": small(True, False),
    "num_splits": small(0, 1, 3, 1000),
    "num_threads": small(1, 2, None),
    "cascade": small(True, False),
    "zero_nonfinite": small(True, False),
    "sequences": lambda c: (c.any("PreparedBatch") if c.rng.random() < 0.1 else None) or c.batch,
    "block_table": lambda c: c.target.block_table(c.batch),
    "seq_lens": lambda c: c.target.seq_lens(c.batch),
    "cu_seqlens_q": lambda c: np.arange(len(c.batch) + 1),
    "slot_mapping": Call.slots,
    "index": small(0, 1),
    "max_num_seqs": none_or(1, 3, 100),
    "block_id": small(0, 1),
    "block_ids": small([0], [0, 1], [1, 0], []),
    "first_float_rows": lambda c: np.zeros(getattr(c.target, "first_float_rows_nbytes", 0), np.uint8),
    "as_computed": small(True, False),
    # whole caches
    "cache": lambda c: c.any(*CACHES, "PagedKVCache"),
    "snapshot": lambda c: c.any("Snapshot"),
    "sequence": lambda c: c.any("Sequence", "MLASequence"),
    "compress_cache.cache": lambda c: c.any(*CACHES, "MultiHeadKVCache"),
    "decompress_to_cache.cache": lambda c: c.any(*CACHES, "MultiHeadKVCache"),
    "compressed": lambda c: c.any("CompressedKV"),
    "compressor": lambda c: c.any("KVCacheCompressor"),
    "arrays": Call.state,
    "layers": lambda c: [c.any("CompressedKV")] * 2,
    "config": lambda c: c.any("MultiHeadConfig"),
    "method": lambda c: c.any("LowRank", "VectorQuantization", "Hybrid", "Quantize"),
    "rank": none_or(1, 4, 16),
    "energy": none_or(0.9, 1.0),
    "codebook_size": small(1, 4, 256),
    "num_subvectors": none_or(1, 4),
    "seed": small(0, 7),
    "quant_bits": small(8, 4),
    "path": Call.path,
    "source": lambda c: c.rng.choice([c.path(), c.any("Snapshot")]),
    "mmap": small(True, False),
    "key": none_or(bytes(32)) if find_spec("cryptography") else small(None),
    "folder": Call.path,
    "max_bytes": none_or(0, 10**6),
    "model": small("", "m"),
    "store": Call.path,
    "near": none_or("near"),
    "chunk_tokens": small(16, 64, 256),
    "secret": small(b"", b"s"),
    "time_limit": small(1.0, 10),
    "background": small(True, False),
    "tokens_per_second": none_or(1.0, 1e9),
    "prompts": lambda c: c.any("PromptCache"),
    "use_prompt_cache.save": small(True, False),
    "Calibration.rows": lambda c: np.tile(np.eye(20), (2, 2, 1, 1)),
    "Calibration.channels": lambda c: np.tile(np.eye(20), (2, 2, 1, 1)),
    "calibration": none_or(kvfast.Calibration(*np.tile(np.eye(20), (2, 2, 2, 1, 1)))),
    # the machine and the plan
    "plan.model": Call.config,
    "context": none_or(1, 4096),
    "memory": none_or(1 << 30),
    "bandwidth": lambda c: 1e10,
    "weight_bytes": none_or(10**9),
    "weight_bytes_read": none_or(10**8),
    "plan.batch": small(1, 3),
    "plan.drafts": none_or(1, 3),
    "engine": small("kvfast", "vllm"),
    "name": lambda c: c.rng.choice(kvfast.available_isas()),
    "nbytes": small(1, 100_000),
    "kind": small("int8", "float32"),
    "max_error": small(0.02, 1.0),
    "metric": small("output_error", "kl"),
    "fidelity.q": lambda c: c.floats(3, 4, 20),
    "choose_format.q": lambda c: c.floats(3, 4, 20),
}
