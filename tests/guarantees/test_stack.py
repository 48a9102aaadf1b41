"""Calls in threads with small stacks: musl gives 128 KiB. A call takes at most 24 KiB of its own, wherever its thread is from."""

import os
import subprocess
import sys

import pytest

# Python itself runs with this on every system that the tests have met.
SMALL = 64 << 10

# The widest rows, which need most working memory; one query, a few, and many. `num_threads` decides whose stacks work.
CODE = """
import sys, threading
import numpy as np
import kvfast
from cache_kinds import FORMATS

isa, threads, small, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
kvfast.use_isa(isa)
rng = np.random.default_rng(0)
dim = 512
k, v = rng.standard_normal((2, n, 1, dim), np.float32)
basis = kvfast.calibrate([rng.standard_normal((n, 1, dim), np.float32)], [k])
formats = list(FORMATS.values()) + ["float32", "float16", "bfloat16", "int2", kvfast.KVFormat("int8", rotation="k", calibration=basis)]


def use(cache, append, q):
    for begin in range(0, n, n // 2):
        append(begin, begin + n // 2)
        cache.advance(n // 2)
    for count in (1, 5, 40):
        kwargs = {"num_threads": threads} if threads else {}
        cache.attend(0, q[:count], **kwargs)
        cache.attend(0, q[:count], indices=np.tile(np.r_[0:40, 60:99], (count, 1)), **kwargs)


def work():
    for one in formats:
        cache = kvfast.KVCache(1, 1, dim, dtype=one)
        use(cache, lambda a, b: cache.append(0, k[a:b], v[a:b]), rng.standard_normal((40, 20, dim), np.float32))
        cache.k(0), cache.v(0), cache.truncate(n - 20), cache.copy()
    for one in ("float16", "int8", "int4-plain", "int3-plain"):
        cache = kvfast.MLAKVCache(1, dim, 128, dtype=one)
        rows = np.concatenate((k[:, 0], v[:, 0, :128]), axis=1)
        use(cache, lambda a, b: cache.append(0, rows[a:b]), rng.standard_normal((40, 20, dim + 128), np.float32))
    pool = kvfast.PagedKVCache(1, 1, dim, num_blocks=2 * n // 64, dtype="int4")
    sequence = pool.new_sequence()
    use(sequence, lambda a, b: sequence.append(0, k[a:b], v[a:b]), rng.standard_normal((40, 20, dim), np.float32))
    with sequence.fork() as other:
        pool.attend_batch(0, rng.standard_normal((2, 20, dim), np.float32), [sequence, other], num_threads=threads or None)
    kvfast.attention(rng.standard_normal((40, 4, dim), np.float32), k, v, num_threads=threads or None)


if small:
    threading.stack_size(small)
    failed = []
    def guarded():
        try:
            work()
        except BaseException as error:
            failed.append(error)
    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
else:
    work()
print("done")
"""


def run(isa, threads, small, tokens):
    support = os.path.join(os.path.dirname(__file__), os.pardir, "support")
    path = os.pathsep.join(filter(None, (os.path.abspath(support), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"OMP_STACKSIZE": f"{SMALL >> 10}k", "PYTHONPATH": path}
    command = [sys.executable, "-c", CODE, isa, str(threads), str(small), str(tokens)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "done" in done.stdout, f"exit status {done.returncode}: {done.stderr[-1000:]}"


def test_small_stack_of_a_python_thread(isa):
    run(isa, 1, SMALL, 320)


@pytest.mark.exhaustive
def test_small_stacks_of_openmp(isa):
    run(isa, 2, 0, 4000)
