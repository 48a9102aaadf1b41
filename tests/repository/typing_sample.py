"""What a client with strict types writes; see test_typing.py."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvfast
from kvfast.attention.explained import AttendPlan
from kvfast.caches.multi_head import MultiHeadConfig

Floats = NDArray[np.float32]


def decode(cache: kvfast.KVCache | kvfast.RingKVCache, q: Floats, k: Floats, v: Floats) -> Floats:
    cache.append(0, k, v)
    out: Floats = cache.attend(0, q, softcap=30.0, sliding_window=128, num_threads=1)
    out, lse = cache.attend(0, q, out=out, return_lse=True)
    cache.advance(len(k))
    assert len(cache) == cache.layer_length(0) and isinstance(lse, np.ndarray)
    cache.truncate(0)
    plan: AttendPlan = kvfast.KVCache(1, 2, 64).explain(0, (1, 8, 64)) if False else _plan(cache, k, v)
    print(plan.bytes_read, plan.notes, cache.nbytes, cache.dtype, len(cache.copy()))
    return out


def _plan(cache: kvfast.KVCache | kvfast.RingKVCache, k: Floats, v: Floats) -> AttendPlan:
    cache.append(0, k, v)
    return cache.explain(0, 1)


def fused(cache: kvfast.KVCache, qkv: Floats, cos: Floats, sin: Floats) -> NDArray[Any]:
    return cache.write(0, qkv, cos=cos, sin=sin, interleaved=True)


def batch(pool: kvfast.PagedKVCache, q: Floats, k: Floats, v: Floats) -> Floats:
    prompt = [1, 2, 3]
    with pool.match_prefix(prompt, salt=b"tenant") as sequence:
        branch: kvfast.Sequence = sequence.fork()
        slots = pool.slot_mapping([sequence, branch], [1, 1])
        pool.append_batch(0, k, v, slots)
        out: Floats = pool.attend_batch(0, q, [sequence, branch])
        sequence.advance(1, [4])
        branch.free()
    local = kvfast.PagedKVCache(1, 2, 64, num_blocks=8, sliding_window=64, num_sink_tokens=4, rollback=8)
    shown: NDArray[np.int64] = local.new_sequence().positions(0)
    print(pool.num_free_blocks, pool.usage, pool.seq_lens([]).dtype, local.sliding_window, local.rollback, shown)
    return out


def splice(cache: kvfast.KVCache, documents: list[kvfast.Snapshot]) -> bool:
    rope = kvfast.Rope(theta=500000.0, interleaved=True)
    cache.splice(*documents, rope=rope)
    cache.splice(cache, rope=[rope, None], recomputed=1)
    cache.drop(4, 100, rope=kvfast.Rope(frequencies=[1.0, 0.1]))
    return cache.is_spliced


def keep(cache: kvfast.KVCache, path: Path) -> kvfast.KVCache:
    snapshot: kvfast.Snapshot = cache.snapshot([1], {"model": "m"})
    snapshot.save(path)
    try:
        loaded = kvfast.Snapshot.load(path, mmap=True)
    except (kvfast.CorruptFileError, kvfast.IncompatibleSnapshotError) as error:
        raise SystemExit(str(error)) from error
    cache.restore(loaded)
    prompts = kvfast.PromptCache(path.parent, max_bytes=1 << 20)
    found: int = prompts.restore(cache, [1, 2], model="m")
    keys, values = loaded.to_arrays()
    print(found, keys[0].shape, values[0].shape)
    return kvfast.KVCache.from_state_dict(cache.state_dict())


def others(k: Floats, v: Floats) -> None:
    heads = kvfast.MultiHeadKVCache(2, MultiHeadConfig(head_dim=64, bits=4))
    heads = kvfast.MultiHeadKVCache(2, head_dim=64, bits=4)
    heads.push_token(k[0], v[0])
    weights: Floats = heads.attention_scores(k[0], softmax=True)
    latent = kvfast.MLAKVCache(1, 48, 16, dtype="int8")
    latent.append(0, k[:, 0])
    compressed = kvfast.KVCacheCompressor(kvfast.Hybrid(rank=32, quant_bits=4)).compress_kv_3d(k, v)
    print(weights, latent.get_latent(0), compressed.compression_ratio, compressed.attend(k[:1]))
    for row in kvfast.fidelity(k, k, v, formats=["int8", kvfast.KVFormat("int4", rotation="kv")]):
        print(row)
    codes, scales = kvfast.quantize(k, bits=4)
    back: Floats = kvfast.dequantize(codes, scales, head_dim=64)
    out, lse = kvfast.attention(k, k, v, return_lse=True)
    only = kvfast.attention(k, k, v)
    merged: tuple[Floats, Floats] = kvfast.merge_states(out, lse, only, lse)
    with kvfast.use_isa(kvfast.available_isas()[0]):
        print(kvfast.active_isa(), kvfast.get_include(), kvfast.config()["version"], back, merged)


try:
    kvfast.KVCache(1, 2, 64, max_seq_len=1).append(0, np.ones((2, 2, 64)), np.ones((2, 2, 64)))
except kvfast.CacheFullError as full:
    print(full.needed, full.free)
