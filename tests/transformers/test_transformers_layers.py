"""kvfast.transformers: layers of many kinds in one cache, and what is not an attention over them."""

import copy
import functools

import pytest
from selection import exhaustive
from tiny_architectures import small_model
from tiny_transformers import QUIET, KVFastCache, error, logits, ours, prompt, stock, torch, transformers

import kvfast
from kvfast.engines.transformers.attention import attention
from kvfast.engines.transformers.masks import lazy_mask
from kvfast.engines.transformers.received import Received

pytestmark = QUIET

HYBRIDS = ["qwen3_next", "jamba", "falcon_h1", "lfm2", "granitemoehybrid", "bamba", "zamba2", "lfm3", "nemotron_h"]
SHAPES = ["gemma4_text", "gemma3n_text", "mimo_v2_flash", "llama4_text", "deepseek_v3", "kimi_linear"]
model_of = functools.cache(small_model)  # for tests that leave it as it was


@pytest.fixture(params=HYBRIDS + SHAPES)
def model(request):
    return model_of(request.param)


# --- the tokens of transformers ----------------------------------------------------------------


WINDOWED = ["lfm3", "gemma4_text", "gemma3n_text", "mimo_v2_flash", "llama4_text"]
# The edges of a window or chunk of 16; without one, all prompts longer than a token go the same way.
GREEDY = [
    pytest.param(name, tokens, marks=() if name in WINDOWED or tokens in (1, 70) else exhaustive)
    for name in HYBRIDS + SHAPES
    for tokens in (1, 15, 16, 40, 70)
]


@pytest.mark.parametrize("name, tokens", GREEDY)
def test_greedy(name, tokens):
    model = model_of(name)
    ids, mask = prompt(1, tokens)
    assert ours(model, ids, mask).tolist() == stock(model, ids, mask).tolist()


def test_beams_and_padding(model):
    ids, mask = prompt(2, 20, (0, 6))
    options = {"num_beams": 3, "num_return_sequences": 2}
    assert ours(model, ids, mask, **options).tolist() == stock(model, ids, mask, **options).tolist()


@pytest.mark.parametrize("dtype, limit", [("float32", 1e-4), ("float16", 5e-2)])
def test_logits_of_chunks(model, dtype, limit):
    ids, _ = prompt(2, 45)
    own, other = KVFastCache(model.config, dtype), transformers.DynamicCache(config=model.config)
    for part in (ids[:, :20], ids[:, 20:37], ids[:, 37:38], ids[:, 38:]):
        assert error(logits(model, part, "kvfast", own), logits(model, part, "eager", other)) < limit


def test_copies_resets_and_choices(model):
    ids, _ = prompt(3, 24)
    cache, more = KVFastCache(model.config, "float32"), prompt(3, 5)[0]
    logits(model, ids, "kvfast", cache)
    other = copy.deepcopy(cache)
    expected = logits(model, more, "kvfast", cache)
    other.reorder_cache(torch.tensor([2, 0, 0]))
    assert error(logits(model, more[[2, 0, 0]], "kvfast", other), expected[[2, 0, 0]]) < 1e-5
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.batch_size == -1
    logits(model, ids[:1], "kvfast", cache)
    cache.batch_repeat_interleave(2)
    assert error(logits(model, more[[0, 0]], "kvfast", cache), expected[[0, 0]]) < 1e-4


def test_convolutions_go_back_by_what_they_record():
    """To any token, where all states are theirs; see test_transformers_states for others."""
    model, ids = model_of("lfm2"), prompt(2, 30)[0]
    cache = KVFastCache(model.config, "float32")
    logits(model, ids[:, :20], "kvfast", cache)
    expected = logits(model, ids[:, 20:], "kvfast", copy.deepcopy(cache))
    cache.activate_past_recording()
    logits(model, ids[:, :5], "kvfast", cache)
    cache.crop(-2)
    cache.activate_past_recording()
    logits(model, ids[:, :5], "kvfast", cache)
    cache.crop(-8)
    assert cache.get_seq_length() == len(cache.rows[0]) == 20 and cache.rows[1].checkpoints == (20,)
    assert error(logits(model, ids[:, 20:], "kvfast", cache), expected) < 1e-5


def test_assisted_generation_with_convolutions():
    model, ids = model_of("lfm2"), prompt(1, 8)[0].repeat(1, 4)
    mask = torch.ones_like(ids)
    assert ours(model, ids, mask, prompt_lookup_num_tokens=5).tolist() == stock(model, ids, mask).tolist()


# --- shapes and chunks -------------------------------------------------------------------------


def test_rows_have_the_shapes_of_the_layers(tmp_path):
    pytest.importorskip("safetensors")
    cache = KVFastCache(model_of("gemma4_text").config, "int8")
    logits(model_of("gemma4_text"), prompt(1, 30)[0], "kvfast", cache)
    row = cache.rows[0]
    assert row.num_layers == 2 and row.head_dim == (16, 32) and row.sliding_window == (16, None)  # and two layers that read theirs
    row.save(tmp_path / "row.safetensors")
    assert kvfast.load(tmp_path / "row.safetensors").snapshot() == row.snapshot()
    for implementation in ("kvfast", "eager"):
        cache = KVFastCache(model_of("mimo_v2_flash").config)
        logits(model_of("mimo_v2_flash"), prompt(2, 30)[0], implementation, cache)
        # As its first layers of each kind tell, which the configuration does not.
        assert cache.rows[0].num_kv_heads == (2, 4, 4, 4) and (cache.rows[0].head_dim, cache.rows[0].v_head_dim) == (24, 16)
        assert cache.layers[0].values.shape == (2, 2, 30, 16) if implementation == "eager" else True


def test_latents_are_stored_as_what_their_layer_makes_of_them():
    model = model_of("deepseek_v3")
    for implementation, shape in (("kvfast", (4, 24, 16)), ("eager", (1, 32, 8))):
        cache = KVFastCache(model.config, "float16")
        logits(model, prompt(2, 30)[0], implementation, cache)
        row = cache.rows[0]
        assert (row.num_kv_heads, row.head_dim, row.v_head_dim) == shape and len(row) == 30
        assert row.bytes_per_token == 4 * shape[0] * 2 * sum(-(-dim // 16) * 16 for dim in shape[1:])  # in multiples of 16
    with pytest.raises(
        ValueError, match="layer 0 has 4 KV heads of 24 and 16, and layers of its kind before it have 1 KV heads of 32 and 8"
    ):
        logits(model, prompt(2, 1)[0], "kvfast", cache)


def test_latents_of_several_tokens_are_not_mixed():
    config = copy.deepcopy(model_of("deepseek_v3").config)
    config._attn_implementation = "kvfast"
    cache = KVFastCache(config, "float32")
    latent, rope = cache.update(torch.ones(1, 1, 3, 32), torch.ones(1, 1, 3, 8), 0)
    heads = torch.nn.functional.linear(latent, torch.ones(4 * 32, 32)).view(1, 3, 4, 32).transpose(1, 2)
    assert isinstance(heads, Received) and all(isinstance(one, Received) for one in torch.split(heads, [16, 16], dim=-1))
    for name, wrong in (
        ("softmax", lambda: torch.softmax(heads, -1)),
        ("mean", lambda: heads.mean(2)),
        ("cumsum", lambda: latent.cumsum(2)),
        ("matmul", lambda: heads @ heads.transpose(2, 3)),
        ("roll", lambda: rope.roll(1, 2)),
    ):
        with pytest.raises(RuntimeError, match=rf"layer 0 does more with its keys and values.*calls {name}\)"):
            wrong()


def test_shapes_that_come_as_nothing_told():
    cache = KVFastCache(transformers.LlamaConfig(num_hidden_layers=2), "float32")
    cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 8), 0)
    assert cache.layers[0].keys.shape == (1, 2, 3, 16) and cache.layers[0].values.shape == (1, 2, 3, 8)
    with pytest.raises(ValueError, match="layer 1 has 4 KV heads of 16, and layers of its kind before it have 2 KV heads of 16 and 8"):
        cache.update(torch.zeros(1, 4, 3, 16), torch.zeros(1, 4, 3, 16), 1)


def test_chunks_take_constant_memory():
    model = model_of("llama4_text")
    cache, sizes = KVFastCache(model.config, "int8", rollback=0), []
    for _ in range(40):
        logits(model, prompt(1, 20)[0], "kvfast", cache)
        sizes.append(cache.rows[0]._storage.tables[0].pool.nbytes)
    assert max(sizes[20:]) == max(sizes[:20])


def test_masks_with_chunks():
    chunks = transformers.masking_utils.chunked_causal_mask_function
    padding = torch.ones(2, 60, dtype=torch.bool)
    padding[1, :5] = False
    sizes = {"batch_size": 2, "q_length": 60, "kv_length": 60, "local_size": 8}
    mask = lazy_mask(**sizes, mask_function=chunks(8, torch.tensor([0, 5])), attention_mask=padding)
    assert mask.is_causal and (mask.sliding_window, mask.chunk) == (None, 8)
    for begins in ([0, 0], [5, 5], [0, 4]):  # not where the tokens of a row begin
        assert not lazy_mask(**sizes, mask_function=chunks(8, torch.tensor(begins)), attention_mask=padding).is_causal


# --- layers without attention over the cache----------------------------------------------------


@pytest.fixture
def llama():
    return small_model("llama")


def received(llama, n=3, layer=0):
    llama.set_attn_implementation("kvfast")
    cache = KVFastCache(llama.config, "float32")
    torch.manual_seed(0)
    return cache, *cache.update(torch.randn(1, 2, n, 16), torch.randn(1, 2, n, 16), layer)


def test_changed_keys_are_refused(llama):
    _, key, value = received(llama)
    assert isinstance(key, Received) and key.shape == value.shape == (1, 2, 3, 16) and key.dtype == torch.float32
    for change in (
        lambda one: one + 1,
        lambda one: one.repeat(1, 2, 1, 1),
        lambda one: torch.cat([one, one]),
        lambda one: one[:, :1],
        torch.Tensor.numpy,
        lambda one: one.chunk(2, 1),
        lambda one: one.T,
        lambda one: torch.ones(16) @ one.mT,
    ):
        with pytest.raises(RuntimeError, match="layer 0 does more with its keys and values than to hand them to its attention"):
            change(key)
    module, query = llama.model.layers[0].self_attn, torch.randn(1, 4, 3, 16)
    for wrong in ((key, torch.zeros(1, 2, 3, 16)), (torch.zeros(1, 2, 3, 16), value), (key, received(llama)[2])):
        with pytest.raises(ValueError, match="no KVFastCache returned together"):
            attention(module, query, *wrong, None)


@pytest.mark.parametrize("name", ["diffllama", "jetmoe", "doge"])
def test_models_that_change_keys_are_refused_at_once(name):
    model, (ids, mask) = model_of(name), prompt(1, 9)
    cache = KVFastCache(model.config, "float32")
    with pytest.raises(RuntimeError, match="layer 0 does more with its keys"):
        ours(model, ids, mask, cache)
    cache.reset()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(ids, cache=cache).logits
    assert error(found, logits(model, ids, "eager", None)) < 1e-4


def test_a_second_attention_stores_nothing(llama):
    cache, key, value = received(llama)
    module, query = llama.model.layers[0].self_attn, torch.randn(1, 4, 3, 16)
    first, _ = attention(module, query, key, value, None)
    assert attention(module, query, key, value, None)[0].equal(first) and cache._rows.rows[0].layer_length(0) == 3
    # The last query alone, as layers have it that keep nothing.
    assert attention(module, query[:, :, 2:], key, value, None)[0].equal(first[:, 2:])
    cache.update(key.tensor, value.tensor, 1)
    cache._rows._expected.clear()
    cache.update(key.tensor, value.tensor, 0)
    with pytest.raises(RuntimeError, match="keys of layer 0 from a step before"):
        attention(module, query, key, value, None)


@pytest.mark.parametrize(
    "options, what",
    [
        ({"alibi": torch.ones(4)}, "alibi"),
        ({"head_mask": torch.ones(4)}, "head_mask"),
        ({"sliding_window": 7}, "sliding_window"),
        ({"anything": 1, "new": "x"}, "anything, new"),
    ],
)
def test_arguments_that_are_not_known_are_refused(llama, options, what):
    _, key, value = received(llama)
    with pytest.raises(ValueError, match=f"asks for {what}, which kvfast does not compute"):
        attention(llama.model.layers[0].self_attn, torch.randn(1, 4, 3, 16), key, value, None, **options)


def test_masks_are_no_tensors():
    mask = lazy_mask(1, 6, 6)
    for change in (lambda: mask.dtype, lambda: mask[:, :, :3], lambda: torch.zeros(6, 6) + mask, lambda: mask[:, :, ::2, :]):
        with pytest.raises(ValueError, match="works on its attention mask itself"):
            change()
    last = mask[:, :, -2:, :]
    assert (last.q_offset, last.q_length) == (4, 2) and last.is_causal
    assert last.matrix() is None or last.matrix().shape[-2] == 2


def test_tokens_that_come_again_are_refused(llama):
    """With use_cache=False, generate gives a cache all tokens at each step."""
    ids, mask = prompt(1, 9)
    with pytest.raises(ValueError, match=r"begin at position 0 again, and the cache holds 9:.*use_cache=False"):
        ours(llama, ids, mask, use_cache=False)
    cache, (ids, mask) = KVFastCache(llama.config, "float32"), prompt(2, 9, (0, 4))
    logits(llama, ids, "kvfast", cache, mask)
    with pytest.raises(ValueError, match="attention_mask is for 9 tokens, but with this step the cache has got 18"):
        logits(llama, ids, "kvfast", cache, mask)
    ids, mask = prompt(1, 9)
    with pytest.raises(ValueError, match=r"use_cache=False.*model.generation_config.use_cache = True"):
        KVFastCache(transformers.MptConfig())
    model = model_of("mpt")  # whose configuration says use_cache=True
    assert ours(model, ids, mask, use_cache=True).tolist() == stock(model, ids, mask, use_cache=True).tolist()


def test_layers_are_named_as_the_model_counts_them():
    model = model_of("qwen3_next")
    model.set_attn_implementation("kvfast")
    key, _ = KVFastCache(model.config).update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 3)  # the first with keys
    with pytest.raises(RuntimeError, match=r"layer 3 does more with its keys.*it calls T\)"):
        key.T  # noqa: B018


def test_layers_that_no_step_reaches():
    """What is kept until all kinds of layers have come goes with the first step."""
    cache = KVFastCache(model_of("gemma3n_text").config, "float32")
    model_of("gemma3n_text").set_attn_implementation("eager")
    for _ in range(3):
        cache.update(torch.ones(1, 2, 5, 16), torch.ones(1, 2, 5, 16), 0)
    assert cache.get_seq_length() == 15 and not cache._rows._stored
    with pytest.raises(NotImplementedError, match="reordered alone"):
        cache.layers[0].reorder_cache(torch.tensor([0]))


def test_cross_attention_is_refused():
    with pytest.raises(ValueError, match="layer 3 of mllama_text_model attends to others"):
        KVFastCache(transformers.MllamaConfig())
