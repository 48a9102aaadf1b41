"""Crafted GGUF files: every count and length is checked against the file before what it counts is read."""

import runpy
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvfast

pytest.importorskip("gguf")

from kvfast.planning.gguf_file import GGUFFile, ModelFileError

TINY = runpy.run_path(str(Path(__file__).parents[1] / "data" / "tiny_gguf.py"))
UINT8, UINT32, TEXT, ARRAY, UINT64 = 0, 4, 8, 9, 10


def text(value):
    return struct.pack("<Q", len(value)) + value


def head(tensors=0, keys=1):
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys)


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def array(kind, count, items=b""):
    return struct.pack("<IQ", kind, count) + items


ROOM = bytes(3_000_000)
CRAFTED = {
    "a count of 2**62 numbers": head() + key(b"a", ARRAY, array(UINT8, 1 << 62)) + ROOM,
    "more numbers than bytes": head() + key(b"a", ARRAY, array(UINT64, len(ROOM) // 4)) + ROOM,
    "a count of 2**62 texts": head() + key(b"a", ARRAY, array(TEXT, 1 << 62)) + ROOM,
    "texts, the last too long": head() + key(b"a", ARRAY, array(TEXT, 3, text(b"") * 2 + struct.pack("<Q", 1 << 63))) + ROOM,
    "an array in an array": head() + key(b"a", ARRAY, array(ARRAY, 1, array(UINT8, 1, b"1"))) + ROOM,
    "arrays in arrays, deeply": head() + key(b"a", ARRAY, array(ARRAY, 1) * 200_000) + ROOM,
    "an array of an unknown kind": head() + key(b"a", ARRAY, array(99, 1, b"1")) + ROOM,
    "a text of 2**63 bytes": head() + key(b"a", TEXT, struct.pack("<Q", 1 << 63)) + ROOM,
    "a name of 2**63 bytes": head() + struct.pack("<Q", 1 << 63) + ROOM,
    "2**62 keys": head(0, 1 << 62) + ROOM,
    "as many keys as fit": head(0, 150_000) + b"".join(key(b"%06d" % i, UINT8, b"1") for i in range(150_000)),
    "2**62 tensors": head(1 << 62, 0) + ROOM,
    "as many tensors as fit": head(100_000, 0) + b"".join(text(b"%06d" % i) + struct.pack("<IQIQ", 1, 0, 0, 0) for i in range(100_000)),
    "2**32 - 1 dimensions": head(1, 0) + text(b"t") + struct.pack("<I", (1 << 32) - 1) + ROOM,
    "dimensions whose product wraps": head(1, 0) + text(b"t") + struct.pack("<IQQIQ", 2, 1 << 32, 1 << 32, 0, 0) + ROOM,
    "a tensor after the end": head(1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 1 << 40, 0, 0) + ROOM,
    "a tensor that begins after the end": head(1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 8, 0, (1 << 64) - 64) + ROOM,
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_files_are_refused_at_once(name, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(CRAFTED[name])
    begin = time.process_time()
    with pytest.raises(ModelFileError, match="damaged"):
        GGUFFile(path)
    with pytest.raises(ValueError, match="damaged"):
        kvfast.plan(path)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize("value", [array(UINT8, len(ROOM), ROOM), array(TEXT, len(ROOM) // 8, ROOM)], ids=["numbers", "texts"])
def test_long_arrays_cost_no_more_than_their_bytes(value, tmp_path):
    """They may be those of a model."""
    path = tmp_path / "model.gguf"
    path.write_bytes(head(0, 2) + key(b"general.architecture", TEXT, text(b"llama")) + key(b"a", ARRAY, value))
    code = (
        "import resource; from kvfast.planning.gguf_file import GGUFFile\n"
        "used = lambda: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"  # the most so far
        f"used(); file = GGUFFile({str(path)!r}); used(); len(file.get('a')); used()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    before, opened, read = map(int, done.stdout.split())
    per_kib = 1 if sys.platform == "linux" else 1024
    assert (opened - before) / per_kib < 60_000 and (read - before) / per_kib < 120_000


def test_a_model_is_read_as_before(tmp_path):
    path = tmp_path / "model.gguf"
    TINY["write_model"](path, metadata={"some.floats": [1.5, -2.0], "some.flags": [True, False]})
    file = GGUFFile(path)
    assert file.get("tokenizer.ggml.tokens") == TINY["TOKENS"] and file.get("tokenizer.ggml.token_type")[-1] == 3
    assert file.get("some.floats") == [1.5, -2.0] and file.get("some.flags") == [True, False]
    assert all(type(one) is int for one in file.items("tokenizer.ggml.token_type", int))
