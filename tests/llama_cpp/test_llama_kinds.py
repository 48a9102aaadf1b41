"""Prompts of other kinds of models in llama-cpp-python itself, by small random ones: runs where it is installed."""

import contextlib
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
for package in ("gguf", "safetensors", "xxhash", "prometheus_client"):
    pytest.importorskip(package)

from kvfast.engines.llama_cpp import amx
from kvfast.engines.llama_cpp.served_llama import ServedLlama
from kvfast.llama_cpp import LlamaPromptCache
from kvfast.tools.cli.serve import _may_lay_out

TINY = runpy.run_path(Path(__file__).parents[1] / "data" / "tiny_gguf.py")
CHUNK, NEW_TOKENS = 32, 40
TEXT = "the 12 thin tin men that the thane met in the inn then hid the ten hens in the tent " * 6
KINDS = ["llama", "gemma2", "mamba", "jamba"]
RECURRENT = ["mamba", "jamba"]


@contextlib.contextmanager
def loaded(folder, kind, store=None, make=ServedLlama, **options):
    path = folder / f"{kind}.gguf"
    if not path.exists():
        TINY["write_model"](path, kind)
    llm = make(str(path), n_ctx=1024, n_batch=CHUNK, n_ubatch=CHUNK, n_threads=2, verbose=False, **options)
    prompts = LlamaPromptCache(store, llm, chunk_tokens=CHUNK) if store else None
    llm.set_cache(prompts)
    yield llm
    if prompts:
        prompts.close()
    llm.close()


def ids(llm, text):
    return llm.tokenize(text.encode(), add_bos=False)


def answer(llm, tokens, count=NEW_TOKENS):
    """The tokens that follow, and how many tokens were computed for a prompt."""
    found = []
    generate, computed = llm.generate, []

    def watched(given, **options):
        for token in generate(given, **options):
            computed.append(getattr(llm, "last", None) and llm.last.num_prompt_tokens - llm.last.num_reused_tokens)
            found.append(token)
            yield token

    llm.generate = watched
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            llm.create_completion(list(tokens), max_tokens=count, temperature=0)
    finally:
        del llm.generate
    return found, computed[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_process_finds_prompts(tmp_path, kind):
    with loaded(tmp_path, kind) as llm:
        tokens = ids(llm, TEXT)
        expected, computed = answer(llm, tokens)
        assert computed == len(tokens)
        longer = tokens + expected + tokens[:7]
        llm.reset()
        then, _ = answer(llm, longer)
    for again in (False, True):
        with loaded(tmp_path, kind, tmp_path / "store") as llm:
            found, computed = answer(llm, tokens)
            assert found == expected and computed == (len(tokens) - (len(tokens) - 1) // CHUNK * CHUNK if again else len(tokens))
    with loaded(tmp_path, kind, tmp_path / "store") as llm:
        found, computed = answer(llm, longer)  # a conversation that goes on
        assert found == then and computed <= CHUNK + 7


def test_a_state_has_what_was_not_stored_before(tmp_path):
    with loaded(tmp_path, "llama", tmp_path / "store") as llm:
        tokens = ids(llm, TEXT)
        expected, _ = answer(llm, tokens)
        llm.cache.flush()
        whole = llama_cpp.Llama.save_state(llm).llama_state
        state = llm.save_state()
        assert state.start == llm.n_tokens // CHUNK * CHUNK and state.llama_state_size < len(whole) / 10
        assert llama_cpp.Llama.save_state(llm).llama_state == whole
        longer = tokens + expected + 2 * tokens[:90]
        then, _ = answer(llm, longer)
        llm.cache.flush()
        stored = llm.cache.cache_size
        llm.cache.store.delete([entry.key for entry in llm.cache.store.entries()])
        for _ in range(2):  # it is missed, and stored again
            answer(llm, longer)
            llm.cache.flush()
        assert llm.cache.cache_size == stored
    with loaded(tmp_path, "llama", tmp_path / "store") as llm:
        assert answer(llm, longer) == (then, len(longer) - (len(longer) - 1) // CHUNK * CHUNK)


@pytest.mark.parametrize("kind", KINDS)
def test_contexts_go_on_and_back_in_memory(tmp_path, kind):
    with loaded(tmp_path, kind) as llm:
        tokens = ids(llm, TEXT)
        expected, _ = answer(llm, tokens)
        behind = len(tokens) - (len(tokens) - 1) // CHUNK * CHUNK  # the last chunk of the prompt
        for _ in range(2):
            assert answer(llm, tokens) == (expected, behind)
        longer = tokens + expected + tokens[:7]
        goes_on = answer(llm, longer)
        assert goes_on[1] <= 8  # with the last token of the answer, which was not computed
        other = tokens[:50] + tokens[90:]
        parted = answer(llm, other)
        assert parted[1] == len(other) - (0 if kind in RECURRENT else CHUNK)
        llm.reset()
        assert answer(llm, longer)[0] == goes_on[0] and answer(llm, other)[0] == parted[0]


@pytest.mark.parametrize("kind", RECURRENT)
def test_states_where_two_prompts_part_are_for_the_third(tmp_path, kind):
    first, second, third = (f"{TEXT}{end}" for end in ("1 " * 80, "2 " * 80, "3 " * 80))
    for text in (first, second):
        with loaded(tmp_path, kind, tmp_path / "store") as llm:
            assert answer(llm, ids(llm, text), 1)[1] == len(ids(llm, text))
    with loaded(tmp_path, kind, tmp_path / "store") as llm:
        tokens = ids(llm, third)
        found, computed = answer(llm, tokens)
        assert computed == len(tokens) - len(ids(llm, TEXT)) // CHUNK * CHUNK
    with loaded(tmp_path, kind) as llm:
        assert answer(llm, tokens)[0] == found


def test_contexts_have_states_of_their_own(tmp_path):
    with loaded(tmp_path, "jamba", parallel=2) as llm:
        tokens = ids(llm, TEXT)
        one, other = llm.contexts
        expected, then = answer(one, tokens)[0], answer(other, tokens[9:])[0]
        assert answer(one, tokens)[0] == expected and answer(other, tokens[9:])[0] == then
        assert [*one.checkpoints] and one.checkpoints is not other.checkpoints


def test_what_llama_cpp_python_cannot_go_on_with_is_computed(tmp_path):
    """Its own Llama computes all tokens of a recurrent model again, whatever a cache has."""
    with loaded(tmp_path, "jamba", tmp_path / "store", llama_cpp.Llama) as llm:
        tokens = ids(llm, TEXT)
        with pytest.warns(RuntimeWarning, match="computes all of a prompt again"):
            expected = llm.create_completion(tokens, max_tokens=9, temperature=0)["choices"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert llm.create_completion(tokens, max_tokens=9, temperature=0)["choices"] == expected and llm.cache.cache_size == 0


def test_a_draft_model_finds_prompts(tmp_path):
    def draft():
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        return LlamaPromptLookupDecoding(num_pred_tokens=3)

    with loaded(tmp_path, "llama", make=llama_cpp.Llama, logits_all=True, draft_model=draft()) as llm:
        tokens = ids(llm, TEXT)
        expected = answer(llm, tokens)[0]
    for hits in (0, 1):
        with loaded(tmp_path, "llama", tmp_path / "store", llama_cpp.Llama, logits_all=True, draft_model=draft()) as llm:
            assert answer(llm, tokens)[0] == expected and llm.cache.stats.num_hits == hits


@pytest.mark.skipif(sys.platform != "linux", reason="the crash is one of GCC's builds for Linux")
def test_weights_stay_as_they_are_where_amx_crashes(tmp_path, monkeypatch, capsys):
    has_amx = b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info()
    monkeypatch.setattr(llama_cpp, "llama_print_system_info", lambda: b"AVX512 = 1 | AMX_INT8 = 1 | ")
    if not has_amx:  # the layout that is tried is one for other instructions
        assert _may_lay_out() and not capsys.readouterr().err
    monkeypatch.setattr(amx.subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, -11))
    assert not _may_lay_out() and "; a faster one: CXXFLAGS=-fno-dse pip install" in capsys.readouterr().err
    for use in (False, True):
        with loaded(tmp_path, "llama", use_extra_bufts=use, parallel=2) as llm:
            assert llm.model_params.use_extra_bufts == llm.contexts[1].model_params.use_extra_bufts == use


HOST_CACHE = """
import sys, llama_cpp, kvfast.llama_cpp
kvfast.llama_cpp.load()
found = []
for layers in (0, 99):
    llm = llama_cpp.Llama(sys.argv[1], n_ctx=256, n_batch=1, n_ubatch=1, flash_attn=True, n_gpu_layers=layers, offload_kqv=False)
    found.append([token for token, _ in zip(llm.generate(list(range(5, 40)), temp=0.0), range(20))])
    llm.close()
print(found[0] == found[1])
"""


@pytest.mark.skipif(not llama_cpp.llama_supports_gpu_offload(), reason="llama-cpp-python has no GPU")
def test_a_cache_in_host_memory_is_read_there(tmp_path, library):
    """Where the weights are on a GPU. ggml prints which device each operation got."""
    TINY["write_model"](tmp_path / "tiny.gguf")
    environment = os.environ | {"GGML_SCHED_DEBUG": "2"}
    command = [sys.executable, "-c", HOST_CACHE, tmp_path / "tiny.gguf"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=120)
    devices = re.findall(r"\( *(FLASH_ATTN|SET_ROWS)\): .{20} \(.{5}\) \[ *(\S+)", done.stderr)
    assert {("FLASH_ATTN", "KVFAS"), ("SET_ROWS", "KVFAS")} <= set(devices) and done.stdout == "True\n"
