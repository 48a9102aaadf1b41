"""Rounds of calls, each with a measurement of the machine."""

import contextlib
import itertools
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, harmonic_mean, median
from time import perf_counter

import numpy as np

import kvfast
from kvfast.core.hardware import peak_rate, read_bandwidth
from kvfast.tools.cli.bench.cases import LEAST_BYTES, Case

ROUNDS = (3, 15)  # fewest and most
PEAK_TIMES = 5  # where it counts: a call of a second sees all that a machine is busy with, a peak of 10 ms some of it


@dataclass(frozen=True)
class Result:
    """Medians over the rounds of one case: of one layer, or of one token for `append`, `read` and the codecs.

    `read_bandwidth` and `peak_rate` are the machine's, in the same rounds; without operations there is no peak. The fractions
    are medians of each round's own.
    """

    case: Case
    num_threads: int
    num_rounds: int
    seconds: float
    nbytes: float
    operations: float
    read_bandwidth: float
    peak_rate: float | None
    bandwidth_fraction: float
    compute_fraction: float | None

    @property
    def fraction(self):
        """The fraction of the resource that bounds this case."""
        return self.compute_fraction if self.case.is_compute_bound else self.bandwidth_fraction


class Meter:
    """Measures the machine before each round, and what the rounds are fractions of it."""

    def __init__(self, case, work, num_threads):
        self.case, self.work, self.num_threads = case, work, num_threads
        self._bandwidths, self._peaks = [], []

    def sample(self):
        """Measure the machine; the call comes next."""
        work = self.work
        times = 1
        if self.case.work == "cached":  # as often as the call does, after one that brings the bytes into the caches
            times = work.count
            read_bandwidth(work.read_bytes, self.num_threads)
        reads = [read_bandwidth(work.read_bytes, self.num_threads) for _ in range(times)]
        self._bandwidths.append(harmonic_mean(reads))
        if work.operations:
            times = PEAK_TIMES if self.case.is_compute_bound else 1
            self._peaks.append(fmean(peak_rate(self.case.arithmetic, self.num_threads) for _ in range(times)))

    def result(self, times):
        """What came out, of the last ``len(times)`` samples and the times of the calls after them."""
        work, n = self.work, len(times)
        bandwidths, peaks = self._bandwidths[-n:], self._peaks[-n:]
        return Result(
            case=self.case,
            num_threads=self.num_threads,
            num_rounds=n,
            seconds=median(times) / work.count,
            nbytes=work.nbytes / work.count,
            operations=work.operations / work.count,
            read_bandwidth=median(bandwidths),
            peak_rate=median(peaks) if peaks else None,
            bandwidth_fraction=median(work.nbytes / t / b for t, b in zip(times, bandwidths)),
            compute_fraction=median(work.operations / t / p for t, p in zip(times, peaks)) if peaks else None,
        )


def measure(cases, threads, *, seconds=1.0, rounds=None, least_bytes=LEAST_BYTES, progress=None):
    """Yield a `Result` for each case and number of threads. Neighbours that differ in the format or the rows alone run in interleaved rounds.

    A case is called for about `seconds`, at least three times, or `rounds` times. `progress` is called with a text, which is
    what comes next, and how many results there are since the last time.
    """
    progress = progress or (lambda text, done: None)
    for (work, model, context, n), group in itertools.groupby(cases, lambda one: (one.work, one.model, one.context, one.num_tokens)):
        group = list(group)
        progress(f"{work} {model.name} {context:,}" + (f" ({n})" if n > 1 else ""), 0)
        works = [case.prepare(least_bytes) for case in group]
        for num_threads in threads:
            with using_threads(num_threads):
                yield from _rounds([Meter(*pair, num_threads) for pair in zip(group, works)], seconds, rounds)
            progress("", len(group))
        del works


def _rounds(meters, seconds, rounds):
    first = sum(_timed(meter.work.call) for meter in meters)
    if rounds is None:
        fewest, most = ROUNDS
        rounds = int(min(most, max(fewest, seconds * len(meters) / first)))
    times = [[] for _ in meters]
    for _ in range(rounds):
        for meter, record in zip(meters, times):
            meter.sample()
            record.append(_timed(meter.work.call))
    return [meter.result(record) for meter, record in zip(meters, times)]


def _timed(call):
    start = perf_counter()
    call()
    return perf_counter() - start


def interleaved(calls, rounds):
    """Times of calls that are run in turn, after one of each that does not count: array of shape (rounds, calls)."""
    for call in calls:
        call()
    return np.array([[_timed(call) for call in calls] for _ in range(rounds)])


@contextlib.contextmanager
def using_threads(num_threads):
    """Let kvfast use `num_threads` threads inside."""
    kvfast.set_num_threads(num_threads)
    try:
        yield
    finally:
        kvfast.set_num_threads(None)


def default_threads():
    """One thread, and all that there are."""
    return sorted({1, kvfast.get_num_threads()})


def cpu_name():
    """What the processor is called, or on ARM the numbers by which its maker and its core are known."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True).strip()
    facts = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = (part.strip() for part in line.partition(":"))
            facts.setdefault(name, value)
    if "CPU part" in facts:
        return f"{platform.machine()}, implementer {facts.get('CPU implementer', '?')}, part {facts['CPU part']}"
    return facts.get("model name") or platform.processor() or platform.machine()
