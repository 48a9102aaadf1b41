"""Which tests a plain `pytest` takes, and which are exhaustive."""

import itertools
import json
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


# One process for all: most of the time goes into starting it.
COLLECT = """
import json, sys, pytest

for arguments in json.loads(sys.argv[1]):
    print("collected", flush=True)
    pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *arguments])
"""


def collected(folder, *every):
    """For each list of arguments: names of the tests that pytest takes, but for those of the grid; and the number of those."""
    (folder / "conftest.py").write_text("from selection import pytest_addoption, pytest_collection_modifyitems\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = exhaustive\naddopts = --strict-markers\n")
    (folder / "test_suite.py").write_text(SUITE)
    path = os.pathsep.join([str(Path(selection.__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, json.dumps(every)],
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        check=True,
    )
    _, *outputs = done.stdout.split("collected\n")
    assert len(outputs) == len(every), done.stdout
    for output in outputs:
        names = re.findall(r"^test_suite.py::(.*)$", output, re.MULTILINE)
        yield [name for name in names if name not in GRID], len(set(names) & set(GRID))


def test_what_runs(tmp_path):
    plain, marked, (names, of_grid) = collected(tmp_path, [], ["-m", "exhaustive"], ["--exhaustive"])
    assert plain == (USUAL, 4)
    assert (sorted(marked[0]), marked[1]) == (sorted(EXHAUSTIVE), 4)
    assert (sorted(names), of_grid) == (sorted(USUAL + EXHAUSTIVE), 8)


def test_what_is_named_runs(tmp_path):
    wanted = {
        ("test_suite.py::test_long",): (["test_long"], 0),
        ("test_suite.py::TestLong",): (["TestLong::test_one"], 0),
        ("test_suite.py::test_some",): (["test_some[1]", "test_some[2]", "test_some[3]"], 0),
        ("test_suite.py::test_some[3]",): (["test_some[3]"], 0),
        ("test_suite.py::test_grid",): ([], 8),
        ("-k", "test_long"): ([], 0),
    }
    assert dict(zip(wanted, collected(tmp_path, *wanted))) == wanted


@pytest.mark.parametrize("sizes", [(3, 2), (2, 2, 2), (10, 4, 3), (3, 4, 10), (5, 5, 5, 5), (7, 1, 2)])
def test_every_pair_is_covered(sizes):
    rows = list(selection.covering(*sizes))
    assert len(set(rows)) == len(rows) and set(rows) <= set(itertools.product(*map(range, sizes)))
    for i, j in itertools.combinations(range(len(sizes)), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(range(sizes[i]), range(sizes[j])))
    assert len(rows) < 2 * max(a * b for a, b in itertools.combinations(sizes, 2))


def test_cases_within_a_test():
    axes = ["abc", [1, 2], [{}, {"more": 1}]]
    every, usual = (selection.cases_of(every, *axes) for every in (True, False))
    assert every == list(itertools.product(*axes)) and all(case in every for case in usual)
    for first, second in itertools.combinations(range(3), 2):
        pairs = [(case[first], case[second]) for case in usual]
        assert all(pair in pairs for pair in itertools.product(axes[first], axes[second]))
    assert len(usual) < len(every)
