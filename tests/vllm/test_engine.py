"""vLLM with kvfast as its KV cache, against vLLM alone and against kvfast's own pools, on tiny models with random weights."""

import importlib.metadata
import logging
import random

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

from vllm_engines import MODELS, engine, generate, layers_of, save_model

import kvfast
from kvfast.vllm import versions

LENGTHS = 5, 40, 200, 333


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """A function of a name of MODELS: the folder of such a model."""
    folders = {}

    def folder(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            save_model(name, folders[name])
        return folders[name]

    return folder


def prompts(lengths=LENGTHS, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(3, 500) for _ in range(n)] for n in lengths]


def pools_of(llm):
    """The pool of each attention layer."""
    return [layer.impl.memory.pool for layer in layers_of(llm).values()]


@pytest.mark.parametrize("name", MODELS)
def test_float_caches_give_the_tokens_of_vllm(folder_of, monkeypatch, name):
    """GQA, windows, hybrid groups, softcap, sinks and ALiBi; prompts in chunks, alone and in one batch, and from known prefixes."""
    monkeypatch.setenv("KVFAST_VLLM", "0")
    with engine(folder_of(name)) as llm:
        assert not any(type(layer.impl).__module__.startswith("kvfast") for layer in layers_of(llm).values())
        expected = generate(llm, prompts())
    monkeypatch.setenv("KVFAST_VLLM", "1")
    with engine(folder_of(name), max_num_batched_tokens=128) as llm:
        assert generate(llm, prompts()) == expected
        assert {pool.dtype for pool in pools_of(llm)} == {"float32"}
        assert generate(llm, prompts()) == expected
        assert [generate(llm, [one])[0] for one in prompts()] == expected


@pytest.mark.parametrize(("name", "dtype"), [("int8_per_token_head", "int8"), ("int4_per_token_head", "int4"), ("turboquant_k8v4", "k8v4")])
def test_integer_caches_take_less_memory_and_do_not_depend_on_the_batch(folder_of, name, dtype):
    """A small cache, so that requests are preempted and computed again."""
    with engine(folder_of("llama"), kv_cache_dtype=name, num_gpu_blocks_override=8, block_size=64) as llm:
        alone = [generate(llm, [one])[0] for one in prompts()]
        assert generate(llm, prompts()) == alone
        pools = {pool.dtype: pool for pool in pools_of(llm)}
        assert any(one.startswith(dtype) for one in pools)
        assert min(pool.bytes_per_token / pool.num_layers for pool in pools.values()) < 0.4 * 2 * 2 * 32 * 4


def test_what_is_not_known_is_left_to_vllm(monkeypatch, caplog):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = AttentionBackendEnum.CPU_ATTN
    backend.clear_override()
    monkeypatch.setenv("KVFAST_VLLM", "off")
    kvfast.vllm.register()
    assert not backend.is_overridden()
    monkeypatch.delenv("KVFAST_VLLM")
    monkeypatch.setattr(versions, "installed_version", lambda: "9.1.0")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        kvfast.vllm.register()
    assert not backend.is_overridden()
    assert [record.getMessage() for record in caplog.records] == [
        "kvfast leaves attention to vLLM's own backend: it was tested with vLLM 0.32, and 9.1.0 is installed"
    ]
    monkeypatch.undo()
    kvfast.vllm.register()
    assert backend.is_overridden()


def test_vllm_finds_the_plugin():
    (found,) = [one for one in importlib.metadata.entry_points(group="vllm.general_plugins") if one.name == "kvfast"]
    assert found.load() is kvfast.vllm.register
