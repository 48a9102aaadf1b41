"""Annotations and stubs: good for a strict client, and true; what `import kvfast` loads."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

import kvfast

HERE = Path(__file__).parent
PACKAGE = Path(kvfast.__file__).parent
# Compiled modules that nobody imports but kvfast itself: they have no stubs.
COMPILED = {path.parent / path.name.partition(".")[0] for path in PACKAGE.rglob("*.so")}
PRIVATE = sorted(".".join(path.relative_to(PACKAGE.parent).parts) for path in COMPILED if not path.with_suffix(".pyi").exists())
needs_mypy = pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy (extra types)")


def run(*parts):
    """Output of a module of Python; the kvfast that is found is the one under test."""
    path = os.pathsep.join([str(Path(kvfast.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *map(str, parts)],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE,
        env=os.environ | {"PYTHONPATH": path, "MYPYPATH": ""},
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


@needs_mypy
def test_a_strict_client(tmp_path):
    run("-m", "mypy", "--strict", "--cache-dir", tmp_path, "--config-file", HERE.parents[1] / "pyproject.toml", "typing_sample.py")


@needs_mypy
def test_a_strict_client_is_told_of_mistakes(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import kvfast\ncache = kvfast.KVCache('1', 2, 64)\ncache.atend(0)\nx: str = cache.nbytes\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(wrong)],
        text=True,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        check=False,
    )
    assert all(f"[{name}]" in done.stdout for name in ("arg-type", "attr-defined", "assignment")), done.stdout


def test_public_names_of_compiled_modules_have_stubs():
    modules = {getattr(getattr(kvfast, name), "__module__", "kvfast") for name in kvfast.__all__}
    assert PRIVATE and modules & set(PRIVATE) == set()


@needs_mypy
def test_stubs_are_true(tmp_path):
    private = tmp_path / "private.txt"
    private.write_text("\n".join(map(re.escape, PRIVATE)))
    run(
        "-m",
        "mypy.stubtest",
        "kvfast",
        "--mypy-config-file",
        HERE.parents[1] / "pyproject.toml",
        "--concise",
        "--ignore-disjoint-bases",
        "--allowlist",
        HERE / "stubtest_allowlist.txt",
        "--allowlist",
        private,
        "--ignore-unused-allowlist",
    )


def test_import_loads_no_more_than_it_needs():
    # Without `site`, as the finder of an editable install has loaded some of them already.
    places = [str(Path(module.__file__).parents[1]) for module in (kvfast, numpy)]
    code = f"import sys; sys.path[:0] = {places}; import numpy; before = set(sys.modules); import kvfast; print(*sorted(set(sys.modules) - before))"
    loaded = {name.partition(".")[0] for name in run("-S", "-c", code).split()}
    heavy = {
        *("asyncio", "concurrent", "ctypes", "gguf", "hashlib", "logging", "matplotlib", "mmap"),
        *("multiprocessing", "pathlib", "queue", "rich", "safetensors", "shutil", "tokenizers", "torch"),
        *("transformers", "typing_extensions", "urllib", "uuid", "xxhash"),
    }
    assert sorted(loaded & heavy) == []
    assert "kvfast.llama" not in run("-c", code) and "kvfast.tools.cli.bench" not in run("-c", code)


def test_import_time(record_property):
    def seconds(code):
        begin = time.perf_counter()
        run("-c", code)
        return time.perf_counter() - begin

    alone, both = (min(times) for times in zip(*[(seconds("import numpy"), seconds("import numpy, kvfast")) for _ in range(3)]))
    record_property("kvfast_beyond_numpy_seconds", both - alone)  # reported, as machines differ
    print(f"import numpy {alone:.3f} s, with kvfast {both:.3f} s")
