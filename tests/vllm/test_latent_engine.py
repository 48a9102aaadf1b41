"""vLLM's models with multi-head latent attention over pools of kvfast, in place of CPU_MLA and of AMX_MLA."""

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import torch
from vllm_engines import generate, in_engine, layers_of, save_model

from kvfast.engines.vllm import versions

# vLLM and PyTorch use parts of each other that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = 5, 40, 200, 333
# vLLM's own operator for the interleaved rotation of DeepSeek is wrong on CPUs: its texts depend on the batch, with any cache.
RIGHT = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepseek")
    save_model("deepseek", folder)
    return folder


@pytest.fixture(params=[True, False], ids=["AMX_MLA", "CPU_MLA"])
def has_amx(request, monkeypatch):
    """vLLM has one of two backends, which kvfast replaces; with AMX, prompts come in chunks and known prefixes are used."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: request.param)
    return request.param


def prompts():
    return [[3 + (i * i * 7 + 11 * i * n) % 497 for i in range(n)] for n in LENGTHS]


def pool_of(llm):
    (pool,) = {layer.impl.memory.pool for layer in layers_of(llm).values()}
    return pool


@pytest.fixture(scope="module")
def expected(folder):
    """The tokens of vLLM's CPU_MLA; its AMX_MLA takes bfloat16 only."""
    with pytest.MonkeyPatch.context() as own:
        own.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        own.setenv("KVFAST_VLLM", "0")
        return in_engine(folder, lambda llm: generate(llm, prompts()), **RIGHT)


def test_float_latents_give_the_tokens_of_vllm(folder, expected, has_amx):
    def with_kvfast(llm):
        assert generate(llm, prompts()) == expected
        assert (pool_of(llm).dtype, pool_of(llm).block_size) == ("float32", 128 if has_amx or versions.takes_names() else 16)
        assert generate(llm, prompts()) == expected
        assert [generate(llm, [one])[0] for one in prompts()] == expected

    in_engine(folder, with_kvfast, **RIGHT, **({"max_num_batched_tokens": 128} if has_amx else {}))


@pytest.mark.parametrize(("name", "share"), [("int8_per_token_head", 0.26), ("int4_per_token_head", 0.13)])
def test_integer_latents_take_less_memory_and_do_not_depend_on_the_batch(folder, has_amx, name, share):
    def use(llm):
        alone = [generate(llm, [one])[0] for one in prompts()]
        assert generate(llm, prompts()) == alone
        assert pool_of(llm).dtype.startswith(name[:4])
        assert pool_of(llm).bytes_per_token / pool_of(llm).num_layers < share * 4 * (512 + 64)

    in_engine(folder, use, kv_cache_dtype=name, **RIGHT)


def test_formats_without_latents_are_refused(folder):
    own = "kvfast keeps latent rows as auto.*got MLAAttentionSpec with kv_cache_dtype=fp8"
    with pytest.raises(Exception, match=rf"(?s){own}|fp8 is not supported by MLA attention on CPU"):  # by vLLM, from 0.33 on
        in_engine(folder, print, kv_cache_dtype="fp8")
