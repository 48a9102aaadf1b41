"""The documentation: it builds without warnings, has every public name, and its examples run."""

import doctest
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import kvfast

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SPHINX = ("sphinx", "myst_parser", "numpydoc", "furo")


def test_site_builds_without_warnings(tmp_path):
    missing = [name for name in SPHINX if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the docs extra is not installed: no {', '.join(missing)}")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", tmp_path / "doctrees", DOCS, tmp_path / "site"]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    site = {path.relative_to(tmp_path / "site").with_suffix("") for path in (tmp_path / "site").rglob("*.html")}
    assert site >= {path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md")}
    reference = "".join(path.read_text("utf-8") for path in (tmp_path / "site" / "reference").glob("*.html"))
    assert [name for name in kvfast.__all__ if f'id="kvfast.{name}"' not in reference] == []


def test_reference_names_what_is_public():
    told = [line.split("::")[1].strip() for path in (DOCS / "reference").glob("*.md")
            for line in path.read_text("utf-8").splitlines() if line.startswith((".. auto", ".. data::"))]
    assert sorted(told) == sorted(kvfast.__all__)


@pytest.mark.parametrize("name", kvfast.__all__)
def test_examples_of_docstrings(name):
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(getattr(kvfast, name), name, module=False, globs={}):
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0
