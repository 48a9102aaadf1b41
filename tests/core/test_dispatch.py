"""ISA tiers: which there are, and that one build holds them all."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from selection import parametrize

import kvfast
from kvfast.core.kernels import cpu_features

ARM = platform.machine() in ("aarch64", "arm64")
# Older processors that qemu knows, and the tier that they can run at best.
OLDER = {"cortex-a53": "neon", "neoverse-n1": "neon_dotprod"} if ARM else {"Nehalem": "sse2", "Haswell": "avx2"}

SMOKE = """
import numpy as np, kvfast
rng = np.random.default_rng(0)
k, q = rng.standard_normal((100, 2, 32)).astype("f4"), rng.standard_normal((3, 4, 32)).astype("f4")
print(kvfast.active_isa())
for dtype in ("float32", "float16", "bfloat16", "int8-plain", "int4-plain", "int8", "k8v4", "int4"):
    cache = kvfast.KVCache(1, 2, 32, dtype=dtype)
    cache.append(0, k, k)
    cache.advance(100)
    print(repr(cache.attend(0, q).astype(float).sum(axis=(0, 2)).round(3).tolist()))
"""


def test_tiers():
    tiers = kvfast.available_isas()
    assert tiers[-1] == "scalar" and kvfast.active_isa() in tiers
    if cpu_features().get("avx2"):
        assert "avx2" in tiers and "sse2" in tiers
    assert ("avx_vnni" in tiers) == cpu_features().get("avxvnni", False)  # gcc 11 and clang 13 know it
    if cpu_features().get("avx512bw"):
        assert "avx512" in tiers
    if cpu_features().get("avx512vnni"):
        assert "avx512_vnni" in tiers
        assert ("avx512_vbmi" in tiers) == cpu_features()["avx512vbmi"]
    assert ("neon" in tiers) == ARM
    assert ("neon_dotprod" in tiers) == cpu_features().get("dotprod", False)  # gcc and clang 16 know it
    assert ("neon_i8mm" in tiers) == cpu_features().get("i8mm", False)
    assert ("neon_bf16" in tiers) == (cpu_features().get("i8mm", False) and cpu_features().get("bf16", False))
    for feature in ("amx_int8", "amx_bf16"):
        assert (tiers[0] == "amx") == cpu_features().get(feature, False)


def test_use_isa():
    before = kvfast.active_isa()
    with kvfast.use_isa("scalar"):
        assert kvfast.active_isa() == "scalar"
    assert kvfast.active_isa() == before
    kvfast.use_isa("scalar")
    assert kvfast.active_isa() == "scalar"
    kvfast.use_isa(before)
    with pytest.raises(ValueError, match="unknown ISA tier 'mmx'"):
        kvfast.use_isa("mmx")
    assert kvfast.active_isa() == before


def test_show_config(capsys):
    kvfast.show_config()
    told = capsys.readouterr().out
    assert kvfast.active_isa() in told
    source = kvfast.config()["threads"]
    assert source == ("OpenMP" if kvfast.has_openmp() else "kvfast") and f"{kvfast.get_num_threads()} (of {source})" in told


def environment(**more):
    """The environment of a process that has this kvfast and this NumPy, in which both choose their instructions themselves."""
    paths = {Path(kvfast.__file__).parents[1], Path(np.__file__).parents[1]}
    kept = {name: value for name, value in os.environ.items() if name not in ("KVFAST_ISA", "OPENBLAS_CORETYPE")}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, paths)), **more}


def emulate(cpu, code, **more):
    """In a process on another processor. On ARM, ci/aarch64.sh has this one emulated, and its Python heeds QEMU_CPU."""
    python = [sys.executable] if ARM else ["qemu-x86_64", str(Path(sys.executable).resolve())]
    return subprocess.run(
        [*python, "-W", "ignore", "-c", code], env=environment(QEMU_CPU=cpu, **more), capture_output=True, text=True, check=False
    )


needs_qemu = pytest.mark.skipif(
    "QEMU_CPU" not in os.environ if ARM else shutil.which("qemu-x86_64") is None, reason="no emulation by qemu-user"
)


@needs_qemu
@pytest.mark.parametrize(("cpu", "tier"), OLDER.items())
def test_older_cpus(cpu, tier):
    """The same binary on CPUs without the newer instructions: the tier they have, the same results."""
    native = subprocess.run(
        [sys.executable, "-c", SMOKE], env={**environment(), "KVFAST_ISA": tier}, capture_output=True, text=True, check=True
    )
    old = emulate(cpu, SMOKE)
    assert old.returncode == 0, old.stderr[-2000:]
    assert native.stdout == old.stdout


@needs_qemu
@parametrize("tier", NEWER := [tier for tier in kvfast.available_isas() if tier not in (*OLDER.values(), "scalar")], usual=NEWER[:1])
def test_refused_by_older_cpus(tier):
    """A tier whose instructions a CPU lacks is not offered by it, and refused where it is asked for."""
    *_, newest = OLDER
    old = emulate(newest, "import kvfast", KVFAST_ISA=tier)
    assert old.returncode == 1
    can = "neon_dotprod, neon, scalar" if ARM else "avx2, sse2, scalar"
    assert f"this CPU cannot run the ISA tier '{tier}'; it can run {can}" in old.stderr
