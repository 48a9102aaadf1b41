"""The ways of a key and of a query in docs/architecture.md, step by step, against the sources."""

import re
from pathlib import Path

import pytest
from selection import needs_sources

pytestmark = needs_sources
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
# The tables, and the files of each. An earlier step calls each, so no file is left out between them.
WALKS = {"The way of a key in": 6, "The way of a query out": 9}


def walk(title):
    """The steps of a table: (file, function, number of the step that enters it or None)."""
    section = PAGE.read_text("utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| `(.+?)` \| `(.+?)` \| (\d+|-) \|$", section, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    return [(file, function, None if caller == "-" else int(caller)) for _, file, function, caller in rows]


def source(path):
    """The text of a file, with its declarations."""
    declared = path.with_suffix(".pxd")
    return path.read_text("utf-8") + (declared.read_text("utf-8") if path.suffix == ".pyx" and declared.exists() else "")


def imported(text, module):
    """The names that a source imports from a module, by Python or Cython."""
    found = re.findall(rf"^[ \t]*from {re.escape(module)} c?import +(\([^)]*\)|[^\n#]*)", text, re.MULTILINE)
    return {name.split(" as ")[0].strip() for names in found for name in names.strip("()").split(",")}


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def classes_of(text):
    return set(re.findall(r"^(?:cdef )?class (\w+)", text, re.MULTILINE))


def link(caller, file, function):
    """How a file calls a function of another one, as far as its text tells, or None."""
    text, callee, module = source(caller), source(file), module_of(file)
    if file.suffix == ".h":
        if f"(*{function}" in callee:  # a table of kernels
            is_called = re.search(rf"\bkernels(?:\(\))?(?:\.|->){function}(?:\[.+?\])?\(", text)
            return "kernel" if is_called and imported(text, "kvfast.core.kernels") else None
        is_named = re.search(rf"(?<![\w.]){function}\(", text) and re.search(rf"^static inline .+ {function}\(", callee, re.MULTILINE)
        declared = [path.read_text("utf-8") for path in caller.parent.glob("*.pxd") if module_of(path) in text]
        return "C" if is_named and any(file.name in one and function in one for one in declared) else None
    if not re.search(rf"^ *cp?def [^\n]*\b{function}\(|\bdef {function}\(", callee, re.MULTILINE):
        return None
    if caller.suffix == ".h":  # by a pointer, which some source sets to the function that it imports
        sets = re.compile(rf"\.{function}\b[^=\n]*= *[^\n]*\b{function}\b")
        others = [path.read_text("utf-8") for path in (ROOT / "kvfast").rglob("*.pyx")]
        is_set = any(sets.search(one) and function in imported(one, module) for one in others)
        return "pointer" if is_set and re.search(rf"->{function}\(", text) and f"(*{function})" in text else None
    if function in imported(text, module) and re.search(rf"(?<![\w.]){function}(?:\[.+?\])?\(", text):
        return "function"
    types = classes_of(callee) & imported(text, module)
    for name in re.findall(rf"\b(\w+)\.{function}\(", text):
        if any(re.search(rf"\b{kind} {name}\b|\b{name}: {kind}\b", text) for kind in types):
            return "method"
        # Without a type: some file of the package makes what the attribute is.
        for path in caller.parent.glob("*.py"):
            other = path.read_text("utf-8")
            makers = {maker for made in re.findall(rf"\b{name}\b[^=\n]* = (.+)", other) for maker in re.findall(r"(\w+)\(", made)}
            if makers & classes_of(callee) & imported(other, module):
                return "attribute"
    return None


@pytest.mark.parametrize("title", WALKS)
def test_each_step_is_called_by_an_earlier_one(title):
    steps = walk(title)
    files = [ROOT / file for file, _, _ in steps]
    assert len(files) == len(set(files)) == WALKS[title]
    for number, (_, function, caller) in enumerate(steps, 1):
        if caller is None:
            assert re.search(rf"\bdef {function}\(", source(files[number - 1]))
        else:
            assert 0 < caller < number
            way = link(files[caller - 1], files[number - 1], function)
            assert way is not None, f"{files[caller - 1].name} does not call {function} of {files[number - 1].name}"


@pytest.mark.parametrize("title", WALKS)
def test_a_step_that_is_not_called_is_found(title):
    """No step passes for its name alone: each is called by the file that the table names, and by none of the others in the walk."""
    steps = walk(title)
    files = [ROOT / file for file, _, _ in steps]
    for number, (_, function, caller) in enumerate(steps, 1):
        if caller is not None:
            assert link(files[caller - 1], files[number - 1], f"{function}_else") is None
            assert link(files[0] if caller > 1 else files[-2], files[number - 1], function) is None
            assert link(files[caller - 1], ROOT / "kvfast" / "codec" / "decode.pyx", function) is None
