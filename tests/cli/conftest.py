import runpy
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Path of a random two-layer model."""
    pytest.importorskip("gguf")
    pytest.importorskip("tokenizers")
    pytest.importorskip("rich")
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    runpy.run_path(DATA / "tiny_gguf.py")["write_model"](path)
    return path


@pytest.fixture
def text(tmp_path):
    """Path of a text file."""
    path = tmp_path / "text.txt"
    path.write_text("The one the other — then the 12 others. " * 10, encoding="utf-8")
    return path
