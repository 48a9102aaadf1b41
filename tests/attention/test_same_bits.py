"""Instruction sets give the same bits on codes: a file of one machine answers alike on another."""

import numpy as np
import pytest
from cache_kinds import filled

import kvfast

ROUND_TWICE = ("sse2", "scalar")  # a product, and its sum
ANOTHER_ORDER = ("neon_i8mm", "neon_bf16")  # of the channels of keys with channel scales
HEADS, DIM, TOKENS = 2, 64, 600


@pytest.mark.parametrize("loud", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "k8v4", "int4-plain", "int5", "int4", "int3", "k4v3"])
def test_tiers_store_and_answer_alike(rng, tmp_path, dtype, loud):
    """Some formats have float tokens, which weigh nothing here. Loud keys are multiplied with what rounding left out."""
    k, v = rng.standard_normal((2, TOKENS, HEADS, DIM), np.float32)
    q = rng.standard_normal((40, 6, DIM), np.float32) * (4 if loud else 1)
    if loud:
        k[..., 3] *= 30
        v[..., 5] *= 8
    k[:16, :, 0], k[-200:, :, 0], q[..., 0] = -400, -400, 40
    snapshots, outs = [], []
    apart = ROUND_TWICE + (ANOTHER_ORDER if dtype in ("int4", "int3", "k4v3") else ())
    alike = [isa for isa in kvfast.available_isas() if isa not in apart]
    for isa in alike:
        with kvfast.use_isa(isa):
            cache = kvfast.KVCache(1, HEADS, DIM, dtype=dtype)
            for start in range(0, TOKENS, 200):
                filled(cache, k[start : start + 200], v[start : start + 200])
            snapshots.append(cache.snapshot())
    for isa in alike:
        snapshots[0].save(tmp_path / "cache")
        with kvfast.use_isa(isa):
            cache = kvfast.KVCache(1, HEADS, DIM, dtype=dtype)
            cache.restore(kvfast.Snapshot.load(tmp_path / "cache"))
            outs.append([cache.attend(0, q[-n:], num_splits=1) for n in (1, 5, 16, 40)])
    assert all(snapshot == snapshots[0] for snapshot in snapshots)
    assert all(np.array_equal(one, other) for out in outs for one, other in zip(out, outs[0], strict=True))
