"""Models whose queries read the tokens that an indexer has chosen, eight here: against transformers' own attention and cache."""

import copy
import functools

import pytest
from tiny_architectures import small_config
from tiny_transformers import QUIET, KVFastCache, prompt, torch, transformers

import kvfast
from kvfast.engines.transformers.masks import MATRICES

pytestmark = QUIET


MODELS = ["deepseek_v32", "glm_moe_dsa", "dots3_note_text", "hy_v4_vl_text", "mistral_large4_text", "qwen4_exp_text"]


@pytest.fixture(params=MODELS)
def model(request):
    return made(request.param)


@functools.cache
def made(name):
    """With many heads: where those of a token all give 0, its score has ties, of which PyTorch takes any."""
    config = small_config(transformers.models.auto.configuration_auto.CONFIG_MAPPING[name])
    config.index_n_heads = config.indexer_n_heads = 16
    torch.manual_seed(0)
    # The text parts of models with images have no head of their own.
    kind = transformers.AutoModel if name in ("hy_v4_vl_text", "mistral_large4_text") else transformers.AutoModelForCausalLM
    return kind.from_config(config, dtype=torch.float32).eval()


def logits(model, steps, implementation, cache, mask=None):
    """The logits of all tokens, which come in steps; the hidden states of a model without a head."""
    model.set_attn_implementation(implementation)
    found, first = [], 0
    with torch.no_grad():
        for ids in steps:
            first += ids.shape[1]
            given = model(ids, cache=cache, attention_mask=None if mask is None else mask[:, :first])
            found.append(given.get("logits", given.get("last_hidden_state")))
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
    dropped = 25 if "linear_attention" not in model.config.layer_types else 0  # no state was kept to go back to
    cache.crop(-dropped)
    cache.batch_select_indices(torch.tensor([1, 1, 0]))
    other = copy.deepcopy(cache)
    rows, later = ids[[1, 1, 0], : 60 - dropped], prompt(3, 10)[0]
    expected = own(model, [rows, later])[:, 60 - dropped :]
    for one in (cache, other):
        torch.testing.assert_close(logits(model, [later], "kvfast", one), expected, rtol=1e-3, atol=1e-3)
    cache.reset()
    torch.testing.assert_close(logits(model, [ids], "kvfast", cache), own(model, [ids]), rtol=1e-3, atol=1e-3)


def test_int8(model):
    """Other tokens are chosen where the layers before have rounded, but most are the same."""
    ids, _ = prompt(1, 90)
    found, plain = logits(model, [ids], "kvfast", KVFastCache(model.config, "int8")), own(model, [ids])
    lost = ((found - plain).norm() / plain.norm()).item()
    assert lost < 0.4
    dense = copy.deepcopy(model)
    for module in dense.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 90
        if hasattr(module, "token_budget"):
            module.token_budget, module.block_topk = 90, 45
    assert ((own(dense, [ids]) - plain).norm() / plain.norm()).item() > max(0.2, 1.5 * lost)  # which tokens are read matters


@pytest.mark.parametrize("name", MODELS)
def test_padding_behind(name):
    """It is refused, but for a model that says by a mask what it has chosen."""
    model, (ids, mask) = made(name), prompt(1, 40)
    mask[:, 30:] = 0
    for steps in ([ids], cut(ids, 30, 10)):
        cache = KVFastCache(model.config, "float32")
        if name in MATRICES:
            found = logits(model, steps, "kvfast", cache, mask)
            torch.testing.assert_close(found[:, :30], own(model, steps, mask)[:, :30], rtol=1e-3, atol=1e-3)
            continue
        with pytest.raises(ValueError, match="padding after the tokens of a row, which has an indexer"):
            logits(model, steps, "kvfast", cache, mask)


def test_a_mask_that_hides_what_an_indexer_may_choose_is_refused():
    model, (ids, _) = made("deepseek_v32"), prompt(1, 40)
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    mask[..., 20:, 3] = False
    model.set_attn_implementation("kvfast")
    with torch.no_grad(), pytest.raises(ValueError, match="is another one: token 20 of row 0 sees 20 tokens from 0 to 20"):
        model(ids, cache=KVFastCache(model.config, "float32"), attention_mask=mask)


def test_latents_that_layers_share_are_refused():
    """Each layer makes keys of its own of them, and the cache has those of one."""
    config = copy.deepcopy(made("mistral_large4_text").config)
    config.kv_source_layers = [0, 0, 2, 3]
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(ValueError, match="latents that another layer has stored"):
        logits(model, [prompt(1, 20)[0]], "kvfast", KVFastCache(config))


def test_what_is_refused(model, tmp_path):
    ids, _ = prompt(1, 40)
    cache = KVFastCache(model.config, prompt_cache=kvfast.PromptCache(tmp_path))
    with pytest.raises(ValueError, match="do not have the keys of its indexers"):
        cache.restore_prompt(ids)
    logits(model, [ids], "kvfast", cache)
    snapshot = cache.rows[0].snapshot()
    cache.reset()
    with pytest.raises(ValueError, match="do not have the keys of its indexers"):
        cache.restore([snapshot])
    if model.config.model_type not in MATRICES:
        with pytest.raises(ValueError, match="an indexer without a KVFastCache"):
            logits(model, [ids], "kvfast", transformers.DynamicCache(config=model.config))
    cache.prompt_cache.close()
