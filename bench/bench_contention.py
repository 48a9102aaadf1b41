"""Two threads while another process keeps one of the cores busy, next to one thread and next to a quiet machine.

    python bench/bench_contention.py        # Linux; wants two cores and nobody else on them

Calls with 1 and 2 threads alternate, as do short rounds with the neighbour awake and stopped (SIGSTOP), so that
whatever else the machine does meets all four alike.
"""

import argparse
import os
import signal
import subprocess
import sys
from statistics import mean, median
from time import perf_counter, sleep

import numpy as np

import kvfast
from kvfast.cli.bench.cases import LLAMA_3_8B, SMOLLM2_135M, check_attention, filled, layers_of, query

TOTAL = 128 * 10**6
NEIGHBOUR = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


def times(cache, q, num_threads, calls, pause):
    """Seconds of so many calls, layer after layer; the first finds threads and data where the last round left them."""
    result = []
    for i in range(calls + 1):
        if pause:
            sleep(pause)
        start = perf_counter()
        cache.attend(i % cache.num_layers, q, num_threads=num_threads)
        result.append(perf_counter() - start)
    return result[1:]


def measure(cache, q, neighbour, rounds, calls, pause):
    """{(busy, threads): seconds of each call}"""
    found = {(busy, threads): [] for busy in (False, True) for threads in (1, 2)}
    for _ in range(rounds):
        for busy in (False, True):
            neighbour.send_signal(signal.SIGCONT if busy else signal.SIGSTOP)
            sleep(0.02)
            for threads in (1, 2):
                found[busy, threads] += times(cache, q, threads, calls, pause)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", default="int8,int4")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two calls")
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) != 2:
        sys.exit(f"this needs two cores, for example under taskset; here are {len(cores)}")
    neighbour = subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(cores[0])])
    try:
        print(
            f"tier {kvfast.active_isa()}, {given.context} tokens, {given.rounds} rounds of {given.calls} calls; us a call, median "
            f"(mean), and 2 threads next to 1"
        )
        for model in (SMOLLM2_135M, LLAMA_3_8B):
            for dtype in given.dtypes.split(","):
                neighbour.send_signal(signal.SIGSTOP)
                cache = filled(model, dtype, given.context, layers_of(model, dtype, given.context, TOTAL))
                q = query(model)
                check_attention(cache, q)
                found = measure(cache, q, neighbour, given.rounds, given.calls, given.pause)
                for busy in (False, True):
                    one, two = found[busy, 1], found[busy, 2]
                    print(
                        f"{model.num_kv_heads}/{model.head_dim} {dtype:<6}{'busy ' if busy else 'quiet'}  "
                        f"1 thread {median(one) * 1e6:6.0f} ({mean(one) * 1e6:6.0f})  2 threads {median(two) * 1e6:6.0f} "
                        f"({mean(two) * 1e6:6.0f})  x{median(two) / median(one):.2f} (x{mean(two) / mean(one):.2f})  "
                        f"p95 {np.percentile(two, 95) * 1e6:.0f}",
                        flush=True,
                    )
                del cache
    finally:
        neighbour.kill()
        neighbour.wait()


if __name__ == "__main__":
    main()
