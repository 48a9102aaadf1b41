"""What setup.py decides, archives of the same bytes, and the audit of the instructions."""

import ctypes
import importlib
import itertools
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from selection import exhaustive, needs_sources

import kvfast

ROOT = Path(__file__).parents[2]
pytest.importorskip("setuptools")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
needs_audit = pytest.mark.skipif(
    shutil.which("objdump") is None or platform.machine() not in ("x86_64", "aarch64"), reason="no objdump"
)
ARM_COMPILER = shutil.which("cc" if platform.machine() == "aarch64" else "aarch64-linux-gnu-gcc")

SETUP = """
import json, runpy, setuptools
modules = {}
def setup(ext_modules, **rest):
    for module in ext_modules:
        modules[module.name.removeprefix("kvfast.")] = module.extra_compile_args, module.extra_link_args
setuptools.setup = setup
parallel = runpy.run_path("setup.py")["PARALLEL"]
print(json.dumps([modules, [path[len("kvfast/"):-len(".pyx")].replace("/", ".") for path in parallel]]))
"""


def flags(**environment):
    """({module: (flags of the compiler, of the linker)}, those that have parallel regions) of setup.py, or its complaint."""
    kept = {name: value for name, value in os.environ.items() if name not in ("KVFAST_OPENMP", "KVFAST_CFLAGS", "CC")}
    got = subprocess.run([sys.executable, "-c", SETUP], cwd=ROOT, env=kept | environment, capture_output=True, text=True, check=False)
    return got.stderr if got.returncode else json.loads(got.stdout)


def decide(**environment):
    """(modules built with OpenMP, those that have parallel regions), or the complaint."""
    got = flags(**environment)
    if isinstance(got, str):
        return got
    modules, parallel = got
    assert all(("-fopenmp" in compiled) == ("-fopenmp" in linked) for compiled, linked in modules.values())
    return {name for name, (compiled, _) in modules.items() if "-fopenmp" in compiled}, set(parallel)


@pytest.fixture
def compiler(tmp_path):
    """Scripts that stand for a compiler: one that succeeds, and one that fails where it sees -fopenmp."""

    def script(name, body):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return {"with": script("with", "exit 0"), "without": script("without", 'case "$*" in *-fopenmp*) exit 1;; esac')}


@needs_sources
@pytest.mark.skipif(os.name != "posix", reason="the compiler is a shell script")
def test_openmp_where_it_is_found(compiler):
    """One module has all parallel loops: every other one calls its `for_each`."""
    with_openmp, parallel = decide(CC=compiler["with"])
    assert with_openmp == parallel == {"core.threads"}
    assert decide(CC=compiler["without"]) == (set(), parallel)
    assert decide(CC="/nowhere/cc") == (set(), parallel)


@pytest.mark.skipif(os.name != "posix", reason="the compiler is a shell script")
def test_openmp_by_wish(compiler):
    assert decide(CC=compiler["with"], KVFAST_OPENMP="0")[0] == set()
    with_openmp, parallel = decide(CC=compiler["with"], KVFAST_OPENMP="1")
    assert with_openmp == parallel
    for missing in (compiler["without"], "/nowhere/cc"):
        assert f"KVFAST_OPENMP=1, but this failed: {missing} -fopenmp" in decide(CC=missing, KVFAST_OPENMP="1")


def test_flags_of_ones_own_come_last():
    modules, _ = flags(KVFAST_OPENMP="0", KVFAST_CFLAGS="-O2 '-DNAME=two words'")
    for compiled, linked in modules.values():
        assert compiled[-2:] == linked == ["-O2", "-DNAME=two words"] and compiled.index("-O3") < compiled.index("-O2")
    assert all(compiled[-1] != "-O2" and linked == [] for compiled, linked in flags(KVFAST_OPENMP="0")[0].values())


@needs_sources
@needs_compiler
def test_modules_with_parallel_regions_are_listed():
    """One that is not would run serially, and nothing would say so."""
    sources = sorted((ROOT / "kvfast").rglob("*.pyx"))
    uses = {
        ".".join(path.relative_to(ROOT / "kvfast").with_suffix("").parts)
        for path in sources
        if "prange" in (text := path.read_text()) or "parallel(" in text or "omp.h" in text
    }
    assert uses == decide(KVFAST_OPENMP="0")[1]


@pytest.fixture(scope="module")
def setuptools():
    yield pytest.importorskip("setuptools")
    # Where it has put distutils, looking for pip, as other tests do, would warn.
    for name in [name for name in sys.modules if name.partition(".")[0] == "distutils"]:
        del sys.modules[name]


def test_modules_are_compiled_at_once_and_translated_one_by_one(monkeypatch, setuptools):
    cython = pytest.importorskip("Cython.Build")
    build_ext = importlib.import_module("setuptools.command.build_ext")
    translating, compiled, two = threading.Lock(), [], threading.Barrier(2)

    def translate(module, **_):
        assert translating.acquire(blocking=False), "Cython is at work for two modules"
        time.sleep(0.01)
        translating.release()
        return [setuptools.Extension(module.name, [f"{module.name}.c"])]

    def compile(_, module):
        two.wait(60)
        compiled.append(module.sources)

    def compile_one(sources, **options):
        two.wait(60)
        return [f"{source}.o {options}" for source in sources]

    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(cython, "cythonize", translate)
    monkeypatch.setattr(build_ext.build_ext, "build_extension", compile)
    monkeypatch.chdir(ROOT)
    modules = [setuptools.Extension(name, [f"{name}.pyx"]) for name in "abcd"]
    command = runpy.run_path("setup.py")["BuildExt"](setuptools.Distribution({"ext_modules": modules}))
    command.finalize_options()
    assert command.parallel == os.cpu_count()
    command.parallel, command.force = 2, True
    command.compiler = types.SimpleNamespace(
        compile=compile_one, _compile=None, compiler_so=[sys.executable, "-c", ""], include_dirs=[]
    )
    command.build_extensions()
    assert sorted(compiled) == [[f"{name}.c"] for name in "abcd"]
    # And so are the files of one module; their objects keep the order.
    assert command.compiler.compile(["d.c", "a.c"], debug=1) == ["d.c.o {'debug': 1}", "a.c.o {'debug': 1}"]


@pytest.fixture
def project(tmp_path, monkeypatch, setuptools, capsys):
    """A package of one module and one file of C, and what builds it in a folder that is new each time, as pip does."""
    pytest.importorskip("Cython.Build")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.chdir(tmp_path)
    for name in ("CFLAGS", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CCACHE_DISABLE", "1")  # it does not see that a new header hides another
    package = tmp_path / "kvfast"
    package.mkdir()
    (package / "value.h").write_text("#define VALUE 1\n")
    (package / "plain.c").write_text("#include <value.h>\nint kv_value(void) { return VALUE; }\n")
    (package / "part.pyx").write_text("def part():\n    return 1\n")
    builds = itertools.count()

    def build(*flags, force=False, include_dirs=("kvfast/first", "kvfast")):
        """The number of compiled files and the value that the module has."""
        sources, folder = ["kvfast/part.pyx", "kvfast/plain.c"], tmp_path / f"build-{next(builds)}"
        module = setuptools.Extension("part", sources, include_dirs=list(include_dirs), extra_compile_args=["-O0", *flags])
        command = runpy.run_path(str(ROOT / "setup.py"))["BuildExt"](setuptools.Distribution({"ext_modules": [module]}))
        command.build_lib, command.build_temp, command.force, command.verbose = str(folder), str(folder / "temp"), force, 1
        command.ensure_finalized()
        command.run()
        return ctypes.CDLL(str(next(folder.glob("part*")))).kv_value()

    def counted(*flags, **options):
        capsys.readouterr()
        value = build(*flags, **options)
        told = capsys.readouterr().out
        assert "[ 1/2] kvfast/" in told and "[ 2/2] kvfast/" in told
        return int(re.search(r"kvfast: (\d) files compiled", told)[1]), value

    return types.SimpleNamespace(package=package, build=build, counted=counted, objects=tmp_path / "build" / "objects")


@needs_compiler
def test_a_second_build_compiles_nothing(project):
    assert project.counted() == (2, 1)
    assert project.counted() == (0, 1)
    for name in ("value.h", "plain.c", "part.pyx"):  # dates say nothing
        os.utime(project.package / name)
    (project.package / "part.c").touch()
    assert project.counted() == (0, 1)
    assert project.counted(include_dirs=("kvfast/first", "kvfast", "empty")) == (0, 1)  # as that of another virtual environment
    assert project.counted(force=True)[1] == 1


@needs_compiler
def test_what_has_changed_is_compiled_again(project):
    project.counted()
    for value in (2, 1):  # with a date before the object's
        (project.package / "value.h").write_text(f"#define VALUE {value}\n")
        os.utime(project.package / "value.h", (1, 1))
        assert project.counted() == (1, value)
    assert project.counted("-DOTHER") == (2, 1)  # next to the objects with other flags
    assert project.counted() == project.counted("-DOTHER") == (0, 1)
    (project.package / "part.pyx").write_text("def part():\n    return 'another'\n")
    os.utime(project.package / "part.pyx", (1, 1))
    assert project.counted() == (1, 1) and "another" in (project.package / "part.c").read_text()
    (project.package / "first").mkdir()  # a header that hides another
    (project.package / "first" / "value.h").write_text("#define VALUE 3\n")
    os.utime(project.package / "first" / "value.h", (1, 1))
    assert project.counted() == (2, 3)
    assert project.counted() == (0, 3)


@needs_compiler
def test_damaged_and_lost_objects_are_compiled_again(project):
    project.counted()
    for damage in (lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink):
        for suffix in ("o", "json"):
            damage(next(project.objects.glob(f"plain-*.{suffix}")))
            assert project.counted() == (1, 1)
    written = project.package / "part.c"
    written.write_text(written.read_text()[:10_000])  # by a build that was killed
    assert project.counted() == (0, 1)  # Cython has written the same again


@needs_compiler
@pytest.mark.skipif(os.name != "posix", reason="builds do not wait for each other there")
def test_builds_at_once_wait_for_each_other(project, capsys):
    with ThreadPoolExecutor(2) as pool:
        assert [one.result() for one in [pool.submit(project.build) for _ in range(2)]] == [1, 1]
    assert sorted(re.findall(r"kvfast: (\d) files compiled", capsys.readouterr().out)) == ["0", "2"]


@pytest.mark.skipif(os.name != "posix", reason="the compiler is a shell script")
@pytest.mark.parametrize(
    "why", ["/nowhere/cc: No such file or directory", "probe.c:1:10: fatal error: Python.h: No such file or directory"]
)
def test_without_a_compiler_one_line_says_the_way_out(project, monkeypatch, tmp_path, why):
    script = tmp_path / "cc"
    script.write_text(f"#!/bin/sh\necho '{why}' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", "/nowhere/cc" if why.startswith("/nowhere") else str(script))
    with pytest.raises(SystemExit, match=f"this failed: {re.escape(why)}. Install a C compiler .*, or install a wheel [^\n]*$"):
        project.build()


@pytest.mark.skipif(os.name != "posix", reason="the compiler is a shell script")
def test_windows_takes_clang_and_no_openmp_unless_asked(monkeypatch, setuptools, compiler, tmp_path):
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "platform", "win32")
    for name in ("CC", "KVFAST_OPENMP"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    ours = runpy.run_path("setup.py")
    assert os.environ["CC"] == "clang"
    command = ours["BuildExt"](setuptools.Distribution({"ext_modules": [setuptools.Extension("a", ["a.c"])]}))
    command.finalize_options()
    assert command.compiler == "mingw32"

    monkeypatch.setenv("CC", compiler["with"])
    assert not runpy.run_path("setup.py")["OPENMP"]
    with pytest.raises(SystemExit, match="needs clang with mingw-w64.* says: $"):
        ours["check_compiler"]()
    monkeypatch.setenv("CC", "/nowhere/clang")
    with pytest.raises(SystemExit, match="No such file"):
        ours["check_compiler"]()
    clang = tmp_path / "clang-script"
    clang.write_text("#!/bin/sh\necho clang version 16\n")
    clang.chmod(0o755)
    monkeypatch.setenv("CC", str(clang))
    ours["check_compiler"]()
    monkeypatch.setenv("KVFAST_OPENMP", "1")
    assert runpy.run_path("setup.py")["OPENMP"]


def test_sdist_has_the_same_bytes(tmp_path, monkeypatch, setuptools):
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.chdir(ROOT)
    command = runpy.run_path("setup.py")["Sdist"](setuptools.Distribution())
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    archives = []
    for number, names in enumerate((("b", "a"), ("a", "b"))):
        folder = tmp_path / str(number)
        for name in names:  # made in another order, at another time, with another umask
            path = folder / "kvfast-1" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
            path.chmod(0o664 if number else 0o600)
            os.utime(path, (number, number))
        (folder / "kvfast-1" / "a").chmod(0o775 if number else 0o700)
        monkeypatch.chdir(folder)
        archives.append(Path(command.make_archive("dist/kvfast-1", "gztar", base_dir="kvfast-1")).read_bytes())
    assert archives[0] == archives[1]
    with tarfile.open(tmp_path / "0" / "dist" / "kvfast-1.tar.gz") as archive:
        found = {member.name: (member.mode, member.mtime, member.uid, member.uname) for member in archive}
    assert found["kvfast-1/a"] == (0o755, 1700000000, 0, "") and found["kvfast-1/b"] == (0o644, 1700000000, 0, "")


@pytest.fixture(scope="module")
def audit():
    return runpy.run_path(str(ROOT / "ci" / "audit_instructions.py"))


@pytest.mark.parametrize(
    ("code", "name", "need"),
    [
        ("0f28c1", "movaps", None),
        ("660f6fc1", "movdqa", None),
        ("f30fbcc1", "tzcnt", None),  # `rep bsf` to an older CPU
        ("f3480fb8c1", "popcnt", "popcnt"),
        ("f30fbdc1", "lzcnt", "lzcnt"),
        ("f20f7cc1", "haddps", "sse3"),
        ("660f3800c1", "pshufb", "map 0F 38 or 0F 3A"),
        ("66450f3800c1", "pshufb", "map 0F 38 or 0F 3A"),
        ("660f3a0fc108", "palignr", "map 0F 38 or 0F 3A"),
        ("c5f058c2", "vaddps", "vex"),
        ("c4e27d13c1", "vcvtph2ps", "vex"),
        ("c5f877", "vzeroupper", "vex"),
        ("c4e2f1f7c2", "shlx", "vex"),
        ("c5fb92c0", "kmovd", "evex"),
        ("62f17c4858c1", "vaddps", "evex"),
        ("62f27550508100040000", "vpdpbusd", "vnni"),
        ("c4e27550c2", "vpdpbusd", "vnni"),
        ("62f275488dc2", "vpermb", "vbmi"),
        ("c4e2735ec2", "tdpbssd", "amx"),
        ("c4e27849c0", "tilerelease", "amx"),
        ("62f2764852c2", "vdpbf16ps", "bfloat16"),
        ("62f57c4858c1", "vaddph", "vaddph"),
        ("0f01d0", "xgetbv", "xsave"),
        ("480fc70f", "cmpxchg16b", "cmpxchg16b"),
        ("d5f8af", "imul", "apx"),
        ("8f00", "pop", None),
        ("8fe97801c1", "blcs", "xop"),
    ],
)
def test_needs_of_an_instruction(audit, code, name, need):
    assert audit["needs"](bytes.fromhex(code), name) == need


@pytest.mark.parametrize(
    ("text", "need"),
    [
        ("ldp\tq1, q0, [x14]", None),
        ("cnt\tv0.8b, v0.8b", None),
        ("ldaxr\tw0, [x1]", None),
        ("stlr\tw0, [x1]", None),
        ("fcvtl\tv0.4s, v0.4h", None),
        ("fcvt\th0, s0", None),
        ("sqrdmulh\tv0.8h, v1.8h, v2.8h", None),
        ("umax\tv0.4s, v1.4s, v2.4s", None),
        ("sdot\tv7.4s, v1.16b, v5.4b[0]", "dotprod"),
        ("usdot\tv7.4s, v1.16b, v5.4b[0]", "i8mm"),
        ("sdot\tz7.s, z1.b, z5.b", "sve"),
        ("ld1w\t{z0.s}, p0/z, [x0]", "sve"),
        ("swpal\tw1, w0, [x0]", "lse"),
        ("ldaddal\tx1, x0, [x0]", "lse"),
        ("casb\tw1, w0, [x0]", "lse"),
        ("sqrdmlah\tv0.8h, v1.8h, v2.8h", "rdm"),
        ("fadd\tv0.8h, v1.8h, v2.8h", "fp16"),
        ("fmul\th0, h1, h2", "fp16"),
        ("bfdot\tv0.4s, v1.8h, v2.8h", "bf16"),
        ("ldapr\tw0, [x1]", "rcpc"),
        ("crc32b\tw0, w0, w1", "crc"),
        ("retaa", "pauth"),
        ("umax\tw0, w1, w2", "cssc"),
        ("cpyfp\t[x0]!, [x1]!, x2!", "mops"),
        ("fjcvtzs\tw0, d0", "later"),
    ],
)
def test_needs_of_an_arm_instruction(audit, text, need):
    assert audit["arm"].needs(text) == need


def test_tiers_of_symbols(audit):
    of = audit["tier_of"]
    regions = {"tile": "amx", "tiles_": "amx"}
    assert of("scores_int8_neon", {}) == "neon"
    assert of("scores_int8_neon_dotprod.part.0", {}) == "neon_dotprod"
    assert of("scores_int8_neon_i8mm", {}) == "neon_i8mm"
    assert of("scores_bfloat16_neon_bf16", {}) == "neon_bf16"
    assert of("encode_k_avx2", regions) == "avx2"
    assert of("encode_k_avx512_vnni.constprop.0.cold", regions) == "avx512_vnni"
    assert of("tile_avx512_vbmi.part.0", regions) == "amx"
    assert of("tiles_of_int8_avx512_vbmi", regions) == "amx"
    assert of("encode_avx512_vbmi", regions) == of("tile_avx512_vbmi_fast", regions) == "avx512_vbmi"
    assert of("tile_amx_fast", regions) == "amx"
    assert of("__pyx_pw_6kvfast_avx2_5quant", {}) is None


@needs_audit
@exhaustive
def test_no_instruction_stands_outside_its_tier(audit, capsys):
    assert not audit["main"]([]), capsys.readouterr().err
    told = capsys.readouterr().out
    for tier in kvfast.available_isas():
        assert tier in told


@needs_audit
@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="an attribute of x86-64")
def test_the_audit_finds_what_is_wrong(audit, tmp_path, capsys):
    """In the functions of every CPU, of another tier, and in a binary whose symbols are gone."""
    source = tmp_path / "leak.c"
    source.write_text('__attribute__((target("avx2"))) void NAME(float *x) { for (int i = 0; i < 64; i++) x[i] += 1; }')

    def built(name, *flags):
        library = tmp_path / f"{name}.so"
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", f"-DNAME={name}", *flags, str(source), "-o", str(library)], check=True)
        return str(library)

    assert not audit["main"]([built("add_avx2")])
    for wrong in (built("add"), built("add_sse2"), built("sum_avx2", "-s", "-fvisibility=hidden")):
        assert audit["main"]([wrong]), wrong
        assert "needs vex" in capsys.readouterr().err


@needs_audit
@pytest.mark.skipif(ARM_COMPILER is None, reason="no compiler for 64-bit ARM")
def test_the_audit_finds_what_is_wrong_on_arm(audit, tmp_path, capsys):
    source = tmp_path / "leak.c"
    source.write_text(
        "#include <arm_neon.h>\n"
        '__attribute__((target("arch=armv8.2-a+dotprod")))\n'
        "int32x4_t NAME(int32x4_t sum, int8x16_t a, int8x16_t b) { return vdotq_s32(sum, a, b); }"
    )

    def built(name):
        library = tmp_path / f"{name}.so"
        subprocess.run([ARM_COMPILER, "-O3", "-shared", "-fPIC", f"-DNAME={name}", str(source), "-o", str(library)], check=True)
        return str(library)

    assert not audit["main"]([built("add_neon_dotprod")])
    for wrong in (built("add"), built("add_neon")):
        assert audit["main"]([wrong]), wrong
        assert "needs dotprod" in capsys.readouterr().err


def tests_named(text):
    """Paths and patterns of tests in a script, and names of tests of these files."""
    for names in re.findall(r"tests/\*/test_\{([\w,\\\s]+)\}\.py", text):
        yield from ((f"tests/*/test_{name}.py", "") for name in re.sub(r"[\\\s]", "", names).split(","))
    yield from re.findall(r"(tests/[\w/]+\.py)(?:::(?:\w+::)*(\w+))?", text)


def test_scripts_name_tests_that_exist():
    scripts = [ROOT / ".ci" / "run", ROOT / "Makefile", ROOT / "pyproject.toml", *(ROOT / "ci").glob("*.sh")]
    named = {one for script in scripts for one in tests_named(script.read_text())}
    assert len(named) > 30
    for path, name in named:
        assert len(found := list(ROOT.glob(path))) == 1, path
        assert not name or re.search(rf"def {name}\b", found[0].read_text()), f"{path}::{name}"


@needs_sources
def test_a_wheel_holds_every_header_and_kernel():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    package = ROOT / "kvfast"
    own = {*package.rglob("*.h"), *package.glob("simd/**/*.c")}
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["kvfast"]
    assert not own - {path for pattern in patterns for path in package.glob(pattern)}


@needs_sources
def test_software_has_every_instruction_of_avx512():
    """ci/software_tiers.sh puts its functions in their place, and compiles with them only on machines without AVX-512."""
    software = (ROOT / "tests" / "support" / "software_avx512.h").read_text()
    used = {name for path in (ROOT / "kvfast" / "simd").rglob("*.[ch]") for name in re.findall(r"_mm512_(\w+)", path.read_text())}
    assert [name for name in sorted(used) if not re.search(rf"\b(software_)?{name}\b", software)] == []
