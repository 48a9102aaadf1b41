"""`tests/README.md` names every folder and every shared module of the tests, and nothing that is not there."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
MAP = (TESTS / "README.md").read_text("utf-8")


def first_cells(head):
    """Names of the first column of the table that begins with this head."""
    table = MAP.split(f"| {head} | ")[1].split("\n\n")[0]
    return sorted(name for row in table.split("\n")[2:] for name in re.findall("`(.+?)`", row.split("|")[1]))


def test_map_names_every_folder():
    assert first_cells("folder") == sorted(path.name for path in TESTS.iterdir() if any(path.glob("*.py")) or path.name == "support")


def test_map_names_every_shared_module():
    assert first_cells("module of `support`") == sorted(path.stem for path in (TESTS / "support").glob("*.py"))


def test_named_files_exist():
    for name in re.findall(r"`((?:\w+/)?\w+\.py)`", MAP):
        assert list(TESTS.rglob(name)), name
