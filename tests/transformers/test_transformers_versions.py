"""Versions of transformers that were tested, and those that were not: they are tried, and what comes of that is said."""

import logging

import pytest
from tiny_transformers import QUIET, SLIDING, logits, ours, prompt, random_model, stock, torch, transformers

from kvfast.core.capabilities import missing
from kvfast.engines.transformers import attention, trial, versions
from kvfast.engines.transformers.versions import check_transformers, needs_trial, tell
from kvfast.transformers import KVFastCache

pytestmark = QUIET


@pytest.mark.parametrize("version", ["5.20.0", "5.24.1.dev0", "5.40.2", "5.99.0rc1"])
def test_versions_that_are_known(version):
    check_transformers(version)


@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.19.0", "6.0.0", "6.1.0.dev0"])
def test_other_versions_are_refused(version):
    with pytest.raises(ImportError, match=rf'{version} is installed: pip install "transformers>=5.20,<6"'):
        check_transformers(version)


def test_this_version_has_all_that_is_used():
    assert missing(versions.USED) is None


@pytest.mark.parametrize("name", ["llama", *SLIDING])
def test_the_tokens_of_transformers(name):
    """With padding, in every version."""
    model, (ids, mask) = random_model(name), prompt(3, 20, (0, 5, 11))
    assert ours(model, ids, mask).tolist() == stock(model, ids, mask).tolist()


def test_drafts_and_beams():
    model, (ids, mask) = random_model("llama"), prompt(1, 20)
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        assert ours(model, ids, mask, **options).tolist() == stock(model, ids, mask, **options).tolist()


def test_a_prompt_in_pieces():
    model, (ids, _) = random_model("llama"), prompt(2, 24)
    cache = KVFastCache(model.config, "float32")
    pieces = [logits(model, part, "kvfast", cache) for part in ids.split([10, 13, 1], 1)]
    whole = logits(model, ids, "eager", transformers.DynamicCache(config=model.config))
    assert torch.allclose(torch.cat(pieces, 1), whole, atol=1e-3)
    assert cache.get_seq_length() == 24


def test_models_with_states(monkeypatch):
    """Are refused where the cache does not see their states."""
    config = transformers.Qwen3NextConfig(num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2)
    if versions.asks_for_states():
        KVFastCache(config)
        monkeypatch.delattr(transformers.cache_utils.Cache, "get_conv_state")
    with pytest.raises(ValueError, match=r"needs transformers 5.21 or later for models with recurrent layers, such as qwen3_next"):
        KVFastCache(config)


def test_what_a_version_lacks_is_named(monkeypatch):
    check_transformers("5.77.0")
    monkeypatch.delattr(transformers.cache_utils.Cache, "batch_select_indices")
    check_transformers("5.24.3")  # which was tested
    with pytest.raises(
        ImportError,
        match=r"tested with transformers up to 5.24, and 5.77.0 is installed: Cache of transformers.cache_utils has no "
        r'batch_select_indices; pip install "transformers>=5.20,<5.25"',
    ):
        check_transformers("5.77.0")


def test_an_attention_call_is_tried(monkeypatch, caplog):
    assert needs_trial("5.25.0") and not needs_trial("5.24.9")
    monkeypatch.setattr(logging.getLogger("kvfast"), "propagate", True)
    tell("5.77.0", trial.trial())
    assert "5.77.0 is installed: one attention call gave transformers' own result, it is used" in caplog.text


def test_another_result_is_refused(monkeypatch):
    def half(*arguments, scaling, **options):
        return attention.attention(*arguments, scaling=scaling / 2, **options)

    def lacking(*arguments, **options):
        raise TypeError("unknown argument\nof this version")

    for wrong, why in ((half, "differs from transformers' own by"), (lacking, "failed with TypeError: unknown argument;")):
        monkeypatch.setattr(trial, "attention", wrong)
        with pytest.raises(ImportError, match=f"5.77.0 is installed: an attention call {why}.*pip install"):
            tell("5.77.0", trial.trial())
