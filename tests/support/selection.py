"""Two speeds: what a plain `pytest` runs, and what is exhaustive.

Tests with the marker `exhaustive` run with ``pytest -m exhaustive``, with ``pytest --exhaustive`` with all others, and
where a node id names them (``pytest tests/file.py::test_name``).
"""

import itertools
from pathlib import Path

import pytest

import kvfast

exhaustive = pytest.mark.exhaustive
# Where the tests of an sdist run against an installed wheel, they are away.
needs_sources = pytest.mark.skipif(not (Path(__file__).parents[2] / "kvfast").is_dir(), reason="needs the sources of kvfast")
# Tiers of this machine. All but the best, AVX2 and plain C are exhaustive.
TIERS = [
    pytest.param(tier, marks=() if tier in (kvfast.available_isas()[0], "avx2", "scalar") else exhaustive)
    for tier in kvfast.available_isas()
]


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="run the exhaustive tests, too")


def pytest_collection_modifyitems(config, items):
    if config.option.exhaustive or config.option.markexpr:
        return
    named = [arg.partition("::")[2] for arg in config.args if "::" in arg]
    taken = [item for item in items if not item.get_closest_marker("exhaustive") or is_named(item, named)]
    config.hook.pytest_deselected(items=list(set(items) - set(taken)))
    items[:] = taken


def is_named(item, named):
    """Whether a name on the command line, without its file, is that of a test, of its function, or of its class."""
    own = item.nodeid.partition("::")[2]
    return any(own == name or own.startswith((f"{name}[", f"{name}::")) for name in named)


def parametrize(names, cases, usual, **options):
    """`pytest.mark.parametrize` of which the cases alone that are in `usual` run always. Each is a tuple where there are several names."""
    values = [case if isinstance(names, tuple) else (case,) for case in cases]
    marked = [pytest.param(*value, marks=() if case in usual else exhaustive) for case, value in zip(cases, values)]
    return pytest.mark.parametrize(names, marked, **options)


def pairwise(names, *axes, **options):
    """`pytest.mark.parametrize` with the product of axes, of which enough cases run always to have all pairs of two values.

    A value may be a `pytest.param`; one that is exhaustive is so in all its cases. The name "isa" is that of the fixture.
    """
    axes = [[one if isinstance(one, type(pytest.param())) else pytest.param(one) for one in axis] for axis in axes]
    plain = [[one for one in axis if not one.marks] for axis in axes]
    usual = {tuple(id(axis[at]) for axis, at in zip(plain, row)) for row in covering(*map(len, plain))}
    cases = [
        pytest.param(*(one.values[0] for one in case), marks=() if tuple(map(id, case)) in usual else exhaustive)
        for case in itertools.product(*axes)
    ]
    return pytest.mark.parametrize(names, cases, indirect=[name for name in names if name == "isa"], **options)


def on_tiers(name, cases, few):
    """`pytest.mark.parametrize` of the fixture "isa" and of cases, for tests that compare two ways of storage on one tier. Plain C, which
    takes longest, has AVX2's ways to cut and to walk: there, `few` of the cases run always."""
    assert {*few} <= {*cases}
    marked = [
        pytest.param(
            *tier.values, case, marks=exhaustive if tier in TIERS[1:] and tier.values[0] == "scalar" and case not in few else tier.marks
        )
        for tier in TIERS
        for case in cases
    ]
    return pytest.mark.parametrize(("isa", name), marked, indirect=["isa"])


def cases_of(every, *axes):
    """The product of axes within a test; unless `every`, as many of its cases as hold all pairs of two values."""
    rows = itertools.product(*(range(len(axis)) for axis in axes)) if every else covering(*map(len, axes))
    return [tuple(axis[at] for axis, at in zip(axes, row)) for row in rows]


def covering(*sizes):
    """Cases of ``itertools.product(*map(range, sizes))`` that hold every pair of values of two axes: few, not fewest."""
    axes = range(len(sizes))
    left = dict.fromkeys(((i, a), (j, b)) for i, j in itertools.combinations(axes, 2) for a in range(sizes[i]) for b in range(sizes[j]))
    while left:
        row = dict(next(iter(left)))
        for axis in sorted(set(axes) - row.keys()):
            row[axis] = max(range(sizes[axis]), key=lambda value: sum(pair in left for pair in pairs({**row, axis: value}, axis)))
        for axis in axes:
            for pair in pairs(row, axis):
                left.pop(pair, None)
        yield tuple(row[axis] for axis in axes)


def pairs(row, axis):
    """What a row holds of an axis and each other one."""
    return [tuple(sorted(((axis, row[axis]), other))) for other in row.items() if other[0] != axis]
