import ctypes
import os
from pathlib import Path

import pytest
from ggml_attention import Backend

import kvfast.llama_cpp
from kvfast.engines.llama_cpp.headers import fetch_headers, find_headers
from kvfast.engines.llama_cpp.installed import Ggml, installed


@pytest.fixture(scope="session")
def ggml():
    """The libraries of a ggml: those that ci/llama_cpp.sh has built, or of llama-cpp-python."""
    if folder := os.environ.get("KVFAST_TEST_GGML"):
        return Ggml(folder)
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    return installed()


@pytest.fixture
def ggml_headers(ggml, tmp_path):
    if folder := os.environ.get("KVFAST_TEST_GGML_SOURCES"):
        return find_headers(Path(folder))
    try:
        return fetch_headers(tmp_path)
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def library(ggml):
    """ggml with the backend loaded: with that of KVFAST_TEST_GGML_BACKEND, if it names one."""
    alone = "KVFAST_TEST_GGML" in os.environ
    try:
        kvfast.llama_cpp.load(os.environ.get("KVFAST_TEST_GGML_BACKEND"), ggml.folder if alone else None)
    except FileNotFoundError as error:
        if alone:
            raise
        pytest.skip(f"no backend was built: {error}")
    return ctypes.CDLL(str(ggml.folder / ggml.base.name.replace("ggml-base", "ggml" if alone else "llama")))


@pytest.fixture(scope="session")
def cpu(library):
    return Backend(library, "CPU")


@pytest.fixture(scope="session")
def backend(library):
    """kvfast in the exact precision."""
    backend = Backend(library, "KVFAST")
    assert backend.use_precision("exact")
    return backend


@pytest.fixture
def fast_backend(backend):
    """The same in the fast precision, for a test."""
    assert backend.use_precision("fast")
    yield backend
    backend.use_precision("exact")


@pytest.fixture
def model(tmp_path):
    """A file of weights for stand-ins of ``Llama``."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return str(path)


@pytest.fixture
def folder(tmp_path):
    """A folder of prompts that is not there yet."""
    return tmp_path / "prompts"
