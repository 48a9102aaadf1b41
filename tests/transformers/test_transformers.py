"""kvfast.transformers: the tokens of transformers' own caches, on tiny models with random weights and on SmolLM2."""

import copy

import pytest
from selection import exhaustive
from tiny_transformers import (
    MODELS,
    NEW_TOKENS,
    QUIET,
    SLIDING,
    WINDOW,
    KVFastCache,
    logits,
    new_model,
    ours,
    padded,
    prompt,
    random_model,
    stock,
    torch,
    transformers,
)

pytestmark = QUIET


# They differ from llama in numbers of heads and in what comes before attention alone: their tokens and logits are compared always, and
# what batches, padding and beams make of a cache is the same for all four.
LIKE_LLAMA = ("smollm2", "multi-query", "qwen3")


@pytest.fixture(params=MODELS)
def any_model(request):
    return random_model(request.param)


@pytest.fixture(params=[pytest.param(name, marks=exhaustive if name in LIKE_LLAMA else ()) for name in MODELS])
def model(request):
    return random_model(request.param)


# --- the tokens of transformers ----------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_greedy(any_model, tokens):
    ids, mask = prompt(1, tokens)
    assert ours(any_model, ids, mask).tolist() == stock(any_model, ids, mask).tolist()


def test_batch_with_left_padding(model):
    ids, mask = prompt(3, 30, (21, 0, 4))
    cache = KVFastCache(model.config, "float32")
    assert ours(model, ids, mask, cache).tolist() == stock(model, ids, mask).tolist()
    assert [len(row) for row in cache.rows] == [9 + NEW_TOKENS - 1, 30 + NEW_TOKENS - 1, 26 + NEW_TOKENS - 1]
    assert cache.get_seq_length() == 30 + NEW_TOKENS - 1


def test_extra_left_padding_changes_nothing(model):
    ids, mask = prompt(1, 30)
    expected = ours(model, ids, mask)[:, 30:].tolist()
    padding = torch.zeros(1, 50, dtype=ids.dtype)
    assert ours(model, torch.cat([padding, ids], 1), torch.cat([padding, mask], 1))[:, 80:].tolist() == expected


def test_prompt_in_chunks(model):
    ids, mask = prompt(2, 41, (0, 25))
    assert ours(model, ids, mask, prefill_chunk_size=8).tolist() == stock(model, ids, mask).tolist()


def test_sampling(model):
    ids, mask = prompt(2, 9, (3,))
    torch.manual_seed(1)
    expected = stock(model, ids, mask, do_sample=True, top_k=5)
    torch.manual_seed(1)
    assert ours(model, ids, mask, do_sample=True, top_k=5).tolist() == expected.tolist()


def test_beams(model):
    ids, mask = prompt(2, 20, (0, 6))
    options = {"num_beams": 3, "num_return_sequences": 2}
    assert ours(model, ids, mask, **options).tolist() == stock(model, ids, mask, **options).tolist()


def test_assisted_generation(model):
    ids = prompt(1, 8)[0].repeat(1, 4)
    mask = torch.ones_like(ids)
    expected = stock(model, ids, mask).tolist()
    assert ours(model, ids, mask, prompt_lookup_num_tokens=5).tolist() == expected
    assistant = new_model("llama", num_hidden_layers=1)
    assert ours(model, ids, mask, assistant_model=assistant).tolist() == expected


def test_conversation_goes_on(model):
    ids, mask = prompt(2, 12, (5,))
    cache = KVFastCache(model.config, "float32")
    first = ours(model, ids, mask, cache)
    more, _ = prompt(2, 7)
    ids, mask = torch.cat([first, more], 1), torch.cat([mask, torch.ones(2, NEW_TOKENS + 7, dtype=mask.dtype)], 1)
    assert ours(model, ids, mask, cache).tolist() == stock(model, ids, mask).tolist()


def test_padding_inside(llama):
    """Each turn of a conversation padded on its left: nothing of it is seen, by rows that are cut in other places."""
    ids, mask = prompt(2, 30, (4,))
    mask[1, 10:15] = 0
    assert ours(llama, ids, mask).tolist() == stock(llama, ids, mask).tolist()
    llama.bfloat16()
    try:
        cache = KVFastCache(llama.config, "float32")
        found = logits(llama, ids, "kvfast", cache, mask)[mask.bool()]
        expected = logits(llama, ids, "eager", transformers.DynamicCache(config=llama.config), mask)[mask.bool()]
        assert (found - expected).abs().max() < 0.1 * expected.abs().max()
        assert [len(row) for row in cache.rows] == [26, 25]
    finally:
        llama.float()


def test_a_row_begins_after_others(llama):
    """Its first tokens have the first positions, and it had padding where others have tokens."""
    ids, mask = prompt(2, 20, (8,))
    cache = KVFastCache(llama.config, "float32")
    logits(llama, ids[:, :8], "kvfast", cache, mask[:, :8])
    assert ours(llama, ids, mask, cache).tolist() == stock(llama, ids, mask).tolist()


RIGHT, LEFT, BOTH = (0, slice(7, None)), (1, slice(0, 4)), ((2, slice(0, 3)), (2, slice(9, None)))


@pytest.mark.parametrize("holes", [[RIGHT], [RIGHT, LEFT], [RIGHT, LEFT, *BOTH], [(0, slice(2, 5)), RIGHT, (1, slice(10, 11))]])
def test_padding_anywhere(model, holes):
    """The first token after padding on the right is what the padding sees, as in transformers; a window must hold all of it."""
    ids, mask = padded(3, 12, *holes)
    cache = KVFastCache(model.config, "float32")
    options = {"max_new_tokens": 4}
    expected = stock(model, ids, mask, **options).tolist()
    assert ours(model, ids, mask, cache, **options).tolist() == expected
    assert [len(row) for row in cache.rows] == (mask.sum(1) + 3).tolist()
    assert ours(model, ids, mask, prefill_chunk_size=5, **options).tolist() == expected


def test_long_padding_anywhere(llama):
    ids, mask = padded(3, 300, (0, slice(3, None)), (1, slice(20, 90)), (1, slice(200, None)), (2, slice(0, 299)))
    options = {"max_new_tokens": 3}
    assert ours(llama, ids, mask, **options).tolist() == stock(llama, ids, mask, **options).tolist()
    options |= {"num_beams": 3, "num_return_sequences": 2}
    ids, mask = padded(2, 20, (0, slice(12, None)))
    assert ours(llama, ids, mask, **options).tolist() == stock(llama, ids, mask, **options).tolist()


@pytest.mark.parametrize("name", SLIDING)
def test_padding_on_the_right_of_a_window_is_refused(name):
    ids, mask = padded(2, WINDOW - 2, (0, slice(5, None)))
    with pytest.raises(ValueError, match="pad on the left"):
        ours(random_model(name), ids, mask)


@pytest.mark.parametrize("dtype, limit", [("float32", 1e-5), ("float16", 5e-3), ("bfloat16", 2e-2), ("int8", 5e-2), ("int4", 0.3)])
def test_logits(any_model, dtype, limit):
    """For a prompt and a token after it, in every storage."""
    ids, _ = prompt(1, 60)
    own, other = KVFastCache(any_model.config, dtype), transformers.DynamicCache(config=any_model.config)
    for part in (ids[:, :50], ids[:, 50:51], ids[:, 51:]):
        found, expected = logits(any_model, part, "kvfast", own), logits(any_model, part, "eager", other)
        assert (found - expected).norm() < limit * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_halves(llama, dtype):
    ids, _ = prompt(2, 30)
    half = copy.deepcopy(llama).to(dtype)
    found = logits(half, ids, "kvfast", KVFastCache(half.config, "float32"))
    assert found.dtype == dtype
    expected = logits(llama, ids, "eager", None)
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_other_implementations_decode_the_cache(llama):
    ids, mask = prompt(2, 30, (11, 0))
    expected = stock(llama, ids, mask).tolist()
    for implementation in ("sdpa", "eager"):
        llama.set_attn_implementation(implementation)
        cache = KVFastCache(llama.config, "float32")
        assert llama.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=NEW_TOKENS, do_sample=False).tolist() == expected
    mistral = random_model("mistral")
    mistral.set_attn_implementation("sdpa")
    cache = KVFastCache(mistral.config, "float32")
    found = mistral.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert found.tolist() == stock(mistral, ids, mask).tolist()


def test_implementation_may_change_between_steps(llama):
    ids, _ = prompt(1, 20)
    cache = KVFastCache(llama.config, "float32")
    logits(llama, ids[:, :9], "sdpa", cache)
    logits(llama, ids[:, 9:14], "kvfast", cache)
    found = logits(llama, ids[:, 14:], "eager", cache)
    expected = logits(llama, ids, "eager", None)[:, 14:]
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_without_the_cache(llama):
    ids, mask = prompt(2, 12, (5,))
    llama.set_attn_implementation("kvfast")
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": mask}
    for others in ({}, {"use_cache": False}):
        assert llama.generate(ids, **options, **others).tolist() == stock(llama, ids, mask).tolist()
        llama.set_attn_implementation("kvfast")
    llama(ids, labels=ids).loss.backward()  # training is PyTorch's
    assert llama.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0
    llama.zero_grad()
    for name, what in (("gemma2", "softcap"), ("gpt-oss", "sinks")):
        random_model(name).set_attn_implementation("kvfast")
        with pytest.raises(ValueError, match=f"no .*{what}.*KVFastCache"):
            random_model(name).generate(ids, **options)


# --- a model that people have ------------------------------------------------------------------


@pytest.mark.model
def test_smollm2(smollm2_file, read_once):
    from kvfast.llama import Tokenizer
    from kvfast.planning.gguf_file import GGUFFile

    path, tokenizer = smollm2_file, Tokenizer(GGUFFile(smollm2_file))
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer.encode("It is a truth universally acknowledged")])
    mask = torch.ones_like(ids)
    expected = stock(model, ids, mask).tolist()
    for dtype in ("float32", "int8"):
        assert ours(model, ids, mask, KVFastCache(model.config, dtype)).tolist() == expected
