"""Scores of compressed prompts, and the names of methods."""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

import kvfast
from kvfast.tools.evaluation.compressed_prompts import METHODS, evaluate_compressed, parse_methods

TOKENS = np.random.default_rng(0).integers(0, 250, 150).tolist()


def test_parse_methods():
    parsed = parse_methods("lowrank:48, lowrank:0.9,hybrid:4,hybrid:48:8,pq:16:32,int8-plain,int8-plain")
    assert list(parsed.values()) == [
        kvfast.LowRank(rank=48),
        kvfast.LowRank(energy=0.9),
        kvfast.Hybrid(quant_bits=4),
        kvfast.Hybrid(rank=48, quant_bits=8),
        kvfast.VectorQuantization(16, 32),
        kvfast.Quantize("int8-plain"),
    ]
    assert list(parse_methods("all")) == list(METHODS)
    for wrong in ("lowrank", "lowrank:0", "lowrank:a", "hybrid:3", "hybrid", "pq:16", "pq:300:4", "int9", "int8,x"):
        with pytest.raises(ValueError, match=wrong.split(",")[-1]):
            parse_methods(wrong)


def test_evaluate(tiny_model):
    """What loses nothing has no divergence; what is dropped shows in every column."""
    net, _ = tiny_model
    methods = parse_methods("float32,int8-plain,int4-plain,lowrank:2")
    done = []
    scores = evaluate_compressed(net, TOKENS, 100, methods, chunk_size=16, progress=done.append)
    assert sum(done) == 149 and [score.dtype for score in scores] == list(methods)
    exact, *others = scores
    assert exact.kl < 1e-9 and exact.top1 == 1 and exact.k_error == exact.v_error == 0 and exact.output_error < 1e-5
    assert exact.num_predictions == 49 and exact.nll == pytest.approx(exact.nll_float32, abs=1e-6)
    for column in ("kl", "k_error", "v_error", "output_error"):
        values = [getattr(score, column) for score in others]
        assert 0 < values[0] < values[1] < values[2]
    assert others[1].bits_per_element < others[0].bits_per_element < exact.bits_per_element
