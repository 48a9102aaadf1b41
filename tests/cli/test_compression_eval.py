"""`python -m kvfast eval --compress` and what it rests on."""

import json

import numpy as np
import pytest
from command_line import run, run_here

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
pytest.importorskip("rich")

import kvfast
from kvfast.llama.compression import METHODS, evaluate_compressed, parse_methods

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


def test_command(model, text, tmp_path):
    args = ("--text", text, "--tokens", 160, "--prompt", 100, "--compress", "int8-plain,hybrid:4,pq:16:4")
    code, out, err = run("eval", "--model", model, *args)
    assert code == 0, err
    assert "59 predictions behind prompts of 100 tokens" in out
    rows = [line.split() for line in out.splitlines() if line.strip().startswith(("int8-plain", "hybrid:4", "pq:16:4"))]
    assert [row[0] for row in rows] == ["int8-plain", "hybrid:4", "pq:16:4"]
    plot = tmp_path / "kl.svg"
    code, out, err = run_here("eval", "--model", model, *args, "--json", "--plot", plot, "--text", text)
    assert code == 0, err
    report = json.loads(out)
    assert plot.read_bytes().startswith(b"<?xml")
    assert [one["prompt"] for one in report["texts"]] == [100, 100]
    for mean, one in zip(report["results"], report["texts"][0]["results"]):
        assert mean["num_predictions"] == 2 * 59 and mean["kl"] == pytest.approx(one["kl"])
        assert float(rows[report["results"].index(mean)][7]) == pytest.approx(one["kl"], abs=1e-6)


def test_errors(model, text):
    for args, message in [
        (("--compress", "pq:16"), "a method is"),
        (("--compress", "int8", "--llama-cpp", "q8_0"), "--llama-cpp is not for --compress"),
        (("--compress", "int8", "--tokens", "100"), "-412 cannot be compressed"),
        (("--compress", "int8", "--tokens", "100", "--prompt", "99"), "99 cannot be compressed"),
        (("--compress", "lowrank:13", "--tokens", "100", "--prompt", "50"), "rank must be at most head_dim, 12"),
    ]:
        code, _, err = run_here("eval", "--model", model, "--text", text, *args)
        assert code == 1 and err.splitlines()[-1].startswith("error: ") and message in err
