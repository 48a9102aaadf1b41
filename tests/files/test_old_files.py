"""Files that versions before this one have written are read, with the numbers that were stored.

Run as a script before a release, this writes the files of its version.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvfast

pytest.importorskip("safetensors")

FOLDER = Path(__file__).parent.parent / "data" / "files"
TOKENS, PRESETS = 70, ["int8", "k8v4", "int4", "k4v3", "int3", "int2", "int8-rotated", "float16"]


def as_it_was(name):
    """A preset as 0.1.0 has it in these files: with fewer floats."""
    form = kvfast.KVFormat.of(name)
    newest = {"num_recent_float_tokens": 0} if name in ("int4", "k4v3") else {}
    return replace(form, num_first_float_tokens=min(4, form.num_first_float_tokens), **newest)


FORMATS = [as_it_was(name) for name in PRESETS]


def rows(first, *shape):
    """Rows that no version of NumPy makes otherwise."""
    return np.sin(0.7 * np.arange(first, first + np.prod(shape), dtype=np.float64)).astype(np.float32).reshape(shape)


def caches():
    """By the kind in the name of a file."""
    full = kvfast.KVCache(len(FORMATS), 1, 16, dtype=FORMATS)
    ring = kvfast.RingKVCache(2, 1, 16, 40, num_sink_tokens=4, dtype=["int8-rotated", as_it_was("int4")])
    for cache in (full, ring):
        for layer in range(cache.num_layers):
            cache.append(layer, rows(layer, TOKENS, 1, 16), rows(50 + layer, TOKENS, 1, 16))
        cache.advance(TOKENS)
    latent = kvfast.MLAKVCache(1, 32, 16, dtype="int4")
    latent.append(0, rows(0, TOKENS, 48))
    latent.advance(TOKENS)
    return {"full": full, "ring": ring, "latent": latent}


def outputs(cache, layer):
    """What queries read."""
    width = cache.latent_dim + cache.rope_dim if hasattr(cache, "latent_dim") else 16
    return cache.attend(layer, rows(5, 1, 2, width))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.kvfast")), ids=lambda path: path.name)
def test_a_file_of_a_version_is_read(path):
    version, kind = path.stem.rsplit("-", 1)
    expected, cache = caches()[kind], kvfast.load(path)
    assert len(cache) == TOKENS and repr(cache.dtype) == repr(expected.dtype), version
    for layer in range(expected.num_layers):
        np.testing.assert_allclose(outputs(cache, layer), outputs(expected, layer), atol=1e-6)
    more = rows(9, 30, 48) if kind == "latent" else rows(9, 30, 1, 16)
    for one in (cache, expected):  # and goes on
        for layer in range(expected.num_layers):
            one.append(layer, *[more] * (1 if kind == "latent" else 2))
        one.advance(30)
    for layer in range(expected.num_layers):
        np.testing.assert_allclose(outputs(cache, layer), outputs(expected, layer), atol=1e-6)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for kind, cache in caches().items():
        cache.save(FOLDER / f"{kvfast.__version__}-{kind}.kvfast")
