"""The level of prefetches: the table, the variable; and that no bit depends on it."""

import functools
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cache_kinds import FORMATS, filled
from selection import parametrize

import kvfast
from kvfast.core import prefetching

FLOATS = ["float32", "float16", "bfloat16"]


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """What was in force is in force afterwards."""
    monkeypatch.delenv(prefetching.VARIABLE, raising=False)
    before = prefetching.in_use()
    yield
    prefetching.use(*before)


# --- the same bits -----------------------------------------------------------------------------


def calls(form):
    """For caches in one block and in many, with one query and several, and 1 to 6 query rows; and for a ring."""
    rng = np.random.default_rng(0)
    few_rows = [(length, heads, 128, 1) for length, heads in ((333, 2), (210, 4), (77, 6), (130, 8))]
    for length, heads, dim, queries in ((5, 2, 20, 3), (700, 12, 64, 1), (1300, 4, 128, 3), *few_rows):
        cache = filled(kvfast.KVCache(1, 2, dim, dtype=form), *rng.standard_normal((2, length, 2, dim), np.float32))
        yield functools.partial(cache.attend, 0, rng.standard_normal((queries, heads, dim), np.float32))
    ring = kvfast.RingKVCache(1, 2, 32, dtype=form, sliding_window=200, num_sink_tokens=20)
    for rows in rng.standard_normal((5, 2, 100, 2, 32), np.float32):
        filled(ring, *rows)
    yield functools.partial(ring.attend, 0, rng.standard_normal((1, 4, 32), np.float32))


@parametrize("form", [*FORMATS, *FLOATS], ["int8", "k8v4", "int4", "int4-plain", "channels, int3", *FLOATS])
def test_the_same_bits_whatever_is_chosen(isa, form):
    attends, found = list(calls(FORMATS.get(form, form))), []
    for level in prefetching.LEVELS:
        prefetching.use(level, "a test")
        assert prefetching.in_use() == (level, "a test")
        found.append([attend().tobytes() for attend in attends])
    assert found[0] == found[1]


@pytest.mark.parametrize("form", FLOATS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", [3, 4, 8])
def test_the_same_bits_of_pages(isa, form, dim, rows, rng):
    """For blocks of 16 tokens."""
    cache = kvfast.PagedKVCache(1, 2, dim, 20, 16, dtype=form)
    sequence = filled(cache.new_sequence(), *rng.standard_normal((2, 99, 2, dim), np.float32))
    q = rng.standard_normal((1, 2 * rows, dim), np.float32)
    found = set()
    for level in prefetching.LEVELS:
        prefetching.use(level, "a test")
        found.add(sequence.attend(0, q).tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("form", ["float16", "int8", "int4-plain"])
def test_the_same_bits_of_latent_rows(form, rng):
    cache = filled(kvfast.MLAKVCache(1, 64, 32, dtype=form), rng.standard_normal((300, 64 + 32), np.float32))
    q = rng.standard_normal((1, 8, 64 + 32), np.float32)
    found = set()
    for level in prefetching.LEVELS:
        prefetching.use(level, "a test")
        found.add(cache.attend(0, q).tobytes())
    assert len(found) == 1


# --- which level -------------------------------------------------------------------------------


def test_every_row_of_the_table():
    for name, (vendor, family, models, level) in prefetching.TABLE.items():
        assert {prefetching.choose((vendor, family, model)) for model in models} == {(level, f"the table, {name}")}
    assert prefetching.choose(("GenuineIntel", 6, 1)) == prefetching.choose(("", 0, 0))
    assert prefetching.choose(("", 0, 0))[0] == 2 or platform.machine() != "x86_64"


def test_this_processor():
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if "vendor_id" not in text:
        pytest.skip("the system does not tell vendor and family")
    told = dict(line.partition(":")[::2] for line in text.split("\n\n")[0].replace("\t", "").splitlines())
    vendor, family, model = (told[name].strip() for name in ("vendor_id", "cpu family", "model"))
    assert prefetching.choose() == prefetching.choose((vendor, int(family), int(model)))


@pytest.mark.parametrize("text", ["0", "3", "near", "1,2", "prefetch_level=1"])
def test_bad_values_of_the_variable(text, monkeypatch):
    monkeypatch.setenv(prefetching.VARIABLE, text)
    with pytest.raises(ValueError, match=f"^KVFAST_PREFETCH_LEVEL must be 1 or 2, got '{text}'"):
        prefetching.choose()


@pytest.mark.parametrize("level", prefetching.LEVELS)
def test_the_variable_at_import(level):
    code = "import kvfast; kvfast.show_config(); print(kvfast.config()['prefetch'])"
    environment = {**os.environ, prefetching.VARIABLE: f" {level} "}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert f"Prefetches:   of level {level} (from KVFAST_PREFETCH_LEVEL)" in out
    assert str({"level": level, "source": "KVFAST_PREFETCH_LEVEL"}) in out
