"""Scores of caches on a text: perplexity, KL divergence and agreement with a float32 cache."""

import runpy
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
from selection import exhaustive

import kvfast
from kvfast import evaluation
from kvfast.tools.evaluation import perplexity

reference = runpy.run_path(Path(__file__).parents[1] / "support" / "make_llama_reference.py")


def new_cache(model, dtype="float32"):
    return kvfast.KVCache(*model.cache_shape, max_seq_len=512, dtype=dtype)


def test_evaluation_equals_its_definition(tiny_model):
    model, _ = tiny_model
    model.batch_invariant = True  # `evaluate` puts all caches into one batch
    tokens = np.random.default_rng(7).integers(0, model.config.vocab_size, 150)

    def log_probabilities(dtype):
        logits = model.logits(model.forward(tokens[:-1], new_cache(model, dtype))).astype(np.float64)
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    p, q = log_probabilities("float32"), log_probabilities("int4")
    (score,) = evaluation.evaluate(model, tokens, [new_cache(model, "int4")], chunk_size=512)
    assert score.dtype == "int4"
    assert score.num_predictions == 149
    assert score.nll_float32 == pytest.approx(-p[np.arange(149), tokens[1:]].mean(), rel=1e-6)
    assert score.nll == pytest.approx(-q[np.arange(149), tokens[1:]].mean(), rel=1e-6)
    assert score.nll_difference == score.nll - score.nll_float32
    divergences = (np.exp(p) * (p - q)).sum(1)
    assert score.kl == pytest.approx(divergences.mean(), rel=1e-4)
    assert score.kl_999 == pytest.approx(np.quantile(divergences, 0.999), rel=1e-4)
    assert score.top1 == (p.argmax(1) == q.argmax(1)).mean()


def test_evaluation_of_several_caches_in_chunks(tiny_model):
    model, _ = tiny_model
    tokens = np.random.default_rng(8).integers(0, model.config.vocab_size, 150)
    done = []
    caches = [new_cache(model, dtype) for dtype in ("float32", "int8", "int4")]
    exact, int8, int4 = evaluation.evaluate(model, tokens, caches, chunk_size=40, progress=done.append)
    assert done == [40, 40, 40, 29]
    assert abs(exact.kl) < 1e-9
    assert exact.top1 == 1
    assert exact.kl < int8.kl < int4.kl
    assert int8.bytes_per_token > int4.bytes_per_token
    (alone,) = evaluation.evaluate(model, tokens, [new_cache(model, "int8")])
    assert alone.kl == pytest.approx(int8.kl, rel=1e-3)


def test_parts_of_a_text_end_where_the_length_doubles(tiny_model, monkeypatch):
    monkeypatch.setattr(perplexity, "_FIRST_END", 32)
    model, _ = tiny_model
    (score,) = evaluation.evaluate(model, np.random.default_rng(9).integers(0, 250, 157), [new_cache(model, "int4")])
    assert [part["num_tokens"] for part in score.lengths] == [32, 64, 156]  # nothing ends at 128, so near the end
    assert [part["num_predictions"] for part in score.lengths] == [32, 32, 92]
    for name in ("nll", "nll_float32", "kl", "top1"):
        mean = np.average([part[name] for part in score.lengths], weights=[32, 32, 92])
        assert getattr(score, name) == pytest.approx(mean)
    bits = [part["bits_per_element"] for part in score.lengths]
    assert bits == sorted(bits, reverse=True) and bits[-1] == score.bits_per_element
    (alone,) = evaluation.evaluate(model, np.random.default_rng(9).integers(0, 250, 157)[:65], [new_cache(model, "int4")])
    assert (alone.bits_per_element, alone.lengths[1]["kl"]) == (bits[1], pytest.approx(score.lengths[1]["kl"]))


def test_bits_per_element_count_all_bytes_in_use(tiny_model):
    model, _ = tiny_model
    cache = new_cache(model, "int8")
    (score,) = evaluation.evaluate(model, list(range(101)), [cache])
    elements = 2 * cache.num_layers * cache.entry_size
    nbytes = getattr(cache, "nbytes_used", 100 * cache.bytes_per_token)
    assert score.bits_per_element == 8 * nbytes / (100 * elements)


def test_simulated_caches_beside_ours(tmp_path, monkeypatch):
    """The table of four texts, with a model whose heads have a whole block of ggml. Rivals have the floats of `int4`."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    accuracy = pytest.importorskip("accuracy")
    assert accuracy.FLOATS == {name: getattr(kvfast.PRESETS["int4"], name) for name in accuracy.FLOATS}
    monkeypatch.setattr(accuracy, "FORMATS", ("int4",))
    monkeypatch.setattr(accuracy, "CALIBRATED", ())
    tiny = runpy.run_path(Path(__file__).parents[1] / "data" / "tiny_gguf.py")
    tiny["SIZES"]["head_dim"] = 32
    tiny["write_model"](tmp_path / "tiny.gguf")
    model, _ = kvfast.llama.load(tmp_path / "tiny.gguf")
    rows, _ = accuracy.scores(model, np.random.default_rng(7).integers(0, model.config.vocab_size, 321), None)
    found = {(row["dtype"], row.get("floats")): row for row in rows}
    assert len(rows) == len(found) == 1 + len(accuracy.RIVALS)
    assert found["q8_0", False]["bits_per_element"] == 8.5 and found["q4_0", False]["bits_per_element"] == 4.5
    losses = [found[name]["kl"] for name in (("q8_0", True), ("q8_0", False), ("q4_0", True), ("q4_0", False))]
    assert losses == sorted(losses) and 0 < losses[0] < losses[-1]


def test_mean_score_weighs_texts_by_their_predictions():
    first = evaluation.CacheScore("int8", 100, 3.0, 2.0, 0.1, 0.9, 12, 9.0)
    second = evaluation.CacheScore("int8", 300, 5.0, 4.0, 0.5, 0.5, 12, 8.0)
    mean = evaluation.mean_score([first, second])
    assert (mean.dtype, mean.num_predictions, mean.bytes_per_token) == ("int8", 400, 12)
    assert (mean.nll, mean.nll_float32, mean.nll_difference) == (4.5, 3.5, 1.0)
    assert (mean.kl, mean.top1, mean.bits_per_element) == pytest.approx((0.4, 0.6, 8.25))
    assert evaluation.mean_score([first]) == first


def test_evaluation_needs_two_tokens(tiny_model):
    model, _ = tiny_model
    with pytest.raises(ValueError, match="at least two tokens"):
        evaluation.evaluate(model, [1], [new_cache(model)])


@pytest.mark.model
@exhaustive
def test_smollm2_int8_cache_is_faithful(smollm2):
    _, model, tokenizer = smollm2
    (score,) = evaluation.evaluate(model, tokenizer.encode(reference["TEXT"]), [new_cache(model, "int8")])
    assert 2.5 < score.nll_float32 < 3.5
    assert abs(score.nll_difference) < 0.02
    assert 0 < score.kl < 0.003
    assert score.top1 > 0.93
