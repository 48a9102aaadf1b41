"""`python -m kvfast`, as a user runs it: each command in a process of its own once, and in this one for its options."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import warnings

import pytest
from command_line import command, run, run_here
from selection import exhaustive

import kvfast

# --- help, info and wrong usage ----------------------------------------------------------------


def test_help():
    for run_it, args in [(run, ()), (run_here, ("--help",))]:
        code, out, err = run_it(*args)
        assert (code, err) == (0, "")
        assert all(name in out for name in ("generate", "eval", "serve-sim", "bench", "info"))
    for name, option in [("generate", "--max-seq-len"), ("eval", "--chunk"), ("bench", "--formats"), ("info", "--help")]:
        code, out, _ = run_here(name, "--help")
        assert code == 0
        assert option in out


def test_info():
    import kvfast

    code, out, err = run("info")
    assert (code, err) == (0, "")
    assert out.strip()
    assert kvfast.active_isa() in out


@pytest.mark.parametrize(
    "args",
    [
        ("explode",),
        ("generate", "x", "--max-tokens", "0"),
        ("generate", "x", "--threads", "-1"),
        ("generate", "x", "--seed", "-1"),
        ("generate", "x", "--speculative", "guess"),
        ("generate", "x", "--speculative", "--draft-tokens", "8"),
        ("eval",),
        ("eval", "--text"),
        ("eval", "--text", "x", "--chunk", "0"),
    ],
)
def test_wrong_usage(args):
    code, out, err = run_here(*args)
    assert (code, out) == (2, "")
    assert "usage:" in err


def test_no_extra_package_is_imported_early():
    code = "import sys, kvfast.tools.cli as cli; sys.exit(any(name in sys.modules for name in cli.EXTRAS))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("package", ["gguf", "tokenizers", "rich"])
def test_missing_extra(package, model):
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"from kvfast.tools.cli import main; sys.exit(main(['generate', 'x', '--model', {str(model)!r}]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == 'error: the llama extra is needed: pip install "kvfast[llama]"\n'


@pytest.mark.parametrize(
    ("package", "store", "extra"),
    [("redis", "redis://127.0.0.1:1", "redis"), ("obstore", "memory://x", "cloud"), ("cryptography", "{tmp}", "encrypted")],
)
def test_missing_extra_of_a_store(package, store, extra, tmp_path, monkeypatch):
    pytest.importorskip("rich")
    (tmp_path / "keys").write_text("00" * 32)
    monkeypatch.setenv("KVFAST_STORE_KEY_FILE", str(tmp_path / "keys") if extra == "encrypted" else "")
    monkeypatch.setitem(sys.modules, package, None)
    code, _, err = run_here("store", store.format(tmp=tmp_path))
    assert (code, err) == (2, f'error: the {extra} extra is needed: pip install "kvfast[{extra}]"\n')


@pytest.mark.parametrize(
    ("package", "option", "extra"), [("matplotlib", ("--plot", "kl.png"), "plot"), ("llama_cpp", ("--llama-cpp", "q8_0"), "llama-cpp")]
)
def test_missing_extra_of_eval(package, option, extra, model, text):
    args = ["eval", "--model", str(model), "--text", str(text), "--tokens", "9", *option]
    code = f"import sys; sys.modules[{package!r}] = None; from kvfast.tools.cli import main; sys.exit(main({args!r}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == f'error: the {extra} extra is needed: pip install "kvfast[{extra}]"'


def test_missing_extra_of_a_model_of_hugging_face(text, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, err = run_here("eval", "--model", tmp_path, "--text", text)
    assert (code, err) == (2, 'error: the transformers extra is needed: pip install "kvfast[transformers]"\n')


# --- generate ----------------------------------------------------------------------------------


def test_generate(model):
    code, out, err = run("generate", "then the", "--model", model, "--max-tokens", 12, "--dtype", "int8")
    assert (code, err) == (0, "")
    assert out.startswith("then the")
    assert re.search(r"^prefill  3 tokens in .* s: .* tokens/s$", out, re.MULTILINE)
    assert re.search(r"^decode   11 tokens in .* s: .* tokens/s$", out, re.MULTILINE)
    assert "cache    int8: 14 tokens take " in out


@pytest.mark.parametrize("dtype, max_tokens", [("int4", 5), ("int4", 120), ("int8", 12), ("float32", 12)])
def test_generate_tells_what_the_cache_took(model, dtype, max_tokens, tmp_path):
    """Blocks that are not full and float rows included: of a short text they are most of it."""
    session = tmp_path / "text"
    code, out, _ = run_here(
        "generate", "then the", "--model", model, "--max-tokens", max_tokens, "--dtype", dtype, "--session", session
    )
    cache, line = kvfast.load(session), re.search(r"^cache    .*", out, re.MULTILINE)[0]
    tokens, taken = (int(number.replace(",", "")) for number in re.search(r": ([\d,]+) tokens take ([\d,]+) bytes", line).groups())
    assert code == 0 and tokens == len(cache) and taken == cache.nbytes_used
    plain = 2 * 2 * 2 * 12 * 4 * tokens  # K and V, layers, KV heads, head_dim
    assert f"float16 takes {plain / 2 / taken:.2f} times as many, float32 {plain / taken:.2f} times" in line
    longer = f"In a long text {dtype} takes {plain / 2 / tokens / cache.bytes_per_token:.1f}x fewer bytes than float16"
    assert (longer in line) == (plain / 2 < taken and dtype != "float32")
    if (dtype, max_tokens) == ("int4", 5):
        assert plain / 2 < taken


def test_generate_reads_a_file(model, tmp_path, monkeypatch):
    """It prints the end of a long text, and compares attention with float16."""
    pytest.importorskip("gguf")
    from kvfast.tools.cli import reading

    monkeypatch.setattr(reading, "COMPARED", 64)
    monkeypatch.setattr(reading, "CHUNK", 16)
    path = tmp_path / "long.txt"
    path.write_text("then the one the other " * 40 + "the end", encoding="utf-8")
    code, out, err = run_here("generate", "--text", path, "--model", model, "--max-tokens", 6)
    assert (code, err) == (0, "") and out.startswith("... ") and "the end" in out
    prompt, cached = (int(number) for number in re.search(r"prefill  (\d+) tokens.*int4: (\d+) tokens", out, re.DOTALL).groups())
    assert cached == prompt + 5
    line = rf"^attention int4 .* ms, float16 .* ms for a token after {cached}, on one thread: .* times as fast$"
    assert re.search(line, out, re.MULTILINE)
    code, again, _ = run_here("generate", "--text", path, "--model", model, "--max-tokens", 6, "--dtype", "float16")
    assert code == 0 and "attention" not in again
    bases = tmp_path / "bases.npz"
    assert run_here("calibrate", model, "--text", path, "--out", bases)[0] == 0
    code, fitted, err = run_here("generate", "--text", path, "--model", model, "--max-tokens", 6, "--calibration", bases)
    assert (code, err) == (0, "") and re.search("^attention int4 calibrated .* times as fast$", fitted, re.MULTILINE)
    code, _, err = run_here("generate", "the", "--text", path, "--model", model)
    assert code == 1 and "not both" in err


def test_generate_without_a_text_reads_a_novel(model, monkeypatch):
    pytest.importorskip("gguf")
    from kvfast.tools.cli import reading

    text = reading.opening_text()
    assert text.startswith("PRIDE AND PREJUDICE") and 15_000 < len(text) < 30_000 and reading.end_of("short") == "short"
    code, out, err = run_here("generate", "--model", model, "--max-tokens", 4)
    assert (code, err) == (0, "") and "\nChapter 4\n" in out
    assert out.rsplit("\n\n", 1)[0] == run_here("generate", "--model", model, "--max-tokens", 4)[1].rsplit("\n\n", 1)[0]


def test_generate_is_repeatable(model):
    def text(*args, run=run_here):
        code, out, err = run("generate", "the", "--model", model, "--max-tokens", 20, *args)
        assert code == 0, err
        return out.rsplit("\n\n", 1)[0]

    drawn = text("--temperature", 2, "--seed", 1)
    assert drawn == text("--temperature", 2, "--seed", 1)
    assert drawn != text("--temperature", 2, "--seed", 2)
    assert text("--temperature", 2, "--top-k", 1) == text()
    alone = ("--threads", 1, "--temperature", 2, "--seed", 1)
    assert text(*alone, run=run) == text(*alone, run=run)


@pytest.mark.parametrize(
    ("args", "stored"),
    [
        (("--dtype", "int8/int4"), "int8/int4"),
        (("--dtype", "fp16"), "float16"),
        (("--dtype", "int8", "--v-dtype", "int4"), "int8/int4"),
        (("--dtype", "int8", "--k-dtype", "float16"), "float16/int8"),
        (("--k-dtype", "int4", "--v-dtype", "int4"), "int4-plain"),
        (("--dtype", "k8v4"), "k8v4"),
        ((), "int4"),
    ],
)
def test_generate_dtypes(model, args, stored):
    code, out, _ = run_here("generate", "the", "--model", model, "--max-tokens", 2, *args)
    assert code == 0
    assert f"cache    {stored}: " in out


def test_generate_stops_when_the_cache_is_full(model):
    code, out, _ = run_here("generate", "the", "--model", model, "--max-tokens", 50, "--max-seq-len", 10)
    assert code == 0
    assert "decode   9 tokens" in out  # 1 prompt token, 9 more stored; one more token chosen, not stored


@pytest.mark.parametrize("more", [(), ("--speculative", "--compare", "--seed", 3)])
def test_generate_goes_on_when_the_cache_is_full(model, more):
    options = ("--model", model, "--max-tokens", 50, "--max-seq-len", 20)
    code, out, err = run_here("generate", "the", *options, "--keep", 2, *more)
    assert (code, err) == (0, "")
    assert "decode   49 tokens" in out
    code, _, err = run_here("generate", "the", *options, "--keep", 20)
    assert code == 1 and "--keep is 20, and there is room for 20 tokens" in err
    code, _, err = run_here("generate", "the", *options, "--keep", 2, "--session", "nowhere")
    assert code == 1 and "--keep is not for --session" in err


@pytest.mark.parametrize(
    "args",
    [
        ("--speculative",),
        ("--speculative", "lookup", "--temperature", 1.2),
        ("--speculative", "tree", "--dtype", "float32"),
        ("--speculative", "lookup", "--draft-tokens", 3),
    ],
)
def test_generate_speculatively(model, args):
    options = ("--model", model, "--max-tokens", 40, "--seed", 3)
    code, out, err = run_here("generate", "the the the the the", *options, *args, "--compare")
    assert (code, err) == (0, "")
    drafted = re.search(r"^drafted  (\d+) tokens, (\d+) accepted \((\d+)%\), (\d\.\d\d) tokens per step$", out, re.MULTILINE)
    count, accepted, percent, per_step = map(float, drafted.groups())
    assert percent == round(100 * accepted / max(1, count))
    assert per_step == pytest.approx(39 / (39 - accepted), abs=0.01)
    assert re.search(r"^plain    39 tokens in .* tokens/s; the same tokens, [\d.]+x as fast with drafts$", out, re.MULTILINE)
    _, plain, _ = run_here("generate", "the the the the the", *options, *args[2:4] * ("--temperature" in args))
    assert out.split("\n\nprefill")[0] == plain.split("\n\nprefill")[0]
    assert "drafted" not in plain


def test_generate_compares_nothing_when_the_text_ends_at_once(model):
    args = ("--model", model, "--max-tokens", 1, "--speculative", "--compare")
    code, out, _ = run_here("generate", "the", *args)
    assert code == 0
    assert "plain    no tokens; the same tokens\n" in out


@pytest.mark.model
@exhaustive
def test_generate_with_the_fetched_model():
    code, out, err = run("generate", "It is a truth universally acknowledged", "--dtype", "int8", "--max-tokens", 16)
    if "could not download" in err and not os.environ.get("CI"):
        pytest.skip(err)
    assert code == 0, err
    assert out.startswith("It is a truth universally acknowledged")
    assert re.search(r"int8: 2\d tokens take 783,360 bytes, [\d,]+ each; float16 takes 0.\d\d times as many, float32 1", out)


# --- prompts in a store ------------------------------------------------------------------------


def test_generate_goes_on_from_a_stored_prompt(model, tmp_path):
    pytest.importorskip("safetensors")
    store, prompt = tmp_path / "prompts", "ab " * 60
    options = ["generate", prompt, "--model", model, "--max-tokens", 5, "--prompt-cache", store]
    _, first, _ = run_here(*options)
    code, second, err = run_here(*options)
    assert code == 0 and not err
    text, count = prompt_line(first)
    assert text.startswith("prompts  0 of ") and "(0 of 1 prompts)" in text
    text, again = prompt_line(second)
    assert text.startswith(f"prompts  {count - 1} of {count} tokens restored (1 of 1 prompts)") and again == count
    assert first.partition("\nprompts")[0] == second.partition("\nprompts")[0]  # the same text
    code, shown, _ = run_here("store", store)
    assert code == 0 and "1 prompts" in shown and "end of a prompt" in shown
    found = json.loads(run_here("store", store, "--json")[1])
    assert found["prompts"] == 1 and found["nbytes"] > 0 and found["removed"] == 0
    assert {one["kind"] for one in found["values"]} <= {"chunk", "end of a prompt"} and found["values"][0]["hits"] == 1
    assert json.loads(run_here("store", store, "--json", "--max-bytes", 0)[1])["nbytes"] == 0
    code, _, err = run_here(*options[:-2], "--prompt-cache", store, "--session", tmp_path / "talk")
    assert code and "leave out --prompt-cache" in err
    code, _, err = run_here("store", tmp_path / "nowhere")
    assert code and "there is no folder" in err and not (tmp_path / "nowhere").exists()


def test_no_command_shows_the_password_of_a_store(model):
    pytest.importorskip("redis")
    store = "redis://:hunter2@127.0.0.1:1"
    for words in (["generate", "ab"], ["serve-sim", "--requests", 1, "--no-check"]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code, out, err = run_here(*words, "--model", model, "--max-tokens", 2, "--prompt-cache", store)
        assert code == 0 and "127.0.0.1" in out and "hunter2" not in out + err
    code, out, err = run_here("store", store)
    assert code and "127.0.0.1" in err and "hunter2" not in out + err


def prompt_line(out):
    (line,) = (line for line in out.splitlines() if line.startswith("prompts "))
    return line, int(line.split(" of ")[1].split()[0].replace(",", ""))


# --- serve-sim ---------------------------------------------------------------------------------


def test_serve_sim(model):
    # Not the default: in int4 a prompt reads its own tokens as floats, and a prefix that was found as its codes.
    options = ("--model", model, "--requests", 3, "--max-tokens", 4, "--show", 1)
    code, out, err = run("serve-sim", *options, "--dtype", "int8")
    assert code == 0, err
    assert re.search(r"^served +3 requests, \d+ tokens in .* tokens/s$", out, re.MULTILINE)
    assert re.search(r"^prefix +[\d,]+ of [\d,]+ prompt tokens found in the pool \(\d+%\)$", out, re.MULTILINE)
    assert re.search(r"^pool +int8, ", out, re.MULTILINE)
    assert "3 of 3 texts the same" in out
    code, out, err = run_here("serve-sim", *options)
    assert code == 0 and re.search(r"^pool +int4, .* blocks of 64 tokens", out, re.MULTILINE), err
    assert re.search(r"^alone +\d of 3 texts the same", out, re.MULTILINE)


@pytest.mark.model
@exhaustive
def test_serve_sim_with_the_fetched_model():
    code, out, err = run("serve-sim", "--requests", 4, "--max-tokens", 6, "--dtype", "int8")
    if "could not download" in err and not os.environ.get("CI"):
        pytest.skip(err)
    assert code == 0, err
    assert "4 of 4 texts the same" in out


# --- eval --------------------------------------------------------------------------------------


def test_eval_table(model, text):
    code, out, err = run("eval", "--model", model, "--text", text, "--dtype", "int8,int8/int4,int2", "--tokens", 200)
    assert code == 0
    assert "199 tokens predicted" in out
    rows = [line.split() for line in out.splitlines() if line.strip().startswith(("float32", "int"))]
    assert [row[0] for row in rows] == ["float32", "int8", "int8/int4", "int2"]
    assert float(rows[0][1]) > 1
    for row in rows[1:]:
        assert float(row[1]) - float(rows[0][1]) == pytest.approx(float(row[2]), abs=2e-5)
    assert 0 < float(rows[1][3]) < float(rows[2][3]) < float(rows[3][3])  # KL
    assert "199/199" in err  # the progress bar


def test_eval_json(model, text):
    args = ("--dtype", "float32,int4", "--tokens", 100, "--chunk", 30, "--json")
    code, out, _ = run_here("eval", "--model", model, "--text", text, *args)
    assert code == 0
    report = json.loads(out)
    assert (report["text"], report["chunk"]) == (str(text), 30)
    exact, int4 = report["results"]
    assert exact["dtype"] == "float32"
    assert exact["nll_float32"] == int4["nll_float32"]
    assert exact["nll"] == pytest.approx(exact["nll_float32"], rel=1e-6)  # BLAS may round a row by its place in the batch
    assert exact["top1"] == 1
    assert int4["nll_difference"] == int4["nll"] - int4["nll_float32"] != 0
    assert int4["num_predictions"] == 99
    assert int4["kl"] > 0


def test_eval_formats(model, text):
    from kvfast.tools.evaluation.perplexity import FORMATS

    def results(*args):
        code, out, err = run_here("eval", "--model", model, "--text", text, "--tokens", 40, "--json", *args)
        assert code == 0, err
        return json.loads(out)["results"]

    every = results("--formats", "float16, all,int8")
    assert [score["dtype"] for score in every] == ["float16", *FORMATS]
    assert [score["runtime"] for score in every] == ["kvfast"] * len(every)
    bits = {score["dtype"]: score["bits_per_element"] for score in every}
    assert bits["bfloat16"] == pytest.approx(16 * 16 / 12 * 64 / 39, rel=0.01)  # heads of 12, stored as 16; whole blocks
    assert bits["int4-plain"] < bits["int8-rotated"] == bits["int8-plain"] < bits["bfloat16"]
    assert bits["int4-plain"] < bits["k8v4-rotated"] < bits["int8-rotated"]
    assert results("--formats", "int8/int4") == results("--dtype", "int8/int4")
    assert [score["dtype"] for score in results("--formats", "int8-rotated", "--v-dtype", "int4")] == ["int8/int4"]
    assert [score["dtype"] for score in results()] == list(FORMATS)


def test_calibrate(model, text, tmp_path):
    path = tmp_path / "model.npz"
    code, out, err = run_here("calibrate", model, "--text", text, "--tokens", 200, "--out", path)
    assert code == 0 and out.startswith("Calibration(") and "200 tokens" in out and path.stat().st_size > 1000, err
    calibrated = ("--text", text, "--tokens", 199, "--json", "--calibration", path)
    code, out, err = run_here("eval", "--model", model, "--formats", "int8,int4", *calibrated)
    assert code == 0, err
    scores = json.loads(out)["results"]
    assert [score["dtype"] for score in scores] == ["int8 calibrated", "int4 calibrated"]
    assert 0 < scores[0]["kl"] < scores[1]["kl"]
    for args, reason in [
        (("--formats", "int8-plain"), "calibration is for keys that are rotated or per_channel"),
        (("--formats", "int8", "--v-dtype", "int4"), "--calibration is for a format"),
        (("--compress", "lowrank:4"), "--calibration is not for --compress"),
    ]:
        code, _, err = run_here("eval", "--model", model, *args, *calibrated)
        assert code == 1 and reason in err
    code, _, err = run_here("calibrate", model, "--text", text, "--tokens", 100, "--out", path)
    assert code == 1 and "at least 128 tokens, got 100" in err


def test_what_cannot_be_done_is_said_before_the_work(model, text, tmp_path):
    for words in ("calibrate", model, "--text", text, "--out"), ("bench", "--json"), ("bench", "--report"):
        for path, reason in ((tmp_path, "it is a folder"), (tmp_path / "no" / "file", "there is no folder")):
            code, _, err = run_here(*words, path)
            assert code == 1 and err.startswith(f"error: {path}: {reason}")
    for number in ("x", "0", ""):
        assert f"--contexts: {number} is not an integer of at least 1\n" in run_here("bench", "--contexts", f"64,{number}")[2]


def test_eval_of_several_texts(model, text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("12 of the others then. " * 9, encoding="utf-8")
    args = ("--formats", "int8,int4", "--tokens", 90, "--json")
    reports = []
    for texts in [("--text", text, other), ("--text", text, "--text", other), ("--text", text), ("--text", other)]:
        code, out, err = run_here("eval", "--model", model, *texts, *args)
        assert code == 0, err
        reports.append(json.loads(out))
    both, again, *single = reports
    assert both == again
    assert both["texts"] == [{"text": report["text"], "results": report["results"]} for report in single]
    for index, mean in enumerate(both["results"]):
        scores = [report["results"][index] for report in single]
        counts = [score["num_predictions"] for score in scores]
        assert mean["num_predictions"] == sum(counts)
        for name in ("nll", "nll_float32", "kl", "top1", "bits_per_element"):
            expected = sum(count * score[name] for count, score in zip(counts, scores)) / sum(counts)
            assert mean[name] == pytest.approx(expected)


def test_eval_report(model, text, tmp_path):
    path, other = tmp_path / "report.json", tmp_path / "other.json"
    args = ("eval", "--model", model, "--formats", "int8,int4", "--report")
    code, _, err = run_here(*args, path, "--text", text, "--tokens", 90)
    assert code == 0, err
    report, words = json.loads(path.read_text("utf-8")), text.read_text("utf-8")
    assert (report["model"]["name"], report["model"]["architecture"], report["model"]["num_layers"]) == (model.stem, "llama", 2)
    assert report["model"]["sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()
    assert (report["versions"]["kvfast"], report["config"]["active_isa"]) == (kvfast.__version__, kvfast.active_isa())
    (of_text,) = report["texts"]
    assert of_text["sha256"] == hashlib.sha256(words.encode()).hexdigest()
    assert (of_text["characters"], of_text["tokens"]) == (len(words), 90)
    for row, dtype in zip(of_text["results"], ("int8", "int4"), strict=True):
        (part,) = row["lengths"]
        assert row["dtype"] == dtype and row["attention_seconds"] > 0 and part["num_tokens"] == 89
        assert {"kl", "kl_999", "top1", "bits_per_element"} <= part.keys()
    found = path.read_text("utf-8")
    assert str(tmp_path) not in found and str(model) not in found and words[:30] not in found
    code, _, err = run_here(*args, other, "--novel", "--tokens", 60)
    assert code == 0, err
    code, out, err = run_here("eval", "--compare", path, other, path)
    assert code == 0 and err == ""
    rows = [line.split()[:4] for line in out.splitlines() if model.stem in line]
    assert len(rows) == 6 and rows == sorted(rows, key=lambda row: row[:2])
    assert rows.count([of_text["sha256"][:8], "int4", "89", model.stem]) == 2


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_eval_plot(model, text, tmp_path, suffix, magic):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"kl.{suffix}"
    code, out, err = run_here(
        "eval", "--model", model, "--text", text, "--tokens", 60, "--formats", "float32,int8,int4", "--plot", path
    )
    assert code == 0 and "59 tokens predicted" in out, err
    assert path.read_bytes().startswith(magic)


# --- errors ------------------------------------------------------------------------------------


def test_errors_are_one_plain_line(model, text, tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(model.read_bytes()[:3000])
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    empty = tmp_path / "empty"
    empty.touch()
    missing = tmp_path / "missing"
    # The whole of stderr, in a process of its own; of the others the text.
    assert run("generate", "x", "--model", missing) == (1, "", f"error: {missing}: No such file or directory\n")
    for args, message in [
        (("generate", "x", "--model", missing), f"{missing}: No such file"),
        (("generate", "x", "--model", damaged), f"{damaged} is damaged"),
        (("generate", "x", "--model", empty), "not a GGUF file"),
        (("generate", "x", "--model", text), "not a GGUF file"),
        (("generate", "x", "--model", tmp_path), "is a folder"),
        (("generate", "x", "--model", model, "--dtype", "int9"), "int4"),  # the names there are
        (("generate", "", "--model", model), "prompt is empty"),
        (("generate", "x", "--model", model, "--top-p", "0"), "top_p"),
        (("generate", "the the the", "--model", model, "--max-seq-len", "2"), "room for 2"),
        (("generate", "x", "--model", model, "--compare"), "--compare is for --speculative"),
        (("eval", "--model", model, "--text", missing), f"{missing}: No such file"),
        (("eval", "--model", model, "--text", latin), "not UTF-8"),
        (("eval", "--model", model, "--text", empty), "at least two tokens"),
        (("eval", "--model", model, "--text", text, "--tokens", "70000"), "context is 65536"),
        (("eval", "--model", model, "--text", text, missing), f"{missing}: No such file"),
        (("eval", "--model", model, "--text", text, "--formats", "int8,int9"), "int4"),
        (("eval", "--model", model, "--text", text, "--llama-cpp", "q8_0,q3_0"), "no cache of type 'q3_0'"),
        (("eval", "--model", model, "--text", text, "--plot", "kl.txt"), "png"),
        (("eval", "--model", model, "--text", text, "--plot", missing / "kl.png"), f"no folder {missing}"),
        (("eval", "--model", model, "--text", text, "--report", missing / "kl.json"), f"no folder {missing}"),
        (("eval", "--compress", "int8", "--model", model, "--text", text, "--report", "kl.json"), "--report is not for --compress"),
    ]:
        code, _, err = run_here(*args)
        line = err.strip().splitlines()[-1]
        assert code == 1, args
        assert line.startswith("error: "), args
        assert message in line, args
        assert "Traceback" not in err, args


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_interrupt_is_quiet(model):
    args = command("generate", "the", "--model", model, "--max-tokens", 60000, "--threads", 1)
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.read(10)  # some text came: it is generating
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX pipes")
def test_closed_pipe_is_quiet(model):
    args = command("generate", "the", "--model", model, "--max-tokens", 60000, "--threads", 1)
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=60) == 1
        assert "Traceback" not in process.stderr.read()


# --- sessions ----------------------------------------------------------------------------------


def session_text(out, prompt):
    return out.partition("\n\nprefill")[0].partition("\n\nsession")[0].removeprefix(prompt)


def test_a_session_goes_on_where_it_was_left(model, tmp_path):
    from kvfast import llama

    path = tmp_path / "talk.safetensors"
    options = ("--model", model, "--max-tokens", 8, "--session", path)
    code, first, err = run("generate", "then the", *options)
    assert code == 0, err
    length = len(kvfast.load(path))
    code, second, err = run_here("generate", " and", *options, "--speculative", "--compare")
    assert code == 0 and f"session  {length} tokens of {path}" in second and "the same tokens" in second, err
    # The same in one go, by hand.
    runtime, tokenizer = llama.load(model)
    cache, token_ids = kvfast.KVCache(*runtime.cache_shape), []
    for prompt, out in [("then the", first), (" and", second)]:
        tokens = tokenizer.encode(prompt)
        tokens = tokens[1:] if token_ids and tokens[:1] == [tokenizer.bos_id] else tokens
        written = list(llama.generate(runtime, tokens, cache, max_tokens=8, end_ids=tokenizer.end_ids))
        token_ids += tokens + written
        assert session_text(out, prompt) == "".join(tokenizer.stream(iter(written)))
        runtime.prefill(token_ids[len(cache) :], cache)
    snapshot = kvfast.Snapshot.load(path)
    assert snapshot.token_ids.tolist() == token_ids and snapshot == cache.snapshot()
    code, _, err = run_here("generate", "", *options)
    assert code == 0 and len(kvfast.load(path)) > len(token_ids), err


def test_a_session_keeps_its_storage_and_its_model(model, tmp_path):
    path = tmp_path / "talk.safetensors"
    options = ("--model", model, "--max-tokens", 4, "--session", path)
    assert run_here("generate", "then the", *options, "--dtype", "int4")[0] == 0
    before = path.read_bytes()
    code, _, err = run_here("generate", "the", *options, "--dtype", "float32")
    assert code == 1 and "int4" in err and "float32" in err
    code, _, err = run_here("generate", "the", *options, "--max-seq-len", 5)
    assert code == 1 and "room for" in err
    kvfast.load(path).save(path)  # without tokens and model
    code, _, err = run_here("generate", "the", *options)
    assert code == 1 and "not a session of this model" in err
    path.write_bytes(before[:-1])
    code, _, err = run_here("generate", "the", *options)
    assert code == 1 and str(path) in err and path.read_bytes() == before[:-1]
    path.write_bytes(before)
    code, out, err = run_here("generate", "the", *options)
    assert code == 0 and "int4" in out, err


def test_a_full_session_is_kept_as_far_as_it_goes(model, tmp_path):
    path = tmp_path / "talk.safetensors"
    code, _, err = run_here("generate", "then the", "--model", model, "--max-seq-len", 10, "--max-tokens", 50, "--session", path)
    assert code == 0 and len(kvfast.load(path)) == 10, err
