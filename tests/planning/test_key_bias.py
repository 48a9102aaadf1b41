"""Formats that lose much on keys with a bias are named where the model is known."""

import numpy as np
import pytest
from cache_kinds import filled

import kvfast
from kvfast.codec.formats import PRESETS, KVFormat
from kvfast.planning.key_bias import key_bias_note

QWEN = {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "vocab_size": 64,
    "intermediate_size": 64,
}
QUIET = {"memory": 1 << 30, "bandwidth": 1e9}


def error_of(name, bias):
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((1024, 2, 64)).astype(np.float32) for _ in range(2))
    k += bias
    cache = filled(kvfast.KVCache(1, 2, 64, dtype=name), k, v)
    return float(np.sqrt(np.mean((cache.k(0) - k) ** 2)))


def test_the_named_formats_are_those_that_lose_more_than_int4():
    bias = np.zeros(64, np.float32)
    bias[[26, 30, 58, 62]] = 400, -300, 250, 350
    note = key_bias_note("qwen2", {name: KVFormat.of(name) for name in PRESETS})
    named = note.partition("less than ")[2].partition(":")[0].split(", ")
    most = error_of("int4", bias)
    enough_bits = [name for name, one in PRESETS.items() if one.k_dtype in ("int4", "int8")]
    assert {name for name in enough_bits if error_of(name, bias) > most} == {name for name in named if name in enough_bits}
    assert set(named) - set(enough_bits) == {"int2", "int2-plain", "int3-plain"}


@pytest.mark.parametrize("model_type, formats", [("llama", ["int8"]), (None, ["int8"]), ("qwen2", ["int4", "float16", "int8-centred"])])
def test_nothing_is_said_of_others(model_type, formats):
    assert key_bias_note(model_type, {name: KVFormat.of(name) for name in formats}) is None


def test_plan_names_them():
    for model_type, names in (("qwen2", ["int8", "k8v4"]), ("qwen2_moe", ["int8-plain", "int4"])):
        notes = kvfast.plan(QWEN | {"model_type": model_type}, context=512, dtype=names, **QUIET).notes
        assert notes[-1].startswith(f"the keys of {model_type} have a large bias") and names[0] in notes[-1]
    assert kvfast.plan(QWEN | {"model_type": "llama"}, context=512, **QUIET).notes == ()
    (*_, note) = kvfast.plan(QWEN | {"model_type": "qwen2"}, context=512, engine="vllm", dtype=["int8_per_token_head"], **QUIET).notes
    assert note.endswith("loses less than int8_per_token_head: take int4_per_token_head")
