"""Two speeds: what a plain `pytest` runs, and what is exhaustive.

Tests with the marker `exhaustive` run with ``pytest -m exhaustive``, with ``pytest --exhaustive`` beside all others, and
where a node id names them (``pytest tests/file.py::test_name``).
"""

import itertools

import pytest

import kvfast

exhaustive = pytest.mark.exhaustive
# The best tier of this machine, AVX2 and plain C; the others are exhaustive.
USUAL_TIERS = {kvfast.available_isas()[0], "avx2", "scalar"}


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
    """`pytest.mark.parametrize` of which the cases alone that are in `usual` run always."""
    return pytest.mark.parametrize(names, [case if case in usual else pytest.param(case, marks=exhaustive) for case in cases], **options)


def pairwise(names, *axes, **options):
    """`pytest.mark.parametrize` with the product of axes, of which cases with every pair of two values run always."""
    usual = set(covering(*map(len, axes)))
    cases = [
        pytest.param(*case, marks=() if at in usual else exhaustive)
        for at, case in zip(itertools.product(*map(range, map(len, axes))), itertools.product(*axes))
    ]
    return pytest.mark.parametrize(names, cases, **options)


def covering(*sizes):
    """Cases of ``itertools.product(*map(range, sizes))`` that hold every pair of values of two axes: few, not fewest."""
    axes = range(len(sizes))
    left = dict.fromkeys(
        ((i, a), (j, b)) for i, j in itertools.combinations(axes, 2) for a in range(sizes[i]) for b in range(sizes[j])
    )
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
