"""Threads: the same bits for every number, and no corruption."""

import multiprocessing
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import kvfast


@pytest.fixture(autouse=True)
def default_threads():
    yield
    kvfast.set_num_threads(None)


def filled(rng, dtype, length=6000):
    cache = kvfast.KVCache(1, 4, 64, dtype=dtype)
    cache.append(0, rng.standard_normal((length, 4, 64)).astype(np.float32), rng.standard_normal((length, 4, 64)).astype(np.float32))
    return cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("n", [1, 70])
def test_same_bits_for_any_number_of_threads(rng, dtype, n):
    cache = filled(rng, dtype)
    q = rng.standard_normal((n, 16, 64)).astype(np.float32)
    one = cache.attend(0, q, num_threads=1)
    for num_threads in (2, 3, 8):
        assert np.array_equal(cache.attend(0, q, num_threads=num_threads), one)


def test_second_thread_is_refused_or_served(rng):
    cache = filled(rng, "int8")
    q = rng.standard_normal((200, 16, 64)).astype(np.float32)
    expected = cache.attend(0, q)
    outcomes = []

    def work():
        for _ in range(10):
            try:
                outcomes.append(np.array_equal(cache.attend(0, q), expected))
            except RuntimeError as error:
                outcomes.append("another thread" in str(error))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(outcomes) == 30 and all(outcomes)
    assert np.array_equal(cache.attend(0, q), expected)


def test_distinct_caches_in_distinct_threads(rng):
    caches = [filled(np.random.default_rng(i), "int4", 3000) for i in range(3)]
    q = rng.standard_normal((1, 8, 64)).astype(np.float32)
    expected = [cache.attend(0, q) for cache in caches]
    right = [0] * 3

    def work(i):
        for _ in range(20):
            right[i] += np.array_equal(caches[i].attend(0, q), expected[i])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert right == [20] * 3


def _attend_in_child(cache, q, queue):
    queue.put(cache.attend(0, q, num_threads=2))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_after_a_parallel_call(rng):
    cache = filled(rng, "int8")
    q = rng.standard_normal((1, 8, 64)).astype(np.float32)
    expected = cache.attend(0, q, num_threads=2)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_attend_in_child, args=(cache, q, queue))
    child.start()
    assert np.array_equal(queue.get(timeout=60), expected)
    child.join(60)


def test_policy():
    threadpoolctl = pytest.importorskip("threadpoolctl")
    kvfast.set_num_threads(3)
    assert kvfast.get_num_threads() == (3 if kvfast.config()["openmp"] else 1)
    kvfast.set_num_threads(None)
    with threadpoolctl.threadpool_limits(1):
        assert kvfast.get_num_threads() == 1
    for bad, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="num_threads"):
            kvfast.set_num_threads(bad)


def run(code, **environment):
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_environment():
    code = "import kvfast; print(kvfast.get_num_threads(), kvfast.active_isa())"
    got = run(code, KVFAST_NUM_THREADS="5", KVFAST_ISA="scalar")
    assert got.stdout.split() == ["5" if kvfast.config()["openmp"] else "1", "scalar"]
    assert "KVFAST_NUM_THREADS" in run(code, KVFAST_NUM_THREADS="many").stderr
    assert "unknown ISA tier 'abacus'" in run(code, KVFAST_ISA="abacus").stderr
