"""Loads the backend into the llama.cpp of this process."""

import ctypes
from os import PathLike
from pathlib import Path
from typing import Literal

from kvfast import config
from kvfast.engine import shown
from kvfast.engines.llama_cpp.installed import SUFFIX, Ggml, bundled, installed

_HINT = "python -m kvfast llama-cpp build"


def load(
    library: str | PathLike[str] | None = None,
    libraries: str | PathLike[str] | None = None,
    precision: Literal["exact", "fast", "invariant"] | None = None,
) -> Path:
    """Let llama-cpp-python compute attention with kvfast, in the models that are opened from now on.

    Contexts need flash attention: ``Llama(..., flash_attn=True)``. A second call changes the precision alone.

    Parameters
    ----------
    library : path, optional
        The backend; by default the one that `build` made for these libraries, or else the one that the wheel of kvfast brings.
    libraries : path, optional
        The folder of the ``libggml`` that loads it; by default that of the llama-cpp-python that is installed.
    precision : str, optional
        ``"exact"``; ``"fast"``, of prompts on quantised keys and values; or ``"invariant"``, exact with the same bits however a prompt is
        cut. See [precision](../concepts/precision.md). It holds for all models of the process, from now on. By default that of
        KVFAST_PRECISION in the environment, else ``"exact"``.

    Returns
    -------
    Path
        The backend.

    Raises
    ------
    FileNotFoundError
        If there is no such file: this kvfast did not bring it, and `build` was not run, or llama-cpp-python or kvfast are others
        since. Or if there are no libraries.
    RuntimeError
        If ggml cannot load it, or refuses it because it is for another ggml.
    ValueError
        If there is no such precision.
    """
    if precision not in (None, "exact", "fast", "invariant"):
        raise ValueError(f"precision must be 'exact', 'fast', 'invariant' or None, got {shown(precision)}")
    found = installed() if libraries is None else Ggml(libraries)
    path = _backend_for(found) if library is None else Path(library).resolve()
    if not path.exists():
        raise FileNotFoundError(f"there is no backend for the ggml in {found.folder}, {path}; {_HINT} makes it")
    if libraries is None:
        import llama_cpp  # noqa: F401  it loads the library

    # What it depends on is found through it, as the files of llama-cpp-python have copies.
    ggml = ctypes.CDLL(str(found.folder / f"lib{'llama' if libraries is None else 'ggml'}{SUFFIX}"))
    if not hasattr(ggml, "ggml_backend_load"):
        raise RuntimeError("this llama-cpp-python was built without shared libraries; it can load no backends")
    for name in ("ggml_backend_load", "ggml_backend_reg_by_name", "ggml_backend_reg_get_proc_address"):
        getattr(ggml, name).restype = ctypes.c_void_p
        getattr(ggml, name).argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_reg_get_proc_address.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    backend = ggml.ggml_backend_reg_by_name(b"KVFAST") or ggml.ggml_backend_load(str(path).encode())
    if backend is None:
        raise RuntimeError(f"ggml {found.version} refuses {path}, perhaps because it is for another ggml; {_HINT} makes a new one")
    use = lambda name, kind: ctypes.CFUNCTYPE(ctypes.c_int, kind)(ggml.ggml_backend_reg_get_proc_address(backend, name))
    use(b"kvfast_use_prefetch_level", ctypes.c_int)(config()["prefetch"]["level"])
    if precision is not None:
        use(b"kvfast_use_precision", ctypes.c_char_p)(precision.encode())
    return path


def _backend_for(ggml):
    """The backend built for this ggml; else the wheel's, which uses ggml's threads."""
    return bundled() if not ggml.library.exists() and ggml.has_openmp and bundled().exists() else ggml.library
