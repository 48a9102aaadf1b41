"""Values for reading; and no error text that holds data."""

import numpy as np
import pytest
from cache_kinds import filled

import kvfast
from kvfast.core.text import shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (-3, "-3"),
        (1.5, "1.5"),
        ("int5", "'int5'"),
        ([1, 2.5], "[1, 2.5]"),
        ((1,), "(1,)"),
        ((), "()"),
        (("int4", None), "('int4', None)"),
        (10**30, str(10**30)),
        (1 << 20000, "an integer of 20001 bits"),
        (-(1 << 20000), "an integer of 20001 bits"),
        ("x" * 500, "a str of 502 characters"),
        ([0] * 9, "a list of length 9"),
        ([[1]], "a list of length 1"),
        (b"secret", "a bytes of length 6"),
        ({"a": 1, "b": [[2]]}, "{'a': 1, 'b': a list of length 1}"),
        (dict.fromkeys(range(9)), "a dict of length 9"),
        (object(), "a object"),
        (np.zeros((2, 3)), "a ndarray of float64 and shape (2, 3)"),
        (np.zeros((), np.int8), "array(0, dtype=int8)"),
        (np.ma.masked, "masked"),
    ],
    ids=range(22),
)
def test_shown(value, text):
    assert shown(value) == text


def test_no_error_prints_data(rng):
    """An array in the wrong place, in each of the calls with several arguments."""
    secret = rng.integers(1_000_000, 9_999_999, 64).astype(np.float32).reshape(1, 1, 64)
    marks = [f"{int(number)}" for number in secret.ravel()]
    cache, pool = kvfast.KVCache(1, 1, 64), kvfast.PagedKVCache(1, 1, 64, num_blocks=8)
    filled(cache, *secret.repeat(2, 0)[:, None] / 1e7)
    sequence, text = pool.new_sequence(), " ".join(marks)
    good = np.ones((1, 1, 64), np.float32)
    calls = [
        lambda x: pool.attend_batch(0, [sequence], x),
        lambda x: pool.attend_batch(0, x, [x]),
        lambda x: pool.attend_batch(x, good, [sequence]),
        lambda x: pool.slot_mapping(x),
        lambda x: pool.slot_mapping([sequence], x),
        lambda x: pool.block_table([x]),
        lambda x: pool.match_prefix(x),
        lambda x: pool.match_prefix([1], salt=x),
        lambda x: pool.prepare_batch(x, [1]),
        lambda x: pool.prepare_batch([[1]], x),
        lambda x: pool.prepare_batch([[0]], [1], x),
        lambda x: pool.prepare_batch([[0]], [1], None, x),
        lambda x: pool.append_batch(0, good, good, x),
        lambda x: pool.append_batch(x, good, good, [0]),
        lambda x: pool.restore(x),
        lambda x: cache.append(0, good, x),
        lambda x: cache.append(x, good, good),
        lambda x: cache.attend(x, good),
        *[
            lambda x, name=name: cache.attend(0, good, **{name: x})
            for name in ("scale", "causal", "softcap", "sliding_window", "sinks", "alibi_slopes", "num_splits", "num_threads", "out")
        ],
        lambda x: cache.truncate(x),
        lambda x: cache.advance(x),
        lambda x: cache.k(x),
        lambda x: cache.splice(x, rope=None),
        lambda x: cache.splice(cache.snapshot(), rope=x),
        lambda x: cache.drop(x, 1, rope=None),
        lambda x: cache.snapshot(x),
        lambda x: cache.snapshot(metadata={"a": x}),
        lambda x: kvfast.KVCache(x, 1, 64),
        lambda x: kvfast.KVCache(1, 1, 64, dtype=x),
        lambda x: kvfast.PagedKVCache(1, x, 64, 8),
        lambda x: kvfast.KVFormat(x),
        lambda x: kvfast.KVFormat("int4", block_size=x),
        lambda x: kvfast.Rope(x),
        lambda x: kvfast.RingKVCache(1, 1, 64, sliding_window=x),
        lambda x: kvfast.use_isa(x),
        lambda x: kvfast.set_num_threads(x),
        lambda x: kvfast.attention(good, good, x),
    ]
    for i, call in enumerate(calls):
        for value in (secret, secret.tolist(), text, text.encode(), [text]):
            try:
                call(value)
            except Exception as error:  # noqa: BLE001  (whatever it is)
                found = [mark for mark in marks if mark in str(error)]
                assert len(found) <= 1, (i, type(value), str(error)[:300])
