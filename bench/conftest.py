import os
import sys
from pathlib import Path
from statistics import median

import pytest

import kvfast

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=[n for n in (1, 2) if n <= (os.cpu_count() or 1)])
def threads(request):
    kvfast.set_num_threads(request.param)
    yield request.param
    kvfast.set_num_threads(None)


@pytest.fixture
def against_bandwidth(benchmark):
    """Run a call that moves `nbytes`, with the read bandwidth measured before each round.

    Absolute times mean nothing across machines: what is recorded is `bandwidth_fraction`, the median over the
    rounds of nbytes / time / read bandwidth of the same round.
    """

    def run(call, nbytes, num_threads, rounds=5, **about):
        bandwidths = []

        def measure():
            bandwidths.append(kvfast.read_bandwidth(1 << 28, num_threads))

        benchmark.pedantic(call, setup=measure, rounds=rounds, warmup_rounds=1)
        times = benchmark.stats.stats.data
        fractions = [nbytes / t / b for t, b in zip(times, bandwidths[-len(times) :])]
        benchmark.extra_info.update(
            about,
            isa=kvfast.active_isa(),
            threads=num_threads,
            bytes=nbytes,
            GBps=nbytes / median(times) / 1e9,
            read_GBps=median(bandwidths) / 1e9,
            bandwidth_fraction=median(fractions),
        )

    return run
