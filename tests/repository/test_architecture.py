"""The packages of kvfast: who imports whom, and what each has."""

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from selection import needs_sources

from kvfast import engine
from kvfast.attention.options import AttendOptions

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
    assert "kvfast.caches.snapshot" in files["kvfast.caches.pool"]  # for types
    assert "kvfast.storage.sequences.sequence" in files["kvfast.storage.sequences.heads"]  # cimport
    assert "kvfast.core.prefetching" in files["kvfast"]  # as a name of a package


GUESTS = ("engines", "tools", "evaluation", "llama", "llama_cpp", "torch", "transformers", "vllm")
# Modules of the core that tools import besides; GGUF files need an extra package, which `kvfast.engine` does without.
TAKEN = {
    "tools.cli.bench.cases": {"codec.dtypes"},
    "tools.cli.bench.measure": {"core.hardware"},
    "tools.cli.bench.stream": {"core.hardware"},
    "tools.evaluation.calibration": {"codec.calibration"},
    "tools.evaluation.compressed_prompts": {"compression.compressor"},
    "tools.llama.model": {"codec.rope", "planning.gguf_file"},
    "tools.llama.tokenizer": {"planning.gguf_file"},
    "tools.llama.weights": {"planning.gguf_file"},
    "llama": {"planning.gguf_file"},
}


def test_engines_and_tools_use_public_names_alone(rooms):
    """Those of `kvfast` and of `kvfast.engine`, each other's, and a few of the core."""
    taken = {}
    for name, others in rooms.imports_of_files().items():
        inside = {other.removeprefix("kvfast.") for other in others - {"kvfast", "kvfast.engine"}}
        found = {other for other in inside if other.partition(".")[0] not in GUESTS}
        if found and name.split(".")[1:2] and name.split(".")[1] in GUESTS:
            taken[name.removeprefix("kvfast.")] = found
    assert taken == TAKEN
    told = set(re.findall(r"`(\w+)`", engine.__doc__))
    for path in (path for room, paths in rooms.rooms().items() if room.partition(".")[0] in GUESTS for path in paths):
        named = [names for _, room, names in rooms.imports_of(path.read_text()) if room == "engine"]
        assert {one for names in named for one in names} <= told, path


def test_every_package_has_a_floor(rooms):
    assert set(rooms.rooms()) == set(rooms.FLOOR_OF) - {"simd"}


def test_the_map_of_a_package_names_each_of_its_modules_and_nothing_else(rooms):
    """A line of a map begins with a hyphen, names with commas between them, and a colon."""
    for path in rooms.PACKAGE.rglob("__init__.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
        named = {name for line in re.findall(r"^- ([a-z_, ]+): ", docstring, re.MULTILINE) for name in line.split(", ")}
        names = {one.name.partition(".")[0] for one in path.parent.iterdir() if one.suffix in (".py", ".pyx", ".pxd", ".h")}
        modules = names - {"__init__", "__main__"} | {one.name for one in path.parent.iterdir() if one.is_dir()} - {"__pycache__"}
        assert named == modules - {"kvfast"}, path


@pytest.mark.parametrize(
    "wrong",
    [
        ("core/kernels.pyx", "from kvfast.codec.blocks cimport kv_layout", "core imports codec"),
        ("core/kernels.pyx", "    from kvfast.storage.memory import pool", "core imports storage"),
        ("codec/blocks.pxd", "from kvfast cimport capi", "codec imports capi"),
        ("caches/ring.py", "import kvfast", "caches imports __init__"),
        ("caches/ring.py", "import kvfast.tools.cli.bench", "caches imports tools.cli"),
        ("planning/plan.py", "from kvfast.caches.ring import (\n    RingKVCache,\n    _hidden,\n)", "_hidden is private to caches"),
        ("tools/llama/model.py", "def f(cache):\n    return cache._storage", "_storage is private"),
    ],
)
def test_broken_rules_are_found(rooms, tmp_path, monkeypatch, wrong):
    file, text, message = wrong
    monkeypatch.setattr(rooms, "PACKAGE", copied(rooms, tmp_path, file, text))
    (found,) = rooms.violations()
    assert message in found and re.match(rf"kvfast/{file}:\d+:", found)


@pytest.mark.parametrize(
    "wrong",
    [
        ("caches/snapshot.py", "def f():\n    from kvfast.caches.loading import CLASSES", {"caches.loading", "caches.snapshot"}),
        ("caches/snapshot.py", "def f():\n    import kvfast.caches.loading", {"caches.loading", "caches.snapshot"}),
        ("caches/token_ids.py", "from kvfast.caches import paged_sequence", {"caches.token_ids", "caches.paged_sequence"}),
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


def own_ancestors(kind):
    return [one.__name__ for one in kind.__mro__[1:] if one.__module__.partition(".")[0] == "kvfast"]


def public_classes():
    for name in ["", ".compression", ".evaluation", ".llama", ".llama_cpp", ".planning", ".torch", ".transformers", ".vllm"]:
        try:
            module = importlib.import_module(f"kvfast{name}")
        except ImportError:  # of an extra
            continue
        yield from {getattr(module, one) for one in getattr(module, "__all__", ()) if inspect.isclass(getattr(module, one))}


def test_a_class_that_users_see_has_at_most_two_bases():
    """Those of its bases count, so neither a tower nor a row of mixins says in many places what a class is."""
    found = {one.__name__: own_ancestors(one) for one in public_classes() if not issubclass(one, BaseException)}
    assert len(found) > 30 and {name: bases for name, bases in found.items() if len(bases) > 2} == {}


LINES, LINES_OF_CLASS, SHORT = 450, 800, 6


def too_long(text):
    """Whether a file is longer than 450 lines; up to 800 are for one class whose methods are documented, all but short ones."""
    lines = text.splitlines()
    if len(lines) <= LINES:
        return False
    methods = [i for i, line in enumerate(lines) if re.match(r"    (def |cdef [^=]*\(|@)", line)]
    for first, after in zip(methods, [*methods[1:], len(lines)]):
        if re.match(r"    def [a-z]", lines[first]) and after - first > SHORT:
            body = next(i for i in range(first, after) if re.search(r":(  #.*)?$", lines[i])) + 1
            if not lines[body].lstrip().startswith('"""'):
                return True
    return len(lines) > LINES_OF_CLASS or sum(bool(re.match(r"(cdef )?class ", line)) for line in lines) != 1


def test_one_class_is_one_file_and_a_file_fits_in_a_head(rooms):
    paths = [path for path in rooms.PACKAGE.rglob("*") if path.suffix in {".py", ".pyi", ".pyx", ".pxd", ".h", ".c"}]
    sources = {path: path.read_text("utf-8") for path in paths}
    written = {path: text for path, text in sources.items() if not text.startswith("/* Generated by Cython")}
    assert len(written) > 200
    assert [str(path.relative_to(rooms.PACKAGE)) for path, text in written.items() if too_long(text)] == []


def test_a_long_file_is_found():
    method = '    def read(self):\n        """Read."""\n' + 8 * "        pass\n"
    for text in ("x = 1\n" * 451, "class A:\n" + 80 * method, "class A:\n" + 25 * method + "class B:\n" + 25 * method):
        assert too_long(text)
    assert too_long("class A:\n" + 50 * method.replace('"""Read."""', "pass"))
    assert not too_long("class A:\n" + 50 * method) and not too_long("x = 1\n" * 450)


# Most files that an option's word stands in, engines included. Words that name other things, too, are left out, and so are those of paths.
FILES_OF_OPTIONS = {
    "alibi_slopes": 8,
    "attention_chunk_size": 10,
    "indices": 26,
    "index_block": 5,
    "clamp_spans": 9,
    "num_splits": 8,
    "tree_parents": 12,
    "return_lse": 9,
    "sinks": 18,
    "spans": 14,
}


def test_an_option_of_attend_lives_in_few_files(rooms):
    """A field, its check, its use and its words: who adds an option to more places writes something twice."""
    paths = [path for path in rooms.PACKAGE.rglob("*") if path.suffix in {".py", ".pyi", ".pyx", ".pxd", ".h", ".c"}]
    texts = {path: path.read_text("utf-8") for path in paths if path.suffix != ".c" or not path.with_suffix(".pyx").exists()}
    assert set(FILES_OF_OPTIONS) < set(AttendOptions.__annotations__)
    for word, most in FILES_OF_OPTIONS.items():
        found = [str(path) for path, text in texts.items() if re.search(rf"(?<!\.)\b{word}\b(?!=True)", text)]
        assert 4 < len(found) <= most, (word, found)
    own = {"kvfast.h", "options.pxd", "options.py", "request.pyx", "sight.pyx", "sequence_cache.py"}  # of a flag that no engine has
    assert {path.name for path, text in texts.items() if "attention_chunk_size" in text} >= own


def test_the_c_interface_has_no_second_path(rooms):
    assert not re.search(r"\b(quick|python)_", "".join(path.read_text("utf-8") for path in (rooms.PACKAGE / "handles").glob("*.p*")))


MACHINES = (
    r"EPYC|Ryzen|Threadripper|Xeon|Zen ?[1-9]|Bulldozer|(?:Sapphire|Emerald|Granite) Rapids|"
    r"(?:Cascade|Cooper|Ice|Sky|Alder|Arrow|Raptor) ?[Ll]ake|Haswell|Broadwell|Graviton|Neoverse|Cortex|Apple M[1-9]|Core i[3579]"
)
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DATES = rf"(?:{MONTHS}) (?:\d\d?, )?20\d\d|20\d\d-\d\d-\d\d|\b202[4-9]\b"
FIGURES = r"\d of the time\b|\d %? ?(?:of the time|longer|faster|slower)\b|\d times as (?:long|fast|slow)\b|\d (?:us|ns)\b"
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


def test_pages_name_them_in_performance_alone():
    pages = [path for path in SCRIPT.parent.rglob("*.md") if not {"performance", "_build"} & set(path.parts)]
    assert len(pages) > 30
    assert [f"{path.name}: {one}" for path in pages for one in told(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "text",
    [
        *("128 rows take 0.94 on an EPYC", "(Zen 5, int8)", "a Xeon without AMX", "Sapphire Rapids"),
        *("(November 2026)", "on 2026-11-26", "0.95 of the time of vectors", "nested loops take 8 % longer"),
        "0.4 us more",
        "a prompt took 2.6 times as long",
    ],
)
def test_a_machine_a_date_or_a_time_is_found(text):
    assert told(text)


def test_papers_sizes_and_shares_are_no_figures():
    assert told("(KIVI, arXiv 2402.00456; Wilson 1927; OSDI 2022), 2048 tokens, 95 % intervals, more than 15 % below") == []
