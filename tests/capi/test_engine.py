"""An engine in C serves several prompts with `kvfast.h`: shared prefix, forks, batches, a snapshot. Its tokens are those of `generate`."""

import numpy as np
import pytest

import kvfast
from kvfast import llama


@pytest.fixture(scope="module")
def engine(extension):
    return extension("engine_in_c")


def served(engine, model, pool, prompts, num_shared, max_tokens, end=-1):
    """Code, text, and the tokens after each prompt, and once more after the first."""
    config, weights = model.config, model.weights
    sizes = (
        *(config.num_layers, config.num_q_heads, config.num_kv_heads, config.head_dim),
        *(config.hidden_size, config.ffn_size, config.vocab_size, config.rope_dims),
    )
    arrays = [weights.embedding, weights.output_norm, weights.output, weights.rope_frequencies]
    for layer in weights.layers:
        assert layer.qkv_bias is None and layer.q_norm is None and layer.k_norm is None
        arrays += [layer.attn_norm, layer.qkv, layer.attn_output, layer.ffn_norm, layer.gate_up, layer.ffn_down]
    prompts = tuple(tuple(map(int, prompt)) for prompt in prompts)
    return engine.serve(sizes, config.norm_eps, tuple(arrays), pool, prompts, num_shared, max_tokens, end)


def generated(model, prompts, num_shared, dtype, max_tokens, end_ids=()):
    """The same by Python, which also sends the shared tokens first, as formats that seal blocks read other floats for other cuts."""
    outputs = []
    for prompt in prompts:
        cache = kvfast.KVCache(*model.cache_shape, dtype=dtype)
        model.prefill(prompt[:num_shared], cache)
        outputs.append(list(llama.generate(model, prompt[num_shared:], cache, max_tokens=max_tokens, end_ids=end_ids)))
    return [*outputs, outputs[0]]


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_a_tiny_model(engine, tiny_model, dtype):
    (model, _), rng = tiny_model, np.random.default_rng(15)  # with which no two tokens are nearly as likely
    shared = rng.integers(0, 256, 70)
    prompts = [[*shared, *rng.integers(0, 256, count)] for count in (1, 9, 30)]
    pool = kvfast.PagedKVCache(*model.cache_shape, num_blocks=16, dtype=dtype)
    expected = generated(model, prompts, len(shared), dtype, 40)
    assert len({tuple(one) for one in expected}) == 3
    assert served(engine, model, pool, prompts, len(shared), 40) == (0, "", expected)
    assert pool.num_free_blocks == 16 and pool.num_sequences == 0


def test_texts_that_end_leave_the_batch(engine, tiny_model):
    (model, _), rng = tiny_model, np.random.default_rng(7)  # with which no two tokens are nearly as likely
    shared = rng.integers(0, 256, 20)
    prompts = [[*shared, token] for token in range(5)]
    end = generated(model, prompts, 20, "int8", 30)[2][7]
    expected = generated(model, prompts, 20, "int8", 30, {end})
    assert len(expected[2]) <= 7 < max(map(len, expected))
    pool = kvfast.PagedKVCache(*model.cache_shape, num_blocks=16, dtype="int8")
    assert served(engine, model, pool, prompts, 20, 30, end) == (0, "", expected)


@pytest.mark.parametrize("num_blocks", [1, 3, 5])
def test_an_engine_without_room_is_told_so(engine, tiny_model, rng, num_blocks):
    model, _ = tiny_model
    shared = rng.integers(0, 256, 24)
    pool = kvfast.PagedKVCache(*model.cache_shape, num_blocks=num_blocks, block_size=16, dtype="int8")
    code, text, outputs = served(engine, model, pool, [[*shared, token] for token in range(4)], 24, 30)
    assert code == -4 and "block" in text and all(len(one) < 30 for one in outputs)
    assert pool.num_free_blocks == num_blocks and pool.num_sequences == 0


@pytest.mark.model
def test_smollm2(engine, smollm2):
    _, model, tokenizer = smollm2
    words = {"Japan": "Tokyo, Japanese", "Spain": "Madrid, Spanish", "Egypt": "Cairo, Arabic", "Greece": "Athens, Greek"}
    facts = [f" The capital of {land} is {word.replace(',', ', and people there speak')}." for land, word in words.items()]
    texts = [" The capital of France is", " The capital of Italy is the city of", " The capital of Germany is"]
    shared = tokenizer.encode("Here are facts about countries of the world." + "".join(facts))
    prompts = [shared + tokenizer.encode(text) for text in texts]
    assert 60 < len(shared) < 64  # so that their first block is sealed while the engine generates
    pool = kvfast.PagedKVCache(*model.cache_shape, num_blocks=16)
    caches = [kvfast.KVCache(*model.cache_shape) for _ in prompts]
    expected = [list(llama.generate(model, prompt, cache, max_tokens=16)) for prompt, cache in zip(prompts, caches, strict=True)]
    assert "Paris" in tokenizer.decode(expected[0])
    assert served(engine, model, pool, prompts, len(shared), 16) == (0, "", [*expected, expected[0]])
