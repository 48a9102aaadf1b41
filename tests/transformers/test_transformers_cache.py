"""kvfast.transformers: the cache itself, tensors, and what is refused."""

import copy
import functools
import subprocess
import sys
import warnings

import numpy as np
import pytest
from tiny_transformers import (
    MODELS,
    QUIET,
    SLIDING,
    KVFastCache,
    interrupt,
    logits,
    ours,
    prompt,
    random_model,
    stock,
    torch,
    transformers,
)

import kvfast
from kvfast.core.interchange import as_numpy
from kvfast.engines.transformers.attention import attention
from kvfast.engines.transformers.masks import lazy_mask

pytestmark = QUIET


@pytest.fixture(params=MODELS)
def model(request):
    return random_model(request.param)


def test_a_format_that_loses_much_is_named():
    config = transformers.Qwen2Config(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, hidden_size=512)
    with pytest.warns(UserWarning, match="the keys of qwen2 have a large bias, with which int4 loses less than int8"):
        KVFastCache(config, dtype="int8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KVFastCache(config)


# --- the cache ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_crop_is_exact(model, dtype):
    ids, mask = prompt(2, 40, (13, 0))
    cache = KVFastCache(model.config, dtype, rollback=12)
    logits(model, ids, "kvfast", cache, mask)
    expected = copy.deepcopy(cache)
    logits(model, prompt(2, 12)[0], "kvfast", cache, torch.cat([mask, torch.ones(2, 12, dtype=mask.dtype)], 1))
    cache.crop(-12)
    cache.crop(0)
    assert cache.get_seq_length() == 40
    assert [len(row) for row in cache.rows] == [27, 40]
    more, mask = prompt(2, 3)[0], torch.cat([mask, torch.ones(2, 3, dtype=mask.dtype)], 1)
    assert logits(model, more, "kvfast", cache, mask).equal(logits(model, more, "kvfast", expected, mask))


def test_rejected_drafts_seal_no_block(llama):
    """With them the first block of int4 would become codes."""
    cache = KVFastCache(llama.config, "int4")
    logits(llama, prompt(1, 78)[0], "kvfast", cache)
    expected = copy.deepcopy(cache)
    logits(llama, prompt(1, 5)[0], "kvfast", cache)
    cache.crop(-4)
    logits(llama, prompt(1, 5)[0][:, :1], "kvfast", expected)
    assert cache.get_seq_length() == 79
    for more in (prompt(1, 1)[0], prompt(1, 2)[0]):
        # PyTorch multiplies five rows in another order than one.
        torch.testing.assert_close(logits(llama, more, "kvfast", cache), logits(llama, more, "kvfast", expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", SLIDING)
def test_crop_beyond_what_is_held(name):
    ids, _ = prompt(2, 60)
    cache = KVFastCache(random_model(name).config, "float32", rollback=4)
    for part in (ids[:, :50], ids[:, 50:]):
        logits(random_model(name), part, "kvfast", cache)
    with pytest.raises(ValueError, match="cannot go back"):
        cache.crop(-30)
    assert cache.get_seq_length() == 60 and all(len(row) == 60 for row in cache.rows)
    cache.crop(-60)
    assert cache.get_seq_length() == 0


def test_crop_takes_what_transformers_gives(llama):
    cache = KVFastCache(llama.config)
    cache.crop(-3)
    with pytest.raises(ValueError, match="negative integer, got 2"):
        cache.crop(2)
    assert cache.is_croppable and not cache.is_compileable and not cache.is_initialized


def test_rows_are_chosen_and_repeated(model):
    ids, mask = prompt(3, 24, (0, 9, 2))
    cache = KVFastCache(model.config, "int8")
    logits(model, ids, "kvfast", cache, mask)
    single = [KVFastCache(model.config, "int8") for _ in range(3)]
    for i, one in enumerate(single):
        logits(model, ids[i : i + 1], "kvfast", one, mask[i : i + 1])
    before = cache.nbytes
    cache.batch_repeat_interleave(2)  # 0 0 1 1 2 2
    assert cache.batch_size == 6 and cache.nbytes == before  # shared until they are written
    cache.reorder_cache(torch.tensor([5, 5, 0, 0, 2, 3]))
    cache.batch_select_indices(torch.tensor([4, 0, 1, 3]))
    order = [1, 2, 2, 0]
    more, mask = prompt(4, 5)[0], torch.cat([mask[order], torch.ones(4, 5, dtype=mask.dtype)], 1)
    found = logits(model, more, "kvfast", cache, mask)
    for i, j in enumerate(order):
        expected = logits(model, more[i : i + 1], "kvfast", copy.deepcopy(single[j]), mask[i : i + 1])
        assert (found[i : i + 1] - expected).abs().max() < 1e-2 * expected.abs().max()


def test_a_mask_of_rows_is_not_their_numbers(llama):
    """True would be row 1. transformers' own cache takes masks where it indexes, and refuses them where it reorders."""
    ids, mask = prompt(3, 24, (0, 9, 2))
    cache = KVFastCache(llama.config, "int8")
    logits(llama, ids, "kvfast", cache, mask)
    held = [row.k(0) for row in cache.rows]
    for call, error, text in (
        (lambda: cache.reorder_cache(torch.tensor([True, False, True])), ValueError, "beam_idx must be integers of shape .* got bool"),
        (
            lambda: cache.batch_select_indices(torch.tensor([True, False])),
            ValueError,
            r"or a mask of shape \(3,\).* got bool of shape \(2,\)",
        ),
        (lambda: cache.batch_select_indices(torch.tensor([False] * 3)), ValueError, "for at least one row"),
        (lambda: cache.batch_select_indices(torch.tensor([0.0])), ValueError, "indices must be integers .* got float32"),
        (lambda: cache.batch_select_indices(np.ma.masked_array([0], True)), TypeError, "indices must not be a masked array"),
        (lambda: cache.batch_select_indices(torch.tensor([0, 3])), IndexError, "indices must be between -3 and 2, got 3"),
        (lambda: cache.batch_repeat_interleave(True), TypeError, "repeats must be an integer, got True"),
        (lambda: cache.crop(True), TypeError, "tokens_to_remove must be an integer, got True"),
    ):
        with pytest.raises(error, match=text):
            call()
        assert [np.array_equal(row.k(0), k) for row, k in zip(cache.rows, held)] == [True] * 3
    for given, order in ((torch.tensor([True, False, True]), (0, 2)), (np.array([-1, 1, -1]), (1, 1, 1)), ([False, True, False], (1,))):
        cache.batch_select_indices(given)
        assert [np.array_equal(row.k(0), held[i]) for row, i in zip(cache.rows, order, strict=True)] == [True] * len(order)
        held = [held[i] for i in order]
    cache.batch_repeat_interleave(2)
    assert len({id(row) for row in cache.rows}) == 2  # also a row that -1 and 1 both name is written by one of them alone


def test_copies_are_independent(llama):
    ids, mask = prompt(1, 20)
    cache = KVFastCache(llama.config, "float32")
    logits(llama, ids[:, :-1], "kvfast", cache)
    other = copy.deepcopy(cache)
    expected = stock(llama, ids, mask).tolist()
    assert ours(llama, ids, mask, cache).tolist() == expected
    assert other.get_seq_length() == 19
    assert ours(llama, ids, mask, other).tolist() == expected


def test_reset_takes_another_batch(llama):
    cache = KVFastCache(llama.config, "float32")
    logits(llama, prompt(2, 7)[0], "kvfast", cache)
    with pytest.raises(ValueError, match="batch of 2, got keys of 3"):
        logits(llama, prompt(3, 7)[0], "kvfast", cache)
    cache.reset()
    ids, mask = prompt(3, 7)
    assert ours(llama, ids, mask, cache).tolist() == stock(llama, ids, mask).tolist()


def test_most_tokens(llama):
    cache = KVFastCache(llama.config, "int8", max_seq_len=16)
    assert cache.get_max_length() == 16 and KVFastCache(llama.config).get_max_length() == -1
    logits(llama, prompt(1, 16)[0], "kvfast", cache)
    with pytest.raises(kvfast.CacheFullError):
        logits(llama, prompt(1, 1)[0], "kvfast", cache)
    with pytest.raises(ValueError, match="without sliding windows"):
        KVFastCache(random_model("gemma3").config, max_seq_len=16)


@pytest.mark.parametrize("dtype", ["int8-rotated", "int8"])
def test_windows_take_constant_memory(dtype):
    model = random_model("mistral")
    cache = KVFastCache(model.config, dtype, rollback=0)
    sizes = []
    for _ in range(40):
        logits(model, prompt(1, 20)[0], "kvfast", cache)
        sizes.append(cache.nbytes)
    assert cache.get_seq_length() == 800 and max(sizes[20:]) <= max(sizes[:20])
    assert dtype == "int8" or max(sizes[20:]) == max(sizes[:20])  # float rows of the first steps lie further apart
    assert isinstance(cache.rows[0], kvfast.RingKVCache) and cache.is_sliding == [True] * 4


def test_a_row_is_a_kvfast_cache(llama, tmp_path):
    pytest.importorskip("safetensors")
    cache = KVFastCache(llama.config, "int8")
    logits(llama, prompt(1, 20)[0], "kvfast", cache)
    cache.rows[0].save(tmp_path / "row.safetensors")
    found = kvfast.load(tmp_path / "row.safetensors")
    assert len(found) == 20 and np.array_equal(found.k(3), cache.rows[0].k(3))
    assert repr(cache).startswith("KVFastCache(int8, 4 layers, batch of 1, 20 tokens, ")


# --- tensors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_not_copied(dtype):
    tensor = torch.zeros(2, 5, 3, 16, dtype=dtype).transpose(1, 2)
    view = as_numpy(tensor)
    assert view.shape == tensor.shape and view.__array_interface__["data"][0] == tensor.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_that_are_still_to_be_negated(llama, dtype):
    """As those that rotate by complex numbers make: their memory has the other sign."""
    torch.manual_seed(0)
    k, v, q = torch.randn(2, 2, 5, 16, dtype=dtype), torch.randn(2, 2, 5, 16, dtype=dtype), torch.randn(2, 4, 5, 16, dtype=dtype)
    llama.set_attn_implementation("kvfast")
    outputs = []
    for negated in (torch.neg, torch._neg_view):
        cache = KVFastCache(llama.config, "float32")
        key, value = cache.update(negated(k), negated(v), 0)
        outputs.append(attention(llama.model.layers[0].self_attn, negated(q), key, value, None)[0])
    assert negated(k).is_neg() and outputs[0].equal(outputs[1])
    cache = kvfast.KVCache(1, 2, 16, dtype="float32")
    cache.append(0, torch._neg_view(k[0].transpose(0, 1)), v[0].transpose(0, 1))
    assert torch.from_numpy(cache.k(0)).equal(-k[0].transpose(0, 1).float())


def test_a_row_gets_the_bits_that_it_gets_alone(llama):
    torch.manual_seed(0)
    k, v = torch.randn(2, 3, 2, 300, 16)
    q = torch.randn(3, 4, 300, 16)
    padding = torch.ones(3, 300, dtype=torch.bool)
    padding[0, :290], padding[2, :7] = False, False

    def attend(batch):
        llama.set_attn_implementation("kvfast")
        cache = KVFastCache(llama.config, "int8")
        outputs = []
        for tokens in (slice(299), slice(299, 300)):
            n, before = tokens.stop - (tokens.start or 0), tokens.start or 0
            mask = lazy_mask(len(batch), n, before + n, before, attention_mask=padding[batch, : before + n])
            key, value = cache.update(k[batch][:, :, tokens], v[batch][:, :, tokens], 0)
            outputs.append(attention(llama.model.layers[0].self_attn, q[batch][:, :, tokens], key, value, mask)[0])
        return torch.cat(outputs, 1)

    together = attend([0, 1, 2])
    for i in range(3):
        assert attend([i])[0].equal(together[i])
    assert together[0, :290].abs().max() == 0  # padding


# --- what is refused ---------------------------------------------------------------------------


def test_gradients_are_refused(llama):
    llama.set_attn_implementation("kvfast")
    with pytest.raises(RuntimeError, match="no gradients"):
        llama(prompt(1, 4)[0], cache=KVFastCache(llama.config))


def test_other_masks_are_refused(llama):
    ids, _ = prompt(1, 6)
    with pytest.raises(
        ValueError, match="the mask of LlamaAttention is another one: no token sees token 1 of row 0, which sees others"
    ):
        logits(llama, ids, "kvfast", KVFastCache(llama.config), (torch.arange(36) % 2 == 0).reshape(1, 1, 6, 6))
    for shape in ((1, 1, 6, 5), (1, 1, 6, 9), (1, 1, 4, 6)):
        with pytest.raises(RuntimeError, match="got 6 more, and the mask is one for .* or the mask is not this cache's"):
            logits(llama, ids, "kvfast", KVFastCache(llama.config), torch.ones(shape, dtype=torch.bool))
    window = transformers.masking_utils.sliding_window_causal_mask_function
    chunks = transformers.masking_utils.chunked_causal_mask_function
    sizes = {"batch_size": 1, "q_length": 6, "kv_length": 6}
    assert lazy_mask(**sizes).is_causal and lazy_mask(**sizes, mask_function=window(8), local_size=8).is_causal
    for others, text in (
        ({"mask_function": window(5), "local_size": 7}, "token 5 of row 0 sees 5 tokens from 1 to 5"),
        ({"mask_function": window(5)}, "token 5 of row 0 sees 5 tokens from 1 to 5"),
        (
            {"mask_function": chunks(8, torch.zeros(1, dtype=int)), "local_size": 8},
            "it is for a window of None and chunks of 8, and the layer has None and None",
        ),
        (
            {"mask_function": transformers.masking_utils.sliding_window_bidirectional_mask_function(2)},
            "token 0 of row 0 sees 3 tokens from 0 to 2",
        ),
        ({"mask_function": lambda row, head, query, key: key <= 2 * query}, "token 1 of row 0 sees 3 tokens from 0 to 2"),
    ):
        mask = lazy_mask(**sizes, **others)
        assert mask.is_causal == (mask.chunk == 8)  # which layers without chunks refuse
        llama.set_attn_implementation("kvfast")
        key, value = KVFastCache(llama.config).update(torch.zeros(1, 2, 6, 16), torch.zeros(1, 2, 6, 16), 0)
        with pytest.raises(ValueError, match=f"the mask of LlamaAttention is another one: {text}"):
            attention(llama.model.layers[0].self_attn, torch.zeros(1, 4, 6, 16), key, value, mask)


@pytest.mark.parametrize(
    "options, what",
    [
        ({"is_causal": False}, "bidirectional attention"),
        ({"dropout": 0.1}, "dropout of 0.1"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
    ],
)
def test_other_attentions_are_refused(llama, options, what):
    llama.set_attn_implementation("kvfast")
    key, value = KVFastCache(llama.config).update(torch.zeros(1, 2, 6, 16), torch.zeros(1, 2, 6, 16), 0)
    with pytest.raises(ValueError, match=f"asks for {what}, which kvfast does not compute"):
        attention(llama.model.layers[0].self_attn, torch.zeros(1, 4, 6, 16), key, value, None, **options)


def test_padding_that_changes_is_refused(llama):
    ids, mask = prompt(2, 12, (5,))
    cache = KVFastCache(llama.config, "float32")
    logits(llama, ids, "kvfast", cache, mask)
    for other in (None, torch.ones(2, 13, dtype=int), torch.cat([mask[:1].expand(2, -1), torch.ones(2, 1, dtype=int)], 1)):
        with pytest.raises(ValueError, match="differs from what it was"):
            logits(llama, ids[:, :1], "kvfast", copy.deepcopy(cache), other)
    with pytest.raises(ValueError, match="without padding"):
        logits(llama, ids[:, :1], "sdpa", copy.deepcopy(cache), torch.ones(2, 13, dtype=int))
    mask = torch.ones(1, 30, dtype=int)
    mask[0, 20] = 0
    with pytest.raises(ValueError, match="pad on the left"):
        logits(random_model("mistral"), prompt(1, 30)[0], "kvfast", KVFastCache(random_model("mistral").config), mask)


def test_a_step_that_broke_off_is_noticed_and_taken_back(llama):
    ids, cache = prompt(1, 20)[0], KVFastCache(llama.config, "float32")
    logits(llama, ids[:, :5], "kvfast", cache)
    weight = llama.model.layers[2].self_attn.k_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = float("nan")
    try:
        with pytest.raises(kvfast.NonFiniteInputError):
            logits(llama, ids[:, 5:8], "kvfast", cache)
    finally:
        weight.data.copy_(kept)
    for call in (
        *(functools.partial(logits, llama, ids[:, 8:9], one, cache) for one in ("kvfast", "sdpa", "kvfast")),
        lambda: cache.rows,
        lambda: cache.crop(-1),
        lambda: copy.deepcopy(cache),
        lambda: cache.batch_repeat_interleave(2),
    ):
        with pytest.raises(RuntimeError, match=r"did not reach every layer .they have seen 5 or 8 tokens.. crop\(-3\)"):
            call()
    cache.crop(-3)
    assert cache.get_seq_length() == len(cache.rows[0]) == 5
    assert torch.equal(logits(llama, ids[:, 5:], "kvfast", cache), logits(llama, ids[:, 5:], "kvfast", cache_after(llama, ids[:, :5])))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("begun, dropped", [(0, 4), (30, 4), (30, 9), (30, 34)])
def test_an_interrupted_step_costs_no_more_than_itself(name, begun, dropped):
    """Between any two layers, in a batch with padding; copies too, which were made before the cache counted the step before."""
    model, (ids, mask) = random_model(name), prompt(2, 40, (0, 3))
    for i, layer in enumerate(model.model.layers[1:]):
        cache = KVFastCache(model.config, "float32")
        if begun:
            logits(model, ids[:, :begun], "kvfast", cache, mask[:, :begun])
        cache = copy.deepcopy(cache) if i % 2 else cache
        interrupt(layer, functools.partial(logits, model, ids[:, begun : begun + 4], "kvfast", cache, mask[:, : begun + 4]))
        assert cache.get_seq_length() == begun + 4
        cache.crop(-dropped)
        keep = begun + 4 - dropped
        expected = cache_after(model, ids[:, :keep], mask[:, :keep])
        assert cache.get_seq_length() == keep
        found = [logits(model, ids[:, keep:], "kvfast", one, mask) for one in (cache, expected)]
        assert torch.allclose(*found, atol=1e-4)


def test_dtypes_of_torch_and_single_snapshots(llama):
    cache = KVFastCache(llama.config, torch.float16, v_dtype=torch.bfloat16)
    logits(llama, prompt(1, 5)[0], "kvfast", cache)
    assert cache.rows[0].dtype == "float16/bfloat16"
    with pytest.raises(TypeError, match="snapshots must be a list with one for each row, got a Snapshot"):
        KVFastCache(llama.config).restore(cache.rows[0].snapshot())


def test_weights_are_for_eager_attention(llama):
    ids, mask = prompt(1, 5)
    with pytest.raises(ValueError, match='asks for output_attentions.*use attn_implementation="eager"'):
        ours(llama, ids, mask, output_attentions=True, return_dict_in_generate=True)


def test_rows_that_others_change_are_noticed(llama):
    ids, cache = prompt(1, 20)[0], cache_after(llama, prompt(1, 20)[0])
    snapshot = cache.rows[0].snapshot()
    cache.rows[0].truncate(15)
    with pytest.raises(RuntimeError, match=r"rows\[0\] holds 15 tokens, and the cache has counted 20: change a cache by its own crop"):
        logits(llama, ids[:, :1], "kvfast", cache)
    cache.rows[0].restore(snapshot)
    assert torch.equal(logits(llama, ids, "kvfast", cache), logits(llama, ids, "kvfast", cache_after(llama, ids)))


def cache_after(model, ids, mask=None):
    cache = KVFastCache(model.config, "float32")
    if ids.shape[1]:
        logits(model, ids, "kvfast", cache, mask)
    return cache


def test_attention_that_is_not_kvfasts_is_noticed(llama):
    llama.set_attn_implementation("kvfast")
    cache = KVFastCache(llama.config)
    tensors = torch.zeros(2, 1, 2, 3, 16)
    cache.update(*tensors, 0)
    with pytest.raises(RuntimeError, match="did not go through kvfast"):
        cache.update(*tensors, 0)


def test_models_that_are_not_known_are_refused(llama):
    with pytest.raises(ValueError, match="t5 has an encoder"):
        KVFastCache(transformers.T5Config())
    with pytest.raises(
        ValueError, match="does not know what layer . of glm5_next_text keeps, which is indexed_attention.*DynamicCache"
    ):
        KVFastCache(transformers.AutoConfig.for_model("glm5_next"))
    with pytest.raises(ValueError, match="no layer of mamba has keys and values"):
        KVFastCache(transformers.MambaConfig())
    with pytest.raises(ValueError, match="the same shape"):
        KVFastCache(llama.config).update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 1, 3, 16), 0)
    with pytest.raises(ValueError, match="int9"):
        KVFastCache(llama.config, "int9")


def test_kvfast_does_not_import_it():
    script = "import kvfast, sys; assert not {'torch', 'transformers', 'kvfast.transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_another_models_configuration_is_refused(llama):
    """With fewer layers than the model, or another attention; and a model where its configuration belongs."""
    with pytest.raises(TypeError, match=r"config must be the configuration of a model, got a \w+: pass model.config"):
        KVFastCache(llama)
    llama.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"made with another configuration .*: make it by KVFastCache\(model.config\)"):
        logits(llama, prompt(1, 5)[0], "kvfast", KVFastCache(copy.deepcopy(llama.config)))
    config = copy.deepcopy(llama.config)
    config.num_hidden_layers -= 1
    cache = KVFastCache(config)
    with pytest.raises(
        ValueError, match=r"made for the \d+ layers? of a llama, and the model has a layer \d+: make it by KVFastCache\(model.config\)"
    ):
        logits(llama, prompt(1, 5)[0], "kvfast", cache)
