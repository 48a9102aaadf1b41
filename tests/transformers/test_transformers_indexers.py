"""Models whose queries read the tokens that an indexer has chosen, eight here: against transformers' own attention and cache."""

import copy
import functools

import pytest
from tiny_architectures import small_config
from tiny_transformers import QUIET, KVFastCache, prompt, torch, transformers

import kvfast

pytestmark = QUIET


@pytest.fixture(params=["deepseek_v32", "glm_moe_dsa"])
def model(request):
    return made(request.param)


@functools.cache
def made(name):
    """With many heads: where those of a token all give 0, its score has ties, of which PyTorch takes any."""
    config = small_config(transformers.models.auto.configuration_auto.CONFIG_MAPPING[name])
    config.index_n_heads = 16
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def logits(model, steps, implementation, cache, mask=None):
    """The logits of all tokens, which come in steps."""
    model.set_attn_implementation(implementation)
    found, first = [], 0
    with torch.no_grad():
        for ids in steps:
            first += ids.shape[1]
            found.append(model(ids, cache=cache, attention_mask=None if mask is None else mask[:, :first]).logits)
    return torch.cat(found, 1)


def own(model, steps, mask=None):
    return logits(model, steps, "eager", transformers.DynamicCache(config=model.config), mask)


def cut(ids, *sizes):
    return torch.split(ids, sizes, 1)


def test_prompts_in_pieces(model):
    ids, _ = prompt(2, 70)
    steps = cut(ids, 40, 1, 1, 20, 8)
    found = logits(model, steps, "kvfast", KVFastCache(model.config, "float32"))
    torch.testing.assert_close(found, own(model, steps), rtol=1e-3, atol=1e-3)


def test_padding_on_the_left(model):
    ids, mask = prompt(3, 50, (0, 7, 30))
    steps = cut(ids, 20, 20, 1, 9)  # the first has no token of the last row
    found, expected = logits(model, steps, "kvfast", KVFastCache(model.config, "float32"), mask), own(model, steps, mask)
    for row, tokens in enumerate(mask.bool()):
        torch.testing.assert_close(found[row, tokens], expected[row, tokens], rtol=1e-3, atol=1e-3)


def test_tokens_are_dropped_rows_selected_and_copied(model):
    """The keys of the indexer go with them."""
    ids, _ = prompt(2, 60)
    cache = KVFastCache(model.config, "float32")
    logits(model, [ids], "kvfast", cache)
    cache.crop(-25)
    cache.batch_select_indices(torch.tensor([1, 1, 0]))
    other = copy.deepcopy(cache)
    rows, later = ids[[1, 1, 0], :35], prompt(3, 10)[0]
    expected = own(model, [rows, later])[:, 35:]
    for one in (cache, other):
        torch.testing.assert_close(logits(model, [later], "kvfast", one), expected, rtol=1e-3, atol=1e-3)
    cache.reset()
    torch.testing.assert_close(logits(model, [ids], "kvfast", cache), own(model, [ids]), rtol=1e-3, atol=1e-3)


def test_int8(model):
    """Other tokens are chosen where the layers before have rounded, but most are the same."""
    ids, _ = prompt(1, 90)
    found, plain = logits(model, [ids], "kvfast", KVFastCache(model.config, "int8")), own(model, [ids])
    assert ((found - plain).norm() / plain.norm()).item() < 0.4
    dense = copy.deepcopy(model)
    for module in dense.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 90
    assert ((own(dense, [ids]) - plain).norm() / plain.norm()).item() > 0.6  # which tokens are read matters


def test_what_is_refused(model, tmp_path):
    ids, mask = prompt(1, 40)
    mask[:, 30:] = 0
    for steps in ([ids], cut(ids, 30, 10)):
        with pytest.raises(ValueError, match="padding after the tokens of a row, which has an indexer"):
            logits(model, steps, "kvfast", KVFastCache(model.config), mask)
    with pytest.raises(ValueError, match="what layer . of glm5_next_text keeps"):
        KVFastCache(transformers.AutoConfig.for_model("glm5_next"))
    cache = KVFastCache(model.config, prompt_cache=kvfast.PromptCache(tmp_path))
    with pytest.raises(ValueError, match="do not have the keys of its indexers"):
        cache.restore_prompt(ids)
    logits(model, [ids], "kvfast", cache)
    snapshot = cache.rows[0].snapshot()
    cache.reset()
    with pytest.raises(ValueError, match="do not have the keys of its indexers"):
        cache.restore([snapshot])
    with pytest.raises(ValueError, match="an indexer without a KVFastCache"):
        logits(model, [ids], "kvfast", transformers.DynamicCache(config=model.config))
    cache.prompt_cache.close()
