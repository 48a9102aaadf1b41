"""Building the backend, loading it, and what is refused."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvfast.llama_cpp
from kvfast.engines.llama_cpp import building, headers, loading
from kvfast.engines.llama_cpp.installed import Ggml
from kvfast.tools import cli


@pytest.fixture
def sources(tmp_path):
    """What looks like the sources of llama.cpp with ggml 0.25.3."""
    folder = tmp_path / "llama.cpp" / "ggml"
    for name in headers.NEEDED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("#define GGML_BACKEND_API_VERSION 2\n")
    (folder / "CMakeLists.txt").write_text("set(GGML_VERSION_MAJOR 0)\nset(GGML_VERSION_MINOR 25)\nset(GGML_VERSION_PATCH 3)\n")
    return folder


@pytest.mark.parametrize("version", ["0.25.3", "0.25.3-dirty"])
def test_headers_of_the_library_are_taken(sources, version):
    assert headers.find_headers(sources.parent) == headers.find_headers(sources) == sources
    headers.check_headers(sources, SimpleNamespace(version=version, base="libggml-base.so"))


def test_headers_of_another_version_are_refused(sources):
    with pytest.raises(ValueError, match=r"expected headers of ggml 0\.25\.4, which .* is, got those of ggml 0\.25\.3"):
        headers.check_headers(sources, SimpleNamespace(version="0.25.4", base="libggml-base.so"))


def test_another_interface_of_backends_is_refused(sources):
    (sources / "src/ggml-backend-impl.h").write_text("#define GGML_BACKEND_API_VERSION 3\n")
    with pytest.raises(ValueError, match="expected GGML_BACKEND_API_VERSION 2, got 3"):
        headers.check_headers(sources, SimpleNamespace(version="0.25.3", base="libggml-base.so"))


def test_folders_without_headers_or_libraries_are_refused(tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match="expected sources of llama.cpp"):
        headers.find_headers(tmp_path)
    with pytest.raises(FileNotFoundError, match="expected a folder with libggml-base"):
        Ggml(tmp_path)
    assert cli.main(["llama-cpp", "build", "--libraries", str(tmp_path)]) == 1
    assert "libggml-base" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(ggml, tmp_path):
    with pytest.raises(FileNotFoundError, match="llama-cpp build"):
        kvfast.llama_cpp.load(tmp_path / "none.so", ggml.folder)


def tried(path, folder):
    """The error of loading a backend, in a process of its own."""
    code = f"import kvfast.llama_cpp\ntry: kvfast.llama_cpp.load({str(path)!r}, {str(folder)!r})\nexcept RuntimeError as error: print(error)"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout


def test_a_failing_compiler_is_reported(ggml, sources, tmp_path, monkeypatch):
    monkeypatch.setattr(headers, "check_headers", lambda folder, ggml: None)
    monkeypatch.setattr("kvfast.engines.llama_cpp.building.check_headers", lambda folder, ggml: None)
    with pytest.raises(RuntimeError, match="error"):
        kvfast.llama_cpp.build(sources, ggml.folder, tmp_path / "backend.so")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="there is no C compiler 'no-such-compiler'"):
        kvfast.llama_cpp.build(sources, ggml.folder, tmp_path / "backend.so")
    assert not (tmp_path / "backend.so").exists()


@pytest.mark.exhaustive
def test_a_backend_of_another_ggml_is_refused(ggml, ggml_headers, tmp_path, monkeypatch):
    """Built with a version that is not the library's, it reports that it is not supported, and llama.cpp goes on."""
    monkeypatch.setattr("kvfast.engines.llama_cpp.building.check_headers", lambda folder, ggml: None)
    monkeypatch.setattr("kvfast.engines.llama_cpp.building.Ggml", lambda folder: SimpleNamespace(**vars(ggml) | {"version": "0.1.2"}))
    path = kvfast.llama_cpp.build(ggml_headers, ggml.folder, tmp_path / "other.so")
    assert "refuses" in tried(path, ggml.folder)


@pytest.fixture
def bundled(ggml_headers, tmp_path):
    """The backend of a wheel."""
    if sys.platform != "linux":
        pytest.skip("only wheels for Linux have a backend")
    return building.build_bundled(ggml_headers, tmp_path / "bundled.so")


@pytest.mark.exhaustive
def test_the_backend_of_a_wheel(ggml, bundled):
    """It computes with the threads of the ggml that loads it, and names no other library, nor a folder."""
    listed = subprocess.run(["readelf", "-d", bundled], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"NEEDED.*\[(.*)\]", listed)) == {"libggml-base.so.0", "libc.so.6", "libm.so.6"}
    assert "PATH" not in listed and str(Path(__file__).parents[2]).encode() not in bundled.read_bytes()
    tests = "tests/llama_cpp/test_backend.py", "-k", "each_type or number_of_threads or every_tier"
    environment = os.environ | {"KVFAST_TEST_GGML_BACKEND": str(bundled)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout


@pytest.mark.exhaustive
def test_the_backend_of_a_wheel_is_refused_by_a_ggml_with_other_tensors(ggml, ggml_headers, tmp_path):
    sources = tmp_path / "other" / "ggml"
    shutil.copytree(ggml_headers, sources)
    header = sources / "include/ggml.h"
    text = header.read_text()
    header.write_text(text.replace("#define GGML_MAX_OP_PARAMS      64", "#define GGML_MAX_OP_PARAMS      128"))
    assert header.read_text() != text
    other = building.build_bundled(sources, tmp_path / "other.so")
    assert "refuses" in tried(other, ggml.folder)


def test_the_backend_of_a_wheel_comes_after_the_one_that_was_built(tmp_path, monkeypatch):
    built, brought = tmp_path / "built.so", tmp_path / "brought.so"
    ggml = SimpleNamespace(library=built, has_openmp=True)
    monkeypatch.setattr(loading, "bundled", lambda: brought)
    assert loading._backend_for(ggml) == built  # which the error names
    brought.touch()
    assert loading._backend_for(ggml) == brought
    ggml.has_openmp = False  # it would have one thread
    assert loading._backend_for(ggml) == built
    ggml.has_openmp = True
    built.touch()
    assert loading._backend_for(ggml) == built
