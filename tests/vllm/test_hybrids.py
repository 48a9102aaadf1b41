"""Models of vLLM that mix attention with recurrent states: the blocks that hold both, and what the prefix cache finds of them."""

import random

import numpy as np
import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import torch
from vllm import SamplingParams, TokensPrompt
from vllm_engines import generate, in_engine

from kvfast import PagedKVCache
from kvfast.caches.buffer_layout import buffer_layout
from kvfast.engines.vllm import backend, hybrids, versions

# vLLM and PyTorch use parts of each other that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")

# Before 0.32, vLLM does not say for which layers it asks for sizes of blocks, so each layer has blocks of its own.
shares_blocks = pytest.mark.skipif(not versions.tells_specs(), reason="layers share blocks from vLLM 0.32 on")
STATES = {"dtype": "bfloat16"}  # what vLLM's operator of gated delta layers takes on CPUs


def prompts(lengths, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(3, 500) for _ in range(n)] for n in lengths]


def block_size_of(llm):
    return llm.llm_engine.vllm_config.cache_config.block_size


def answer(llm, ids):
    """The first token that follows a prompt with its log probability, and how many tokens of the prompt were found."""
    parameters = SamplingParams(temperature=0, max_tokens=1, detokenize=False, logprobs=1)
    [found] = llm.generate([TokensPrompt(prompt_token_ids=ids)], parameters, use_tqdm=False)
    [(token, one)] = found.outputs[0].logprobs[0].items()
    return token, one.logprob, found.num_cached_tokens


@shares_blocks
@pytest.mark.parametrize("dtype", ["int4_per_token_head", pytest.param("int8_per_token_head", marks=pytest.mark.exhaustive)])
def test_a_block_of_all_layers_holds_a_state(folder_of, monkeypatch, dtype):
    """The tokens of blocks that each have one layer's keys and values, which are twice as long here with two such layers."""

    def use(llm):
        return block_size_of(llm), generate(llm, prompts((5, 300, 700)))

    options = STATES | {"kv_cache_dtype": dtype, "enable_prefix_caching": False}
    together = in_engine(folder_of("qwen3_next"), use, **options)
    monkeypatch.setattr(backend, "layers_of_block", lambda: 1)
    assert in_engine(folder_of("qwen3_next"), use, **options) == (2 * together[0], together[1])


@shares_blocks
@pytest.mark.parametrize(("states", "size"), [("float32", 512), ("bfloat16", 256)])
def test_states_in_sixteen_bits_make_blocks_shorter(folder_of, states, size):
    options = STATES | {"kv_cache_dtype": "int4_per_token_head", "block_size": 64, "mamba_ssm_cache_dtype": states}
    assert in_engine(folder_of("qwen3_next"), block_size_of, enable_prefix_caching=True, **options) == size


@shares_blocks
def test_prefixes_that_end_within_a_block(folder_of):
    """With prefix_match_unit, of a prompt that is given again; of a common beginning, the blocks that have their state once two texts
    have shown it."""
    [first, *tails] = prompts((700, 200, 150, 100))

    def use(llm):
        size = block_size_of(llm)
        found = [answer(llm, ids) for ids in (first, first, *(first[:600] + tail for tail in tails))]
        last = 700 // size * size  # where the last whole block of the first prompt ends, of which vLLM keeps the state
        assert [one[2] for one in found] == [0, 640, last if last <= 600 else 0, 600 // size * size, 600 // size * size]
        assert found[0][1] == pytest.approx(found[1][1], abs=0.1)
        assert llm.reset_prefix_cache()
        again = answer(llm, first[:600] + tails[-1])
        assert again[1] == pytest.approx(found[-1][1], abs=0.1) and again[2] == 0

    in_engine(folder_of("qwen3_next"), use, kv_cache_dtype="int8_per_token_head", prefix_match_unit=64, **STATES)


def test_int4_refuses_prefixes_within_a_block(folder_of):
    with pytest.raises(Exception, match="keeps some tokens as floats outside vLLM's blocks, which vLLM would not copy"):
        in_engine(folder_of("qwen3_next"), len, kv_cache_dtype="int4_per_token_head", prefix_match_unit=64, **STATES)


def test_short_convolutions(folder_of, monkeypatch):
    """The tokens of vLLM's own backend: states that are smaller than a block of keys and values leave the blocks as they are. Each text
    alone: without kvfast, too, vLLM 0.32 gives this model other tokens in a batch."""

    def use(llm):
        return block_size_of(llm), [generate(llm, [one]) for _ in range(2) for one in prompts((5, 300, 700))]

    carried = in_engine(folder_of("lfm2"), use)
    monkeypatch.setenv("KVFAST_VLLM", "0")
    assert in_engine(folder_of("lfm2"), use) == carried
    assert carried[0] == 128


@pytest.mark.parametrize(
    ("model", "dtype", "options"),
    [
        ("granite", "auto", {"block_size": 512}),
        ("nemotron", "int8_per_token_head", {}),
        ("granite", "int8_per_token_head", {"prefix_match_unit": 64}),
    ],
)
def test_mamba_with_known_prefixes(folder_of, model, dtype, options):
    """The tokens without the prefix cache. kvfast cuts these blocks of 512 tokens in two, where vLLM would write zeros into other texts,
    and copy too little of a block."""
    given, folder = prompts((300, 600, 700, 900)), folder_of(model)

    def use(llm):
        found = [[generate(llm, [ids])[0] for _ in range(2)] for ids in given]
        return found, [answer(llm, ids)[2] for ids in given]

    found, hits = in_engine(folder, use, kv_cache_dtype=dtype, enable_prefix_caching=True, **options)
    assert hits == ([256, 576, 640, 896] if "prefix_match_unit" in options else [0, 512, 512, 512])
    plain = in_engine(folder, lambda llm: generate(llm, given), kv_cache_dtype=dtype, enable_prefix_caching=False)
    assert found == [[one, one] for one in plain]


def tensors_of(layout, layers, tokens, gap=0):
    """Tensors as vLLM makes them in BLHNC: the parts of the layers side by side in each of three blocks."""
    part = layout.block_nbytes[0] // layout.block_size * tokens
    memory = torch.zeros(3 * (layers * part + gap) + 64, dtype=torch.int8)
    start = -memory.data_ptr() % 64
    strides = layers * part + gap, part // 2, part // 2 // tokens, 1
    return [memory.as_strided((3, 2, tokens, part // 2 // tokens), strides, start + i * part) for i in range(layers)]


def test_interleaved_blocks_are_apart():
    """Two layers in all blocks of the pool attend as two pools with memory of their own."""
    layout = buffer_layout(1, 2, 32, 1, 64, "int8")
    tensors = tensors_of(layout, 2, 192)
    parts = [one.numpy().view(np.uint8) for one in hybrids.interleaved(tensors, 64)]
    pool = PagedKVCache(2, 2, 32, 9, 64, "int8", buffer=parts)
    table = hybrids.finer(np.array([[2, 0, 1]], np.int32), 3)
    assert table.tolist() == [[6, 7, 8, 0, 1, 2, 3, 4, 5]]
    keys = np.random.default_rng(0).standard_normal((2, 576, 2, 32), np.float32)
    slots = (table[0][:, None] * 64 + np.arange(64)).reshape(-1).astype(np.int64)
    batch = pool.prepare_batch(table, np.array([576], np.int32), np.array([0, 576], np.int32), slots)
    for layer in range(2):
        pool.append_batch(layer, keys[layer], keys[layer], batch)
    for layer in range(2):
        alone = PagedKVCache(1, 2, 32, 9, 64, "int8")
        plain = np.arange(9, dtype=np.int32)[None]
        other = alone.prepare_batch(plain, np.array([576], np.int32), np.array([0, 576], np.int32), np.arange(576))
        alone.append_batch(0, keys[layer], keys[layer], other)
        assert np.array_equal(pool.attend_batch(layer, keys[layer], batch), alone.attend_batch(0, keys[layer], other))


def test_layers_that_do_not_fill_a_block_are_refused():
    layout = buffer_layout(1, 2, 32, 1, 64, "int8")
    with pytest.raises(ValueError, match="the layers of a block must fill it"):
        hybrids.interleaved(tensors_of(layout, 2, 192, gap=64), 64)
    with pytest.raises(ValueError, match="the layers of a block must fill it"):
        hybrids.interleaved(tensors_of(layout, 3, 192)[:2], 64)
