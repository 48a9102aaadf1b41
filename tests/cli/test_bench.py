"""What the machine can do, `kvfast.tools.cli.bench`, and `python -m kvfast bench`."""

import getpass
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import command_line
import numpy as np
import pytest
from selection import exhaustive

import kvfast
from kvfast.core import prefetching
from kvfast.core.hardware import peak_rate, read_bandwidth
from kvfast.tools.cli.bench import measure as measuring
from kvfast.tools.cli.bench.cases import FORMATS, LLAMA_3_8B, MODELS, SMOLLM2_135M, Case, Model
from kvfast.tools.cli.bench.json_file import json_text
from kvfast.tools.cli.bench.measure import interleaved, measure
from kvfast.tools.cli.bench.real_rows import NAME, TEXT, real_rows
from kvfast.tools.evaluation.wrapped import WrappedCache

TINY = Model("tiny", 2, 4, 2, 32)
CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def default_threads():
    yield
    kvfast.set_num_threads(None)


# --- the machine -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8", "float32"])
def test_peak_rate(isa, kind):
    rate = peak_rate(kind, num_threads=1)
    assert 1e8 < rate < 1e13
    assert peak_rate(kind) > 0


def test_vectors_multiply_faster_than_plain_c():
    def best(isa):
        with kvfast.use_isa(isa):
            return [max(peak_rate(kind, 1) for _ in range(5)) for kind in ("int8", "float32")]

    tiers = kvfast.available_isas()
    if tiers[0].startswith("avx"):
        assert np.all(np.array(best(tiers[0])) > 2 * np.array(best("scalar")))


def test_peak_rate_refuses_what_it_does_not_know():
    for kind in ("int4", None):
        with pytest.raises(ValueError, match='"int8" or "float32"'):
            peak_rate(kind)
    with pytest.raises(ValueError, match="num_threads"):
        peak_rate(num_threads=0)


def test_read_bandwidth_of_any_size(isa):
    for nbytes in (0, 1 << 20, 5 << 20, 3 << 20):
        assert read_bandwidth(nbytes, num_threads=1) > 1e6


# --- cases -------------------------------------------------------------------------------------


def test_cases_are_known_by_their_names():
    assert str(Case("prefill", LLAMA_3_8B, "int8", 4096, 512)) == "prefill Llama-3-8B int8 4096 512"
    assert Case.parse("decode SmolLM2-135M int8 64 real") == Case("decode", SMOLLM2_135M, "int8", 64, rows="real")
    for name in (
        "",
        "decode",
        "decode Llama-3-8B int8",
        "sleep Llama-3-8B int8 64",
        "decode GPT int8 64",
        "decode Llama-3-8B int8 -1",
        "decode Llama-3-8B int8 64 1 1",
        7,
    ):
        with pytest.raises(ValueError, match="is not a case"):
            Case.parse(name)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("work", ["decode", "cached", "batch", "prefill", "append", "read"])
def test_work_is_done_right(work, form):
    case = Case(work, TINY, form, 230, 40 if work in ("batch", "prefill", "append") else 1)
    work = case.prepare(least_bytes=100_000)
    work.check()
    work.call()
    assert work.nbytes > 0 and work.count > 0
    assert work.nbytes >= (100_000 if case.work in ("decode", "cached") else 1)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("work", ["quantize", "dequantize"])
def test_codec_work(work, bits):
    done = Case(work, TINY, f"int{bits}", 64).prepare()
    done.check()
    done.call()
    assert done.nbytes == 64 * 2 * (32 * 4 + 32 * bits // 8 + 4)
    with pytest.raises(ValueError, match="int8 and int4"):
        Case(work, TINY, "float16", 64).prepare()


def test_operations_are_counted_causally():
    for context, n in ((7, 1), (7, 7), (50, 20)):
        seen = sum(position + 1 for position in range(context - n, context))
        assert Case("prefill", TINY, "int8", context, n).prepare().operations == seen * 4 * 32 * 4
    with pytest.raises(ValueError, match="do not fit"):
        Case("prefill", TINY, "int8", 7, 8).prepare()


def test_real_rows_are_what_attention_sees(model, tmp_path, monkeypatch):
    from kvfast import llama

    model, tokenizer = tiny = llama.load(model)
    shape, loads, queries = Model("tiny", 2, 4, 2, 12), [], []
    monkeypatch.setenv("KVFAST_CACHE", str(tmp_path))
    monkeypatch.setattr("kvfast.llama.load", lambda: loads.append(1) or tiny)
    observed = WrappedCache(cache := kvfast.KVCache(*model.cache_shape, 700, "float32"))
    observed.write = lambda *args, **options: queries.append(cache.write(*args, **options)) or queries[-1]
    model.prefill(tokenizer.encode(TEXT)[:700], observed, 700)
    for context, loaded in ((600, 1), (40, 1), (700, 2), (600, 2)):  # a longer context is computed again
        q, k, v = real_rows(shape, context, 3)
        assert q.dtype == np.float32 and len(loads) == loaded
        for layer in range(2):
            pairs = (q, queries[layer][context - 3 : context]), (k, cache.k(layer)[:context]), (v, cache.v(layer)[:context])
            assert all(np.allclose(rows[layer], seen, rtol=2e-3, atol=1e-4) for rows, seen in pairs)
    for work, n, layers in (("decode", 1, 4), ("prefill", 40, 2)):  # all layers as often
        case = Case(work, shape, "int8", 600, n, "real").prepare(least_bytes=100_000)
        case.check()
        assert case.count == layers
    with pytest.raises(ValueError, match="contexts of up to"):
        real_rows(shape, 65536, 1)
    assert [path.name for path in tmp_path.glob("rows*")] == [f"{NAME}.npy"]


# --- rounds ------------------------------------------------------------------------------------


def test_results():
    cases = [
        Case(work, TINY, form, 128, n) for work, n in (("decode", 1), ("prefill", 16), ("append", 1)) for form in ("float16", "int4")
    ]
    told = []
    results = list(measure(cases, [1, 2], rounds=2, least_bytes=50_000, progress=lambda text, done: told.append((text, done))))
    assert [(one.case, one.num_threads) for one in results] == [
        (case, threads) for pair in (cases[:2], cases[2:4], cases[4:]) for threads in (1, 2) for case in pair
    ]
    assert sum(done for _, done in told) == 12
    assert [text for text, _ in told if text] == ["decode tiny 128", "prefill tiny 128 (16)", "append tiny 128"]
    for one in results:
        assert one.num_rounds == 2 and one.seconds > 0 and one.bandwidth_fraction > 0
        assert (one.compute_fraction is None) == (one.case.work == "append")
        assert one.fraction == (one.compute_fraction if one.case.work == "prefill" else one.bandwidth_fraction)
    decode = results[0]
    assert decode.nbytes == 128 * 2 * 2 * 32 * 2 and decode.operations == 128 * 4 * 32 * 4


def test_fractions_are_of_the_same_round(monkeypatch):
    """A machine that is half as fast for a while, and a call with it, is the same fraction."""
    speeds = iter([4e9, 2e9, 1e9])
    monkeypatch.setattr(measuring, "read_bandwidth", lambda *args: next(speeds))
    case = Case("append", TINY, "int8", 64)
    meter = measuring.Meter(case, case.prepare(), 1)
    for _ in range(3):
        meter.sample()
    nbytes = meter.work.nbytes
    result = meter.result([nbytes / 2e9, nbytes / 1e9, nbytes / 0.5e9])
    assert result.bandwidth_fraction == pytest.approx(0.5) and result.read_bandwidth == 2e9


def test_threads_are_set_and_given_back():
    seen, before = [], kvfast.get_num_threads()
    with measuring.using_threads(3):
        seen.append(kvfast.get_num_threads())
    assert seen == [3] and kvfast.get_num_threads() == before


def test_calls_are_interleaved():
    order = []
    times = interleaved([lambda: order.append(0), lambda: order.append(1)], 3)
    assert times.shape == (3, 2) and order == [0, 1] * 4


# --- the command -------------------------------------------------------------------------------

SIZE = ("--model", "SmolLM2-135M", "--contexts", "64,128", "--tokens", "32", "--formats", "float16,int4")
QUICK = ("--megabytes", "1", "--rounds", "1", "--threads", "1")


def run(*args):
    """Run `python -m kvfast bench` to its end: (exit code, stdout, stderr)."""
    pytest.importorskip("rich")
    return command_line.run("bench", *args)


def run_here(*args):
    pytest.importorskip("rich")
    return command_line.run_here("bench", *args)


def test_tables_and_json(tmp_path):
    path = tmp_path / "bench.json"
    code, out, err = run(*SIZE, *QUICK, "--json", path)
    assert code == 0, err
    assert kvfast.active_isa() in out and "decode: one token" in out and "last 32 tokens" in out
    assert "float16 takes" in out and "1.00x" in out and "of bandwidth" in out and "of peak" in out
    report = json.loads(path.read_text())
    assert (report["isa"], report["version"], report["megabytes"]) == (kvfast.active_isa(), kvfast.__version__, 1)
    places = [(row["work"], row["context"], row["format"], row["num_tokens"]) for row in report["results"]]
    assert places == [
        (work, context, form, n)
        for work, n in (("decode", 1), ("prefill", 32))
        for context in (64, 128)
        for form in ("float16", "int4")
    ]
    assert all(row["seconds"] > 0 and 0 < row["compute_fraction"] and row["model"] == "SmolLM2-135M" for row in report["results"])


def test_report_of_every_tier(tmp_path):
    path, isas = tmp_path / "report.json", [isa for isa in kvfast.available_isas() if isa != "scalar"]
    before = kvfast.active_isa()
    code, out, err = run_here("--work", "decode", "--formats", "int8", "--contexts", "64", *QUICK, "--report", path)
    assert code == 0, err
    assert kvfast.active_isa() == before and all(f"tier {isa};" in out for isa in isas)
    report = json.loads(path.read_text())
    assert set(isas) <= set(report["tiers"]) <= set(kvfast.available_isas())
    assert all(row["seconds"] > 0 for rows in report["tiers"].values() for row in rows) and report["cpu"] and report["machine"]
    assert report["versions"]["kvfast"] == kvfast.__version__ and report["versions"]["numpy"] == np.__version__
    assert report["config"]["cpu_features"] == kvfast.config()["cpu_features"]


def test_report_has_no_name_or_path(tmp_path):
    before = prefetching.in_use()
    try:
        prefetching.use(1, "a test")
        path = tmp_path / "report.json"
        code, _, err = run_here("--work", "decode", "--formats", "int8", "--contexts", "64", *QUICK, "--report", path)
    finally:
        prefetching.use(*before)
    assert code == 0, err
    text = path.read_text()
    assert '"level": 1' in text and str(tmp_path) not in text and '"/' not in text
    assert not {platform.node(), getpass.getuser()} & set(re.findall(r"[\w.-]+", text))


@pytest.mark.model
def test_real_rows_beside_random_ones(smollm2, tmp_path, monkeypatch):
    monkeypatch.setenv("KVFAST_CACHE", str(tmp_path))
    monkeypatch.setattr("kvfast.llama.load", lambda: smollm2[1:])
    args = "--rows", "random,real", "--formats", "int8", "--contexts", "64", "--tokens", "32", *QUICK, "--json", tmp_path / "x.json"
    code, out, err = run_here(*args)
    assert code == 0 and out.count("int8 real") == 2, err
    assert [row["rows"] for row in json.loads((tmp_path / "x.json").read_text())["results"]] == ["random", NAME] * 2


def test_json_has_one_line_per_result():
    rows = [{"name": f"row {i}", "seconds": i / 3, "of": {"int8": 1.5, "int4": None}, "list": [1, 2]} for i in range(3)]
    report = {"cpu": "one \u00e9", "rows": rows, "deep": {"within": {"rows": rows[:1]}}, "empty": [], "long": list(range(300))}
    text = json_text(report)
    assert json.loads(text) == report
    lines = [line.strip().rstrip(",") for line in text.splitlines()]
    assert [line for line in lines if line.startswith('{"name"')] == [json.dumps(row) for row in [*rows, rows[0]]]
    assert max(map(len, lines)) <= 480


def test_every_work_and_format():
    code, out, err = run_here("--work", "append,cached,read", "--formats", "all", "--contexts", "64", "--tokens", "64", *QUICK)
    assert code == 0, err
    assert all(form in out for form in FORMATS) and out.count("threads") >= 3
    code, out, err = run_here("--work", "quantize,dequantize", "--formats", "int8,int4", "--contexts", "64", *QUICK)
    assert code == 0, err
    assert "quantize" in out and "of peak" not in out


@pytest.mark.parametrize(("suffix", "magic"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_plot(tmp_path, suffix, magic):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"bench.{suffix}"
    code, _, err = run_here(*SIZE, *QUICK, "--plot", path)
    assert code == 0, err
    assert path.read_bytes().startswith(magic)


def test_plot_shows_the_memory_wall(tmp_path, monkeypatch):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from kvfast.tools.cli.bench import report

    cases = [
        Case(work, SMOLLM2_135M, form, context, n)
        for work, n in (("decode", 1), ("prefill", 32))
        for context in (64, 128)
        for form in ("float16", "int4")
    ]
    results = list(measure(cases, [1, 2], rounds=1, least_bytes=10**6))
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: figures.append(self))
    report.plot(results, tmp_path / "bench.svg")
    decode, prefill = figures[0].axes
    assert "2 threads" in figures[0].get_suptitle() and "32 queries" in prefill.get_title()
    for axes, wall in ((decode, "memory wall"), (prefill, "bound")):
        texts = [text.get_text() for text in axes.get_legend().get_texts()]
        assert texts[:2] == ["float16", "int4"] and wall in texts[2]
        assert len(axes.lines) == 5 and axes.get_xlabel() and "token" in axes.get_ylabel()
    walls = [line for line in decode.lines if line.get_linestyle() == "--" and len(line.get_xdata())]
    ours = [one for one in results if one.case.work == "decode" and one.num_threads == 2 and one.case.format == "float16"]
    bandwidth = np.median([one.read_bandwidth for one in results if one.case.work == "decode" and one.num_threads == 2])
    assert np.allclose(walls[0].get_ydata(), [one.nbytes / bandwidth * SMOLLM2_135M.num_layers * 1e3 for one in ours])
    with pytest.raises(ValueError, match="neither was measured"):
        report.plot([], tmp_path / "bench.svg")


def test_scaling(tmp_path, monkeypatch):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from kvfast.tools.cli.bench import scaling

    assert [scaling.thread_counts(most) for most in (1, 2, 6, 16)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16]]
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: figures.append(self))
    size = "--model", "SmolLM2-135M", "--formats", "int8,float16", "--contexts", "64", "--tokens", "32", "--sequences", "3"
    code, out, err = run_here(
        "--scaling", *size, "--threads", "1,2,3", "--rounds", "1", "--megabytes", "1", "--plot", tmp_path / "x.svg"
    )
    assert code == 0, err
    assert all(text in out for text in ("decode", "batch 3", "prefill 32", "3 threads")) and out.count(" 1.00x") >= 6
    cases = [Case("decode", SMOLLM2_135M, "int8", 64), Case("prefill", SMOLLM2_135M, "int8", 64, 32)]
    results = list(measure(cases, [1, 2], rounds=1, least_bytes=10**6))
    scaling.plot_scaling(results, tmp_path / "x.svg")
    assert [axes.get_title() for axes in figures[0].axes] == ["decode", "batch", "prefill"]
    for axes, ours in zip(figures[1].axes, (results[:2], results[2:])):
        times, ideal, wall = (line.get_ydata() * 1e-3 for line in axes.lines[:3])
        assert np.allclose(times, [one.seconds for one in ours])
        assert np.allclose(ideal, [times[0], times[0] / 2]) and np.allclose(
            wall, [one.seconds * one.fraction for one in ours], rtol=1e-6
        )


def test_stream(monkeypatch):
    pytest.importorskip("rich")
    from kvfast.tools.cli.bench import stream

    def interleaved(calls, rounds):
        for call in calls:
            call()
        return np.array([[0, 2.0, 4, 6], [0, 8, 4, 10], [0, 2, 4, 5]])

    monkeypatch.setattr(stream, "interleaved", interleaved)
    size = "--model", "SmolLM2-135M", "--formats", "int8,float16", "--contexts", "64", "--threads", "1,2", "--megabytes", "1"
    code, out, err = run_here("--stream", *size)
    assert code == 0, err
    assert out.count("int8 fast") == 2 and out.count("float16") == 2 and out.count(" 1.25 ") == 6  # of 6/4, 10/8 and 5/4


def test_errors_are_one_plain_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    missing = tmp_path / "no" / "such"
    for args, words in [
        (("--formats", "int9"), "int9"),
        (("--work", "sleep"), "decode"),
        (("--model", "GPT"), "SmolLM2-135M"),
        (("--rows", "real", "--model", "Llama-3-8B"), "of SmolLM2-135M"),
        (("--rows", "real", "--work", "append"), "decode and prefill"),
        (("--contexts", "64", "--work", "prefill"), "at least as many"),
        (("--stream", "--json", "x.json"), "without --json"),
        (("--stream", "--rows", "real"), "without --rows"),
        (("--plot", "bench.txt"), "png"),
        (("--json", missing / "x.json"), "no folder"),
        (("--report", missing / "x.json"), "no folder"),
        (("--work", "quantize", "--formats", "float16", "--contexts", "64"), "codecs"),
        (("--work", "append", "--contexts", "64", "--tokens", "8", "--plot", "x.svg", *QUICK), "neither was measured"),
    ]:
        code, _, err = run_here(*args)
        assert code == 1, (args, err)
        lines = [line for line in err.splitlines() if line.strip()]
        assert lines[-1].startswith("error: ") and words in lines[-1], (args, err)
        assert "Traceback" not in err


@pytest.mark.parametrize("args", [("--contexts", "0"), ("--threads", "x"), ("--rounds", "0"), ("--megabytes", "-1")])
def test_wrong_usage(args):
    code, out, err = run_here(*args)
    assert (code, out) == (2, "") and "usage:" in err


@pytest.mark.parametrize(("package", "option", "extra"), [("rich", (), "bench"), ("matplotlib", ("--plot", "bench.svg"), "plot")])
def test_missing_extra(package, option, extra):
    pytest.importorskip("rich")
    args = ["bench", *SIZE, *QUICK, *option]
    code = f"import sys; sys.modules[{package!r}] = None; from kvfast.tools.cli import main; sys.exit(main({args!r}))"
    environment = os.environ | {"PYTHONPATH": str(Path(kvfast.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert done.stderr == f'error: the {extra} extra is needed: pip install "kvfast[{extra}]"\n'


def test_import_needs_no_more_than_numpy():
    code = "import sys, kvfast; sys.exit(any(name.startswith('kvfast.tools.cli.bench') or name in ('rich', 'matplotlib') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_models_are_known_by_name():
    assert all(MODELS[name].name == name for name in MODELS)


# --- regressions by pytest-benchmark -----------------------------------------------------------

BENCH = "import time\n\n\ndef bench_sleep(benchmark):\n    benchmark.pedantic(time.sleep, (0.001,), rounds=3)\n"


@exhaustive
def test_saved_runs_are_compared(tmp_path):
    """Also with none, and with one of another machine; and what has become slower can be made to fail."""
    pytest.importorskip("pytest_benchmark")
    (tmp_path / "bench_tiny.py").write_text(BENCH)
    (tmp_path / "conftest.py").write_text((CHECKOUT / "bench" / "conftest.py").read_text())
    saved = tmp_path / "saved"

    def run(*options):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-c",
            CHECKOUT / "pyproject.toml",
            "--rootdir",
            tmp_path,
            "bench_tiny.py",
            f"--benchmark-storage={saved}",
            "-p",
            "no:cacheprovider",
            *options,
        ]
        # Nothing is measured in a process of pytest-xdist; this process must not be one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return result.returncode, result.stdout + result.stderr

    code, text = run("--benchmark-compare")
    assert code == 0 and "No benchmark files" in text and "INTERNALERROR" not in text
    assert run("--benchmark-save=before")[0] == 0
    code, text = run("--benchmark-compare")
    assert code == 0 and "machine_info is different" not in text and "0001_before" in text
    (path,) = saved.rglob("0001_before.json")
    document = json.loads(path.read_text())
    assert document["machine_info"]["cpu"].keys() == {"brand_raw", "arch", "count"}
    document["machine_info"]["node"] = "elsewhere"
    path.write_text(json.dumps(document))
    code, text = run("--benchmark-compare")
    assert code == 0 and "machine_info is different" in text and "elsewhere" in text
    (one,) = document["benchmarks"]
    for name in ("min", "max", "mean", "median"):
        one["stats"][name] /= 10
    path.write_text(json.dumps(document))
    assert run("--benchmark-compare=0001")[0] == 0
    code, text = run("--benchmark-compare=0001", "--benchmark-compare-fail=min:200%")
    assert code != 0 and "Performance has regressed" in text
