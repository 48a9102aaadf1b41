"""The ggml that a backend is built for and loaded into."""

import ctypes
import hashlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent / "backend"
KERNELS = SOURCES.parents[1] / "simd"
WALK = SOURCES.parents[1] / "attention" / "walk"
SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


class Ggml:
    """The libraries of a ggml.

    Parameters
    ----------
    folder : Path
        Where they are.
    """

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
        library.ggml_tensor_overhead.restype = ctypes.c_size_t
        self.tensor_overhead = library.ggml_tensor_overhead()

    @property
    def library(self):
        """Path of the backend for this ggml, of the sources of this kvfast."""
        digest = hashlib.sha256(f"{self.version} {self.tensor_overhead} {self.folder.resolve()}".encode())
        for path in sorted([*SOURCES.iterdir(), *WALK.iterdir(), *KERNELS.rglob("*.[ch]")]):
            digest.update(path.read_bytes())
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache, "kvfast", "llama_cpp", f"libggml-kvfast-{self.version}-{digest.hexdigest()[:12]}{SUFFIX}")


def installed():
    """The ggml of the llama-cpp-python that is installed."""
    package = find_spec("llama_cpp")
    if package is None:
        raise ModuleNotFoundError("No module named 'llama_cpp'", name="llama_cpp")
    return Ggml(os.environ.get("LLAMA_CPP_LIB_PATH") or Path(package.origin).parent / "lib")
