"""Answers of vLLM with kvfast have the same bits however their prompts were computed."""

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

from unittest import mock

from vllm_engines import in_engine, prompts, same_rows, settle, stored, texts

from kvfast.engines.vllm.prompts.figures import Figures
from kvfast.engines.vllm.prompts.transfers import Transfers

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = 40


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("llama", "int8_per_token_head"),
        ("deep", "turboquant_k8v4"),
        pytest.param("gemma3", "int8_per_token_head", marks=pytest.mark.exhaustive),
    ],
)
def test_answers_have_the_same_bits(folder_of, tmp_path, monkeypatch, model, dtype):
    """Alone, in a batch, preempted, in chunks, and from the prefix cache or a store. Two prompts have a common beginning."""
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setenv("KVFAST_TAIL", "0")
    common, *tails = prompts((150, 25, 200, 90))
    asked = [common + tails[0], common + tails[1], tails[2], prompts((33,), seed=1)[0]]

    def whole(llm):
        same_rows(llm)
        alone = [texts(llm, [one], TOKENS, skip_reading_prefix_cache=True)[0] for one in asked]
        assert texts(llm, asked, TOKENS) == alone
        settle(llm)
        restored = []
        with mock.patch.object(Figures, "add", lambda self, **counts: restored.append(counts.get("num_restored_tokens", 0))):
            assert texts(llm, asked, TOKENS) == alone  # from the store
        assert sum(restored) >= 2 * 128
        return alone

    def cut(llm):
        same_rows(llm)
        original, preempted = Scheduler._preempt_request, []
        with mock.patch.object(Scheduler, "_preempt_request", lambda *all_, **more: preempted.append(1) or original(*all_, **more)):
            found = texts(llm, asked[::-1], TOKENS)[::-1]
        assert preempted
        return found, texts(llm, asked, TOKENS)

    monkeypatch.setattr(Transfers, "rates", lambda self: None)  # fetch, although these models compute as fast
    options = {"kv_cache_dtype": dtype, "block_size": 64, "max_model_len": 448}
    alone = in_engine(folder_of(model), whole, **options, kv_transfer_config=stored(tmp_path))
    blocks = 15 if model == "gemma3" else 10
    assert in_engine(folder_of(model), cut, **options, num_gpu_blocks_override=blocks, max_num_batched_tokens=50) == (alone, alone)


@pytest.mark.parametrize(
    ("model", "dtype"), [("deep", "int4_per_token_head"), ("deep", "turboquant_k8v4"), ("llama", "int8_per_token_head")]
)
def test_answers_with_float_rows_have_the_same_bits(folder_of, monkeypatch, model, dtype):
    """Alone, in a batch, in chunks; known prompts again and again, and conversations that go on."""
    monkeypatch.setenv("KVFAST_TAIL", "1")
    asked, questions = prompts((175, 192, 290, 33)), prompts((20, 90, 5, 70), seed=1)

    def whole(llm):
        same_rows(llm)
        alone = [texts(llm, [one], TOKENS, skip_reading_prefix_cache=True)[0] for one in asked]
        assert texts(llm, asked, TOKENS) == alone
        assert [texts(llm, [one], TOKENS)[0] for one in asked] == alone
        longer = [[*one, *tokens, *question] for one, (tokens, _), question in zip(asked, alone, questions)]
        assert texts(llm, longer, TOKENS) == [texts(llm, [one], TOKENS, skip_reading_prefix_cache=True)[0] for one in longer]
        assert texts(llm, asked, TOKENS) == alone
        return alone

    def cut(llm):
        same_rows(llm)
        return texts(llm, asked[::-1], TOKENS)[::-1], texts(llm, asked, TOKENS)

    # Enough blocks for the ends of all these prompts and texts.
    options = {"kv_cache_dtype": dtype, "block_size": 64, "max_model_len": 448, "num_gpu_blocks_override": 2000}
    alone = in_engine(folder_of(model), whole, **options)
    assert in_engine(folder_of(model), cut, **options, max_num_batched_tokens=50) == (alone, alone)
