"""SmolLM2 in vLLM with kvfast's cache: the texts of vLLM's own backend, and of kvfast's own runtime on the same format."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")
pytest.importorskip("gguf", reason="the model is a GGUF file")

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from llama_folder import save_folder
from vllm_engines import in_engine, texts

import kvfast
from kvfast.planning.vllm_blocks import VLLM_FORMATS
from kvfast.tools.llama.prompts import chat_prompts

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = 12
# Errors of log-probabilities: what the precision contract leaves through the layers, in float32; and where rounding to a code may turn out
# otherwise. One such code moves those of later layers, so two runtimes differ as much as the format's rounding does: the root mean
# square over all tokens says whether they compute the same, and single tokens may be further off.
EXACT, ROUNDED, ROUNDED_RMS = 2e-3, 0.1, 0.02


@pytest.fixture(scope="module")
def smollm2(smollm2, tmp_path_factory):
    """(model, its folder, 20 prompts of token ids)."""
    _, model, tokenizer = smollm2
    folder = tmp_path_factory.mktemp("smollm2")
    save_folder(model, folder)
    return model, folder, [tokenizer.encode(text) for text in chat_prompts(20)]


def check_texts(model, prompts, form, found, error):
    """Texts are what kvfast's own runtime chooses on a cache of this format, given the tokens before; but for ties, which most
    texts do not have. Their log-probabilities are as near as `error`, in int8 all but 1 in 100."""
    prefix = kvfast.PagedKVCache(*model.cache_shape, num_blocks=16 * len(prompts), dtype=form).new_sequence()
    shared = len(os.path.commonprefix(prompts))  # nothing depends on the steps
    model.forward(prompts[0][:shared], prefix)
    rest = [[*ids[shared:], *tokens[:-1]] for ids, (tokens, _) in zip(prompts, found, strict=True)]
    counts = [len(tokens) for tokens in rest]
    hidden = np.split(model.forward_batch(np.concatenate(rest), [prefix.fork() for _ in prompts], counts), np.cumsum(counts)[:-1])
    wholes, differences = 0, []
    for ids, (tokens, logprobs), part in zip(prompts, found, hidden, strict=True):
        logits = model.logits(part[-TOKENS:]).astype(np.float64)
        chosen, best = logits[range(TOKENS), tokens], logits.max(1)
        assert (best - chosen < 2 * error).all(), ids
        differences.append(logprobs - (chosen - best - np.log(np.exp(logits - best[:, None]).sum(1))))
        wholes += (best == chosen).all()
    assert wholes >= 0.7 * len(prompts)
    if form == VLLM_FORMATS["int8_per_token_head"]:
        assert np.mean(np.abs(differences) < error) >= 0.99
    else:
        np.testing.assert_allclose(differences, 0, atol=error)
    if error == ROUNDED:
        assert np.sqrt(np.mean(np.square(differences))) < ROUNDED_RMS


@pytest.fixture(scope="module")
def of_vllm(smollm2):
    """The texts of vLLM's own backend in float32."""
    _, folder, prompts = smollm2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVFAST_VLLM", "0")
        return in_engine(folder, lambda llm: texts(llm, prompts, TOKENS))


def test_the_texts_of_vllm(smollm2, of_vllm):
    """In float32, in chunks, eight at once and alone, from known prefixes and not: the same but for ties."""
    model, folder, prompts = smollm2

    def use(llm):
        return texts(llm, prompts, TOKENS), texts(llm, prompts[:5], TOKENS), [texts(llm, [ids], TOKENS)[0] for ids in prompts[5:10]]

    together, again, alone = in_engine(folder, use, max_num_batched_tokens=128, enable_prefix_caching=True)
    for found, expected in ((together, of_vllm), (again, of_vllm[:5]), (alone, of_vllm[5:10])):
        same = [one[0] == other[0] for one, other in zip(found, expected, strict=True)]
        assert sum(same) >= 0.8 * len(same)
        for one, other in zip(found, expected):
            if one[0] == other[0]:
                np.testing.assert_allclose(one[1], other[1], atol=EXACT)
    check_texts(model, prompts, "float32", together, EXACT)  # where they differ, both are ties
    check_texts(model, prompts[::4], "float32", of_vllm[::4], EXACT)


@pytest.mark.parametrize("name", [pytest.param("bfloat16", marks=pytest.mark.exhaustive), "int8_per_token_head", "int4_per_token_head"])
def test_the_texts_of_kvfast(smollm2, name):
    """They are those of its own runtime on the same format; and the tokens that fit in memory are those of `plan`."""
    model, folder, prompts = smollm2
    form = VLLM_FORMATS.get(name, name)

    def use(llm):
        config = llm.llm_engine.vllm_config.cache_config
        return texts(llm, prompts, TOKENS), config.num_gpu_blocks * config.block_size

    found, capacity = in_engine(
        folder, use, kv_cache_dtype=name, block_size=64, enable_prefix_caching=False, num_gpu_blocks_override=None
    )
    check_texts(model, prompts, form, found, ROUNDED)
    planned = kvfast.plan(folder, engine="vllm", memory=1 << 30, bandwidth=1e10, context=64)
    assert capacity == planned[name if name in VLLM_FORMATS else "auto"].longest_context  # of VLLM_CPU_KVCACHE_SPACE=1
