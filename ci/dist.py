"""Check that an sdist holds the repository and nothing else, and a wheel what a user needs and nothing else.

    python ci/dist.py DIST/*.tar.gz DIST/*.whl

Run in a git checkout. A wheel may also hold the backend for llama.cpp, and one that auditwheel repaired libgomp.
"""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MADE_BY_SETUPTOOLS = re.compile(r"PKG-INFO|setup\.cfg|kvfast\.egg-info/.*")
MODULES = re.compile(r"\.((abi3|cpython-[\w-]+)(-[\w-]+)?\.so|cp\w+-win_\w+\.pyd)$")
MAY_BE = re.compile(r"kvfast\.libs/libgomp-|kvfast/engines/llama_cpp/libggml-kvfast-[0-9a-f]{12}\.so$")
MAX_BYTES = 6_000_000


def tracked():
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True)
    return set(listed.stdout.splitlines())


def check_sdist(path):
    """Problems of an sdist."""
    with tarfile.open(path) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    files = {name for name in files if not MADE_BY_SETUPTOOLS.fullmatch(name)}
    known = tracked()
    yield from (f"{name} is missing" for name in sorted(known - files))
    yield from (f"{name} is not in the repository" for name in sorted(files - known))


def wanted(name):
    """What a wheel must hold for a file of the repository: a name, a module's stem, or None. The backend for llama.cpp is compiled
    of its kernels."""
    if not name.startswith("kvfast/") and name != "kvfast_vllm.py":
        return None
    if name.endswith(".pyx"):
        return name.removesuffix(".pyx")
    return name


def check_wheel(path):
    """Problems of a wheel."""
    if path.stat().st_size > MAX_BYTES:
        yield f"{path.stat().st_size:,} bytes are more than {MAX_BYTES:,}"
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    info = {name.partition("/")[2] for name in names if re.match(r"kvfast-[^/]*\.dist-info/", name)}
    yield from (
        f"{name} is missing in .dist-info"
        for name in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE", "entry_points.txt")
        if name not in info
    )
    files = {MODULES.sub("", name) for name in names if ".dist-info/" not in name and not MAY_BE.match(name)}
    known = {wanted(name) for name in tracked()} - {None} | {"kvfast/core/memoryviews"}  # Cython writes this one by itself
    yield from (f"{name} is missing" for name in sorted(known - files))
    yield from (f"{name} is of no use to a user" for name in sorted(files - known))


def main(paths):
    if not paths:
        raise SystemExit(__doc__)
    problems = 0
    for path in map(Path, paths):
        found = list(check_wheel(path) if path.suffix == ".whl" else check_sdist(path))
        print(f"{path.name}: {path.stat().st_size:,} bytes, {len(found)} problems")
        print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
        problems += len(found)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
