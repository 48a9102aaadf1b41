import functools
import gc
import importlib
import os
import runpy
import signal
from pathlib import Path

# Before NumPy is imported: the threads of its BLAS wait by spinning, on the processors of the threads under test. Where
# products are large, in tests/llama, there are more.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest
from cache_kinds import CENTRED, PACKED
from extras import pytest_configure, pytest_make_collect_report, pytest_sessionfinish, pytest_terminal_summary  # noqa: F401  (hooks)
from selection import TIERS, pytest_addoption, pytest_collection_modifyitems  # noqa: F401  (hooks)

import kvfast
from kvfast.prompts import patient

# A shell's background jobs ignore Ctrl-C, and so would those that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=TIERS)
def isa(request):
    """Every ISA tier of this machine in turn."""
    with kvfast.use_isa(request.param):
        yield request.param


def pytest_collection_finish():
    """What was collected stays: `gc.collect()` of the tests need not look at it each time."""
    gc.freeze()


def pytest_make_parametrize_id(config, val, argname):
    return {CENTRED: "centred", PACKED: "packed"}.get(val) if isinstance(val, kvfast.KVFormat) else None


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def smollm2_file():
    """The path of SmolLM2-135M-Instruct."""
    from kvfast import llama

    try:
        return llama.fetch_model()
    except llama.FetchError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(smollm2_file):
    """(path, model, tokenizer) of it."""
    from kvfast import llama

    return smollm2_file, *llama.load(smollm2_file)


@pytest.fixture(scope="session")
def read_once(smollm2_file):
    """Let transformers read that file and make its table of tensor names once a session. For a model and its tokenizer, it reads the
    100,000 strings of the file three times, and makes the table once for each module of the model."""
    gguf = pytest.importorskip("gguf")
    importlib.import_module("kvfast.planning.gguf_file")  # it has a subclass of the reader, so it comes first
    of_any_file, once = gguf.GGUFReader, functools.cache(gguf.GGUFReader)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", lambda path: (once if Path(path) == smollm2_file else of_any_file)(path))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        yield


@pytest.fixture
def tiny_model(tmp_path):
    """(model, tokenizer) of a random two-layer model."""
    from kvfast import llama

    runpy.run_path(Path(__file__).parent / "data" / "tiny_gguf.py")["write_model"](tmp_path / "tiny.gguf")
    return llama.load(tmp_path / "tiny.gguf")


@pytest.fixture
def short_pauses(monkeypatch):
    """A store that failed is asked again at once."""
    monkeypatch.setattr(patient, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(patient, "LONGEST_PAUSE", 0.05)
