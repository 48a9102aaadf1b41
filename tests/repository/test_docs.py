"""The documentation: it builds without warnings, has every public name, and its examples run."""

import doctest
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from selection import needs_sources

import kvfast
from kvfast.planning.vllm_blocks import VLLM_FORMATS
from kvfast.prompts import stores
from kvfast.tools import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SPHINX = ("sphinx", "myst_parser", "numpydoc", "furo", "sphinx_copybutton")
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md", "tests/FINDINGS.md")]
PAGES += sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
WHEEL = ("wheel", "--no-deps", "--wheel-dir", "dist", "dist/kvfast-*.whl")  # how one is built and installed
PYTORCH = ("torch", "torch==2.13.0+cpu", "--index-url", "--extra-index-url", "https://download.pytorch.org/whl/cpu")  # builds for CPUs
FOLDER = ("--find-links", "FOLDER", "uninstall", "torchvision", "torchaudio", "torchcodec")
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
# What the public names take and return, by where it is.
IN_MODULES = {
    "kvfast.attention.explained": ("AttendItem", "AttendPlan"),
    "kvfast.caches.buffer_layout": ("BufferLayout", "buffer_layout"),
    "kvfast.caches.multi_head": ("MultiHeadConfig",),
    "kvfast.caches.paged_mla": ("MLASequence",),
    "kvfast.compression": ("CompressedShape", "ReconstructionError"),
    "kvfast.core.hardware": ("peak_rate", "read_bandwidth"),
    "kvfast.core.numa": ("set_numa_policy",),
    "kvfast.core.kernels": ("cpu_features",),
    "kvfast.planning": ("DtypePlan", "Fidelity", "LayerShape", "MemoryPlan", "ModelShape"),
    "kvfast.prompts.stats": ("PromptCacheStats",),
    "kvfast.storage.batches.prepared_batch": ("PreparedBatch",),
    "kvfast.prompts.stores": stores.__all__,
}
MEMBERS = [(module, name) for module, names in IN_MODULES.items() for name in names]


def test_site_builds_without_warnings(tmp_path):
    missing = [name for name in SPHINX if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the docs extra is not installed: no {', '.join(missing)}")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", tmp_path / "doctrees", DOCS, tmp_path / "site"]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=900, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    site = {path.relative_to(tmp_path / "site").with_suffix("") for path in (tmp_path / "site").rglob("*.html")}
    assert site >= {path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md")}
    reference = "".join(path.read_text("utf-8") for path in (tmp_path / "site" / "reference").glob("*.html"))
    assert [name for name in kvfast.__all__ if f'id="kvfast.{name}"' not in reference] == []


def test_reference_names_what_is_public():
    told = [
        line.split("::")[1].strip()
        for path in (DOCS / "reference").glob("*.md")
        for line in path.read_text("utf-8").splitlines()
        if line.startswith((".. auto", ".. data::"))
    ]
    assert sorted(told) == sorted([*kvfast.__all__, *(f"{module}.{name}" for module, name in MEMBERS)])


@pytest.mark.parametrize(("module", "name"), [*(("kvfast", name) for name in kvfast.__all__), *MEMBERS])
def test_examples_of_docstrings(module, name):
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(getattr(importlib.import_module(module), name), name, module=False, globs={}):
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0


def marked(path):
    needs_model = re.search("<!-- needs: model", path.read_text("utf-8"))
    return pytest.param(path, id=str(path.relative_to(ROOT)), marks=(pytest.mark.model, pytest.mark.exhaustive) if needs_model else ())


@pytest.mark.parametrize("path", [marked(path) for path in PAGES if "```python\n" in path.read_text("utf-8")])
def test_python_blocks_run(path, request, tmp_path, monkeypatch):
    sybil = pytest.importorskip("sybil", reason="sybil of the test extra is not installed")
    from sybil.parsers.markdown import PythonCodeBlockParser

    if request.node.get_closest_marker("model"):
        request.getfixturevalue("smollm2")
    if re.search("<!-- needs: .*transformers -->", path.read_text("utf-8")):
        pytest.importorskip("transformers", reason="transformers is not installed")
        if request.node.get_closest_marker("model"):
            request.getfixturevalue("read_once")
    if "needs: gguf -->" in path.read_text("utf-8"):
        pytest.importorskip("gguf")
    if ".save(" in path.read_text("utf-8"):
        pytest.importorskip("safetensors")
        pytest.importorskip("xxhash")
    monkeypatch.chdir(tmp_path)
    examples = list(sybil.Sybil([PythonCodeBlockParser()]).parse(path))
    assert len(examples) >= path.read_text("utf-8").count("```python\n")
    for example in examples:
        example.evaluate()


def commands(text):
    """Shell commands of a page, each without its comment: those of its blocks, and those in the text."""
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            yield from line.split(" && ")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`]+)`", prose):
        command = " ".join(code.split())
        if command.startswith(("python ", "pytest ", "pip ", "make ", "OPENBLAS_NUM_THREADS=1 ")):
            yield from command.split(" && ")


def check_kvfast(args):
    """The arguments are those that `python -m kvfast` takes."""
    assert cli.main([arg.replace("...", "int8") for arg in args]) == 0


def check_script(path, args):
    """A script of the repository, and its options."""
    assert (ROOT / path).is_file(), f"there is no {path}"
    if options := [arg for arg in args if arg.startswith("--")]:
        out = subprocess.run([sys.executable, ROOT / path, "--help"], capture_output=True, encoding="utf-8", timeout=60, check=True)
        assert [option for option in options if not re.search(rf"{option}\b", out.stdout)] == []


def check_pip(args):
    """What is installed is this checkout with extras that it has (no release is on an index yet), or packages by their names."""
    section = (ROOT / "pyproject.toml").read_text("utf-8").partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = [line.partition(" = ")[0] for line in section.splitlines()]
    for arg in args:
        if found := re.fullmatch(r"(?:\.|\$\(ls dist/kvfast-\*\.whl\))\[([\w,-]+)\]", arg):
            assert set(found[1].split(",")) <= set(extras)
        else:
            assert arg in ("install", "-e", "-v", ".", "cython", "numpy", "setuptools", *WHEEL, *PYTORCH, *FOLDER)


def check_command(words):
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    program, *args = words
    if program == "pip":
        check_pip(args)
    elif program == "make":
        assert {arg for arg in args if arg != "-k"} <= set(
            re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        )
    elif program == "pytest":
        assert all((ROOT / arg).exists() for arg in args if "/" in arg)
    elif (program, *args[:2]) == ("python", "-m", "kvfast"):
        check_kvfast(args[2:])
    elif (program, *args) == ("python", "-m", "build"):
        assert "[build-system]" in (ROOT / "pyproject.toml").read_text("utf-8")
    elif (program, *args[:2]) == ("python", "-m", "sphinx"):
        assert all((ROOT / arg).is_dir() for arg in args[2:-1] if not arg.startswith("-"))
    elif program == "python" and args[0].endswith(".py"):
        check_script(args[0], [] if args[0] == "setup.py" else args[1:])
    elif (program, *args[:1]) == ("vllm", "serve") or (program, *args[:2]) == ("python", "-m", "vllm.entrypoints.openai.api_server"):
        assert args[args.index("--kv-cache-dtype") + 1] in VLLM_FORMATS  # vLLM need not be installed
    elif program in ("llama-server", "llama-cli"):
        assert "--flash-attn" in args  # of llama.cpp, which need not be installed
    else:
        raise AssertionError(f"no check of {program} is known")


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_commands_are_good(path, monkeypatch, capsys):
    if "python -m kvfast" in (text := path.read_text("utf-8")):
        monkeypatch.setattr(cli, "_later", lambda module, name: lambda args: None)
        monkeypatch.setattr(cli, "_run_llama_cpp_build", lambda args: None)
    for command in commands(text):
        check_command(shlex.split(command, comments=True))


@pytest.mark.parametrize(
    "command",
    [
        "python -m kvfast eval --nonsense",
        "python bench/peers.py --nonsense",
        "pip install .[nonsense]",
        "pip install kvfast[files]",
        "pip install dist/nonsense.whl",
        "pytest bench/nonsense.py",
        "make nonsense",
        "nonsense",
    ],
)
def test_bad_commands_are_found(command, capsys):
    with pytest.raises((AssertionError, SystemExit)):
        check_command(shlex.split(command))


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_links_lead_somewhere(path):
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        file, _, heading = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.is_file(), f"{target} is not there"
        # Where the site has it, too: a page there has no other files than pages and pictures.
        assert path.parent in (ROOT, ROOT / "tests") or linked.is_relative_to(DOCS), f"{target} is not in the site"
        if heading:
            lines = [line.lstrip("# ") for line in linked.read_text("utf-8").splitlines() if line.startswith("#")]
            assert heading in {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_files_that_are_named_exist(path):
    """In backticks: `folder/file`, `folder/*.end`, `tests/test_file.py::test_name`, and `name` of `folder/file`.

    The sources may be away, where a wheel is tested.
    """
    prose = " ".join(re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL).split())
    file = r"`((?:kvfast|tests|bench|docs|\.?ci)/[\w./*-]+)"
    named = [(name, []) for name in re.findall(file, prose)]
    named += [(name, [test]) for name, test in re.findall(rf"{file}::(\w+)`", prose)]
    named += [
        (name, re.findall(r"`(\w+)", words)) for words, name in re.findall(rf"((?:`\w+(?:\(\))?`,? (?:and )?)+)of {file}`", prose)
    ]
    for name, words in named:
        if (ROOT / name.partition("/")[0]).is_dir():
            found = list(ROOT.glob(name.rstrip("/")))
            assert found, f"there is no {name}"
            assert [word for word in words if not re.search(rf"\b{word}\b", found[0].read_text("utf-8"))] == [], name


@pytest.fixture
def docs_script(monkeypatch):
    """A script of docs/, imported by its name."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module


def test_tables_are_those_of_the_json(docs_script):
    tables = docs_script("tables")
    assert {path for path in PAGES if tables.fill(text := path.read_text("utf-8")) != text} == set(), "run python docs/tables.py"
    wrong = [path.name for path, text in tables.FILES.items() if path.read_text("utf-8") != text()]
    assert wrong == [], "run python docs/tables.py"
    used = set(re.findall(r"<!-- table: ([\w-]+) -->", "".join(path.read_text("utf-8") for path in PAGES)))
    assert used == set(tables.TABLES)


def test_figures_of_the_readme_are_those_of_the_json(docs_script):
    tables, text = docs_script("tables"), " ".join((ROOT / "README.md").read_text("utf-8").split())
    losses = {(one["dtype"], one.get("floats")): one for one in tables.load("texts")["texts"]["austen"]["results"]}
    int4, int8, q4_0 = losses["int4", None], losses["int8", None], losses["q4_0", True]
    assert f"in {int4['top1'] * 100:.1f} % of cases with `int4`, and in {int8['top1'] * 100:.1f} % with `int8`" in text
    assert f"`int8` loses {int8['kl']:.5f} and {int8['kl_999']:.4f} in {int8['bits_per_element']} bits" in text
    assert f"on a novel in {int4['bits_per_element']} bits" in text and f"(simulated, {q4_0['bits_per_element']} bits)" in text
    told = (
        " and ".join(f"{int4[name]:.4f}" for name in ("kl", "kl_999")),
        " and ".join(f"{q4_0[name]:.4f}" for name in ("kl", "kl_999")),
    )
    assert f"`int4` {told[0]}, q4_0 with the same float tokens {told[1]}" in text
    float16, int4 = (tables.bytes_per_token(tables.MODELS["Llama-3-8B"], dtype) for dtype in ("float16", "int4"))
    assert f"`int4`, takes {float16 / int4:.1f} times fewer bytes than float16 (Llama-3-8B)" in text


def test_the_figure_of_the_readme_is_that_of_its_picture(docs_script):
    pytest.importorskip("matplotlib")
    times, text = dict(docs_script("pictures").runtimes_data()), " ".join((ROOT / "README.md").read_text("utf-8").split())
    fastest = min(time for name, time in times.items() if not name.startswith("kvfast"))
    assert f"`int4` is {fastest / times['kvfast int4']:.1f} times as fast as the fastest other runtime" in text


@needs_sources
def test_pictures_are_those_of_the_json(docs_script):
    matplotlib = pytest.importorskip("matplotlib")
    pictures = docs_script("pictures")
    assert {path.stem for path in pictures.FOLDER.glob("*.svg")} == set(pictures.PICTURES)
    for name, (data_of, _, _) in pictures.PICTURES.items():
        committed = (pictures.FOLDER / f"{name}.svg").read_bytes()
        assert f"data {pictures.checksum(data_of())}".encode() in committed, f"{name}.svg: run python docs/pictures.py"
        drawn = pictures.draw(name)
        if f"matplotlib {matplotlib.__version__}".encode() in committed:
            assert drawn == committed, f"{name}.svg: run python docs/pictures.py"


def test_a_package_without_words_is_not_left_out_of_the_picture(docs_script, monkeypatch):
    pytest.importorskip("matplotlib")
    diagrams = docs_script("diagrams")
    assert {room for floor in diagrams.rooms_data()["floors"] for room in floor} == set(docs_script("rooms").FLOOR_OF) - diagrams.DOORS
    monkeypatch.delitem(diagrams.WORDS, "prompts")
    with pytest.raises(ValueError, match="prompts"):
        diagrams.rooms_data()


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117", "#131416"], ids=["white", "GitHub, dark", "the site, dark"])
def test_pictures_can_be_read_on_any_page(page, docs_script):
    """They have no background, and the contrast that WCAG asks of graphics; text has a little more."""
    pytest.importorskip("matplotlib")
    for path in docs_script("pictures").FOLDER.glob("*.svg"):
        seen = 0
        for element in ElementTree.parse(path).iter():
            style = dict(part.split(": ") for part in element.get("style", "").split("; ") if part)
            is_text = bool((element.text or "").strip()) and element.tag.endswith(("}text", "}tspan"))
            assert not is_text or "fill" in style, f"{path.name}: text without a colour is black"
            for colour in {style.get("fill", "none"), style.get("stroke", "none")} - {"none"}:
                assert contrast(colour, page) >= (4 if is_text else 3), f"{path.name}: {colour} on {page}"
                seen += 1
        assert seen


def contrast(first, second):
    low, high = sorted(map(luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour):
    """WCAG 2's relative luminance of #rrggbb."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
