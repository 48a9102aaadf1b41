"""vLLM with kvfast as its KV cache, against vLLM alone and against kvfast's own pools, on tiny models with random weights."""

import copy
import dataclasses
import functools
import importlib.metadata
import os
import random
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm_drafts import save_drafts
from vllm_engines import MODELS, generate, in_engine, layers_of

import kvfast
from kvfast.core.kernels import cpu_features
from kvfast.engines.vllm import backend, formats, versions

# vLLM and PyTorch use parts of each other that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = 5, 40, 200, 333


def prompts(lengths=LENGTHS, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(3, 500) for _ in range(n)] for n in lengths]


has_names = pytest.mark.skipif(not versions.takes_names(), reason="kvfast has names of its own from vLLM 0.33 on")
REPEATED = [one[:20] * 4 for one in prompts((20, 30))]


@pytest.fixture(scope="session")
def of_vllm(folder_of):
    """A function of a name of MODELS: what vLLM alone says after `prompts()`, and after REPEATED."""

    def use(llm):
        assert not any(type(layer.impl).__module__.startswith("kvfast") for layer in layers_of(llm).values())
        return generate(llm, prompts()), generate(llm, REPEATED, 40)

    @functools.cache
    def said(name):
        with pytest.MonkeyPatch.context() as own:
            own.setenv("KVFAST_VLLM", "0")
            return in_engine(folder_of(name), use)

    return said


def pools_of(llm):
    """The pool of each attention layer."""
    return [layer.impl.memory.pool for layer in layers_of(llm).values()]


@pytest.mark.parametrize("name", sorted({*MODELS} - {"deep", "deepseek", "qwen3_next", "lfm2", "granite"}))
def test_float_caches_give_the_tokens_of_vllm(folder_of, of_vllm, name):
    """GQA, windows, hybrid groups, softcap, sinks and ALiBi; prompts in chunks, alone and in one batch, and from known prefixes."""
    expected, _ = of_vllm(name)

    def with_kvfast(llm):
        assert generate(llm, prompts()) == expected
        assert {pool.dtype for pool in pools_of(llm)} == {"float32"}
        assert generate(llm, prompts()) == expected
        assert [generate(llm, [one])[0] for one in prompts()] == expected

    in_engine(folder_of(name), with_kvfast, max_num_batched_tokens=128)


PREEMPTED = "int8_per_token_head", "turboquant_3bit_nc"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("int8_per_token_head", "int8"),
        ("turboquant_k8v4", "k8v4"),
        ("turboquant_4bit_nc", "int4"),
        ("turboquant_k3v4_nc", "int3/int4"),
        ("turboquant_3bit_nc", "int3"),
        pytest.param("kvfast_int8", "int8", marks=has_names),
    ],
)
def test_integer_caches_take_less_memory_and_do_not_depend_on_the_batch(folder_of, monkeypatch, name, dtype):
    """In a cache of ten blocks, four texts begin with one each and grow to three: some are preempted and computed again. With
    turboquant's modes vLLM leaves the first and last two layers in the model's dtype, whose blocks have another size. Formats differ
    in the bytes of a block alone; so one with such layers and one without is enough for what preempts. The others have room for all
    texts: where newest tokens are floats, a text whose last blocks are given away is read as codes when it is found again."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def use(llm):
        alone = [generate(llm, [one])[0] for one in prompts()]
        assert generate(llm, prompts()) == alone
        if name in PREEMPTED:
            growing = prompts((50, 52, 54, 56))
            alone = [generate(llm, [one], 100)[0] for one in growing]
            assert not preempted
            assert generate(llm, growing, 100) == alone and preempted
        pools = {pool.dtype: pool for pool in pools_of(llm)}
        assert any(one.startswith(dtype) for one in pools)
        assert min(pool.bytes_per_token / pool.num_layers for pool in pools.values()) < 0.4 * 2 * 2 * 32 * 4

    preempted = []
    original = Scheduler._preempt_request

    def preempt(*args, **options):
        preempted.append(args)
        return original(*args, **options)

    monkeypatch.setattr(Scheduler, "_preempt_request", preempt)
    options = {"num_gpu_blocks_override": 10 if name in PREEMPTED else 40, "block_size": 64, "max_model_len": 448}
    in_engine(folder_of("deep"), use, kv_cache_dtype=name, **options)


@pytest.mark.parametrize(
    ("model", "kind"), [("gemma3", None), ("gemma3", "ngram"), ("gemma3", "draft_model"), ("llama", "eagle"), ("gpt_oss", "dflash")]
)
def test_a_context_that_only_four_bits_have_room_for(folder_of, tmp_path, monkeypatch, model, kind):
    """vLLM takes it or refuses it at the start, as `plan` says, with windows, drafts and float tokens next to the blocks."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")  # else it is the memory
    folder, length, drafts, drafting = folder_of(model), 16384, None, None
    if kind == "draft_model":
        drafting = folder_of("shallow")
        drafts = {"method": kind, "model": str(drafting), "num_speculative_tokens": 3}
    elif kind is not None:
        drafts = save_drafts(kind, folder, tmp_path)
        drafting = drafts.get("model")
    if kind == "dflash":
        monkeypatch.setenv("KVFAST_TAIL", "0")
    planned = functools.partial(kvfast.plan, folder, engine="vllm", bandwidth=1e10, context=length, drafts=drafting)
    int4, int8 = "int4_per_token_head", "int8_per_token_head"
    memory = int(1.2 * planned(memory=1)[int4].bytes_per_sequence)
    planned = planned(memory=memory)
    options = {
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": memory,
        "max_model_len": length,
        "max_num_batched_tokens": 2048,
    }
    options |= {"block_size": 64, "hf_overrides": {"max_position_embeddings": length}, "speculative_config": drafts}
    room = in_engine(folder, lambda llm: llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens, kv_cache_dtype=int4, **options)
    assert planned[int4].fits and room == pytest.approx(length * memory / planned[int4].bytes_per_sequence, rel=0.02)
    with pytest.raises(ValueError, match="estimated maximum model length is") as refused:
        in_engine(folder, len, kv_cache_dtype=int8, **options)
    room = int(re.search(r"model length is (\d+)", str(refused.value))[1])
    assert not planned[int8].fits and room == pytest.approx(planned[int8].longest_context, rel=0.02)


def test_the_default_keeps_float_rows_beside_the_blocks(folder_of, monkeypatch):
    """A text does not depend on the batch, on whose blocks it gets, or on whether it is computed again."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted = []
    original = Scheduler._preempt_request
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda *args, **options: preempted.append(args) or original(*args, **options))

    def use(llm):
        alone = [generate(llm, [one])[0] for one in prompts()]
        assert generate(llm, prompts()) == alone
        growing = prompts((50, 52, 54, 56))
        slowly = [generate(llm, [one], 100)[0] for one in growing]
        assert not preempted
        assert generate(llm, growing, 100) == slowly and preempted
        assert [generate(llm, [one])[0] for one in prompts()] == alone
        assert {pool.dtype for pool in pools_of(llm)} == {"int4-recent"}
        [memory] = {id(layer.impl.memory): layer.impl.memory for layer in layers_of(llm).values()}.values()
        blocks = sum(tensor.nbytes for tensor in memory._tensors)
        assert 0 < memory.pool.nbytes - blocks < 3 * blocks  # at most all of their tokens as float16

    in_engine(
        folder_of("deep"),
        use,
        kv_cache_dtype="int4_per_token_head",
        num_gpu_blocks_override=10,
        block_size=64,
        max_model_len=448,
        enable_prefix_caching=False,
    )


@pytest.mark.parametrize("name", ["int8_per_token_head", "int4_per_token_head"])
def test_the_same_request_twice(folder_of, monkeypatch, name):
    """With a hit of the prefix cache it gets the same tokens, but for a format with float rows after the beginning of another text.
    vLLM warns of it, and gets the same tokens without the hit."""
    given, said = prompts((130, 190, 221, 261, 300)), []
    others = [given[-1][:192] + one for one in prompts((60, 70, 80, 90), seed=1)]
    monkeypatch.setattr(backend.logger, "warning_once", lambda text, *values: said.append(text % values))

    def use(llm):
        first = [generate(llm, [one])[0] for one in given]
        assert [generate(llm, [one], skip_reading_prefix_cache=True)[0] for one in given] == first
        assert [generate(llm, [one])[0] for one in given] == first
        after = [generate(llm, [one])[0] for one in others]
        assert ([generate(llm, [one], skip_reading_prefix_cache=True)[0] for one in others] == after) == (not said)

    in_engine(folder_of("deep"), use, kv_cache_dtype=name, block_size=64)
    assert [text.split(" reads")[0] for text in said] == ["kv_cache_dtype=int4_per_token_head"] * name.startswith("int4")


def test_layers_with_windows_have_blocks_of_the_same_size(folder_of):
    """A model whose layers are of both kinds: int4 as it is, and rotated INT4 in layers with a window."""

    def use(llm):
        alone = [generate(llm, [one])[0] for one in prompts()]
        assert generate(llm, prompts()) == alone
        assert len({pool.dtype for pool in pools_of(llm)}) == 2

    in_engine(folder_of("gemma3"), use, kv_cache_dtype="int4_per_token_head", enable_prefix_caching=False)


def test_vllm_finds_the_plugin(monkeypatch):
    (found,) = [one for one in importlib.metadata.entry_points(group="vllm.general_plugins") if one.name == "kvfast"]
    called = []
    monkeypatch.setattr(kvfast.vllm, "register", lambda: called.append(True))
    found.load()()
    assert called


@pytest.mark.parametrize("name", ["KVFAST_ISA", "KVFAST_PRECISION", "KVFAST_NUM_THREADS", "KVFAST_TAIL"])
def test_a_wrong_setting_ends_vllm(name):
    """It logs what happens while it loads a plugin, and goes on without it. What happens when it calls one ends it."""
    code = "from importlib.metadata import entry_points as points\n[one] = [p for p in points(group='vllm.general_plugins') if p.name == 'kvfast']"
    code += "\nplugin = one.load()\nprint('loaded', flush=True)\nplugin()"
    environment = os.environ | {name: "wrong"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1 and run.stdout == "loaded\n" and name in run.stderr.splitlines()[-1]


def test_fp8_is_left_to_vllm(folder_of, monkeypatch):
    """Which is said, and the tokens are those of vLLM's own backend. It needs AVX-512."""
    if not cpu_features()["avx512f"]:
        pytest.skip("vLLM needs AVX-512 for fp8")

    def use(llm):
        tokens = generate(llm, prompts((40,)))
        assert all(layer.impl.memory is None for layer in layers_of(llm).values())
        return tokens

    said = []
    monkeypatch.setattr(backend.logger, "warning_once", lambda text, *values: said.append(text % values))
    tokens = in_engine(folder_of("llama"), use, kv_cache_dtype="fp8")
    assert said == ["kvfast leaves FullAttentionSpec with kv_cache_dtype=fp8 to vLLM's own backend"]
    monkeypatch.setenv("KVFAST_VLLM", "0")
    assert in_engine(folder_of("llama"), lambda llm: generate(llm, prompts((40,))), kv_cache_dtype="fp8") == tokens


def see_each_other(folder, ids, spans, window, most, clamped=False):
    """The tokens that follow a prompt whose tokens see each other within the spans, by transformers without a cache."""
    model, ids = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32), list(ids)
    for _ in range(most):
        at = torch.arange(len(ids))
        near = at[None] > at[:, None] - window
        seen = (at[None] <= at[:, None]) & near
        for start, last in spans:
            inside = (start <= at) & (at <= last)
            seen |= inside[None] & inside[:, None] & (near | (not clamped))
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0, -1].argmax()))
    return ids[-most:]


@pytest.mark.parametrize(("name", "clamped"), [("llama", False), ("mistral", False), ("mistral", True)])
def test_tokens_of_images_see_each_other(folder_of, monkeypatch, name, clamped):
    """Prompts with ranges as vLLM hands them over for images, in one batch with a prompt without, and the tokens that follow. An image
    may be longer than the window, which some models keep to and others do not."""
    spans = {40: [(3, 20)], 200: [(10, 60), (61, 61), (100, 199)], 5: []}

    def layers(*arguments, original=backend.get_layers_from_vllm_config):
        found = original(*arguments)
        for layer in found.values():
            layer.mm_prefix_clamp_sliding_window = clamped
        return found

    monkeypatch.setattr(backend, "get_layers_from_vllm_config", layers)

    def build(self, common_prefix_len, common, fast_build=False, original=backend.KVFastMetadataBuilder.build):
        common = copy.copy(common)
        lengths = [next(n for n in sorted(spans) if n + 24 > length) for length in common.seq_lens.tolist()]
        common.mm_req_doc_ranges = {i: spans[n] for i, n in enumerate(lengths)}
        return original(self, common_prefix_len, common, fast_build)

    monkeypatch.setattr(backend.KVFastMetadataBuilder, "build", build)
    ids = prompts(sorted(spans))
    window = 70 if name == "mistral" else 1 << 20
    expected = [see_each_other(folder_of(name), one, spans[len(one)], window, 8, clamped) for one in ids]
    assert expected != [see_each_other(folder_of(name), one, [], window, 8) for one in ids]
    assert in_engine(folder_of(name), lambda llm: generate(llm, ids, 8), enable_prefix_caching=False) == expected


def test_a_span_that_a_step_cuts_is_told(monkeypatch):
    said = []
    monkeypatch.setattr(backend.logger, "warning_once", lambda text, *values: said.append(text % values))
    step = {"seq_lens": torch.tensor([100, 50]), "query_start_loc": torch.tensor([0, 40, 41])}
    whole = SimpleNamespace(**step, mm_req_doc_ranges={0: [(5, 30), (60, 99)], 1: [(5, 30)]})
    assert backend.spans_of(whole) == [[(60, 100)], None] and said == []
    cut = SimpleNamespace(**step, mm_req_doc_ranges={0: [(90, 120), (200, 260)]})
    assert backend.spans_of(cut) == [[(90, 100)], None] and "--disable-chunked-mm-input" in said[0]


def test_images_that_are_read_causally_are_told(monkeypatch):
    assert "mm_req_doc_ranges" in {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    said = []
    monkeypatch.setattr(backend.logger, "warning_once", lambda text, *values: said.append(text % values))
    for ranges in (None, {}, {0: [], 1: []}):
        backend.warn_of_spans(SimpleNamespace(mm_req_doc_ranges=ranges))
    assert said == []
    backend.warn_of_spans(SimpleNamespace(mm_req_doc_ranges={0: [], 1: [(4, 260)]}))
    assert len(said) == 1 and "causal order" in said[0]


def test_blocks_of_a_size_that_kvfast_does_not_take(folder_of):
    """vLLM cuts blocks of 96 tokens into three, and refuses others before it starts."""

    def use(llm):
        tokens = generate(llm, prompts((200,)))
        assert {pool.block_size for pool in pools_of(llm)} == {32}
        return tokens

    (tokens,) = in_engine(folder_of("llama"), use, block_size=96, kv_cache_dtype="int8_per_token_head")
    assert len(tokens) == 24
    with pytest.raises(Exception, match="No common block size for 16"):
        in_engine(folder_of("llama"), use, block_size=16, kv_cache_dtype="int8_per_token_head")


def test_drafts_that_are_rejected_are_written_over(folder_of, of_vllm):
    """Speculative decoding with n-grams: the tokens of vLLM's plain decoding."""
    _, plain = of_vllm("llama")
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    assert in_engine(folder_of("llama"), lambda llm: generate(llm, REPEATED, 40), speculative_config=drafts) == plain


@pytest.mark.parametrize("name", ["auto", "int8_per_token_head", "int4_per_token_head"])
def test_a_request_with_nan_does_not_touch_the_others(folder_of, tmp_path, name):
    """A token whose embedding is NaN, in a prompt and in one step with others; the engine goes on."""
    shutil.copytree(folder_of("llama"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][500] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})

    def use(llm):
        expected = [generate(llm, [one])[0] for one in prompts()]
        bad = prompts((60,))[0]
        bad[40] = 500
        tokens = generate(llm, [*prompts()[:2], bad, *prompts()[2:]])
        assert len(tokens.pop(2)) == 24 and tokens == expected
        assert generate(llm, prompts()) == expected

    in_engine(tmp_path, use, kv_cache_dtype=name, enable_prefix_caching=False)  # see the default's test


def test_requests_that_see_later_tokens(folder_of, monkeypatch):
    """In one batch with others, as models of diffusion ask for it: the tokens of vLLM's own backend. Windows, which have two sides
    there, are left to it; and a model that did not say so when it was loaded is refused."""
    for kind in (backend.CPUAttentionMetadataBuilder, backend.KVFastMetadataBuilder):

        def build(self, common_prefix_len, common, fast_build=False, original=kind.build):
            if isinstance(common.causal, bool):
                common = copy.copy(common)
                common.causal = (torch.arange(common.num_reqs) % 3 == 0).int()
            return original(self, common_prefix_len, common, fast_build)

        monkeypatch.setattr(kind, "build", build)
    monkeypatch.setenv("KVFAST_VLLM", "0")
    expected = {name: in_engine(folder_of(name), lambda llm: generate(llm, prompts())) for name in ("llama", "mistral")}
    monkeypatch.setenv("KVFAST_VLLM", "1")

    def use(llm):
        return generate(llm, prompts()), {layer.impl.memory is not None for layer in layers_of(llm).values()}

    assert in_engine(folder_of("llama"), use) == (expected["llama"], {True})
    with pytest.raises(Exception, match="no windows with two sides"):
        in_engine(folder_of("mistral"), use)
    monkeypatch.setattr(formats.Directions, "sees_later_tokens", True)
    assert in_engine(folder_of("mistral"), use) == (expected["mistral"], {False})
