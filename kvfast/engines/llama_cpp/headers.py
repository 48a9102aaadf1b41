"""ggml's headers, which come with the sources of llama.cpp, of ggml or of llama-cpp-python."""

import importlib.metadata
import re
import subprocess
import sys
import tarfile
from pathlib import Path

API_VERSIONS = (2,)  # of ggml's interface of backends that backend.c is written for
FOLDERS = ("", "ggml", "vendor/llama.cpp/ggml")
NEEDED = ("include/ggml.h", "src/ggml-backend-impl.h", "src/ggml-common.h")


def find_headers(source):
    """The folder of ggml in a folder of sources, with `include` and `src`."""
    for folder in (Path(source, name) for name in FOLDERS):
        if all((folder / name).exists() for name in NEEDED):
            return folder
    raise FileNotFoundError(f"expected sources of llama.cpp, ggml or llama-cpp-python, with {NEEDED[1]}, got {source}")


def fetch_headers(folder):
    """Download the source archive of the llama-cpp-python that is installed, and unpack its ggml."""
    version = importlib.metadata.version("llama-cpp-python")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
    done = subprocess.run(
        [*command, "--dest", str(folder), f"llama-cpp-python=={version}"], capture_output=True, text=True, check=False
    )
    archives = list(Path(folder).glob("*.tar.gz"))
    if not archives:
        raise RuntimeError(
            f"pip could not download the sources of llama-cpp-python {version}; pass source=: {done.stderr.strip()[-500:]}"
        )
    with tarfile.open(archives[0]) as archive:
        wanted = re.compile(r"[^/]+/vendor/llama\.cpp/ggml/(CMakeLists\.txt|(include|src)/[^/]+\.h)")
        members = [one for one in archive if one.isfile() and wanted.fullmatch(one.name)]
        for one in members:
            path = Path(folder, one.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.extractfile(one).read())
    return find_headers(next(path for path in Path(folder).iterdir() if path.is_dir()))


def version_of(folder):
    """The version of ggml that headers are of."""
    text = (folder / "CMakeLists.txt").read_text()
    return ".".join(re.search(rf"set\(GGML_VERSION_{part} (\d+)\)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def check_headers(folder, ggml=None):
    """Raise a ValueError unless the headers are of an interface that the backend knows, and those of this ggml if one is given."""
    version = version_of(folder)
    if ggml is not None and version != ggml.version.partition("-")[0]:
        raise ValueError(f"expected headers of ggml {ggml.version}, which {ggml.base} is, got those of ggml {version} in {folder}")
    api = int(re.search(r"GGML_BACKEND_API_VERSION (\d+)", (folder / "src/ggml-backend-impl.h").read_text())[1])
    if api not in API_VERSIONS:
        raise ValueError(f"expected GGML_BACKEND_API_VERSION {' or '.join(map(str, API_VERSIONS))}, got {api} in {folder}")
