"""What a run says of the tests that it left out for want of an extra, and when it fails for them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import extras
import pytest
from selection import needs_sources

SKIPPED = 'import pytest\npytest.skip("{}", allow_module_level=True)\ndef test_one(): pass\n'
FILES = {
    "guests/test_one.py": SKIPPED.format("vLLM is not installed"),
    "guests/test_two.py": SKIPPED.format("needs the extra packages of kvfast[vllm]"),
    "own/test_whole.py": "def test_one(): pass\n",
    "own/test_part.py": "import pytest\ndef test_one(): pass\n"
    "def test_two(): pytest.importorskip('gguf_of_old', reason=\"could not import 'gguf'\")\n",
    "own/test_none.py": SKIPPED.format("needs the extra redis"),
    "own/test_other.py": SKIPPED.format("no compiler"),
}
HOOKS = "from extras import pytest_configure, pytest_make_collect_report, pytest_sessionfinish, pytest_terminal_summary\n"


@pytest.fixture
def run(tmp_path):
    """A run of a small suite: (exit status, the lines about extras)."""
    for name, text in {**FILES, "conftest.py": HOOKS, "pytest.ini": "[pytest]\naddopts = --import-mode=importlib\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(expects, *arguments):
        path = os.pathsep.join([str(Path(extras.__file__).parent), *sys.path])
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        environment = os.environ | {"PYTHONPATH": path, "KVFAST_TEST_EXPECTS": expects, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, check=False)
        return done.returncode, re.findall("^without the extra (.*)$", done.stdout, re.MULTILINE), done.stderr

    return run


@pytest.mark.parametrize("processes", [[], ["-p", "xdist", "-n", "2"]], ids=["alone", "xdist"])
def test_run_names_what_it_left_out(run, processes):
    if processes:
        pytest.importorskip("xdist")
    told = ["llama, this run left out 1 tests of other files", "redis, this run left out own/test_none.py"]
    assert run("", *processes)[:2] == (0, [*told, "vllm, this run left out guests/"])
    assert run("files cloud", *processes)[:2] == (0, [*told, "vllm, this run left out guests/"])
    code, lines, _ = run("vllm files", *processes)
    assert code == 1 and lines == [*told, "vllm, which KVFAST_TEST_EXPECTS names, this run left out guests/"]
    assert run("vllm", "own", *processes)[0] == 0


def test_unknown_extra_is_refused(run):
    code, _, errors = run("llama vlm")
    assert code == pytest.ExitCode.USAGE_ERROR and "KVFAST_TEST_EXPECTS names extras that tests do not know: ['vlm']" in errors


@needs_sources
def test_extras_are_those_of_the_project():
    root, tomllib = Path(__file__).parents[2], pytest.importorskip("tomllib", reason="Python 3.11")
    assert (
        extras.EXTRAS.keys() <= tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"].keys()
    )
    for names in re.findall('KVFAST_TEST_EXPECTS="?([a-z -]+)"? ', (root / ".ci" / "run").read_text("utf-8")):
        assert set(names.split()) <= extras.EXTRAS.keys()
