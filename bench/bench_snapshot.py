"""Snapshots, and files of caches against plain files of the same bytes.

pytest bench/bench_snapshot.py          # --benchmark-save, --benchmark-compare: see CONTRIBUTING.md
python bench/bench_snapshot.py          # the same as a table, runs interleaved, at 32,768 tokens of Llama-3-8B
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

import kvfast
from kvfast.tools.cli.bench.cases import LLAMA_3_8B, SMOLLM2_135M, filled
from kvfast.tools.cli.bench.measure import interleaved


def write_plain(data, path):
    """Write, and wait for the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_new(data, path):
    """The same as a new file that takes the old one's place, which is what `save` has to do at least."""
    part = f"{path}.part"
    write_plain(data, part)
    os.replace(part, path)


def read_plain(path):
    data = np.empty(os.path.getsize(path), np.uint8)
    with open(path, "rb", buffering=0) as file:
        view = memoryview(data)
        while len(view):
            view = view[file.readinto(view) :]
    return data


@pytest.mark.parametrize("action", ["snapshot", "restore"])
def bench_snapshot_8k(benchmark, action):
    cache = filled(SMOLLM2_135M, "int8", 8192, SMOLLM2_135M.num_layers)
    snapshot = cache.snapshot()
    assert snapshot.nbytes < 1 << 16
    benchmark(cache.snapshot if action == "snapshot" else lambda: cache.restore(snapshot))


@pytest.mark.parametrize("action", ["save", "load", "map"])
def bench_file_4k(benchmark, tmp_path, action):
    cache = filled(SMOLLM2_135M, "int8", 4096, SMOLLM2_135M.num_layers)
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    assert kvfast.load(path).snapshot() == cache.snapshot()
    calls = {"save": lambda: cache.save(path), "load": lambda: kvfast.load(path), "map": lambda: kvfast.load(path, mmap=True)}
    benchmark.extra_info.update(bytes=path.stat().st_size)
    benchmark.pedantic(calls[action], rounds=5, warmup_rounds=1)


def table(rounds, folder, context):
    model = LLAMA_3_8B
    cache = filled(model, "int8", context, model.num_layers)
    snapshot = cache.snapshot()
    print(f"{cache!r}; medians of {rounds} interleaved rounds, in {folder}")
    times = np.median(interleaved([cache.snapshot, lambda: cache.restore(snapshot)], 100), 0)
    print(f"snapshot {times[0] * 1e6:.0f} us, {snapshot.nbytes:,} bytes of its own; restore {times[1] * 1e6:.0f} us")
    path, plain = Path(folder, "cache.safetensors"), Path(folder, "plain")
    cache.save(path)
    nbytes = path.stat().st_size
    data = read_plain(path)
    calls = [lambda: write_new(data, plain), lambda: cache.save(path), lambda: write_plain(data, plain)]
    times = interleaved(calls, rounds)
    times, ratios = np.median(times, 0), np.median(times / times[:, :1], 0)
    print(
        f"save     {nbytes / times[1] / 1e9:.2f} GB/s: {1 / ratios[1]:.2f} of a plain write and fsync of a new file "
        f"({nbytes / times[0] / 1e9:.2f} GB/s), {ratios[2] / ratios[1]:.2f} of one over the old file ({nbytes / times[2] / 1e9:.2f} GB/s)"
    )
    calls = [lambda: read_plain(path), lambda: kvfast.load(path), lambda: kvfast.load(path, mmap=True)]
    times = interleaved(calls, rounds)
    times, ratios = np.median(times, 0), np.median(times / times[:, :1], 0)
    print(
        f"load     {nbytes / times[1] / 1e9:.2f} GB/s: {1 / ratios[1]:.2f} of a plain read into fresh memory ({nbytes / times[0] / 1e9:.2f} GB/s)"
    )
    print(f"map      {times[2] * 1e3:.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write the files, of 4 GB by default (default: the folder for temporary files)")
    parser.add_argument("--context", type=int, default=32768)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        table(given.rounds, folder, given.context)
