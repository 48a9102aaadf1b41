"""The driver in C that holds kernels of other compilers and systems to recorded results; ci/windows.sh runs it on Windows."""

import importlib.util
import shutil
import struct
from pathlib import Path

import pytest

import kvfast

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
BEST, HEAD = kvfast.available_isas()[0], 64


@pytest.fixture(scope="module")
def vectors():
    spec = importlib.util.spec_from_file_location("kernel_vectors", Path(__file__).with_name("kernel_vectors.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def functions(vectors, tmp_path_factory):
    return vectors.library(tmp_path_factory.mktemp("vectors"))


@pytest.fixture(scope="module")
def recorded(vectors, functions, tmp_path_factory):
    """A function of tiers that returns a file of their results."""

    def record(*isas):
        path = tmp_path_factory.mktemp("recorded") / "vectors"
        vectors.record(functions, path, isas)
        return path

    return record


def failures(vectors, functions, isa, path):
    return functions.hold_vectors(vectors.table(isa), bytes(path))


def results_of(data):
    """(name, place of the bytes, number of them) of each result in a file of one tier."""
    at, found = HEAD, []
    while at < len(data):
        kind, *name, nbytes = data[at : at + HEAD].rstrip(b"\0").decode().split(" ")
        found.append((kind, " ".join(name), at + HEAD, int(nbytes)))
        at += HEAD + int(nbytes)
    return found


def test_a_tier_repeats_its_bits(vectors, functions, recorded, isa):
    assert failures(vectors, functions, isa, recorded(*kvfast.available_isas())) == 0


def test_tiers_agree_within_the_bounds(vectors, functions, recorded, isa):
    assert failures(vectors, functions, isa, recorded("scalar")) == 0


def test_each_changed_result_is_noticed(vectors, functions, recorded):
    """One bit of a result; a sine of the system may differ in the last one."""
    path = recorded(BEST)
    data = path.read_bytes()
    found = results_of(data)
    assert {"keys", "values", "scores", "accumulate", "accumulate_latent", "rotate", "nearest", "decode_codes"} <= {
        name for _, name, _, _ in found
    }
    for kind, _, at, nbytes in found[::23]:
        changed = bytearray(data)
        changed[at + nbytes - 1] ^= 0x40 if kind == "s" else 1
        path.write_bytes(changed)
        assert failures(vectors, functions, BEST, path) == 1
    path.write_bytes(data[:-1])
    assert failures(vectors, functions, BEST, path) == 1


@pytest.mark.skipif(len(kvfast.available_isas()) == 1, reason="this processor has the scalar tier only")
def test_bounds_of_tiers_are_kept(vectors, functions, recorded):
    """A float that is further off than tiers may be."""
    path = recorded("scalar")
    data = bytearray(path.read_bytes())
    at, nbytes = next((at, nbytes) for _, name, at, nbytes in results_of(data) if name == "accumulate")
    floats = list(struct.unpack_from(f"<{nbytes // 4}f", data, at))
    floats[5] += 1e-3 * max(map(abs, floats))
    struct.pack_into(f"<{nbytes // 4}f", data, at, *floats)
    path.write_bytes(data)
    assert failures(vectors, functions, BEST, path) == 1


def test_a_file_without_results_is_refused(vectors, functions, tmp_path):
    (tmp_path / "empty").touch()
    for name in ("empty", "missing"):
        assert failures(vectors, functions, BEST, tmp_path / name) == 1
