"""Tokens per second of `python -m kvfast generate` while other processes compute all the time, and its fair share.

    python bench/studies/bench_neighbours.py
    python bench/studies/bench_neighbours.py --neighbours 6 --max-tokens 24

The scheduler gives each thread the same time. So the fair share of a process with one thread per processor and n busy
processes is its speed alone times processors / (processors + n).

Belongs to the commit 946e487, "generate beside busy processes: fewer threads of the BLAS, 4.9 tokens a second instead of 1.4".
"""

import argparse
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from statistics import median

BUSY = "while True: sum(range(100_000))"
GENERATE = [sys.executable, "-m", "kvfast", "generate", "It is a truth universally acknowledged"]


@contextmanager
def neighbours(count):
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def tokens_per_second(options):
    model = ["--model", options.model] if options.model else []
    done = subprocess.run([*GENERATE, "--max-tokens", str(options.max_tokens), *model], capture_output=True, text=True, check=True)
    return float(re.search(r"decode .*: ([\d.]+) tokens/s", done.stdout + done.stderr)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--neighbours", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (default: SmolLM2-135M-Instruct)")
    options = parser.parse_args()
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    alone, together = [], []
    for _ in range(options.rounds):
        alone.append(tokens_per_second(options))
        with neighbours(options.neighbours):
            together.append(tokens_per_second(options))
    fair = median(alone) * processors / (processors + options.neighbours)
    print(
        f"alone {median(alone):.1f} tokens/s; with {options.neighbours} busy processes on {processors} processors "
        f"{median(together):.1f}, {median(together) / fair:.2f} of the fair share of {fair:.1f}"
    )


if __name__ == "__main__":
    main()
