"""write of a fused projection (split, RMS norm, rotation, encode) against the same steps in NumPy, and against
one read and one write of its bytes."""

from statistics import median
from time import perf_counter

import numpy as np
import pytest

import kvfast
from kvfast.tools.cli.bench.cases import LLAMA_3_8B, SMOLLM2_135M


def in_numpy(qkv, model, cos, sin, weight):
    """Queries, and INT8 codes and scales of keys and values."""
    x = qkv.reshape(len(qkv), -1, model.head_dim)
    num_rotated = model.num_q_heads + model.num_kv_heads
    qk, half = x[:, :num_rotated], model.head_dim // 2
    qk = qk / np.sqrt(np.mean(qk * qk, axis=-1, keepdims=True) + np.float32(1e-6)) * weight
    first, second = qk[..., :half], qk[..., half:]
    c, s = cos[: len(qkv), None], sin[: len(qkv), None]
    qk = np.concatenate([first * c - second * s, second * c + first * s], axis=-1)
    stored = []
    for rows in (qk[:, model.num_q_heads :], x[:, num_rotated:]):
        scales = np.abs(rows).max(axis=-1, keepdims=True) / 127
        stored.append((np.rint(rows / scales).astype(np.int8), scales))
    return qk[:, : model.num_q_heads], stored


def read_and_write(source, target):
    """Read all of the source, write all of the target."""
    target[:] = source[: len(target)]
    return source[len(target) :].max()


@pytest.mark.parametrize("n", [1, 512])
@pytest.mark.parametrize("model", [LLAMA_3_8B, SMOLLM2_135M], ids=lambda model: model.name)
def bench_write(benchmark, took, model, n, threads):
    rng = np.random.default_rng(0)
    width = (model.num_q_heads + 2 * model.num_kv_heads) * model.head_dim
    qkv = rng.standard_normal((n, width), np.float32)
    weight = rng.standard_normal(model.head_dim).astype(np.float32)
    angles = np.multiply.outer(np.arange(n), 10000.0 ** (-np.arange(0, model.head_dim, 2) / model.head_dim))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    cache = kvfast.KVCache(1, model.num_kv_heads, model.head_dim, max_seq_len=n)
    q = np.empty((n, model.num_q_heads, model.head_dim), np.float32)
    source = qkv.reshape(-1).view(np.uint64)
    target = np.empty((q.nbytes + cache.bytes_per_token * n) // 8, np.uint64)

    def write():
        cache.clear()
        cache.write(0, qkv, cos=cos, sin=sin, q_norm=weight, k_norm=weight, out=q)

    write()
    assert np.allclose(q, in_numpy(qkv, model, cos, sin, weight)[0], atol=1e-4)
    times = {"numpy": [], "copy": []}
    for _ in range(15):
        for name, call in (("numpy", lambda: in_numpy(qkv, model, cos, sin, weight)), ("copy", lambda: read_and_write(source, target))):
            start = perf_counter()
            call()
            times[name].append(perf_counter() - start)
    benchmark.pedantic(write, rounds=15, warmup_rounds=2)
    seconds = took()
    benchmark.extra_info.update(
        model=model.name,
        isa=kvfast.active_isa(),
        threads=threads,
        tokens=n,
        numpy_ratio=median(times["numpy"]) / seconds,
        copy_ratio=seconds / median(times["copy"]),
    )
