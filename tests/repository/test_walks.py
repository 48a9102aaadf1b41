"""The ways of a key and of a query in docs/architecture.md, step by step, against the sources."""

import re
from pathlib import Path

import pytest
from selection import needs_sources

pytestmark = needs_sources
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"


def walk(title):
    """The steps of a table: (file, function, number of the step that enters it or None)."""
    section = PAGE.read_text("utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| `(.+?)` \| `(.+?)` \| (\d+|-) \|$", section, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    return [(file, function, None if caller == "-" else int(caller)) for _, file, function, caller in rows]


@pytest.mark.parametrize(("title", "most"), [("The way of a key in", 8), ("The way of a query out", 9)])
def test_each_step_is_called_by_an_earlier_one(title, most):
    steps = walk(title)
    files = [file for file, _, _ in steps]
    assert 5 < len(files) <= most and len(set(files)) == len(files)
    for number, (file, function, caller) in enumerate(steps, 1):
        source = (ROOT / file).read_text("utf-8")
        if caller is None:
            assert re.search(rf"\bdef {function}\(", source)
            continue
        assert 0 < caller < number
        before, module = (ROOT / files[caller - 1]).read_text("utf-8"), Path(file).with_suffix("")
        assert re.search(rf"\.{function}(\[.+?\])?\(|(?<![\w.]){function}\(", before), f"{files[caller - 1]} calls no {function}"
        if file.endswith(".h"):  # the table of kernels, and the walk in C
            assert (
                f"(*{function}" in source
                and "kvfast.core.kernels cimport" in before
                or (re.search(rf"^static inline .+ {function}\(", source, re.MULTILINE) and "kvfast.attention.tasks cimport" in before)
            )
        else:
            assert re.search(rf"^    cdef .+ {function}\(|^cdef .+ {function}\(|\bdef {function}\(", source, re.MULTILINE)
            is_named = f"from {'.'.join(module.parts)} c" in before or f"from {'.'.join(module.parts)} import" in before
            assert is_named or function in ("append", "attend", "take", "read"), f"{files[caller - 1]} does not import {file}"
