"""Bits depend neither on what the program does with denormals nor on how it rounds, and no call changes that."""

import contextlib
import ctypes
import ctypes.util
import platform
import sys

import numpy as np
import pytest
from cache_kinds import FORMATS, filled
from selection import parametrize

import kvfast

# Where the modes of vectors are in C's fenv_t, their word when denormals count as zero, and when numbers are rounded up besides.
MODES = {"x86_64": (28, 0x9FC0, 0xDFC0), "aarch64": (0, 1 << 24, 1 << 24 | 1 << 22)}
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.machine() not in MODES, reason="needs the fenv_t of Linux on x86-64 or 64-bit ARM"
)


@pytest.fixture(autouse=True)
def default_threads():
    yield
    kvfast.set_num_threads(None)


def mode():
    """This thread's fenv_t, and its word of modes."""
    environment = (ctypes.c_uint32 * 8)()
    ctypes.CDLL(ctypes.util.find_library("m")).fegetenv(environment)
    return environment, environment[MODES[platform.machine()][0] // 4] & ~0x3F


@contextlib.contextmanager
def set_mode(word):
    """As torch.set_flush_denormal does. Threads that begin meanwhile take it over."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    before, _ = mode()
    changed = type(before)(*before)
    changed[MODES[platform.machine()][0] // 4] = word
    libm.fesetenv(changed)
    try:
        yield
        assert mode()[1] == word, "a call changed the mode"
    finally:
        libm.fesetenv(before)


def bits(dtype, k, v, q, num_threads):
    kvfast.set_num_threads(num_threads)
    cache = filled(kvfast.KVCache(1, k.shape[1], k.shape[2], dtype=dtype), k, v)
    outputs = [cache.attend(0, q[:n], return_lse=True) for n in (1, 16, 64)]
    return [*cache.state_dict().values(), cache.k(0), cache.v(0), *(one for pair in outputs for one in pair)]


@parametrize("name", list(FORMATS), ["float32", "float16", "int8", "int4", "k8v4", "int3", "int2"])
def test_any_mode_gives_the_same_bits(isa, rng, name):
    for size in (1e-5, 1e-20, 1e-38):
        k, v = rng.standard_normal((2, 300, 2, 64)).astype(np.float32) * np.float32(size)
        q = rng.standard_normal((64, 8, 64)).astype(np.float32)
        expected = bits(FORMATS[name], k, v, q, 1)
        for word in MODES[platform.machine()][1:]:
            for num_threads in (1, 8):
                with set_mode(word):
                    got = bits(FORMATS[name], k, v, q, num_threads)
                assert all(np.array_equal(one, other) for one, other in zip(got, expected, strict=True)), (size, word, num_threads)


def test_few_codes_and_projections(rng):
    rows = rng.standard_normal((3000, 4, 64)).astype(np.float32) * np.float32(1e-38)

    def results():
        codes, scales = kvfast.quantize(rows, 4)
        qkv = kvfast.split_qkv_norm_rope(rows.reshape(3000, 256), 2, 1, 64, q_norm=np.ones(64, np.float32))
        return [codes, scales, kvfast.dequantize(codes, scales, head_dim=64), *qkv]

    expected = results()
    with set_mode(MODES[platform.machine()][1]):
        assert all(np.array_equal(one, other) for one, other in zip(results(), expected, strict=True))
