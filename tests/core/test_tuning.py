"""How attention asks for memory: the table, `KVFAST_TUNING`, the file that is kept; and that no bit depends on it."""

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from cache_kinds import FORMATS
from command_line import run_here
from selection import parametrize

import kvfast
from kvfast.core import tuning
from kvfast.core.tuning import DEFAULT, LEVELS, ORDERS, Prefetching

FLOATS = ["float32", "float16", "bfloat16"]
PREFETCHINGS = [Prefetching(level, order) for level, order in itertools.product(LEVELS, ORDERS)]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Where the user's configuration is; and what was in force is in force afterwards."""
    monkeypatch.setenv("LOCALAPPDATA" if os.name == "nt" else "XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    before = tuning.in_use()
    yield
    tuning.use(*before)


# --- the same bits -----------------------------------------------------------------------------


def calls(form):
    """For caches in one block and in many, with one query and several, and 1 to 6 query rows; and for a ring."""
    rng = np.random.default_rng(0)
    few_rows = [(length, heads, 128, 1) for length, heads in ((333, 2), (210, 4), (77, 6), (130, 8))]
    for length, heads, dim, queries in ((5, 2, 20, 3), (700, 12, 64, 1), (1300, 4, 128, 3), *few_rows):
        cache = kvfast.KVCache(1, 2, dim, dtype=form)
        cache.append(0, *rng.standard_normal((2, length, 2, dim), np.float32))
        cache.advance(length)
        yield functools.partial(cache.attend, 0, rng.standard_normal((queries, heads, dim), np.float32))
    ring = kvfast.RingKVCache(1, 2, 32, dtype=form, sliding_window=200, num_sink_tokens=20)
    for rows in rng.standard_normal((5, 2, 100, 2, 32), np.float32):
        ring.append(0, *rows)
        ring.advance(100)
    yield functools.partial(ring.attend, 0, rng.standard_normal((1, 4, 32), np.float32))


@parametrize("form", [*FORMATS, *FLOATS], ["int8", "k8v4", "int4", "int4-plain", "channels, int3", *FLOATS])
def test_the_same_bits_whatever_is_chosen(isa, form):
    attends = list(calls(FORMATS.get(form, form)))
    tuning.use(DEFAULT, "a test")
    expected = [attend().tobytes() for attend in attends]
    for prefetching in PREFETCHINGS:
        tuning.use(prefetching, "a test")
        assert tuning.in_use() == (prefetching, "a test")
        assert [attend().tobytes() for attend in attends] == expected, prefetching


@pytest.mark.parametrize("form", FLOATS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", [3, 4, 8])
def test_the_same_bits_of_pages(isa, form, dim, rows, rng):
    """For blocks of 16 tokens."""
    cache = kvfast.PagedKVCache(1, 2, dim, 20, 16, dtype=form)
    sequence = cache.new_sequence()
    sequence.append(0, *rng.standard_normal((2, 99, 2, dim), np.float32))
    sequence.advance(99)
    q = rng.standard_normal((1, 2 * rows, dim), np.float32)
    found = set()
    for prefetching in PREFETCHINGS:
        tuning.use(prefetching, "a test")
        found.add(sequence.attend(0, q).tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("form", ["float16", "int8", "int4-plain"])
def test_the_same_bits_of_latent_rows(form, rng):
    cache = kvfast.MLAKVCache(1, 64, 32, dtype=form)
    cache.append(0, rng.standard_normal((300, 64 + 32), np.float32))
    cache.advance(300)
    q = rng.standard_normal((1, 8, 64 + 32), np.float32)
    found = set()
    for prefetching in PREFETCHINGS:
        tuning.use(prefetching, "a test")
        found.add(cache.attend(0, q).tobytes())
    assert len(found) == 1


# --- the table ---------------------------------------------------------------------------------


def test_every_row_of_the_table():
    for row in tuning.TABLE:
        for model in row.models:
            found = tuning.from_table((row.vendor, row.family, model), row.tier or "avx2")
            assert found == (row.prefetching, f"the table, {row.name}")
        assert row.prefetching != DEFAULT
    assert tuning.from_table(("GenuineIntel", 6, 1))[0] == tuning.from_table(("", 0, 0))[0] == DEFAULT
    keys = [(row.vendor, row.family, model, row.tier) for row in tuning.TABLE for model in row.models]
    assert len(keys) == len(set(keys))


def test_this_processor():
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if "vendor_id" not in text:
        pytest.skip("the system does not tell vendor and family")
    told = dict(line.partition(":")[::2] for line in text.split("\n\n")[0].replace("\t", "").splitlines())
    names = [told[name].strip() for name in ("vendor_id", "cpu family", "model")]
    assert tuning.processor() == "-".join([*names, kvfast.available_isas()[0]])


# --- KVFAST_TUNING -----------------------------------------------------------------------------


def test_the_variable_is_a_list(monkeypatch):
    base = tuning.from_table()[0]
    monkeypatch.setenv(tuning.VARIABLE, " prefetch_level = 1, int8_order=side ")
    assert tuning.choose() == (Prefetching(1, "side"), "KVFAST_TUNING")
    monkeypatch.setenv(tuning.VARIABLE, "int8_order=side")
    assert tuning.choose()[0] == dataclasses.replace(base, int8_order="side")
    monkeypatch.setenv(tuning.VARIABLE, "")
    assert tuning.choose() == tuning.from_table()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefetch_level=0", "prefetch_level must be 1 or 2, got 0"),
        ("prefetch_level=3", "prefetch_level must be 1 or 2, got 3"),
        ("prefetch_level=near", "prefetch_level must be 1 or 2, got 'near'"),
        ("int8_order=2", "int8_order must be memory or side, got 2"),
        ("int8_order=rows", "int8_order must be memory or side, got 'rows'"),
        ("orders=side", "the unknown name 'orders'; the names are prefetch_level, int8_order"),
        ("prefetch_level=1,", "must be a file or a list of name=value, got ''"),
        ("prefetch_level=", "must be a file or a list of name=value, got 'prefetch_level='"),
        ("no/such/file", "must be a file or a list of name=value, got 'no/such/file': No such file"),
    ],
)
def test_bad_values_of_the_variable(text, message, monkeypatch):
    monkeypatch.setenv(tuning.VARIABLE, text)
    with pytest.raises(ValueError) as caught:
        tuning.choose()
    assert str(caught.value).startswith("KVFAST_TUNING") and message in str(caught.value)


def test_the_variable_at_import():
    def imported(text):
        code = "import kvfast; print(kvfast.config()['tuning']['int8_order']); kvfast.show_config()"
        return subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "KVFAST_TUNING": text}, capture_output=True, text=True, check=False
        )

    good, bad = imported("int8_order=side"), imported("int8_order=1")
    assert good.stdout.startswith("side\n") and "int8_order=side" in good.stdout and "(from KVFAST_TUNING)" in good.stdout
    assert bad.returncode == 1 and "KVFAST_TUNING: int8_order must be memory or side, got 1" in bad.stderr


def test_the_variable_is_a_file(tmp_path, monkeypatch):
    path = tmp_path / "other=.json"
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    os.replace(tuning.keep(Prefetching(1, "side")), path)
    assert tuning.choose() == (Prefetching(1, "side"), f"KVFAST_TUNING, {path}")
    path.write_text('{"version": 1, "processors": {"Other-1-2": {}}}')
    with pytest.raises(ValueError, match=f"has nothing for {tuning.processor()}; it has Other-1-2"):
        tuning.choose()
    path.write_text("{")
    with pytest.raises(ValueError, match="not a file of python -m kvfast tune"):
        tuning.choose()


# --- the kept file -----------------------------------------------------------------------------


def test_what_is_kept_is_found():
    assert tuning.choose() == tuning.from_table() and not tuning.forget()
    other, mine = Prefetching(1, "side"), Prefetching(2, "side")
    path = Path(tuning.keep(other))
    content = json.loads(path.read_text())
    content["processors"]["Other-1-2"] = content["processors"].pop(tuning.processor())
    path.write_text(json.dumps(content))
    assert tuning.choose() == tuning.from_table()
    assert tuning.keep(mine) == str(path) == tuning.file()
    assert tuning.choose() == (mine, str(path))
    assert list(json.loads(path.read_text())["processors"]) == ["Other-1-2", tuning.processor()]
    assert os.listdir(path.parent) == [path.name]
    assert tuning.forget() and tuning.choose() == tuning.from_table() and path.exists()
    content["processors"] = {tuning.processor(): {}}
    path.write_text(json.dumps(content))
    assert tuning.forget() and not path.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", "is not a file of python -m kvfast tune"),
        ("[]", 'must have "version": 1 and "processors"'),
        ('{"version": 2, "processors": {}}', 'must have "version": 1'),
        ('{"version": 1, "processors": {"%s": 5}}', "must have the names prefetch_level, "),
        ('{"version": 1, "processors": {"%s": {"prefetch_level": true}}}', "prefetch_level must be 1 or 2, got True"),
        ('{"version": 1, "processors": {"%s": {"int8_order": ["side"]}}}', "int8_order must be memory or side"),
        ('{"version": 1, "processors": {"%s": {"size": 1}}}', "the unknown name 'size'"),
    ],
)
def test_a_bad_file_is_told_and_the_table_taken(content, message):
    path = Path(tuning.file())
    path.parent.mkdir()
    path.write_text(content % tuning.processor() if "%s" in content else content)
    with pytest.warns(RuntimeWarning) as caught:
        assert tuning.choose() == tuning.from_table()
    assert message in str(caught[0].message) and str(path) in str(caught[0].message)


def test_without_a_home(monkeypatch):
    for name in ("XDG_CONFIG_HOME", "LOCALAPPDATA", "HOME", "USERPROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it returns where there is no home
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.choose() == tuning.from_table()


# --- python -m kvfast tune ---------------------------------------------------------------------


def test_tune_measures_and_keeps():
    before = tuning.in_use()
    code, out, err = run_here("tune", "--rounds", 1, "--context", 128, "--megabytes", 1, "--threads", "1")
    assert (code, err) == (0, "")
    base = tuning.from_table()[0]
    (order,) = {*ORDERS} - {base.int8_order}
    for name in (f"prefetch_level={3 - base.prefetch_level}", f"\nint8_order={order}", "float32 1", "int4 1"):
        assert name in out
    kept = tuning.choose()
    assert kept[1] == tuning.file() in out and str(kept[0]) in out
    assert tuning.in_use() == before
    assert run_here("tune", "--forget") == (0, f"removed {tuning.file()}\n", "")
    assert "has nothing for" in run_here("tune", "--forget")[1]
    assert tuning.choose() == tuning.from_table()


def test_tune_keeps_nothing_unasked():
    code, out, _ = run_here("tune", "--rounds", 1, "--context", 64, "--megabytes", 1, "--threads", "1", "--no-keep")
    assert code == 0 and "kept" not in out and not os.path.exists(tuning.file())


def test_what_is_better():
    from kvfast.cli.tune import Trial, best_of

    def trial(name, value, *ratios):
        return Trial(name, value, dict(enumerate(ratios)))

    base = Prefetching(2)
    assert best_of(base, [trial("int8_order", "side", 0.99, 0.99), trial("prefetch_level", 1, 1.0, 1.1)]) == base
    assert best_of(base, [trial("int8_order", "side", 0.9, 1.04), trial("prefetch_level", 1, 0.5)]) == Prefetching(1)
    assert best_of(base, [trial("int8_order", "side", 0.9), trial("prefetch_level", 1, 0.8)]) == Prefetching(1, "side")
