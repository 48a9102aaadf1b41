"""llama.cpp: the ggml that llama-cpp-python was compiled with."""

import ctypes
from ctypes import c_char_p
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path

from contenders import Missing
from contenders.any_ggml import Library, contender


def _files():
    package = find_spec("llama_cpp")
    if package is None:
        raise ModuleNotFoundError("No module named 'llama_cpp'")
    for suffix in (".so", ".dylib"):
        files = [Path(package.origin).parent / "lib" / f"libggml-{part}{suffix}" for part in ("base", "cpu")]
        if all(file.exists() for file in files):
            return ctypes.CDLL(str(files[0]), ctypes.RTLD_GLOBAL), ctypes.CDLL(str(files[1]))
    raise Missing("llama-cpp-python has no libggml-base and libggml-cpu of its own")


_ggml = Library(*_files(), full_precision=10)


def version():
    try:
        number = _ggml.function("ggml_version", c_char_p)().decode()
    except Missing:
        number = "?"
    return f"llama-cpp-python {version_of('llama-cpp-python')}, ggml {number} built for {_ggml.features()}"


def Contender(work, name, storage):
    return contender(_ggml, work, storage)
