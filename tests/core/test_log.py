"""KVFAST_LOG: slow paths are told once, in a process of its own as the variable is read at import."""

import os
import subprocess
import sys

import pytest

import kvfast

START = """
import logging, os, numpy as np, kvfast
def cache(dim=64, dtype="int8", length=64, heads=2, num_threads=1, **settings):
    one = kvfast.KVCache(1, heads, dim, dtype=dtype, **settings)
    one.append(0, *np.ones((2, length, heads, dim), np.float32))
    one.advance(length)
    for _ in range(3):
        one.attend(0, np.ones((1, 2 * heads, dim), np.float32), num_threads=num_threads)
    return one
"""
# What a machine without AVX-512 VNNI or I8MM says of itself.
BEST = kvfast.available_isas()[0].startswith(("avx512_v", "amx", "neon_bf16", "neon_i8mm"))


def lines(code, **environment):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVFAST_")} | environment
    done = subprocess.run([sys.executable, "-c", START + code], env=environment, capture_output=True, text=True, check=True)
    return [line for line in done.stderr.splitlines() if BEST or "the tier is" not in line]


def test_each_kind_once():
    code = "cache(100); cache(108); cache(20); x = np.ones((5, 2, 128), np.float32)[:, :, ::2]; cache().append(0, x, x)"
    told = lines(code, KVFAST_LOG="1")
    assert [line.split(":")[0] for line in told] == ["kvfast"] * 4
    assert [sum(words in line for line in told) for words in ("25 for each", "100 is stored as 112", "of keys", "of values")] == [1] * 4
    assert lines(code) == lines(code, KVFAST_LOG="0") == []


def test_fast_paths_are_not_logged():
    code = (
        "one = cache(80); cache(96, 'int4'); cache(128, 'float16', block_size=16); q = np.ones((1, 4, 160), np.float16)[:, :, ::2]\n"
        "one.attend(0, q); one.append(0, *np.ones((2, 1, 2, 80), np.float16))\n"
        "one.write(0, np.ones((1, 640), np.float32), cos=np.ones((99, 40)), sin=np.ones((99, 40)), interleaved=True)\n"
    )
    assert lines(code, KVFAST_LOG="1") == []


def test_tier():
    slower = {"avx512", "avx_vnni", "avx2", "sse2", "neon_dotprod", "neon", "scalar"}
    for isa in set(kvfast.available_isas()) & slower - {kvfast.available_isas()[0]}:
        (told,) = lines("cache()", KVFAST_LOG="1", KVFAST_ISA=isa)
        assert f"the tier {isa} was asked for" in told and kvfast.available_isas()[0] in told


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fork():
    """A child has threads as its parent does, and there is nothing to tell."""
    code = (
        "one = cache(64, 'int8', 20000, num_threads=2)\n"
        "if os.fork() == 0:\n"
        "    one.attend(0, np.ones((1, 4, 64), np.float32), num_threads=2)\n"
        "    assert one.explain(0, num_threads=2).num_threads == 2\n"
        "    os._exit(0)\n"
        "assert os.wait()[1] == 0\n"
    )
    assert lines(code, KVFAST_LOG="1") == []


def test_handlers_of_an_application():
    code = "logging.basicConfig(format='app %(name)s %(levelname)s %(message)s'); cache(20, 'float16')"
    (told,) = lines(code, KVFAST_LOG="1")
    assert told.startswith("app kvfast WARNING head_dim 20")
