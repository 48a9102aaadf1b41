"""Fork after threads have run, and the three ways of multiprocessing: every child computes, and none hangs."""

import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from process_tasks import CACHES, attend, filled, queries

import kvfast

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
SECONDS = 60  # for a child, that takes one


def num_threads_of(cache):
    """Threads that exist besides Python's, once a call has had two."""
    cache.attend(0, queries(), num_threads=2)
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def fork(work):
    """What `work` returns in a forked child: bytes, at most a pipe's worth."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(write, work())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    watchdog = threading.Timer(SECONDS, os.kill, (child, 9))
    watchdog.start()
    with os.fdopen(read, "rb") as file:
        told = file.read()
    assert os.waitpid(child, 0)[1] == 0, "the child failed, or hung"
    watchdog.cancel()
    watchdog.join()  # or a task of it may be there that Python does not count any more
    return told


def test_a_forked_child_has_threads():
    """And its own child; and the parent goes on with its."""
    cache, q = filled(0), queries()
    expected = cache.attend(0, q, num_threads=2).tobytes()
    notes = cache.explain(0, q, num_threads=2)
    for _ in range(3):
        assert fork(lambda: cache.attend(0, q, num_threads=2).tobytes()) == expected
        assert fork(lambda: fork(lambda: cache.attend(0, q, num_threads=2).tobytes())) == expected
        assert cache.attend(0, q, num_threads=2).tobytes() == expected
    plan = fork(lambda: repr(cache.explain(0, q, num_threads=2)).encode()).decode()
    assert plan == repr(notes)
    if sys.platform == "linux":
        assert notes.num_threads == 2
        assert fork(lambda: bytes([num_threads_of(cache)])) == b"\x01"  # two with its own; here, tools may have some of theirs
        assert num_threads_of(cache) >= 1


def test_a_child_of_another_thread():
    """With OpenMP, each thread of Python has threads of its own; who forks takes none of the others' along."""
    cache, q, told = filled(0), queries(), []
    expected = cache.attend(0, q, num_threads=2).tobytes()

    def work():
        told.append(fork(lambda: cache.attend(0, q, num_threads=2).tobytes()))
        cache.attend(0, q, num_threads=2)
        told.append(fork(lambda: cache.attend(0, q, num_threads=2).tobytes()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(3 * SECONDS)
    assert told == [expected, expected]
    assert fork(lambda: cache.attend(0, q, num_threads=2).tobytes()) == expected  # the main thread's are still there


def test_fork_while_another_thread_computes():
    """Its cache stays refused in the child, where nobody will ever finish that call; all others work."""
    busy, idle, q = filled(0), filled(1), queries()
    expected, stop = idle.attend(0, q, num_threads=2).tobytes(), threading.Event()
    prompt = np.random.default_rng(2).standard_normal((1000, 16, 64), np.float32)

    def compute():
        while not stop.is_set():
            busy.attend(0, prompt, num_threads=2)

    thread = threading.Thread(target=compute)
    thread.start()

    def try_both():
        try:
            busy.attend(0, q)
            refused = b"served"
        except RuntimeError as error:
            refused = b"refused" if "in use" in str(error) else b"?"
        return refused + idle.attend(0, q, num_threads=2).tobytes()

    try:
        told = [fork(try_both) for _ in range(10)]
    finally:
        stop.set()
        thread.join()
    assert all(one in (b"refused" + expected, b"served" + expected) for one in told)
    assert busy.attend(0, q).shape == q.shape


def test_a_child_has_a_cache_of_its_own():
    """What the child appends, the parent does not see."""
    cache, q = filled(0), queries()
    cache.attend(0, q, num_threads=2)
    before = cache.k(0).tobytes()
    tokens = np.ones((2, 500, 4, 64), np.float32)

    def go_on():
        cache.append(0, *tokens)
        cache.advance(500)
        return cache.attend(0, q, num_threads=2).tobytes()

    in_child = fork(go_on)
    assert len(cache) == 3000 and cache.k(0).tobytes() == before
    assert go_on() == in_child


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_multiprocessing(method):
    CACHES.clear()
    CACHES.update({i: filled(i) for i in range(2)})
    expected = [CACHES[i].attend(0, queries(), num_threads=2) for i in range(2)]
    with multiprocessing.get_context(method).Pool(2) as pool:
        got = pool.map_async(attend, range(2)).get(SECONDS)
    assert all(np.array_equal(a, b) for a, b in zip(got, expected))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_process_pool_executor(method):
    """Workers that stay attend to caches from before the fork, time after time."""
    CACHES.clear()
    CACHES.update({i: filled(i, "int8") for i in range(2)})
    kvfast.set_num_threads(2)
    try:
        expected = [[CACHES[i].attend(0, queries(seed), num_threads=2) for i in range(2)] for seed in range(4)]
        with ProcessPoolExecutor(2, multiprocessing.get_context(method)) as executor:
            if method == "spawn":  # the children make their own, of another format
                got = list(executor.map(attend, [0, 1], timeout=SECONDS))
                assert all(np.array_equal(a, filled(i).attend(0, queries())) for i, a in enumerate(got))
                return
            for seed in range(4):
                got = list(executor.map(attend, [0, 1], [seed, seed], timeout=SECONDS))
                assert all(np.array_equal(a, b) for a, b in zip(got, expected[seed]))
    finally:
        kvfast.set_num_threads(None)


def test_preexec_function():
    """`subprocess` forks, too, where it has Python to run in the child."""
    cache, q = filled(0), queries()
    expected = cache.attend(0, q, num_threads=2)
    done = subprocess.run(
        [sys.executable, "-c", ""], preexec_fn=lambda: cache.attend(0, q, num_threads=2), check=False, timeout=SECONDS
    )
    assert done.returncode == 0 and np.array_equal(cache.attend(0, q, num_threads=2), expected)
