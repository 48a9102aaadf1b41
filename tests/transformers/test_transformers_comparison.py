"""kvfast.transformers.compare: what it reports of a format, and what it leaves as it was."""

import numpy as np
import pytest
from tiny_transformers import QUIET, KVFastCache, logits, prompt, random_model, torch, transformers

import kvfast.transformers

pytestmark = QUIET


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_the_same_numbers_agree(name):
    model = random_model(name)
    model.set_attn_implementation("eager")
    found = kvfast.transformers.compare(model, prompt(1, 60)[0], "float32", num_tokens=20, attn_implementation="eager")
    assert found.same.all() and found.agreement == 1 and not found.gaps.any()
    assert len(found.same) == len(found.gaps) == len(found.leads) == len(found.kl) == 20
    assert found.leads.min() > 0 and abs(found.kl).max() < 1e-6
    assert "20 of 20 most likely tokens are the same (median lead" in str(found)
    assert model.config._attn_implementation == "eager"


def test_a_coarse_format_differs_by_the_gaps(llama):
    """They are those of the logits that transformers computes in one step: each place sees the same tokens."""
    ids, _ = prompt(1, 120)
    found = kvfast.transformers.compare(llama, ids.numpy(), "int2-plain", num_tokens=40)
    expected = logits(llama, ids, "sdpa", transformers.DynamicCache(config=llama.config))[0, -40:]
    assert 0 < found.agreement < 1
    np.testing.assert_array_equal(found.gaps[found.same], 0)
    best = expected.topk(2).values
    np.testing.assert_allclose(found.leads, best[:, 0] - best[:, 1], atol=1e-3)
    # The other tokens are those of a cache that takes the text in the same steps.
    cache, steps = KVFastCache(llama.config, "int2-plain"), [ids[:, :80], *ids[:, 80:].split(1, 1)]
    ours = torch.cat([logits(llama, step, "kvfast", cache)[0, -1:] for step in steps][1:]).argmax(-1)
    np.testing.assert_array_equal(found.same, ours == expected.argmax(-1))
    np.testing.assert_allclose(found.gaps, best[:, 0] - expected[range(40), ours], atol=1e-3)
    assert f"up to {found.gaps.max():.2g} logits apart" in str(found)
    assert found.kl.min() > 0 and found.kl.mean() > kvfast.transformers.compare(llama, ids, "int8", num_tokens=40).kl.mean()


def test_what_is_refused_leaves_the_model_as_it_was(llama):
    llama.set_attn_implementation("sdpa")
    for ids in (prompt(2, 30)[0], prompt(1, 30)[0][0], prompt(1, 20)[0]):
        with pytest.raises(ValueError, match="with more than 20 tokens"):
            kvfast.transformers.compare(llama, ids, num_tokens=20)
    with pytest.raises(ValueError, match="dtype"):
        kvfast.transformers.compare(llama, prompt(1, 30)[0], "int9", num_tokens=20)
    with pytest.raises(ValueError, match="num_tokens"):
        kvfast.transformers.compare(llama, prompt(1, 30)[0], num_tokens=0)
    assert llama.config._attn_implementation == "sdpa"
