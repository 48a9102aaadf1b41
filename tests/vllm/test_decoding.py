"""vLLM's ways to decode over a cache of kvfast: drafts of a model, several texts of a prompt, beams; and encoders, left to vLLM."""

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import torch
import transformers
from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import BeamSearchParams
from vllm_drafts import save_drafts, save_own_drafts
from vllm_engines import SMALL, generate, in_engine, layers_of, save_model, save_tokenizer

from kvfast.engines.vllm import formats

# vLLM and PyTorch use parts of each other that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = [[3 + (i * i * 7 + 11 * i * n) % 497 for i in range(n)] for n in (20, 150)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    save_tokenizer(folder)
    return folder


def with_both(monkeypatch, folder, use, **options):
    """What `use` returns of vLLM's own cache, and of kvfast's."""
    results = []
    for switch in "01":
        monkeypatch.setenv("KVFAST_VLLM", switch)
        results.append(in_engine(folder, use, **options))
    return results


def is_carried(llm):
    return {getattr(layer.impl, "is_carried", False) for layer in layers_of(llm).values()}


def test_several_texts_of_a_prompt_and_beams(folder, monkeypatch):
    """They share the prompt's blocks, and beams are left and begun anew at every token."""

    def use(llm):
        given = [TokensPrompt(prompt_token_ids=ids) for ids in PROMPTS]
        drawn = llm.generate(given, SamplingParams(n=3, seed=1, max_tokens=16, ignore_eos=True, detokenize=False), use_tqdm=False)
        texts = [[tuple(one.token_ids) for one in output.outputs] for output in drawn]
        assert all(len({*one}) == 3 for one in texts)
        beams = llm.beam_search(given, BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True))
        carried.append(is_carried(llm))
        return texts, [[one.tokens for one in output.sequences] for output in beams]

    carried = []
    own, kvfast = with_both(monkeypatch, folder, use, skip_tokenizer_init=False)
    assert own == kvfast
    assert carried == [{False}, {True}]


@pytest.mark.parametrize("dtype", ["int8_per_token_head", "int4_per_token_head"])
def test_drafts_of_another_model(folder, tmp_path, dtype):
    """Its layers have a cache of kvfast, too; it has other weights, so nearly all drafts are rejected. It computes these again, and they
    have no slots then. A text ends at the end of what the model can read."""
    save_model("deep", tmp_path)

    def use(llm):
        assert is_carried(llm) == {True}
        return generate(llm, PROMPTS, 42), len(layers_of(llm))

    (plain, few), (drafted, many) = [
        in_engine(folder, use, kv_cache_dtype=dtype, max_model_len=192, **one)
        for one in ({}, {"speculative_config": {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}})
    ]
    assert drafted == plain
    assert many > few


@pytest.mark.parametrize(
    ("kind", "model"), [("dflash", "llama"), ("dflash", "gpt_oss"), ("eagle", "llama"), ("eagle3", "llama"), ("mtp", None)]
)
def test_drafts_of_each_kind(folder_of, tmp_path, monkeypatch, kind, model):
    """Those of vLLM's own cache. `mtp` drafts by a layer of the model, with latent rows. For n-grams see `test_engine.py`."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    target, options = tmp_path if model is None else folder_of(model), {}
    if kind == "mtp":
        if torch.cpu._is_amx_tile_supported():
            pytest.skip("vLLM's own latents are in float32 only without a matrix unit")
        # vLLM's own operator for the interleaved rotation of DeepSeek is wrong on CPUs.
        options["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    config = save_own_drafts(target) if kind == "mtp" else save_drafts(kind, target, tmp_path)
    drafts, forward = [], RejectionSampler.forward

    def counted(self, metadata, *args, **options):
        drafts[-1] += metadata.draft_token_ids.tolist()
        return forward(self, metadata, *args, **options)

    monkeypatch.setattr(RejectionSampler, "forward", counted)

    def use(llm):
        drafts.append([])
        carried.append(is_carried(llm))
        return generate(llm, PROMPTS, 16)

    carried = []
    own, kvfast = with_both(monkeypatch, target, use, speculative_config=config, **options)
    assert own == kvfast and drafts[0] == drafts[1] and len(drafts[0]) >= 15 * len(PROMPTS)
    assert model is None or carried == [{False}, {True}]  # windows, too


def test_dflash_stores_by_slots_alone(folder, folder_of, tmp_path, monkeypatch):
    """Between two steps, where no batch is known. In Mistral, whose window its drafts have, too, it sees later tokens."""
    monkeypatch.setattr(formats.Directions, "sees_later_tokens", False)  # as it is again after this test
    dflash = save_drafts("dflash", folder, tmp_path)

    def texts(dtype, **more):
        return in_engine(folder, lambda llm: generate(llm, PROMPTS, 16), kv_cache_dtype=dtype, **more)

    assert texts("int8_per_token_head", speculative_config=dflash) == texts("int8_per_token_head")
    with pytest.raises(
        ValueError, match="dflash does not know: choose another kv_cache_dtype for the drafts: .*, or set KVFAST_TAIL=0"
    ):
        texts("int4_per_token_head", speculative_config=dflash)
    with pytest.raises(ValueError, match="vLLM's own backend, which has no kv_cache_dtype=int8_per_token_head"):
        in_engine(folder_of("mistral"), print, kv_cache_dtype="int8_per_token_head", speculative_config=dflash)
    for dtype in ("int8_per_token_head", "auto"):
        with pytest.raises(ValueError, match="^kv_cache_dtype=int4_per_token_head keeps .*, which dflash does not know"):
            texts(dtype, speculative_config=dflash | {"kv_cache_dtype": "int4_per_token_head"})
    with_int8 = dflash | {"kv_cache_dtype": "int8_per_token_head"}
    assert texts("int4_per_token_head", speculative_config=with_int8) == texts("int4_per_token_head")
    monkeypatch.setenv("KVFAST_TAIL", "0")
    assert texts("int4_per_token_head", speculative_config=dflash) == texts("int4_per_token_head")


def test_encoders_are_left_to_vllm(tmp_path, monkeypatch):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL | {"num_hidden_layers": 2, "max_position_embeddings": 256})
    transformers.BertModel(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)

    def use(llm):
        outputs = llm.encode([TokensPrompt(prompt_token_ids=ids) for ids in PROMPTS], pooling_task="embed", use_tqdm=False)
        assert is_carried(llm) == {False}
        return torch.stack([one.outputs.data for one in outputs])

    own, kvfast = with_both(monkeypatch, tmp_path, use, runner="pooling", skip_tokenizer_init=False, max_model_len=256)
    assert torch.equal(own, kvfast) and own.isfinite().all()
