"""Compiles the backend."""

import os
import shlex
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path

from kvfast import config
from kvfast.engines.llama_cpp.headers import check_headers, fetch_headers, find_headers, version_of
from kvfast.engines.llama_cpp.installed import KERNELS, SOURCES, SUFFIX, Ggml, bundled, installed

# Those of setup.py, and rows that are wide enough for the keys of multi-head latent attention.
FLAGS = [
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-DKV_WIDEST_HEAD=576",
    "-DKV_LONGEST_TILE=128",
]
# Flags for kvfast's kernels, which are compiled with those for the blocks of ggml.
WITH_ROWS = ["-include", "engines/llama_cpp/backend/ggml_rows.h", '-DKV_MORE_KERNELS="engines/llama_cpp/backend/ggml_rows.inc.h"']
FAST = ("fast_amx", "fast_avx512_vnni")  # with panels: here the fast precision is that of prompts
UNITS = {
    path: WITH_ROWS if path.is_relative_to(KERNELS) else []
    for path in sorted([*KERNELS.rglob("*.c"), *SOURCES.glob("*.c")])
    if not path.name.startswith("fast_") or path.stem in FAST
}


def build(
    source: str | PathLike[str] | None = None, libraries: str | PathLike[str] | None = None, out: str | PathLike[str] | None = None
) -> Path:
    """Compile the backend for a ggml; takes a quarter of a minute on two processors.

    The compiler is that of the environment variable ``CC``, or ``cc``.

    Parameters
    ----------
    source : path, optional
        Sources of llama.cpp, of ggml or of llama-cpp-python, of the version of the libraries, for the headers. By default
        those of the llama-cpp-python that is installed, which pip downloads.
    libraries : path, optional
        The folder of ``libggml-base.so``; by default that of the llama-cpp-python that is installed.
    out : path, optional
        The file to write; by default one in the user's cache, where `load` finds it.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    FileNotFoundError
        If there are no headers, or no libraries, where they were expected.
    ValueError
        If the headers are not those of the libraries, or of an interface of backends that kvfast does not know.
    RuntimeError
        If pip or the compiler fails.
    """
    ggml = installed() if libraries is None else Ggml(libraries)
    with tempfile.TemporaryDirectory() as scratch:
        headers = find_headers(source) if source is not None else fetch_headers(scratch)
        check_headers(headers, ggml)
        openmp = _openmp(scratch)
        # How this processor reads memory best; programs that load the file themselves cannot say it.
        flags = [*openmp, f'-DKVFAST_GGML_VERSION="{ggml.version}"', f"-DKV_PREFETCH_LEVEL={config()['prefetch']['level']}"]
        linked = [*openmp, f"-L{ggml.folder}", "-lggml-base", f"-Wl,-rpath,{ggml.folder.resolve()}"]
        return _compile(headers, scratch, flags, linked, ggml.library if out is None else Path(out))


def build_bundled(source, out=None):
    """Compile the backend that a wheel has, for Linux.

    It fits every ggml of the interface and of the tensors that the headers have, and is refused by others. It names neither folders of
    this machine nor a runtime of OpenMP: its threads are those of the ggml that loads it. `source` is as in `build`. Without `out`, the
    file is the one that `load` finds in the package.
    """
    headers = find_headers(source)
    check_headers(headers)
    with tempfile.TemporaryDirectory() as scratch:
        openmp = _openmp(scratch)
        if not openmp:
            raise RuntimeError("the backend of a wheel needs a compiler with OpenMP")
        # An empty library stands for ggml's: all that is taken from it is its name.
        name, empty = f"libggml-base.so.{version_of(headers).partition('.')[0]}", Path(scratch, "empty.c")
        empty.touch()
        _run([*_compiler(), "-shared", "-fPIC", f"-Wl,-soname,{name}", str(empty), "-o", str(Path(scratch, "libggml-base.so"))])
        linked = ["-Wl,--no-as-needed", f"-L{scratch}", "-lggml-base", "-Wl,--as-needed", "-Wl,--build-id=none"]
        return _compile(headers, scratch, openmp, linked, bundled() if out is None else Path(out))


def _compile(headers, scratch, flags, linked, out):
    """Compile the sources and link them."""
    interface = headers / "include" / "ggml-backend.h"
    if interface.exists() and "mmap_support" in interface.read_text():  # older versions lack it
        flags = [*flags, "-DKVFAST_GGML_HAS_MMAP_SUPPORT"]
    flags = [*FLAGS, *flags, *(f"-I{folder}" for folder in (SOURCES.parents[2], headers / "include", headers / "src"))]
    objects = {unit: str(Path(scratch, f"{unit.stem}.o")) for unit in UNITS}
    calls = [[*_compiler(), *flags, *options, "-c", str(unit), "-o", objects[unit]] for unit, options in UNITS.items()]
    with ThreadPoolExecutor() as pool:
        list(pool.map(_run, calls))
    built = Path(scratch, f"built{SUFFIX}")
    _run([*_compiler(), "-shared", *objects.values(), *linked, "-lm", "-o", str(built)])
    out.parent.mkdir(parents=True, exist_ok=True)
    whole = out.with_name(f".{out.name}.{os.getpid()}")  # a process that loads it meanwhile sees the old or the new one
    whole.write_bytes(built.read_bytes())
    whole.replace(out)
    return out


def _compiler():
    return shlex.split(os.environ.get("CC", "cc"))


def _openmp(scratch):
    """The flag for ggml's own runtime of threads: libgomp with gcc, libomp with clang. RuntimeError without a compiler."""
    _run([*_compiler(), "--version"])
    source = Path(scratch, "probe.c")
    source.write_text("#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n")
    probe = subprocess.run([*_compiler(), "-fopenmp", str(source), "-o", str(Path(scratch, "probe"))], capture_output=True, check=False)
    return ["-fopenmp"] if probe.returncode == 0 else []


def _run(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"there is no C compiler {command[0]!r}: {error.strerror}") from None
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr.strip()[-2000:]}")
