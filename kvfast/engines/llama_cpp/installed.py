"""The ggml that a backend is built for and loaded into."""

import ctypes
import hashlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent / "backend"
KERNELS = SOURCES.parents[2] / "simd"
WALK = SOURCES.parents[2] / "attention" / "walk"
SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


class Ggml:
    """The libraries of a ggml, in `folder`."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.base = self.folder / f"libggml-base{SUFFIX}"
        if not self.base.exists():
            raise FileNotFoundError(f"expected a folder with {self.base.name}, which shared builds of ggml have, got {folder}")
        library = ctypes.CDLL(str(self.base))
        try:
            library.ggml_version.restype = ctypes.c_char_p
            self.version = library.ggml_version().decode()
        except AttributeError:
            raise ValueError(f"{self.base} is older than ggml 0.9, which was the first to report its version") from None
        # Only a ggml that has threads of OpenMP can lend them to the backend of a wheel.
        self.has_openmp = hasattr(library, "GOMP_parallel")

    @property
    def library(self):
        """Path of the backend for this ggml, of the sources of this kvfast."""
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(
            cache, "kvfast", "llama_cpp", f"libggml-kvfast-{self.version}-{_digest(self.version, self.folder.resolve())}{SUFFIX}"
        )


def bundled():
    """Path of the backend that comes with a wheel of this kvfast, whether or not there is one."""
    return SOURCES.parent / f"libggml-kvfast-{_digest()}{SUFFIX}"


def _digest(*parts):
    """A few digits that tell the sources of this kvfast, and what else is given, from others."""
    digest = hashlib.sha256(repr(list(map(str, parts))).encode())
    for path in sorted([*SOURCES.iterdir(), *WALK.iterdir(), *KERNELS.rglob("*.[ch]")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def installed():
    """The ggml of the llama-cpp-python that is installed."""
    package = find_spec("llama_cpp")
    if package is None:
        raise ModuleNotFoundError("No module named 'llama_cpp'", name="llama_cpp")
    return Ggml(os.environ.get("LLAMA_CPP_LIB_PATH") or Path(package.origin).parent / "lib")
