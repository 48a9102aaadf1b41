"""Builds the extension modules. Everything else stands in pyproject.toml.

KVFAST_OPENMP=0 builds without OpenMP, KVFAST_OPENMP=1 insists on it; else a probe decides. Without it, calls use a pool of the
system's threads (kvfast/core/thread_pool.h).
KVFAST_CFLAGS holds flags of one's own, which come last: for the compiler and the linker, as sanitizers need it.
Objects stay in build/objects, where the next build finds them; `build_ext --force` compiles all.
On Windows the compiler is clang in its GNU dialect, with mingw-w64; CC names another one.
"""

import contextlib
import functools
import glob
import gzip
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

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


class Earlier:
    """C files and objects that earlier builds have made. pip gives each build an empty folder, and Cython a new date.

    A record next to an object has its hash and those of all that it was made of, so nothing is stale, even if another build writes at the
    same time, or is killed. An object is found by its source and command.
    """

    FOLDER = Path("build", "objects")

    def __init__(self):
        self.started, self.hashes = time.time_ns(), {}
        self.FOLDER.mkdir(parents=True, exist_ok=True)

    def find(self, path, record, *made_by):
        """The bytes of a file, if it was made by this, of files that are the same; or None."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            data, told = path.read_bytes(), json.loads((self.FOLDER / record).read_bytes())
            if told["made"] == [digest(data), *made_by] and all(self.hash(name) == value for name, value in told["files"].items()):
                return data
        return None

    def keep(self, record, data, files, *made_by):
        # A file that changed during the build may be another one than the compiler read.
        if all(os.stat(name).st_mtime_ns < self.started for name in files):
            told = {"made": [digest(data), *made_by], "files": {name: self.hash(name) for name in files}}
            write(self.FOLDER / record, json.dumps(told).encode())

    def hash(self, name):
        if name not in self.hashes:
            self.hashes[name] = digest(Path(name).read_bytes())
        return self.hashes[name]


class Objects:
    """Compiles what no earlier build has compiled."""

    # Variables that change how a compiler works.
    VARIABLES = ("ARCHFLAGS", "COMPILER_PATH", "CPATH", "C_INCLUDE_PATH", "GCC_EXEC_PREFIX", "MACOSX_DEPLOYMENT_TARGET", "SDKROOT")

    def __init__(self, compiler, earlier):
        self.compiler, self.compile, self.earlier, self.compiled = compiler, compiler._compile, earlier, []
        told = subprocess.run([*compiler.compiler_so, "--version"], capture_output=True, text=True, check=False).stdout
        # With the names of all headers, as a new one may hide another.
        self.surroundings = digest(json.dumps([told, HEADERS, *map(os.environ.get, self.VARIABLES)]).encode())

    def object(self, target, source, suffix, arguments, flags, options):
        """In place of the compiler's `_compile`."""
        command = [*self.compiler.compiler_so, *arguments, *flags]
        if self.earlier is None or any(word in " ".join(command) for word in ("profile", "coverage")):  # these have other files, too
            return self.compile(target, source, suffix, arguments, flags, options)
        used = [part for part in command if not (part.startswith("-I") and has_no_headers(part[2:]))]
        name = f"{Path(source).stem}-{digest(json.dumps([source, used]).encode())[:32]}"
        stored, record = self.earlier.FOLDER / f"{name}.o", f"{name}.json"
        made_by = digest(Path(source).read_bytes()), self.surroundings
        if (data := self.earlier.find(stored, record, *made_by)) is not None:
            Path(target).write_bytes(data)
            return None
        listed = Path(f"{target}.d")
        self.compile(target, source, suffix, arguments, [*flags, "-MD", "-MF", str(listed)], options)
        self.compiled.append(source)
        if digest(Path(source).read_bytes()) == made_by[0]:
            data = Path(target).read_bytes()
            write(stored, data)
            self.earlier.keep(record, data, [path for path in files_of(listed.read_text()) if path != source], *made_by)
        return None


def translated(module, earlier):
    """The sources of a module, in C: Cython writes a file unless an earlier build has made it of the same files.

    Cython goes by dates, and each build that pip isolates has newer files of Cython's own.
    """
    from Cython.Build import cythonize
    from Cython.Build.Dependencies import create_dependency_tree

    first, *others = module.sources
    if earlier is None or not first.endswith(".pyx"):
        return cythonize(module, force=earlier is None, **CYTHON)[0].sources
    path, record = Path(first).with_suffix(".c"), f"{module.name}.json"
    surroundings = digest(json.dumps([importlib.metadata.version("cython"), CYTHON, HEADERS]).encode())
    made_by = digest(Path(first).read_bytes()), surroundings
    if earlier.find(path, record, *made_by) is None:
        cythonize(module, force=(earlier.FOLDER / record).exists(), **CYTHON)
        read = create_dependency_tree().all_dependencies(first) - {first}
        if digest(Path(first).read_bytes()) == made_by[0]:
            earlier.keep(record, path.read_bytes(), sorted(read & set(HEADERS)), *made_by)
    return [path.as_posix(), *others]


def digest(data):
    return hashlib.sha256(data).hexdigest()


def write(path, data):
    """At once: a reader finds the old file or the new one."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


def files_of(rule):
    """Files that a compiler has read, of the rule for make that it wrote."""
    names = re.split(r"(?<!\\)\s+", rule.replace("\\\n", " ").partition(": ")[2].strip())
    return [re.sub(r"\\([ #])", r"\1", name).replace("$$", "$") for name in names]


@functools.cache
def has_no_headers(folder):
    """As that of a virtual environment, whose path says nothing then."""
    return next(Path(folder).rglob("*.h"), None) is None


@contextlib.contextmanager
def alone():
    """Builds of this folder come one after the other: they write the same C files and modules."""
    Earlier.FOLDER.mkdir(parents=True, exist_ok=True)
    with (Earlier.FOLDER / "lock").open("w") as file:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class BuildExt(build_ext):
    """Compiles as many files at once as there are processors, and prints a line for each."""

    cython_is_at_work = threading.Lock()  # it is not made for threads

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()
        if ON_WINDOWS and self.compiler is None:
            self.compiler = "mingw32"  # what setuptools calls compilers of the GNU dialect

    def run(self):
        with alone():
            super().run()

    def build_extensions(self):
        if ON_WINDOWS:
            check_compiler()
        self.check_headers()
        self.earlier = None if self.force else Earlier()
        objects = Objects(self.compiler, self.earlier)
        compile = self.compiler.compile  # the sources of a module one after the other
        count, of = itertools.count(1), sum(len(module.sources) for module in self.extensions)

        def compile_one(source, options):
            found = compile([source], **options)
            if self.verbose:
                print(f"[{next(count):2}/{of}] {source}", flush=True)
            return found

        def compile_at_once(sources, **options):
            with ThreadPoolExecutor(self.parallel) as pool:
                return [one for found in pool.map(compile_one, sources, itertools.repeat(options)) for one in found]

        self.compiler.compile, self.compiler._compile = compile_at_once, objects.object
        logger = logging.getLogger()  # that of setuptools, which prints whole commands
        level = logger.level
        logger.setLevel(max(level, logging.WARNING) if self.verbose < 2 else level)
        try:
            super().build_extensions()
        finally:
            logger.setLevel(level)
        if self.verbose:
            print(f"kvfast: {len(objects.compiled)} files compiled, the others are as before ({Earlier.FOLDER})", flush=True)

    def check_headers(self):
        """Say in one line what is missing, and the way out."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text("#include <Python.h>\n")
            includes = [f"-I{one}" for one in (*self.compiler.include_dirs, sysconfig.get_path("include"))]
            command = [*self.compiler.compiler_so, *includes, "-c", str(source), "-o", str(Path(folder, "probe.o"))]
            try:
                result = subprocess.run(command, capture_output=True, text=True, check=False)
                why = next((line for line in result.stderr.splitlines() if "error" in line), "") if result.returncode else None
            except OSError as error:
                why = f"{command[0]}: {error.strerror}"
        if why is not None:
            sys.exit(
                f"kvfast is compiled when it is installed, and this failed: {why}. Install a C compiler and the headers of Python (on Debian "
                f"gcc and python3-dev), or install a wheel that another machine has built by: pip wheel --no-deps --wheel-dir dist ."
            )

    def build_extension(self, module):
        if importlib.util.find_spec("Cython"):  # else setuptools takes the C files, if they are there
            with self.cython_is_at_work:
                module.sources = translated(module, self.earlier)
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
