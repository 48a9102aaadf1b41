"""Rings that have seen more tokens than 32 bits count: by their state, as writing them takes a quarter of an hour."""

import json

import numpy as np
import pytest
from cache_kinds import DIM, HEADS, LAYERS, fill, filled, tokens

import kvfast


def far(ring, tokens):
    """A ring that has seen `tokens` more, a multiple of the block size, by its state."""
    state = ring.state_dict()
    header = json.loads(state["header"].tobytes())
    header["seq_len"] += tokens
    for table in header["tables"]:
        table["skipped_blocks"] += tokens // ring.block_size
        table["evicted_tokens"] += tokens
        table["floats_begin"] += tokens
    return kvfast.RingKVCache.from_state_dict(state | {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)})


def test_lengths_beyond_32_bits(rng):
    """Lengths of 64 bits are told as they are; where engines take int32, they are refused."""
    near = fill(kvfast.RingKVCache(LAYERS, HEADS, DIM, sliding_window=64, dtype="int8", rollback=10), rng, 300)
    ring, more = far(near, 1 << 33), 1 << 33
    new = [tokens(rng, 50) for _ in range(LAYERS)]
    for one in (near, ring):
        filled(one, each=new)
    assert len(ring) == ring.layer_length(0) == 350 + more and np.array_equal(ring.positions(1), near.positions(1) + more)
    q = rng.standard_normal((3, 4, DIM), np.float32)
    assert np.array_equal(ring.attend(0, q), near.attend(0, q)) and np.array_equal(ring.k(0), near.k(0))
    assert str(350 + more) in repr(ring) and ring.explain(0, (1, 4, DIM)).context == 350 + more
    with pytest.raises(ValueError, match=f"context_lens are int32, for at most 2147483647 tokens, got {350 + more}"):
        _ = ring.context_lens
    assert np.array_equal(near.context_lens, [350] * LAYERS) and near.context_lens.dtype == np.int32
    ring.truncate(345 + more)
    pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, 20, block_size=64, dtype="int8", sliding_window=64, rollback=10)
    sequence = pool.restore(ring.snapshot())
    with pytest.raises(ValueError, match="seq_lens are int32"):
        pool.seq_lens([sequence])
