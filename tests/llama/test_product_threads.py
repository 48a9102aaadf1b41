"""Products of a model while other processes need the processors too."""

import subprocess
import sys
from time import perf_counter, thread_time

import numpy as np
import pytest
import threadpoolctl

from kvfast.tools.llama import product_threads
from kvfast.tools.llama.model import row_by_row
from kvfast.tools.llama.product_threads import ProductThreads


class Clocks:
    """Time of the wall and of the thread, where a thread gets `share` of the processors."""

    def __init__(self, monkeypatch):
        self.wall, self.cpu, self.share = 100.0, 0.0, 1.0
        self.blas = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
        monkeypatch.setattr(product_threads, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(product_threads, "thread_time", lambda: self.cpu)

    def work(self, seconds=0.02):
        """Returns the threads of the BLAS."""
        self.wall += seconds
        self.cpu += seconds * self.share
        return max(one.num_threads for one in self.blas)


@pytest.fixture
def eight_threads():
    with threadpoolctl.threadpool_limits(8, user_api="blas"):
        yield


def test_neighbours_take_threads(monkeypatch, eight_threads):
    clocks, threads = Clocks(monkeypatch), ProductThreads()
    assert [threads.call(clocks.work) for _ in range(20)] == [8] * 20
    clocks.share = 0.3
    used = [threads.call(clocks.work) for _ in range(40)]
    assert used[:3] == [8] * 3 and sorted(used, reverse=True) == used and set(used) == {8, 4, 2, 1} and used[-1] == 1
    assert clocks.work() == 8  # other products of the process have all
    # All are tried again, ever more seldom.
    tries = [threads.call(clocks.work) for _ in range(4000)].count(8)
    assert 3 <= tries <= 30
    clocks.share = 1.0
    assert [threads.call(clocks.work) for _ in range(2000)][-1] == 8


def test_arguments_results_and_errors(monkeypatch, eight_threads):
    clocks, threads = Clocks(monkeypatch), ProductThreads()
    clocks.share = 0.1
    while threads.call(clocks.work) > 1:
        pass
    a = np.arange(6.0).reshape(2, 3)
    assert np.array_equal(threads.call(np.matmul, a, a.T), a @ a.T)
    with pytest.raises(ValueError, match="mismatch"):
        threads.call(np.matmul, a, a)
    assert clocks.work() == 8


def test_without_threadpoolctl_all_threads_are_used(monkeypatch, eight_threads):
    clocks, threads = Clocks(monkeypatch), ProductThreads()
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    clocks.share = 0.1
    assert {threads.call(clocks.work) for _ in range(50)} == {8}


@pytest.mark.parametrize("shape", [(12288, 576), (960, 576), (6144, 1024)])
def test_fewer_threads_give_the_same_bits(rng, shape):
    """So that a text does not depend on the neighbours."""
    weight, x = rng.standard_normal(shape, np.float32), rng.standard_normal((2, shape[1]), np.float32)
    results = []
    for count in (1, 2, 4):
        with threadpoolctl.threadpool_limits(count, user_api="blas"):
            results.append(row_by_row(x, weight).tobytes())
    assert len(set(results)) == 1


def test_a_busy_machine_is_noticed(rng):
    weight, threads, busy = rng.standard_normal((8192, 576), np.float32), ProductThreads(), "while True: pass"
    neighbours = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(6)]
    try:
        end = perf_counter() + 60
        with threadpoolctl.threadpool_limits(2, user_api="blas"):
            while not threads._halvings:
                threads.call(row_by_row, weight[:1], weight)
                assert perf_counter() < end and thread_time() >= 0
    finally:
        for one in neighbours:
            one.kill()
            one.wait()
