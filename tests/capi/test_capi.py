"""`kvfast.h` and `capi.pxd`: what is compiled against an installed kvfast runs as Python does."""

import gc
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from cache_kinds import filled
from in_threads import meanwhile
from selection import exhaustive

import kvfast
from kvfast.caches.buffer_layout import buffer_layout
from kvfast.caches.multi_head import MultiHeadConfig
from kvfast.engines.llama_cpp import building

ROOT = Path(__file__).parents[2]
OK, INVALID, SHAPE, NOT_FINITE, FULL, BUSY, NO_MEMORY, NO_LAYER = range(0, -8, -1)


@pytest.fixture(scope="module")
def runtimes(extension):
    """(runtime_in_c, runtime_in_cython)"""
    return extension("runtime_in_c"), extension("runtime_in_cython")


@exhaustive
def test_the_wheel_has_all_that_is_needed(installed):
    package = installed / "kvfast"
    names = {str(path.relative_to(package)) for path in package.rglob("*.*")}
    assert {"kvfast.h", "capi.pxd", "__init__.pxd", "core/kernels.pxd", "simd/kernels.h", "py.typed"} <= names
    compiled = {name.partition(".")[0] for name in names if name.endswith(".so")}
    if (sources := ROOT / "kvfast").is_dir():
        found = {
            suffix: {path.relative_to(sources) for path in sources.rglob(f"*.{suffix}")} for suffix in ("pyx", "py", "pyi", "pxd", "h")
        }
        assert compiled == {"core/memoryviews", *(str(path.with_suffix("")) for path in found.pop("pyx"))}
        assert {str(path) for paths in found.values() for path in paths} <= names
    # The backend of ggml is compiled where it is used.
    needed = {str(path.relative_to(Path(building.__file__).parents[1])) for path in building.UNITS}
    assert {name for name in names if name.endswith((".pyx", ".c"))} == needed
    code = "import kvfast, os; print(os.path.samefile(os.path.dirname(kvfast.__file__), kvfast.get_include()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(installed)},
        cwd=installed,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "True"


def test_the_blocks_of_the_guide_compile(installed, tmp_path):
    if not (page := ROOT / "docs" / "guide" / "native.md").exists():
        pytest.skip("the docs are not here")
    if shutil.which("cc") is None:
        pytest.skip("no compiler")
    include, *body = "\n".join(re.findall(r"^```c\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)).split("\n")
    given = "PyObject *python_cache, PyObject *python_pool, int layer, float *keys, float *values, float *queries, float *output"
    body = "\n".join(body)
    assert body.count("kvfast->") > 10
    (tmp_path / "guide.c").write_text(f"{include}\n#include <stdio.h>\nvoid guide({given}) {{\n{body}\n}}\n")
    folders = [f"-I{installed / 'kvfast'}", f"-I{sysconfig.get_path('include')}"]
    done = subprocess.run(
        ["cc", "-fsyntax-only", "-Wall", "-Werror", *folders, tmp_path / "guide.c"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def caches():
    return {
        "int4": lambda: kvfast.KVCache(2, 2, 64, max_seq_len=512),
        "int4, growing": lambda: kvfast.KVCache(2, 2, 64),
        "int8": lambda: kvfast.KVCache(2, 2, 64, 512, "int8"),
        "float32": lambda: kvfast.KVCache(2, 2, 64, 512, "float32"),
        "mixed": lambda: kvfast.KVCache(2, 2, 64, 512, ["int4", "k8v4"]),
        "ring": lambda: kvfast.RingKVCache(2, 2, 64, sliding_window=40, num_sink_tokens=4, rollback=8),
        "ring with a global layer": lambda: kvfast.RingKVCache(2, 2, 64, sliding_window=[40, None], dtype="int8"),
        "paged": lambda: kvfast.PagedKVCache(2, 2, 64, num_blocks=32).new_sequence(),
        "narrower values": lambda: kvfast.KVCache(2, 2, 64, 512, v_head_dim=40),
        "wider values": lambda: kvfast.RingKVCache(2, 2, 64, 400, dtype="int8", v_head_dim=80),
        "paged with a window": lambda: kvfast.PagedKVCache(2, 2, 64, num_blocks=8, sliding_window=40, rollback=8).new_sequence(),
        "latent": lambda: kvfast.MLAKVCache(2, 48, 16, 512),
        "latent without a rotary part": lambda: kvfast.MLAKVCache(2, 64, 0, 512, "int4"),
    }


def python_run(cache, k, v, q, out, chunk):
    for t in range(0, k.shape[1], chunk):
        step = slice(t, t + chunk)
        for layer in range(len(k)):
            if v is None:
                cache.append(layer, k[layer, step, 0])
            else:
                cache.append(layer, k[layer, step], v[layer, step])
            cache.attend(layer, q[layer, step], out=out[layer, step])
        cache.advance(len(k[0, step]))


@pytest.mark.parametrize("kind", caches())
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_c_runs_as_python(runtimes, rng, kind, chunk):
    latent = kind.startswith("latent")
    k = rng.standard_normal((2, 300, 1 if latent else 2, 64), dtype=np.float32)
    ours, theirs = caches()[kind](), caches()[kind]()
    v = None if latent else rng.standard_normal((2, 300, 2, ours.v_head_dim), dtype=np.float32)
    q = rng.standard_normal((2, 300, 6, 64), dtype=np.float32)
    out = np.zeros((2, 300, 6, ours.v_head_dim), np.float32)
    expected = np.zeros_like(out)
    python_run(theirs, k, v, q, expected, chunk)
    assert runtimes[0].run(ours, k, v, q, out, chunk) == (OK, "", 300)
    assert np.array_equal(out, expected)
    assert ours.snapshot() == theirs.snapshot()


@pytest.mark.parametrize("paged", [False, True])
def test_a_spliced_cache_runs_in_c(runtimes, rng, paged):
    k, v, q = (rng.standard_normal((1, 40, 2, 32), dtype=np.float32) for _ in range(3))
    caches, outs = [], []
    for run in (python_run, lambda *given: runtimes[0].run(*given)):
        pool = kvfast.PagedKVCache(1, 2, 32, num_blocks=20, dtype="int8")
        cache, chunk = pool.new_sequence() if paged else kvfast.KVCache(1, 2, 32, 200, "int8"), kvfast.KVCache(1, 2, 32, dtype="int8")
        filled(chunk, k[0, :30], v[0, :30])
        cache.splice(chunk, chunk, rope=kvfast.Rope())
        caches.append(cache)
        outs.append(np.zeros((1, 40, 2, 32), np.float32))
        told = run(cache, k, v, q, outs[-1], 1)
    assert told == (OK, "", 100)
    assert np.array_equal(*outs)
    assert caches[0].snapshot() == caches[1].snapshot()


def test_snapshots_stay_as_they_were(runtimes, rng):
    k, v, q = (rng.standard_normal((1, 40, 2, 32), dtype=np.float32) for _ in range(3))
    cache, out = kvfast.KVCache(1, 2, 32, 200, "int8"), np.empty((1, 40, 2, 32), np.float32)
    assert runtimes[0].run(cache, k, v, q, out, 1)[0] == OK
    snapshot, before = cache.snapshot(), cache.k(0)
    assert runtimes[0].run(cache, k, v, q, out, 1)[0] == OK
    cache.truncate(20)
    assert runtimes[0].run(cache, k, v, q, out, 1)[0] == OK
    assert np.array_equal(kvfast.load(snapshot).k(0), before)


def test_what_cannot_be_opened(runtimes):
    for cache in (None, kvfast.PagedKVCache(1, 2, 64, num_blocks=4), kvfast.MultiHeadKVCache(2, MultiHeadConfig(head_dim=64))):
        with pytest.raises(TypeError, match="must be a KVCache, RingKVCache, MLAKVCache or Sequence"):
            runtimes[1].Layer(cache, 0)
    with pytest.raises(ValueError, match="a ring with a rope"):
        runtimes[1].Layer(kvfast.RingKVCache(1, 2, 64, sliding_window=16, rope=kvfast.Rope()), 0)


def test_a_pool_in_memory_of_c(runtimes, rng):
    layout = buffer_layout(2, 2, 64, 4, 16, "int8-rotated")
    memory = np.full(2 * layout.nbytes + 128, 255, np.uint8)
    start, gap = -memory.ctypes.data % 64, 64
    memory = memory[start : start + 2 * 4 * (layout.block_nbytes[0] + gap)]
    references = sys.getrefcount(memory)
    nbytes, pool = runtimes[0].pool_over(memory, 2, 2, 64, 4, 16, b"int8-rotated", layout.block_nbytes[0] + gap)
    assert nbytes == layout.block_nbytes[0] and sys.getrefcount(memory) > references
    k, v = rng.standard_normal((2, 40, 2, 64), np.float32)
    own = kvfast.PagedKVCache(2, 2, 64, 4, 16, "int8-rotated")
    for one in (pool, own):
        one.append_batch(1, k, v, np.arange(40))
    q = rng.standard_normal((1, 4, 64), np.float32)
    first, second = (one.attend_batch(1, q, block_table=[[0, 1, 2]], seq_lens=[40]) for one in (pool, own))
    assert np.array_equal(first, second)
    blocks = memory.reshape(8, -1)
    assert (blocks[:, nbytes:] == 255).all() and (blocks[:4] == 255).all() and not (blocks[4:7, :nbytes] == 255).all(1).any()
    del pool
    assert sys.getrefcount(memory) == references
    for arguments, message in [
        ((memory, 2, 2, 64, 4, 24, b"int8-rotated", 0), "block_size must be"),
        ((memory, 2, 2, 64, 4, 16, b"int8-rotated", 64), "must not overlap"),
        ((memory, 2, 2, 64, 4, 16, b"int8-rotated", nbytes + 4), "aligned to 64 bytes"),
        ((None, 2, 2, 64, 4, 16, b"int8-rotated", 0), "layers.0. must not be NULL"),
    ]:
        with pytest.raises(ValueError, match=message):
            runtimes[0].pool_over(*arguments)
    assert sys.getrefcount(memory) == references


def test_a_freed_sequence_and_a_cache_in_use(runtimes, rng):
    pool = kvfast.PagedKVCache(1, 2, 64, num_blocks=4)
    sequence, rows = pool.new_sequence(), rng.standard_normal((1, 2, 64), dtype=np.float32)
    layer = runtimes[1].Layer(sequence, 0)
    layer.step(rows, rows, rows, np.empty_like(rows))
    sequence.free()
    with pytest.raises(ValueError, match="-1: this sequence has been freed"):
        layer.step(rows, rows, rows, np.empty_like(rows))


def test_a_cache_in_use_says_so(runtimes, rng):
    cache, k = kvfast.KVCache(1, 2, 64, 8192, "float32"), rng.standard_normal((8192, 2, 64), dtype=np.float32)
    filled(cache, k[:8000], k[:8000])
    seen = set()

    def change():
        try:
            cache.append(0, k[8000:], k[8000:])
            cache.truncate(8000)
        except RuntimeError as error:
            seen.add(str(error))

    with meanwhile(change):
        while not seen:
            seen |= {runtimes[0].nanoseconds(cache, 2, 64, 1)[0]} - {OK}
    assert seen <= {BUSY, "this cache is in use by another thread; a thread that changes it must be alone"}
    assert runtimes[0].nanoseconds(cache, 2, 64, 1)[0] == OK


def test_reading_goes_with_reading(runtimes, rng):
    cache, k = kvfast.KVCache(1, 2, 64, 2048, "float32"), rng.standard_normal((2048, 2, 64), dtype=np.float32)
    cache.append(0, k, k)
    expected = cache.attend(0, k[:64], num_threads=1)

    def attend():
        assert np.array_equal(cache.attend(0, k[:64], num_threads=1), expected)

    with meanwhile(attend):
        seen = {runtimes[0].nanoseconds(cache, 2, 64, 1)[0] for _ in range(200)}
    assert seen == {OK}


def test_cython_runs_as_python(runtimes, rng):
    cache, other = kvfast.KVCache(1, 2, 64), kvfast.KVCache(1, 2, 64)
    layer = runtimes[1].Layer(cache, 0)
    fused = rng.standard_normal((50, 10, 64), dtype=np.float32)
    q, k, v = fused[:, :6], fused[:, 6:8], fused[:, 8:]
    for t in range(50):
        step, out, lse = slice(t, t + 1), np.empty((1, 6, 64), np.float32), np.empty((1, 6), np.float32)
        layer.step(k[step], v[step], q[step], out, 20.0, lse)
        other.append(0, k[step], v[step])
        expected, sums = other.attend(0, q[step], softcap=20.0, return_lse=True)
        assert np.array_equal(out, expected) and np.array_equal(lse, sums)
    assert len(layer) == 50
    with pytest.raises(ValueError, match=r"-2: k must have shape \(num_tokens, 2, 64\), got \(1, 3, 64\)"):
        layer.step(q[:1, :3], v[:1], q[:1], np.empty((1, 6, 64), np.float32))


@pytest.mark.parametrize("n", [1, 3, 90])
def test_chunks_spans_and_trees(runtimes, rng, n):
    k, v = rng.standard_normal((2, 100, 2, 64), dtype=np.float32)
    q, out = rng.standard_normal((n, 6, 64), dtype=np.float32), np.empty((n, 6, 64), np.float32)
    spans = np.array([(2, 40), (95, 100)], np.intp)
    for cache in (kvfast.KVCache(1, 2, 64), kvfast.KVCache(1, 2, 64, dtype="int8")):
        cache.append(0, k, v)
        layer, causal = runtimes[1].Layer(cache, 0), cache.attend(0, q)
        for chunk, given, clamp in ((32, None, False), (0, spans, False), (64, spans, False), (64, spans, True)):
            layer.attend(q, out, chunk, given, clamp=clamp)
            expected = cache.attend(0, q, attention_chunk_size=chunk or None, spans=given, clamp_spans=clamp)
            assert np.array_equal(out, expected) and not (np.array_equal(out, causal) and n > 1)
        tree = np.arange(n) // 2 - 1
        layer.attend(q, out, tree_parents=tree[:64])
        assert np.array_equal(out, cache.attend(0, q, tree_parents=tree[:64]))
    rows = kvfast.MLAKVCache(1, 48, 16)
    rows.append(0, k[:, 0])
    for name, value in {"chunk": 8, "spans": spans, "tree_parents": np.array([-1])}.items():
        out = np.empty((n, 6, 48), np.float32)
        runtimes[1].Layer(rows, 0).attend(q, out, **{name: value})
        assert np.array_equal(out, rows.attend(0, q, **{"attention_chunk_size" if name == "chunk" else name: value}))


def test_precision(runtimes, rng):
    """The options have it, or else the cache; with the paths that need the interpreter, too."""
    k, v = rng.standard_normal((2, 300, 2, 64), dtype=np.float32)
    cache = kvfast.KVCache(1, 2, 64, dtype="int4-plain")
    cache.append(0, k, v)
    layer, q = runtimes[1].Layer(cache, 0), rng.standard_normal((3, 6, 64), dtype=np.float32)
    for of_cache in (None, "fast"):
        cache.precision = of_cache
        for precision, name in ((0, None), (1, "exact"), (2, "fast"), (3, "invariant")):
            for options in ({}, {"clamp": True, "spans": np.array([[0, 298]])}):
                out, spans = np.empty((3, 6, 64), np.float32), options.get("spans")
                layer.attend(q, out, precision=precision, **options)
                assert np.array_equal(out, cache.attend(0, q, precision=name, spans=spans, clamp_spans="clamp" in options))


@pytest.mark.parametrize("run", [1, 16])
def test_chosen_tokens(runtimes, rng, run):
    """All KV heads have the same ones, or each has its own; latent rows, too."""
    k, v = rng.standard_normal((2, 300, 2, 64), dtype=np.float32)
    cache, rows = kvfast.KVCache(1, 2, 64, dtype="int8"), kvfast.MLAKVCache(1, 48, 16)
    cache.append(0, k, v)
    rows.append(0, k[:, 0])
    for kind, heads in ((cache, 1), (cache, 2), (rows, 1)):
        q, out = rng.standard_normal((3, 6, 64), dtype=np.float32), np.empty((3, 6, 48 if kind is rows else 64), np.float32)
        chosen = np.full((3, heads, 7), -1)
        for row in chosen.reshape(-1, 7):
            row[:5] = run * rng.permutation(297 // run)[:5]
        layer = runtimes[1].Layer(kind, 0)
        layer.attend(q, out, indices=chosen, run=run)
        assert np.array_equal(out, kind.attend(0, q, indices=chosen[:, 0] if heads == 1 else chosen, index_block=run))


def test_the_kernels(runtimes, rng, isa):
    rows = rng.standard_normal((3, 64), dtype=np.float32)
    twice = rows.copy()
    runtimes[1].rotated(twice)
    assert not np.allclose(twice, rows)
    runtimes[1].rotated(twice)
    assert np.allclose(twice, rows, atol=1e-5)
    cache = kvfast.KVCache(1, 1, 64)
    cache.append(0, rows[:, None], rows[:, None])
    code, _, name = runtimes[0].nanoseconds(cache, 4, 64, 1)
    assert code == OK and name == isa


def test_a_handle_keeps_the_cache(runtimes):
    cache = kvfast.KVCache(1, 2, 64)
    layer = runtimes[1].Layer(cache, 0)
    references = sys.getrefcount(cache)
    del layer
    gc.collect()
    assert sys.getrefcount(cache) == references - 1
