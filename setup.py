"""Builds the extension modules. Everything else stands in pyproject.toml.

KVFAST_OPENMP=0 builds without OpenMP, KVFAST_OPENMP=1 insists on it; else a probe decides. Without it, calls use a pool of the
system's threads (kvfast/core/thread_pool.h).
KVFAST_CFLAGS holds flags of one's own, which come last: for the compiler and the linker, as sanitizers need it.
On Windows the compiler is clang in its GNU dialect, with mingw-w64; CC names another one.
"""

import glob
import gzip
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

# No -ffast-math: the softmax needs its infinities. No -march: one binary runs on any CPU. A product and a sum are rounded at
# once where vf_fma says so: compilers that choose do it differently for one row and for four, and plain C on ARM, too.
COMPILE = ["-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]

ON_WINDOWS = sys.platform == "win32"
if ON_WINDOWS:
    os.environ.setdefault("CC", "clang")

# What Cython writes for memoryviews, once for all modules: compiling takes three quarters of the time.
MEMORYVIEWS = "kvfast.core.memoryviews"
# For `freethreading_compatible`, see `BlockPool.enter`: it says what takes the place of the GIL.
CYTHON = {"quiet": True, "compiler_directives": {"freethreading_compatible": True}, "shared_utility_qualified_name": MEMORYVIEWS}


def files(pattern):
    """Paths with slashes, also on Windows, as setuptools has them."""
    return sorted(Path(path).as_posix() for path in glob.glob(pattern, recursive=True))


# Path of each extension module, and of those with parallel loops.
MODULES = files("kvfast/**/*.pyx")
LOOPS = re.compile(r"\bprange\(|cimport .*\bprange\b|<omp\.h>|cimport openmp")
PARALLEL = [path for path in MODULES if LOOPS.search(Path(path).read_text(encoding="utf-8"))]
KERNELS = files("kvfast/simd/**/*.c")
# Rooms that look after blocks and leave arithmetic to others: -O1 is as fast for them as -O3, and compiles in two thirds of the time.
LITTLE_ARITHMETIC = ("kvfast/storage/", "kvfast/files/", "kvfast/handles/")
HEADERS = sorted(files("kvfast/**/*.h") + files("kvfast/**/*.pxd"))


def openmp_works():
    """Whether the compiler builds and links a program with -fopenmp."""
    wish = os.environ.get("KVFAST_OPENMP")
    if wish == "0" or (ON_WINDOWS and wish is None):  # its runtime there is a library of the compiler's, which Python does not find
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n")
        command = [*os.environ.get("CC", "cc").split(), "-fopenmp", str(source), "-o", str(Path(folder, "probe"))]
        try:
            found = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            found = False
    if wish == "1" and not found:
        sys.exit(f"KVFAST_OPENMP=1, but this failed: {' '.join(command)}")
    return found


def check_compiler():
    """Refuse GCC for Windows: it does not align the stack for AVX (its bug 54412), so kernels would end the process."""
    command = [*os.environ["CC"].split(), "--version"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError as error:
        told = error.strerror
    if "clang" not in told:
        sys.exit(f"kvfast for Windows needs clang with mingw-w64, named by CC; {' '.join(command)} says: {told.strip()[:200]}")


def extension(path, openmp):
    name = path.rpartition(".")[0].replace("/", ".")
    flags = (["-fopenmp"] if openmp and path in PARALLEL else []) + shlex.split(os.environ.get("KVFAST_CFLAGS", ""))
    return Extension(
        name,
        [path, *(KERNELS if name == "kvfast.core.kernels" else [])],
        depends=HEADERS,
        include_dirs=["kvfast"],
        extra_compile_args=COMPILE + (["-O1"] if path.startswith(LITTLE_ARITHMETIC) else []) + flags,
        extra_link_args=flags,
    )


class BuildExt(build_ext):
    """Compiles as many files at once as there are processors."""

    cython_is_at_work = threading.Lock()  # it is not made for threads

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()
        if ON_WINDOWS and self.compiler is None:
            self.compiler = "mingw32"  # what setuptools calls compilers of the GNU dialect

    def build_extensions(self):
        if ON_WINDOWS:
            check_compiler()
        compile = self.compiler.compile  # the sources of a module one after the other

        def compile_at_once(sources, **options):
            with ThreadPoolExecutor(self.parallel) as pool:
                return list(chain.from_iterable(pool.map(lambda source: compile([source], **options), sources)))

        self.compiler.compile = compile_at_once
        super().build_extensions()

    def build_extension(self, module):
        if importlib.util.find_spec("Cython"):  # else setuptools takes the C files, if they are there
            from Cython.Build import cythonize

            with self.cython_is_at_work:
                module.sources = cythonize(module, force=self.force, **CYTHON)[0].sources
        super().build_extension(module)


class Sdist(sdist):
    """With SOURCE_DATE_EPOCH, an archive of the same bytes from the same files; wheels come so by themselves."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        if "SOURCE_DATE_EPOCH" not in os.environ or format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)
        date = int(os.environ["SOURCE_DATE_EPOCH"])

        def anonymous(entry):
            entry.mtime, entry.mode = date, 0o755 if entry.mode & 0o100 else 0o644
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            return entry

        path = Path(f"{base_name}.tar.gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            path.open("wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=date) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            archive.add(base_dir, filter=anonymous)
        return str(path)


if "SOURCE_DATE_EPOCH" in os.environ:
    os.umask(0o022)  # wheels hold the modes of files, too

OPENMP = openmp_works()
setup(
    ext_modules=[extension(path, OPENMP) for path in [*MODULES, MEMORYVIEWS.replace(".", "/") + ".c"]],
    cmdclass={"build_ext": BuildExt, "sdist": Sdist},
)
