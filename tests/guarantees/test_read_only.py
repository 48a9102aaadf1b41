"""Nothing that is given out leads back into a cache: read-only arrays stay so, and what may be written is a copy."""

import gc
import inspect

import numpy as np
import pytest
from cache_kinds import DIM, HEADS, KINDS, LAYERS, fill, filled, make, tokens

import kvfast
from kvfast.caches.multi_head import MultiHeadConfig

DTYPES = ["float32", "float16", "int8", "int4", kvfast.KVFormat("int4/float32", centring=True, num_first_float_tokens=4)]


def arrays_in(value, path):
    """(path, array) of every array in what a call returned."""
    if isinstance(value, np.ndarray):
        yield path, value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from arrays_in(one, f"{path}[{name!r}]")
    elif isinstance(value, (list, tuple)):
        for i, one in enumerate(value):
            yield from arrays_in(one, f"{path}[{i}]")


def given_out(thing):
    """(path, array) of all properties, and of all methods that need nothing but a layer."""
    for name in dir(thing):
        if name.startswith("_") or name in ("advance", "clear", "fork", "free", "to_cache"):
            continue
        if name == "states_at" and not thing.checkpoints:  # which then raises
            continue
        member = getattr(thing, name)
        if callable(member):
            parameters = inspect.signature(member).parameters.values()
            needed = [
                one.name for one in parameters if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
            ]
            if needed not in ([], ["layer"]):
                continue
            member = member(*[0] * len(needed))
        yield from arrays_in(member, f"{type(thing).__name__}.{name}")


def things(tmp_path):
    """Everything public that holds tokens."""
    rng, ids = np.random.default_rng(0), np.arange(100)
    for dtype in DTYPES:
        for kind in KINDS:
            cache = fill(make(kind, dtype), rng, 100)
            yield cache
            yield cache.snapshot(ids[: len(cache)])
    cache = fill(kvfast.KVCache(LAYERS, HEADS, DIM, 200, dtype="float32"), rng, 100)
    cache.save(tmp_path / "one", ids)
    for mmap in (False, True):
        yield kvfast.load(tmp_path / "one", mmap=mmap)
        yield kvfast.Snapshot.load(tmp_path / "one", mmap=mmap)
    for method in (kvfast.Hybrid(8), kvfast.LowRank(4), kvfast.Quantize(), kvfast.VectorQuantization(4, 4)):
        compressed = kvfast.KVCacheCompressor(method).compress_cache(cache, 0)
        yield compressed
        yield kvfast.PrefixKVCache([compressed] * LAYERS)
    latent = filled(kvfast.MLAKVCache(1, 32, 8, 200, dtype="float32"), rng.standard_normal((100, 40), np.float32))
    yield latent
    hybrid = fill(kvfast.KVCache(LAYERS, HEADS, DIM, max_state_bytes=1 << 20), rng, 100)
    hybrid.add_checkpoint({"recurrent": rng.standard_normal((3, 5))})
    hybrid.save(tmp_path / "hybrid")
    yield hybrid
    yield hybrid.snapshot()
    yield kvfast.load(tmp_path / "hybrid")
    heads = kvfast.MultiHeadKVCache(HEADS, MultiHeadConfig(DIM))
    for k, v in zip(*tokens(rng, 20)):
        heads.push_token(k, v)
    yield heads
    yield heads.head(0)


def seen(thing):
    """All that is given out, as bytes."""
    return {path: array.tobytes() for path, array in given_out(thing)}


def test_writing_to_results_changes_no_cache(tmp_path):
    names = set()
    for thing in things(tmp_path):
        before = seen(thing)
        for path, array in given_out(thing):
            names.add(path.partition("[")[0])
            if not array.flags.writeable:
                with pytest.raises(ValueError, match="WRITEABLE"):
                    array.flags.writeable = True
                base = array
                while (base := getattr(base, "base", None)) is not None:
                    assert memoryview(base).readonly, path
            else:
                array[...] = 1
        assert seen(thing) == before, thing
    assert {"KVCache.k", "KVCache.state_dict", "Snapshot.token_ids", "CompressedKV.decode", "MultiHeadKVCache.k"} <= names


def test_a_view_keeps_its_memory_and_sees_what_is_appended():
    cache = kvfast.KVCache(1, 2, 32, 64, dtype="float32")
    cache.append(0, *np.ones((2, 3, 2, 32), np.float32))
    view = cache.k(0)
    assert np.shares_memory(view, cache.k(0))
    del cache
    gc.collect()
    assert (view == 1).all()
