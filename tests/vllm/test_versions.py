"""Versions of vLLM that were tested, and one that was not: it is tried, and what comes of that is said."""

import functools
import importlib
import logging
import os
import pickle
import random
import subprocess
import sys

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import torch
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode
from vllm_engines import AttentionBackendEnum, generate, in_engine, layers_of

import kvfast
from kvfast.engines.vllm import backend, formats, registration, trial, versions
from kvfast.planning.vllm_blocks import VLLM_FORMATS

# vLLM and PyTorch use parts of each other that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")

CPU_ATTN = AttentionBackendEnum.CPU_ATTN


@pytest.fixture(autouse=True)
def as_it_was():
    yield
    versions.Untested.needs_trial = versions.Untested.is_off = False
    kvfast.vllm.register()


@pytest.fixture
def said(monkeypatch):
    """What kvfast logs about a version that was not tested, which is one that does not exist."""
    lines = []
    monkeypatch.setattr(versions, "installed_version", lambda: "9.1.0")
    for logger in (trial.logger, logging.getLogger("vllm.kvfast")):
        for level in ("info", "warning"):
            monkeypatch.setattr(logger, level, lambda text, *values, **options: lines.append(text % values))
    return lines


def prompts():
    draw = random.Random(0)
    return [[draw.randrange(3, 500) for _ in range(n)] for n in (5, 200)]


def use(llm):
    return generate(llm, prompts()), {getattr(layer.impl, "memory", None) is not None for layer in layers_of(llm).values()}


@pytest.fixture(scope="session")
def of_vllm(folder_of):
    """A function of a name of MODELS: what vLLM alone says."""

    @functools.cache
    def texts(name):
        with pytest.MonkeyPatch.context() as own:
            own.setenv("KVFAST_VLLM", "0")
            return in_engine(folder_of(name), use)[0]

    return texts


@pytest.mark.parametrize("part", versions.USED)
def test_this_version_has_all_that_is_used(part):
    assert versions.missing(part) is None


@pytest.mark.parametrize("dtype", ["auto", "int4_per_token_head"])
def test_windows_and_a_format_with_blocks_of_its_own(folder_of, of_vllm, dtype):
    """Whether vLLM says for which layers it asks for the sizes of blocks, or not."""

    def texts(llm):
        found = generate(llm, prompts()), [generate(llm, [one])[0] for one in prompts()]
        sizes = {layer.impl.memory.pool.block_size for layer in layers_of(llm).values()}
        assert 64 in sizes if dtype.startswith("int4") else sizes <= {32, 64, 128, 256}
        return found

    together, alone = in_engine(folder_of("gemma3"), texts, kv_cache_dtype=dtype, enable_prefix_caching=False)
    assert together == alone
    if dtype == "auto":
        assert together == of_vllm("gemma3")


def test_formats_need_no_avx512(monkeypatch):
    """As vLLM 0.33 asks its own backend, which answers by the processor for all but a few dtypes."""
    monkeypatch.setattr(backend.CPUAttentionBackend, "supports_kv_cache_dtype", classmethod(lambda cls, dtype: dtype in (None, "auto")))
    answers = backend.KVFastBackend.supports_kv_cache_dtype
    assert all(answers(dtype) for dtype in (None, "auto", "bfloat16", *backend.NAMES)) and not answers("fp8")


@pytest.mark.parametrize("dtype", ["auto", *formats.LATENT_NAMES, "fp8"])
def test_the_platform_is_asked_for_latent_rows_of_floats(dtype):
    """vLLM 0.33 refuses other names there, before it asks a backend."""
    ask = registration._take_latents(lambda backend, config, num_heads: config.kv_cache_dtype)
    found = [ask(None, AttentionSelectorConfig(64, torch.float32, dtype, None, use_mla=mla), num_heads=4) for mla in (True, False)]
    assert found == ["fp8" if dtype == "fp8" else "auto", dtype]


@pytest.mark.parametrize("switch", ["1", "0"])
def test_names_of_kvfast_are_refused_without_it(switch):
    """By vLLM itself, and up to 0.32 with it, too. Nor has vLLM its connector then, so that no store mixes blocks of both."""
    code = f"""if True:
        import vllm.config, vllm.plugins
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        vllm.plugins.load_general_plugins()
        print("stores:", "KVFastConnector" in KVConnectorFactory._registry)
        for name in {[*formats.OWN_MODES.values()]}:
            vllm.config.CacheConfig(cache_dtype=name)"""
    env, pipe = os.environ | {"KVFAST_VLLM": switch}, subprocess.PIPE
    ended = subprocess.run([sys.executable, "-c", code], env=env, stdout=pipe, stderr=pipe, text=True, check=False)
    is_taken = switch == "1" and versions.takes_names()
    assert (ended.returncode == 0) == is_taken and ("'kvfast_int8'" in ended.stderr) != is_taken, ended.stderr
    assert f"stores: {switch == '1'}" in ended.stdout


def test_a_mode_stands_for_each_name():
    """vLLM's specs have the mode, not the name, and go from process to process."""
    assert len(formats.MODES) == len(VLLM_FORMATS) - 1
    for mode, name in formats.MODES.items():
        spec = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=torch.uint8, kv_quant_mode=mode)
        spec = pickle.loads(pickle.dumps(spec))
        assert formats.format_of(spec) == VLLM_FORMATS[name] and spec.kv_quant_mode is mode
        assert not versions.takes_names() or get_kv_quant_mode(name) is mode


def test_a_switch_turns_it_off(monkeypatch):
    CPU_ATTN.clear_override()
    monkeypatch.setenv("KVFAST_VLLM", "off")
    kvfast.vllm.register()
    assert not CPU_ATTN.is_overridden()


@pytest.mark.parametrize("dtype", ["auto", "int8_per_token_head"])
def test_a_version_that_was_not_tested_is_tried(folder_of, of_vllm, said, dtype):
    """And used, with one line, as one attention call gives vLLM's own result. The layer of that call is gone then."""
    texts, carried = in_engine(folder_of("llama"), use, kv_cache_dtype=dtype)
    assert carried == {True}
    assert dtype != "auto" or texts == of_vllm("llama")
    assert [line for line in said if "9.1.0" in line] == [
        f"kvfast was tested with vLLM {versions.tested_text()}, and 9.1.0 is installed: one attention call gave vLLM's own result, it is used"
    ]
    assert not AttentionBackendEnum.CPU_MLA.is_overridden()


@pytest.mark.parametrize(
    ("module", "name", "detail"),
    [
        ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionMetadataBuilder", None),
        ("vllm.v1.kv_cache_interface", "get_kv_quant_mode", None),
        ("vllm.v1.attention.backend", "AttentionBackend", "customize_spec"),
    ],
)
def test_what_a_version_lacks_is_named(monkeypatch, said, module, name, detail):
    """Everything is left to vLLM then, and its processes go on."""
    CPU_ATTN.clear_override()
    owner = importlib.import_module(module)
    monkeypatch.delattr(owner if detail is None else getattr(owner, name), detail or name)
    kvfast.vllm.register()
    assert not CPU_ATTN.is_overridden()
    [line] = said
    assert line.startswith("kvfast switched itself off (attention): ") and (detail or name) in line
    assert line.endswith(f"it was tested with vLLM {versions.tested_text()}, and 9.1.0 is installed")


def test_a_parameter_that_has_another_name_is_named(monkeypatch, said):
    def forward(self, layer, q, key, value, kv_cache, attn_metadata, output):
        raise NotImplementedError

    cpu_attn = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
    monkeypatch.setattr(cpu_attn.CPUAttentionBackendImpl, "forward", forward)
    kvfast.vllm.register()
    assert "CPUAttentionBackendImpl.forward of vllm.v1.attention.backends.cpu_attn has no query" in said[0]


def test_without_its_connectors_attention_is_used(monkeypatch, said):
    """A part that cannot be had is left out alone."""
    base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    monkeypatch.delattr(base, "SupportsHMA")
    CPU_ATTN.clear_override()
    kvfast.vllm.register()
    assert CPU_ATTN.is_overridden()
    assert [line.partition(":")[0] for line in said] == ["kvfast switched itself off (prompts in stores)"]


def wrong_scale(self):
    return {"scale": 2 * self.scale}


def failing(self):
    raise AttributeError("no such thing\nin this version")


@pytest.mark.parametrize(("options", "why"), [(wrong_scale, "an attention call differs"), (failing, "AttributeError: no such thing;")])
def test_another_result_switches_it_off(folder_of, of_vllm, monkeypatch, said, options, why):
    """And the tokens are vLLM's own."""
    monkeypatch.setattr(backend.KVFastImpl, "_set_options", options)
    assert in_engine(folder_of("llama"), use) == (of_vllm("llama"), {False})
    [line] = [one for one in said if "9.1.0" in one]
    assert line.startswith("kvfast switched itself off: an attention call ") and why in line


def test_a_dtype_that_vllm_does_not_have_is_refused_then(folder_of, monkeypatch, said):
    monkeypatch.setattr(backend.KVFastImpl, "_set_options", wrong_scale)
    with pytest.raises(Exception, match=r"no kv_cache_dtype=int8_per_token_head.*vLLM 0\.30"):
        in_engine(folder_of("llama"), use, kv_cache_dtype="int8_per_token_head")
