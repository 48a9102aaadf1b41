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
    cache.advance(length)
    return cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8-plain", "k8v4", "int4"])
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


@pytest.mark.skipif(not kvfast.has_openmp(), reason="built without OpenMP")
def test_threads_do_not_spin_for_long():
    """What runs between two calls, the BLAS of a model above all, has the processors for itself."""
    script = (
        "import os, time, numpy as np, kvfast\n"
        "assert 'GOMP_SPINCOUNT' not in os.environ or os.environ['GOMP_SPINCOUNT'] == '300000'\n"
        "kvfast.set_num_threads(2)\n"
        "cache = kvfast.KVCache(1, 2, 64)\n"
        "cache.append(0, *np.ones((2, 8192, 2, 64), np.float32))\n"
        "q, used = np.ones((1, 8, 64), np.float32), 0.0\n"
        "for _ in range(20):\n"
        "    cache.attend(0, q)\n"
        "    start = time.process_time()\n"
        "    time.sleep(0.02)\n"
        "    used += time.process_time() - start\n"
        "print(used)\n"
    )

    def seconds(**extra):
        environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} | extra
        command = [sys.executable, "-c", script]
        return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    assert seconds() < 0.05
    if sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1:  # what a user sets stays, and the test can tell
        assert seconds(GOMP_SPINCOUNT="300000") > 2 * seconds()
