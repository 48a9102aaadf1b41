"""Whether one token waits for memory: ``python -m kvfast bench --stream``."""

from statistics import median

from kvfast.core.hardware import read_bandwidth
from kvfast.tools.cli.bench.cases import check_attention, filled, layers_of, query
from kvfast.tools.cli.bench.measure import interleaved, using_threads
from kvfast.tools.cli.bench.report import time_text, titled_table

WORKS = "decode"
CONTEXTS = (4096, 16384)
ROUNDS = 7


def stream_table(cases, threads, *, rounds, least_bytes, progress):
    """Times of a layer in the processor's cache, of its bytes at the read bandwidth, and from memory, in interleaved rounds.

    The ratio is the time from memory, divided by the larger of the other two. Nothing waits where it is 1. The cache is the last one
    that a layer fits.
    """
    columns = "context", "threads", "format", "in cache", "bytes / bandwidth", "from memory", "ratio"
    table = titled_table(f"one token in a layer ({cases[0].model.name})", *columns)
    for case in cases:
        progress(str(case), 0)
        shape = case.model, case.format, case.context
        cache, q = filled(*shape, layers_of(*shape, least_bytes)), query(case.model)
        check_attention(cache, q)
        for n in threads:
            with using_threads(n):
                for precision in ("exact",) if case.arithmetic == "float32" else ("exact", "fast"):
                    *times, ratio = _times(cache, q, precision, n, rounds or ROUNDS)
                    name = case.label if precision == "exact" else f"{case.label} fast"
                    table.add_row(f"{case.context:,}", str(n), name, *map(time_text, times), f"{ratio:.2f}")
            progress("", 1)
    return table


def _times(cache, q, precision, num_threads, rounds):
    """Seconds of a layer in the cache, by bandwidth and from memory, and the ratio."""
    num_layers, nbytes = cache.num_layers, cache.nbytes

    def read(layers):
        for layer in layers:
            cache.attend(layer, q, precision=precision)

    calls = (
        lambda: read([0]),  # brings it into the cache
        lambda: read([0] * num_layers),
        lambda: read_bandwidth(nbytes, num_threads),
        lambda: read(range(num_layers)),
    )
    times = interleaved(calls, rounds)[:, 1:] / num_layers
    return *(median(times[:, i]) for i in range(3)), median(times[:, 2] / times[:, :2].max(1))
