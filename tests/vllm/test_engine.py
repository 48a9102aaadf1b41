"""vLLM with kvfast as its KV cache, against vLLM alone."""

import random

import pytest
from conftest import generate, layers_of

LENGTHS = 5, 40, 200, 333


def prompts(lengths=LENGTHS, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(3, 500) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss", "bloom"])
def test_float_caches_give_the_tokens_of_vllm(engine, name):
    """GQA, windows, hybrid groups, softcap, sinks and ALiBi, prompts in chunks and in one batch."""
    with engine(name, own=True) as llm:
        assert not any(type(layer.impl).__module__.startswith("kvfast") for layer in layers_of(llm).values())
        expected = generate(llm, prompts())
    with engine(name, max_num_batched_tokens=128) as llm:
        assert generate(llm, prompts()) == expected
        impls = [layer.impl for layer in layers_of(llm).values()]
        assert impls and all(impl.memory.pool.dtype == "float32" for impl in impls)
        assert generate(llm, prompts()) == expected  # from the blocks of known prefixes
