"""bench/peers.py without the peers: kvfast's own contenders, what is missing, and the tables."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import peers
from contenders import BATCH, DECODE, PEERS, PREFILL, QUANTISE, Missing, Work, tolerance
from contenders.table import tables

SMALL = "--shapes SmolLM2-135M --contexts 128 --batch-contexts 128 --sequences 3 --prefill-contexts 128 --queries 32 --total 1 --turn 0.01 --threads 1 --rounds 2"


@pytest.mark.parametrize("kind, queries", [(DECODE, 1), (BATCH, 3), (PREFILL, 20), (QUANTISE, 1)])
def test_every_storage_of_kvfast_is_right(kind, queries):
    from contenders import own

    work = Work(kind, 4, 2, 64, 192, queries, 1 << 20)
    for storage in PEERS["kvfast"][1][kind]:
        contender = own.Contender(work, "kvfast", storage)
        contender.run(1)
        assert contender.check() <= tolerance(storage), storage
        assert contender.nbytes >= (1 << 20 if kind in (DECODE, BATCH) else 1)


def test_the_error_of_a_wrong_output_is_seen():
    work = Work(PREFILL, 4, 2, 16, 64, 8, 1)
    k, v, q = (x.astype(np.float64) for x in work.tensors())
    scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, 2, 1)) / 4
    for mask, right in ((work.mask(), True), (np.True_, False)):
        weights = np.where(mask, np.exp(scores), 0)
        output = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), np.repeat(v, 2, 1))
        assert (work.error(output) < 1e-6) == right
    assert work.error(output * np.nan) == float("inf")


def test_every_storage_has_a_tolerance_and_a_partner():
    for _, storages in PEERS.values():
        for kind in storages.values():
            assert all(tolerance(storage) > 0 for storage in kind)


def test_measured_and_printed(tmp_path, capsys, monkeypatch):
    (tmp_path / "bare.py").write_text("import surely_not_installed\n")
    (tmp_path / "fatal.py").write_text("import os\nos.abort()\n")
    (tmp_path / "wrong.py").write_text(
        "from contenders import own\nversion = lambda: 'wrong 1'\n"
        "def Contender(*given):\n"
        "    made = own.Contender(*given)\n    made.check = lambda: 0.9\n    return made\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "same.py").write_text("from contenders.own import Contender\nversion = lambda: 'same 1'\n")
    for name in ("bare", "fatal", "wrong", "same"):
        monkeypatch.setitem(PEERS, name, (name, {DECODE: ["int8"]}))
    file = tmp_path / "peers.json"
    peers.main([*SMALL.split(), "--only", "kvfast,bare,fatal,wrong,same", "--json", str(file)])
    printed = capsys.readouterr().out
    measured = json.loads(file.read_text())
    assert [cell["kind"] for cell in measured["cells"]] == [DECODE, BATCH, PREFILL, QUANTISE]
    results = {one["storage"]: one for one in measured["cells"][0]["results"] if one["peer"] == "kvfast"}
    assert results["int4"]["status"] == "timed"
    assert results["int4"]["rounds"] == 2
    assert results["int4"]["bandwidth_fraction"] > 0
    assert "times_kvfast" not in results["int4"]
    others = {one["peer"]: one for one in measured["cells"][0]["results"] if one["peer"] != "kvfast"}
    assert others["same"]["times_kvfast"].keys() == {"int8", "int4", "fast int8", "fast int4"}, "what the tables compare it with"
    assert all(ratio > 0 for ratio in others["same"]["times_kvfast"].values())
    assert others["bare"]["status"] == "missing"
    assert "surely_not_installed" in others["bare"]["reason"]
    assert others["fatal"]["status"] == "failed"
    assert others["wrong"]["status"] == "wrong"
    assert "| kvfast int4 |" in printed
    assert "| wrong int8 | wrong |" in printed
    assert "- wrong int8: wrong, relative error 0.9\n" in printed
    assert "- bare int8: missing, No module named 'surely_not_installed'\n" in printed
    peers.main(["--table", str(file)])
    assert capsys.readouterr().out == printed


def test_one_kv_head_for_all_queries(capsys):
    options = SMALL.replace("SmolLM2-135M", "MQA").split()
    peers.main([*options, "--works", "decode,prefill", "--only", "kvfast int8,kvfast float16"])
    printed = capsys.readouterr().out
    assert "**Decoding one token**, MQA: 8 query and 1 KV heads of 256" in printed
    assert "| kvfast int8 | 0" in printed


def test_the_table_compares_layers_of_the_same_width():
    def result(peer, storage, ratio):
        figures = {"status": "timed", "layers": 2, "seconds": 0.002, "bandwidth_fraction": 0.5}
        return {"peer": peer, "storage": storage, "times_kvfast": {"int8": ratio, "int4": 2 * ratio}, **figures}

    results = [result("kvfast", "int8", 1), result("llama.cpp", "q8_0", 15), result("OpenVINO", "u4", 7)]
    shape = {"model": "M", "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    cell = {"kind": DECODE, "context": 4096, "queries": 1, "threads": 1, "read_GBps": 1, "results": results, **shape}
    text = tables({"machine": {"cpu": "C", "cores": 1}, "versions": {}, "rounds": 3, "total": 1e6, "cells": [cell]})
    assert "| llama.cpp q8_0 | 0.50 (1,000 us), 15.0x |" in text
    assert "| OpenVINO u4 | 0.50 (1,000 us), 14.0x |" in text
    assert "| int8 against any peer, any precision | 7.0x (OpenVINO u4) |" in text
    assert "| int8 against llama.cpp q8_0 | 15.0x |" in text


def test_ik_llama_sits_out_where_none_is_named(tmp_path, monkeypatch):
    from contenders.ik_llama import find_library

    monkeypatch.delenv("KVFAST_IK_LLAMA", raising=False)
    with pytest.raises(Missing, match="KVFAST_IK_LLAMA names no folder"):
        find_library()
    monkeypatch.setenv("KVFAST_IK_LLAMA", str(tmp_path))
    with pytest.raises(Missing, match="no libggml in"):
        find_library()
    (tmp_path / "libggml.so").touch()
    assert find_library() == tmp_path / "libggml.so"


def test_unknown_shapes_are_refused(capsys):
    with pytest.raises(SystemExit):
        peers.main(["--shapes", "GPT-7"])
    assert "GPT-7" in capsys.readouterr().err
