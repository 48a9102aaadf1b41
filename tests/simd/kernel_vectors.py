"""python tests/simd/kernel_vectors.py FILE: records what the kernels of this kvfast compute, each tier that the processor has.

`kernel_vectors.c` computes, and holds other builds to it.
"""

import ctypes
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import kvfast
from kvfast.core import kernels

SOURCE = Path(__file__).with_suffix(".c")


def library(folder):
    """`kernel_vectors.c`, compiled into a folder."""
    compiler, path = shlex.split(os.environ.get("CC", "cc")), Path(folder, "kernel_vectors.so")
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-DKV_NO_MAIN", f"-I{kvfast.get_include()}"]
    subprocess.run([*compiler, *flags, str(SOURCE), "-o", str(path), "-lm"], check=True)
    return ctypes.CDLL(str(path))


def table(isa):
    """The address of a tier's table of kernels."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = kernels.__pyx_capi__["active"]
    active = ctypes.CFUNCTYPE(ctypes.c_void_p)(pointer(capsule, b"kv_kernels const *(void)"))
    with kvfast.use_isa(isa):
        return ctypes.c_void_p(active())


def record(functions, path, isas=None):
    """Write the results of tiers to a new file, by default of all, the best first."""
    Path(path).unlink(missing_ok=True)
    for isa in isas or kvfast.available_isas():
        if functions.record_vectors(table(isa), os.fsencode(path)):
            raise OSError(f"cannot write to {path}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        record(library(folder), sys.argv[1])
