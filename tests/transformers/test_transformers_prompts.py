"""Prompts of transformers' models in a store."""

import numpy as np
import pytest
from dict_store import DictStore
from tiny_architectures import small_model
from tiny_transformers import MODELS, QUIET, ours, prompt, random_model, torch

import kvfast
from kvfast.transformers import KVFastCache

pytestmark = QUIET


def cache_of(model, store, dtype="float32", **options):
    model.set_attn_implementation("kvfast")
    return KVFastCache(model.config, dtype, prompt_cache=kvfast.PromptCache(store, chunk_tokens=64), **options)


def compute(model, ids, cache):
    with torch.no_grad():
        model(ids, cache=cache)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_a_second_process_goes_on_where_the_first_was(name, dtype):
    """With the same tokens, from a saved prompt and from one that was computed."""
    store, model, (ids, mask) = DictStore(), random_model(name), prompt(1, 200)
    first = cache_of(model, store, dtype)
    assert first.restore_prompt(ids, "tiny") == 0 and not first.is_initialized
    compute(model, ids, first)
    assert first.save_prompt(ids, "tiny")
    rows = [first.rows[0].k(layer) for layer in range(4)]
    second = cache_of(model, store, dtype)
    found = second.restore_prompt(ids, "tiny")
    assert found == second.get_seq_length() == 199
    for layer, one in enumerate(rows):
        count = len(one) - 1  # a window at 199 tokens begins one token sooner
        assert np.array_equal(second.rows[0].k(layer)[-count:], one[:count])
    computed, restored = (ours(model, ids, mask, cache) for cache in (cache_of(model, DictStore(), dtype), second))
    if dtype == "float32":
        assert np.array_equal(computed, restored)
    else:  # the first new token is read from the same rows but for rounding
        assert restored.shape == computed.shape
    assert second.save_prompt(restored, "tiny")
    third = cache_of(model, store, dtype)
    other = np.concatenate([ids, [[5, 6, 7]]], axis=1)
    assert third.restore_prompt(other, "tiny") == 200


@pytest.mark.parametrize("implementation", ["kvfast", "eager"])
def test_latents_come_back(implementation):
    """As keys and values that the layers make of them, and as they are under another attention."""
    store, model, (ids, _) = DictStore(), small_model("deepseek_v3"), prompt(1, 200)
    first = cache_of(model, store)
    model.set_attn_implementation(implementation)
    compute(model, ids, first)
    assert first.save_prompt(ids, "tiny")
    second = cache_of(model, store)
    model.set_attn_implementation(implementation)
    assert second.restore_prompt(ids, "tiny") == second.get_seq_length() == 199
    for layer in range(4):
        assert np.array_equal(second.rows[0].k(layer), first.rows[0].k(layer)[:199])
    with torch.no_grad():
        expected, found = (model(ids[:, -1:], cache=one).logits for one in (cut(first), second))
    assert torch.equal(expected, found)


def cut(cache):
    cache.crop(-1)
    return cache


def test_bad_input():
    model, (ids, _) = random_model("llama"), prompt(2, 20)
    cache = cache_of(model, DictStore())
    for wrong in (ids, ids[0]):
        with pytest.raises(ValueError, match="one prompt"):
            cache.restore_prompt(wrong)
    assert cache.restore_prompt(ids[:1]) == 0
    compute(model, ids[:1], cache)
    with pytest.raises(ValueError, match="empty cache"):
        cache.restore_prompt(ids[:1])
    with pytest.raises(ValueError, match="needs the 20 tokens"):
        cache.save_prompt(ids[:1, :10])
    assert cache.save_prompt(ids[:1])
    with pytest.raises(ValueError, match="without a prompt_cache"):
        KVFastCache(model.config).save_prompt(ids[:1])
