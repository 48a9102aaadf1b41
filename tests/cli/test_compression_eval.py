"""`python -m kvfast eval --compress`."""

import json

import pytest
from command_line import run, run_here

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
pytest.importorskip("rich")


def test_command(model, text, tmp_path):
    args = ("--text", text, "--tokens", 160, "--prompt", 100, "--compress", "int8-plain,hybrid:4,pq:16:4")
    code, out, err = run("eval", "--model", model, *args)
    assert code == 0, err
    assert "59 predictions after prompts of 100 tokens" in out
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
