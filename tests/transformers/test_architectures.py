"""kvfast.transformers: every causal architecture that transformers has and that can be built small."""

import json

import pytest
from tiny_architectures import KEPT, NAMES, try_architecture
from tiny_transformers import QUIET, transformers

pytestmark = QUIET

FOUND = json.loads(KEPT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_architecture(name):
    """What comes of it is what the guide tells: the tokens of transformers, or a refusal, and never other tokens."""
    found, kept = try_architecture(name), FOUND["architectures"].get(name)
    assert not any(text.startswith(("differs", "fails")) for text in found.values()), found
    if transformers.__version__ == FOUND["transformers"]:
        assert found == kept, "python tests/support/tiny_architectures.py --write"
    elif kept is not None:  # of another version, what went must go on
        assert {way for way, text in kept.items() if text.startswith("same")} <= {way for way, text in found.items() if text.startswith("same")}


def test_all_are_kept():
    if transformers.__version__ == FOUND["transformers"]:
        assert list(FOUND["architectures"]) == sorted(NAMES)
