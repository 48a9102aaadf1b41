"""kvfast.transformers.KVFastStaticCache: the tokens of transformers' own caches, also of a step that is compiled."""

import pytest
from tiny_transformers import MODELS, QUIET, interrupt, logits, new_model, padded, prompt, random_model, stock, torch, transformers

import kvfast
from kvfast.engines.transformers.versions import cache_argument
from kvfast.transformers import KVFastStaticCache

pytestmark = QUIET


def static(model, ids, mask, dtype="float32", max_cache_len=80, **options):
    model.set_attn_implementation("kvfast_static")
    cache = options.pop("cache", None) or KVFastStaticCache(model.config, max_cache_len, dtype)
    return model.generate(ids, attention_mask=mask, **{cache_argument(): cache}, **{"max_new_tokens": 16, "do_sample": False} | options)


def compiled(fullgraph=True):
    config = transformers.CompileConfig(fullgraph=fullgraph, mode="default", dynamic=False)
    config._compile_all_devices = True  # or transformers compiles for GPUs alone
    return config


@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_of_transformers(name):
    """With padding, windows, softcaps and sinks; over several blocks."""
    model = random_model(name)
    for ids, mask in (prompt(1, 40), prompt(3, 20, (0, 7, 19))):
        assert static(model, ids, mask).tolist() == stock(model, ids, mask).tolist()


def test_beams_and_chunks():
    model = random_model("llama")
    ids, mask = prompt(2, 30, (15, 0))  # the first chunk of a row is padding alone
    beams = {"num_beams": 3}
    assert static(model, ids, mask, **beams).tolist() == stock(model, ids, mask, **beams).tolist()
    model.set_attn_implementation("kvfast_static")
    # PyTorch may round a single token otherwise, and a code of int8 is then a step away.
    for dtype, atol in (("float32", 1e-4), ("int8", 0.02)):
        cache = KVFastStaticCache(model.config, 80, dtype)
        with torch.no_grad():
            whole = logits(model, ids, "kvfast_static", KVFastStaticCache(model.config, 80, dtype), mask)
            parts = [
                model(ids[:, part], attention_mask=mask[:, : part.stop], **{cache_argument(): cache}).logits
                for part in (slice(0, 12), slice(12, 29), slice(29, 30))
            ]
        assert torch.allclose(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()], atol=atol)


def test_an_index_for_each_row():
    """One would be copied to all of them, and a mask is not the numbers of rows."""
    model, (ids, mask) = random_model("llama"), prompt(2, 20)
    model.set_attn_implementation("kvfast_static")
    cache = KVFastStaticCache(model.config, 32)
    logits(model, ids, "kvfast_static", cache, mask)
    before = [layer.blocks.clone() for layer in cache.layers]
    with pytest.raises(ValueError, match="beam_idx must have an index for each of the 2 rows, got 1"):
        cache.reorder_cache(torch.tensor([1]))
    with pytest.raises((RuntimeError, IndexError)):  # of PyTorch
        cache.reorder_cache(torch.tensor([True, False]))
    assert all(map(torch.equal, before, (layer.blocks for layer in cache.layers)))


@pytest.mark.parametrize("dtype", ["int8-rotated", "k8v4-rotated", "bfloat16"])
def test_the_logits_of_a_kvfast_cache(dtype):
    model = random_model("mistral")
    ids, mask = prompt(2, 50)
    ours_ = logits(model, ids, "kvfast", kvfast.transformers.KVFastCache(model.config, dtype), mask)
    assert torch.allclose(logits(model, ids, "kvfast_static", KVFastStaticCache(model.config, 64, dtype), mask), ours_, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_compiled_step_says_the_same(name):
    """In one graph for all steps, whose tensors stay where they are."""
    model = new_model(name)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ids, mask = prompt(2, 20, (3, 0))
    expected = static(model, ids, mask)
    assert static(model, ids, mask, compile_config=compiled()).tolist() == expected.tolist()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 and not torch._dynamo.utils.counters["graph_break"]
    with pytest.raises(ValueError, match="must be -1 or between 0 and 127, got 128"):
        static(model, ids, mask, max_cache_len=24, compile_config=compiled())


def test_a_cache_goes_back():
    model = random_model("llama")
    ids, mask = prompt(1, 30)
    cache = KVFastStaticCache(model.config, 80, "float32")  # codes may be a step away: PyTorch rounds 10 rows otherwise than 30
    first = logits(model, ids, "kvfast_static", cache, mask)
    cache.crop(-10)
    again = logits(model, ids[:, 20:], "kvfast_static", cache, mask)
    assert int(cache.get_seq_length()) == 30 and torch.allclose(again, first[:, 20:], atol=1e-5)
    for forget in (cache.reset, lambda: cache.crop(-300)):
        forget()
        assert torch.equal(logits(model, ids, "kvfast_static", cache, mask), first)
    with pytest.raises(TypeError, match="tokens_to_remove must be an integer, got -1.5"):
        cache.crop(-1.5)


def test_tokens_keep_their_places():
    """Rows of another batch would not have any, and with other padding those of other tokens."""
    model = random_model("llama")
    ids, mask = prompt(2, 20, (4, 0))
    cache = KVFastStaticCache(model.config, 80, "float32")
    logits(model, ids, "kvfast_static", cache, mask)
    for other in (None, torch.ones(2, 21, dtype=mask.dtype)):
        with pytest.raises(ValueError, match=r"has \[0, 0\] tokens of padding .*, and had \[4, 0\] when the 20 tokens before"):
            logits(model, ids[:, :1], "kvfast_static", cache, other)
    with pytest.raises(ValueError, match="this cache holds a batch of 2, got keys of 1: make another one"):
        logits(model, ids[:1, :1], "kvfast_static", cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = torch.cat([mask.flip(0), mask[:, -1:]], 1)
    found = logits(model, ids[:, :1], "kvfast_static", cache, swapped)
    whole = torch.cat([ids.flip(0), ids[:, :1]], 1)
    assert torch.allclose(found, logits(model, whole, "eager", transformers.DynamicCache(), swapped)[:, -1:], atol=1e-4)


def test_a_step_that_broke_off_is_taken_back():
    model = random_model("llama")
    ids, mask = prompt(1, 30)
    cache = KVFastStaticCache(model.config, 80, "float32")
    first = logits(model, ids, "kvfast_static", cache, mask)
    cache.crop(-10)
    interrupt(model.model.layers[2], lambda: logits(model, ids[:, 20:24], "kvfast_static", cache, mask[:, :24]))
    assert repr(cache) == "KVFastStaticCache(float32, 4 layers, batch of 1, 24 of 80 tokens, 128.0 KiB)"
    with pytest.raises(RuntimeError, match=r"the last step did not reach every layer: crop\(-n\) takes its n tokens back"):
        logits(model, ids[:, 24:], "kvfast_static", cache, mask)
    cache.crop(-4)
    assert torch.allclose(logits(model, ids[:, 20:], "kvfast_static", cache, mask), first[:, 20:], atol=1e-5)


def test_what_is_refused():
    model = random_model("llama")
    ids, mask = prompt(1, 30)
    cache = KVFastStaticCache(model.config, 32, "int8")
    for other in ("eager", "kvfast"):
        with pytest.raises(ValueError, match=f"needs a model with attn_implementation=.kvfast_static., got .{other}.: model.set_attn"):
            model.set_attn_implementation(other)
            model.generate(ids, attention_mask=mask, max_new_tokens=4, **{cache_argument(): cache})
    with pytest.raises(ValueError, match=r"needs a model with attn_implementation=.kvfast_static., got .eager.: model.set_attn"):
        stock(model, ids, mask, **{cache_argument(): cache})
    with pytest.raises(kvfast.CacheFullError, match="32 tokens and 1 more do not fit max_cache_len=32: make a longer cache"):
        static(model, ids, mask, cache=cache)
    with pytest.raises(TypeError, match="needs a KVFastStaticCache: pass cache="):
        logits(model, ids, "kvfast_static", transformers.DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="keeps some tokens as floats"):
        KVFastStaticCache(model.config, 32, "int4")
    with pytest.raises(ValueError, match="max_cache_len must be between 1 and"):
        KVFastStaticCache(model.config, 0)
    with pytest.raises(
        ValueError, match=r"takes masks of padding, of shape \(batch, tokens\), got torch.bool of shape \(1, 1, 30, 32\)"
    ):
        logits(model, ids, "kvfast_static", KVFastStaticCache(model.config, 32), torch.ones(1, 1, 30, 32, dtype=torch.bool).tril())
    for right in (padded(2, 9, (1, slice(7, 9))), padded(2, 9, (0, slice(3, 4)))):
        with pytest.raises(ValueError, match="rows must be padded on the left"):
            static(model, *right)
    with pytest.raises(
        ValueError, match="is for decoders with layers of full_attention or sliding_attention, and qwen3_next has linear_att"
    ):
        KVFastStaticCache(transformers.Qwen3NextConfig(), 32)
    with pytest.raises(ValueError, match="deepseek_v3 has latents: take a KVFastCache"):
        KVFastStaticCache(transformers.DeepseekV3Config(), 32)
    with pytest.raises(ValueError, match="t5 has an encoder"):
        KVFastStaticCache(transformers.T5Config(), 32)
    with pytest.raises(RuntimeError, match="no gradients"):
        model(ids, **{cache_argument(): KVFastStaticCache(model.config, 32)})
