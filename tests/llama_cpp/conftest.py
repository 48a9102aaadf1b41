import pytest
from ggml_attention import Backend

import kvfast.llama_cpp


@pytest.fixture(scope="session")
def library():
    """The ggml of llama-cpp-python, with the backend loaded."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    try:
        kvfast.llama_cpp.load()
    except FileNotFoundError as error:
        pytest.skip(f"no backend was built: {error}")
    return llama_cpp.llama_cpp._lib


@pytest.fixture(scope="session")
def cpu(library):
    return Backend(library, "CPU")


@pytest.fixture(scope="session")
def backend(library):
    return Backend(library, "KVFAST")
