"""ik_llama.cpp: its ggml, a fork of llama.cpp's. It is on no registry, so KVFAST_IK_LLAMA names the folder of one that was built."""

import ctypes
import os
from functools import cache
from pathlib import Path

from contenders import Missing
from contenders.any_ggml import Library, contender

VARIABLE = "KVFAST_IK_LLAMA"


def find_library():
    """The file of a libggml, which lies in ggml/src of the folder that ik_llama.cpp was built in, with shared libraries."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        raise Missing(f"{VARIABLE} names no folder with its libggml")
    for suffix in (".so", ".dylib"):
        if (file := Path(folder).resolve() / f"libggml{suffix}").exists():
            return file
    raise Missing(f"there is no libggml in {folder}, which {VARIABLE} names")


@cache
def _ggml():
    return Library(ctypes.CDLL(str(find_library())), full_precision=1)


def version():
    return f"ik_llama.cpp built for {_ggml().features()}"


def Contender(work, name, storage):
    return contender(_ggml(), work, storage)
