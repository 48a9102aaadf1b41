"""Which tests a plain `pytest` takes, and which are exhaustive."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import selection

SUITE = """
import pytest
from selection import exhaustive, pairwise, parametrize

def test_usual(): pass

@exhaustive
def test_long(): pass

@exhaustive
class TestLong:
    def test_one(self): pass

@parametrize("n", [1, 2, 3], usual=[2])
def test_some(n): pass

@pairwise(("a", "b", "c"), [1, 2], ["x", "y"], [5, 6])
def test_grid(a, b, c): pass
"""
USUAL = ["test_usual", "test_some[2]"]
GRID = [f"test_grid[{a}-{b}-{c}]" for a, b, c in itertools.product((1, 2), "xy", (5, 6))]
EXHAUSTIVE = ["test_long", "TestLong::test_one", "test_some[1]", "test_some[3]"]


@pytest.fixture
def collected(tmp_path):
    """Names of the tests that pytest takes with some arguments, but for those of the grid; and the number of those."""
    (tmp_path / "conftest.py").write_text("from selection import pytest_addoption, pytest_collection_modifyitems\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = exhaustive\naddopts = --strict-markers\n")
    (tmp_path / "test_suite.py").write_text(SUITE)

    def collect(*arguments):
        path = os.pathsep.join([str(Path(selection.__file__).parent), *sys.path])
        done = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments], text=True,
                              cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, check=False)  # fmt: skip
        names = re.findall(r"^test_suite.py::(.*)$", done.stdout, re.MULTILINE)
        return [name for name in names if name not in GRID], len(set(names) & set(GRID))

    return collect


def test_what_runs(collected):
    assert collected() == (USUAL, 4)
    names, of_grid = collected("-m", "exhaustive")
    assert (sorted(names), of_grid) == (sorted(EXHAUSTIVE), 4)
    names, of_grid = collected("--exhaustive")
    assert (sorted(names), of_grid) == (sorted(USUAL + EXHAUSTIVE), 8)


def test_what_is_named_runs(collected):
    assert collected("test_suite.py::test_long") == (["test_long"], 0)
    assert collected("test_suite.py::TestLong") == (["TestLong::test_one"], 0)
    assert collected("test_suite.py::test_some") == (["test_some[1]", "test_some[2]", "test_some[3]"], 0)
    assert collected("test_suite.py::test_some[3]") == (["test_some[3]"], 0)
    assert collected("test_suite.py::test_grid") == ([], 8)
    assert collected("-k", "test_long") == ([], 0)


@pytest.mark.parametrize("sizes", [(3, 2), (2, 2, 2), (10, 4, 3), (3, 4, 10), (5, 5, 5, 5), (7, 1, 2)])
def test_every_pair_is_covered(sizes):
    rows = list(selection.covering(*sizes))
    assert len(set(rows)) == len(rows) and set(rows) <= set(itertools.product(*map(range, sizes)))
    for i, j in itertools.combinations(range(len(sizes)), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(range(sizes[i]), range(sizes[j])))
    assert len(rows) < 2 * max(a * b for a, b in itertools.combinations(sizes, 2))
