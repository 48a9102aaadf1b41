import functools
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

import kvfast
from kvfast.tools.cli.bench.cases import LEAST_BYTES
from kvfast.tools.cli.bench.measure import Meter, using_threads

# Scripts without benches for pytest, some of packages that need not be there.
collect_ignore = [path.name for path in Path(__file__).parent.glob("bench_*.py") if "\ndef bench_" not in path.read_text("utf-8")]
collect_ignore += ["studies"]


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info):
    """Saved runs tell the processor without its frequency at that time, by which no machine would be itself again."""
    machine_info["cpu"] = {key: machine_info["cpu"].get(key) for key in ("brand_raw", "arch", "count")}


def pytest_collection_modifyitems(items):
    """A case with one number of threads comes right after the same with another, for they share its caches."""
    places = {}

    def place(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        rest = tuple((name, str(value)) for name, value in params.items() if name != "threads")
        return places.setdefault((item.path, item.originalname, rest), len(places))

    items.sort(key=place)


@pytest.fixture(params=[n for n in (1, 2) if n <= (os.cpu_count() or 1)])
def threads(request):
    with using_threads(request.param):
        yield request.param


@functools.lru_cache(maxsize=1)
def prepared(case, least_bytes):
    """The work of a case, the same for each number of threads, found to be right."""
    with using_threads(None):
        work = case.prepare(least_bytes=least_bytes)
        work.check()
    return work


@pytest.fixture
def took(benchmark):
    """A function: the median of the rounds in seconds, NaN with --benchmark-disable."""
    return lambda: math.nan if benchmark.disabled else benchmark.stats.stats.median


@pytest.fixture
def run_case(benchmark, threads):
    """Measure a `Case` of kvfast.tools.cli.bench, and the machine before each round. With --benchmark-disable a small case runs once, which
    shows that the bench runs and nothing else.

    Absolute times mean nothing across machines: so records also have `bandwidth_fraction` and
    `compute_fraction`, the medians over the rounds of what the call did of what the machine did just before.
    """

    def run(case, rounds=5):
        least_bytes = LEAST_BYTES
        if benchmark.disabled:
            case, least_bytes = replace(case, context=min(case.context, 4096), num_tokens=min(case.num_tokens, 64)), 10**6
        work = prepared(case, least_bytes)
        kvfast.set_num_threads(threads)
        meter = Meter(case, work, threads)
        benchmark.pedantic(work.call, setup=meter.sample, rounds=rounds, warmup_rounds=1)
        if benchmark.disabled:
            return
        result = meter.result(benchmark.stats.stats.data)
        benchmark.extra_info.update(
            work=case.work,
            model=case.model.name,
            format=str(case.format),
            context=case.context,
            tokens=case.num_tokens,
            isa=kvfast.active_isa(),
            threads=threads,
            us=result.seconds * 1e6,
            GBps=result.nbytes / result.seconds / 1e9,
            GOPps=result.operations / result.seconds / 1e9,
            read_GBps=result.read_bandwidth / 1e9,
            peak_GOPps=result.peak_rate and result.peak_rate / 1e9,
            bandwidth_fraction=result.bandwidth_fraction,
            compute_fraction=result.compute_fraction,
        )

    yield run


@pytest.fixture(scope="session", autouse=True)
def forget_the_last():
    yield
    prepared.cache_clear()
