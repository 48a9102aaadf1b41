"""The packages of kvfast: who imports whom, and what each has."""

import importlib.util
import re
from pathlib import Path

import pytest
from selection import needs_sources

pytestmark = needs_sources
SCRIPT = Path(__file__).parents[2] / "docs" / "rooms.py"


@pytest.fixture
def rooms():
    spec = importlib.util.spec_from_file_location("rooms", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_packages_import_only_from_those_below_and_nothing_private(rooms):
    assert rooms.violations() == []


def test_no_files_import_each_other(rooms):
    """Imports for types and inside functions count, all of them: what kvfast imports there for speed, or because it is an extra, are
    other projects."""
    assert rooms.circles() == []
    files = rooms.imports_of_files()
    assert "kvfast.caches.buffer_layout" in files["kvfast.capi"]  # inside a function
    assert "kvfast.caches.snapshot" in files["kvfast.caches.paged_storage"]  # for types
    assert "kvfast.storage.sequences.sequence" in files["kvfast.storage.sequences.heads"]  # cimport
    assert "kvfast.core.prefetching" in files["kvfast"]  # as a name of a package


def test_every_package_has_a_floor(rooms):
    assert set(rooms.rooms()) == set(rooms.FLOOR_OF) - {"simd"}


@pytest.mark.parametrize(
    "wrong",
    [
        ("core/kernels.pyx", "from kvfast.codec.blocks cimport kv_layout", "core imports codec"),
        ("core/kernels.pyx", "    from kvfast.storage.memory import pool", "core imports storage"),
        ("codec/blocks.pxd", "from kvfast cimport capi", "codec imports capi"),
        ("caches/ring.py", "import kvfast", "caches imports __init__"),
        ("caches/ring.py", "import kvfast.cli.bench", "caches imports cli"),
        ("planning/plan.py", "from kvfast.caches.ring import (\n    RingKVCache,\n    _hidden,\n)", "_hidden is private to caches"),
        ("llama/model.py", "def f(cache):\n    return cache._storage", "_storage is private"),
    ],
)
def test_what_breaks_the_rules_is_found(rooms, tmp_path, monkeypatch, wrong):
    file, text, message = wrong
    monkeypatch.setattr(rooms, "PACKAGE", copied(rooms, tmp_path, file, text))
    (found,) = rooms.violations()
    assert message in found and re.match(rf"kvfast/{file}:\d+:", found)


@pytest.mark.parametrize(
    "wrong",
    [
        ("caches/snapshot.py", "def f():\n    from kvfast.caches.loading import CLASSES", {"caches.loading", "caches.snapshot"}),
        ("caches/snapshot.py", "def f():\n    import kvfast.caches.loading", {"caches.loading", "caches.snapshot"}),
        ("caches/latent_rows.py", "from kvfast.caches import mla", {"caches.latent_rows", "caches.mla"}),
        ("storage/sequences/segments.pxd", "from kvfast.storage.sequences.splicing cimport splice", {"storage.sequences.segments"}),
    ],
)
def test_circles_are_found(rooms, tmp_path, monkeypatch, wrong):
    file, text, names = wrong
    monkeypatch.setattr(rooms, "PACKAGE", copied(rooms, tmp_path, file, text))
    (circle,) = rooms.circles()
    assert {f"kvfast.{name}" for name in names} <= set(circle) and rooms.violations() == []


def copied(rooms, folder, file, text):
    """A copy of the sources with some lines more at the end of a file."""
    for path in (path for paths in rooms.rooms().values() for path in paths):
        copy = folder / "kvfast" / path.relative_to(rooms.PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text() + (f"\n{text}\n" if path == rooms.PACKAGE / file else ""))
    return folder / "kvfast"


def heights(sources):
    """For each class, the number of kvfast's own classes from it up to the end of its longest line of ancestors."""
    bases = {}
    for text in sources:
        for name, given in re.findall(r"^(?:cdef )?class (\w+)(?:\(([^)]*)\))?:", text, re.MULTILINE):
            bases[name] = [base.split("=")[-1].split("[")[0].split(".")[-1].strip() for base in (given or "").split(",")]

    def height(name):
        return 1 + max((height(base) for base in bases[name] if base in bases), default=0)

    return {name: height(name) for name in bases}


def test_no_class_has_a_grandparent(rooms):
    found = heights(path.read_text() for paths in rooms.rooms().values() for path in paths if path.suffix in {".py", ".pyx"})
    assert len(found) > 100 and max(found.values()) == 2, {name: height for name, height in found.items() if height > 2}


def test_a_tower_of_classes_is_found():
    assert heights(["class A:\n", "cdef class B(A):\n", "class C(m.B, metaclass=M):\n"]) == {"A": 1, "B": 2, "C": 3}


MACHINES = (
    r"EPYC|Ryzen|Threadripper|Xeon|Zen ?[1-9]|Bulldozer|(?:Sapphire|Emerald|Granite) Rapids|"
    r"(?:Cascade|Cooper|Ice|Sky|Alder|Arrow|Raptor) ?[Ll]ake|Haswell|Broadwell|Graviton|Neoverse|Cortex|Apple M[1-9]|Core i[3579]"
)
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DATES = rf"(?:{MONTHS}) (?:\d\d?, )?20\d\d|20\d\d-\d\d-\d\d|\b202[4-9]\b"
FIGURES = r"\d of the time\b|\d %? ?(?:of the time|longer|faster|slower)\b|\d (?:us|ns)\b"
LABELS = re.compile(r"^TABLE = \{.*\}\n", re.MULTILINE)


def told(text):
    """Machines, dates and measured times that a text names."""
    return re.findall(rf"{MACHINES}|{DATES}|{FIGURES}", text)


def test_sources_name_no_machine_no_date_and_no_measured_time(rooms):
    """These belong into commits and the pages of performance: a constant has a reason, and the bench that sets it. The one exception
    is the table of `core/prefetching.py`, whose rows are processors: their labels are what `kvfast.config()` shows."""
    kinds = {".py", ".pyi", ".pyx", ".pxd", ".h", ".c"}
    paths = [path for path in rooms.PACKAGE.rglob("*") if path.suffix in kinds]
    sources = [path for path in paths if path.suffix != ".c" or not path.with_suffix(".pyx").exists()]
    assert len(sources) > 200
    found = []
    for path in sources:
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(rooms.PACKAGE))
        if name == "core/prefetching.py":
            (table,) = LABELS.findall(text)
            assert told(table) and not re.findall(f"{DATES}|{FIGURES}", table)
            text = text.replace(table, "")
        found += [f"{name}: {one}" for one in told(text)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "128 rows take 0.94 on an EPYC",
        "(Zen 5, int8)",
        "a Xeon without AMX",
        "Sapphire Rapids",
        "(November 2026)",
        "on 2026-11-26",
        "0.95 of the time of vectors",
        "nested loops take 8 % longer",
        "0.4 us more",
    ],
)
def test_a_machine_a_date_or_a_time_is_found(text):
    assert told(text)


def test_papers_sizes_and_shares_are_no_figures():
    assert told("(KIVI, arXiv 2402.00456; Wilson 1927; OSDI 2022), 2048 tokens, 95 % intervals, more than 15 % below") == []
