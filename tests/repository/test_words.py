"""The lint of words finds what it refuses, and nothing else."""

import importlib
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / "ci"


@pytest.fixture
def found(monkeypatch):
    if not CI.is_dir():
        pytest.skip("the sources are away")
    monkeypatch.syspath_prepend(str(CI))
    return lambda text, kind=".md": [(line, words) for line, words, _ in importlib.import_module("words").found(text, kind)]


@pytest.mark.parametrize(
    "text",
    [
        "A token behind 4,096 others.",
        "The median\nbeside the mean.",
        "It takes 0.9 of the time of int8.",
        "It is 0.84 to 0.92 of its loss.",
        "A product of so many rows.",
        "It has rows. Of these, some are floats.",
        "This is no error.",
        "The index is none of ours.",
        "Latent rows have none.",
    ],
)
def test_words_are_refused(found, text):
    assert len(found(text)) == 1
    assert len(found(f'x = 1  # {text.replace(chr(10), chr(10) + "# ")}\n"""{text}"""', ".py")) == 2
    assert len(found(f"int x; /* {text} */\n// {text.replace(chr(10), ' ')}\n", ".h")) == 2


@pytest.mark.parametrize(
    "text",
    [
        "Nothing is left behind. `len` stays behind.",
        "There is no index, and a cache where none is needed is None.",
        "It is no longer there. Of course.",
        "The rows of 4,096 tokens; 10 % of the time.",
    ],
)
def test_other_words_are_not(found, text):
    assert found(text) == found(f'"""{text}"""', ".py") == []


def test_code_is_not_read_and_lines_are_told(found):
    assert found("behind = beside[0]  # a list\n", ".py") == []
    assert found('"""One.\n\nIt stands\n    behind."""\n', ".py") == [(4, "behind")]
    assert found("One.\n\nThis is\nno error.\n") == [(3, "is no")]
