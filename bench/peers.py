"""kvfast compared with the attention that others offer on CPUs: same tensors, interleaved rounds, a process for each.

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install -e ".[peers]"
    python bench/peers.py --json bench/peers.json       # more than an hour; in parts: --works, --shapes, --only, --add
    python bench/peers.py --table bench/peers.json      # the Markdown again

llama-cpp-python is compiled when it is installed (a C++ compiler and a quarter of an hour; with --no-binary
llama-cpp-python where a wheel would be found), and the table names the instruction sets that it was built for. The build
of PyTorch for CPUs is enough. ik_llama.cpp is on no registry: the environment variable KVFAST_IK_LLAMA names the
folder with the libggml of one that was built with shared libraries (ggml/src of its build folder). A peer that is not
there is reported and left out.

Each round lets every contender run for a while, one at a time, as it does where nobody else takes turns: the first run, which wakes
its threads, is not counted if there is time for others. A round measures the machine's read bandwidth, too. Decoding reads
layers of at least 512 MB in all, so that no processor cache holds them. Fractions are medians over the rounds of
bytes / time / bandwidth, and ratios medians of the ratios within a round. A contender whose output is not that of
NumPy is reported and not timed. All of them together take up to 18 GB.
"""

import argparse
import json
import os
import platform
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from contenders import BATCH, DECODE, PEERS, PREFILL, QUANTISE, Work, tolerance
from contenders.process import Process
from contenders.table import compared, tables

import kvfast
from kvfast.tools.cli.bench.cases import MODELS, Model
from kvfast.tools.cli.bench.json_file import write_json

SHAPES = MODELS | {"MQA": Model("MQA", 1, 8, 1, 256)}
REST = 0.03  # seconds between two runs, in which the threads of the last one stop spinning


def cpu_name():
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@contextmanager
def progress():
    """A call say(stage, detail) that shows what is going on: in one line by rich, else a line per stage."""
    try:
        from rich.console import Console

        console = Console(stderr=True)
    except ImportError:
        console = None
    if console is not None and console.is_terminal:
        with console.status("") as status:
            yield lambda stage, detail: status.update(f"{stage}: {detail}")
        return
    said = []

    def say(stage, detail):
        if [stage] != said[-1:]:
            said.append(stage)
            print(stage, file=sys.stderr, flush=True)

    yield say


def works(model, given):
    """The cells' work of one model."""
    shape = model.num_q_heads, model.num_kv_heads, model.head_dim
    if DECODE in given.works:
        for context in given.contexts:
            yield Work(DECODE, *shape, context, 1, given.total)
    if BATCH in given.works:
        for context in given.batch_contexts:
            yield Work(BATCH, *shape, context, given.sequences, given.total)
    if PREFILL in given.works:
        for context in given.prefill_contexts:
            for queries in given.queries:
                if queries <= context:
                    yield Work(PREFILL, *shape, context, queries, given.total)
    if QUANTISE in given.works:
        tokens = given.total // (8 * model.num_kv_heads * model.head_dim) // 1024 * 1024
        yield Work(QUANTISE, *shape, max(1024, tokens), 1, given.total)


def stage(work):
    return f"{work.kind}, {work.num_q_heads}/{work.num_kv_heads}/{work.head_dim}, {work.queries} at {work.context}"


def prepared(work, given, versions, say):
    """A process and a result for each contender of a work; those that cannot are ended, and say why."""
    processes, results = {}, {}
    for peer, (module, storages) in PEERS.items():
        for storage in storages.get(work.kind, []):
            name = f"{peer} {storage}"
            if given.only and not name.startswith(tuple(given.only)):
                continue
            say(f"{stage(work)}: caches are filled", name)
            process = Process(module, peer, storage, work)
            answer = process.prepare(given.threads[0])
            results[name] = result = {"peer": peer, "storage": storage, **outcome(answer)}
            if result["status"] == "timed":
                versions[module] = answer.pop("version")
                result.update(answer, tolerance=tolerance(storage))
                if result["error"] > result["tolerance"]:
                    result.update(status="wrong", reason=f"relative error {result['error']:.3g}")
            if result["status"] == "timed":
                processes[name] = process
            else:
                process.quit()
    return processes, results


def outcome(answer):
    """The status and reason of a contender that answered so."""
    for status in ("missing", "failed"):
        if status in answer:
            return {"status": status, "reason": answer[status]}
    return {"status": "timed"}


def timed_rounds(work, processes, results, bandwidth, num_threads, given, say):
    """Seconds of every round by name, None for who sat out; and the last answer of each."""
    seconds, answers = {name: [] for name in [*processes, "bandwidth"]}, {}
    for number in range(-1, given.rounds):  # round -1 starts threads and places memory
        for name, process in {"bandwidth": bandwidth, **processes}.items():
            spent = sum(one or 0 for one in seconds[name])
            out = outcome(answers.get(name, {}))["status"] != "timed" or (name in results and spent > given.limit)
            if out or (number < 0 and name in results and results[name]["seconds"] > given.limit / 10):
                if number >= 0:
                    seconds[name].append(None)
                continue
            say(f"{stage(work)}, {num_threads} threads", f"round {max(number, 0) + 1} of {given.rounds}, {name}")
            time.sleep(REST)
            answers[name] = process.run(num_threads, given.turn)
            if number >= 0:
                seconds[name].append(answers[name].get("seconds"))
    return seconds, answers


def medians(values, others):
    """The median of value / other over the rounds that have both; None without any."""
    both = [value / other for value, other in zip(values, others) if value is not None and other is not None]
    return median(both) if both else None


def figures(work, result, seconds, passes, own):
    """What the seconds of a contender come to.

    Parameters
    ----------
    seconds, passes : list
        Of its runs; of the passes over `work.total` bytes that measure the bandwidth.
    own : dict
        Seconds per layer of kvfast, by storage.
    """
    taken = [one for one in seconds if one is not None]
    per_layer = [one and one / result["layers"] for one in seconds]
    found = {
        "seconds": median(taken),
        "rounds": len(taken),
        "GBps": result["nbytes"] / median(taken) / 1e9,
        "bandwidth_fraction": result["nbytes"] / work.total / medians(seconds, passes),
    }
    if result["peer"] != "kvfast":
        wanted = compared(work.kind, result["peer"], result["storage"])
        found["times_kvfast"] = {storage: medians(per_layer, one) for storage, one in own.items() if storage in wanted}
    if work.kind == PREFILL:
        pairs = work.queries * (work.context - work.queries) + work.queries * (work.queries + 1) // 2
        found["gflops"] = 4 * work.num_q_heads * work.head_dim * pairs * result["layers"] / median(taken) / 1e9
    return found


def cells(model, work, given, versions, say):
    """One cell per number of threads."""
    processes, results = prepared(work, given, versions, say)
    bandwidth = Process("contenders.own", "machine", "bandwidth", work)
    if (there := outcome(bandwidth.prepare(given.threads[0])))["status"] != "timed":
        raise RuntimeError(there["reason"])
    try:
        for num_threads in given.threads:
            seconds, answers = timed_rounds(work, processes, results, bandwidth, num_threads, given, say)
            own = {
                one["storage"]: [each and each / one["layers"] for each in seconds[name]]
                for name, one in results.items()
                if one["peer"] == "kvfast" and name in processes
            }
            measured = []
            for name, one in results.items():
                one = dict(one)
                if name in processes and any(seconds[name]):
                    one.update(figures(work, one, seconds[name], seconds["bandwidth"], own))
                elif name in processes:
                    one.update(outcome(answers[name]))
                measured.append(one)
            yield {
                "kind": work.kind,
                "model": model.name,
                "num_q_heads": model.num_q_heads,
                "num_kv_heads": model.num_kv_heads,
                "head_dim": model.head_dim,
                "context": work.context,
                "queries": work.queries,
                "threads": num_threads,
                "turn": given.turn,
                "read_GBps": work.total / median(seconds["bandwidth"]) / 1e9,
                "results": measured,
            }
    finally:
        for process in [*processes.values(), bandwidth]:
            process.quit()


def key(cell):
    return tuple(cell[name] for name in ("kind", "model", "context", "queries", "threads"))


def measure(given):
    versions = {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    about = {"cpu": cpu_name(), "cores": cores, "system": platform.system(), "python": platform.python_version()}
    about["isa"] = kvfast.active_isa()
    measured = {"machine": about, "versions": versions, "rounds": given.rounds, "total": given.total, "cells": []}
    if given.add and given.json and Path(given.json).exists():
        before = json.loads(Path(given.json).read_text())
        versions.update(before["versions"])
        measured["cells"] = before["cells"]
    with progress() as say:
        for name in given.shapes:
            for work in works(SHAPES[name], given):
                for cell in cells(SHAPES[name], work, given, versions, say):
                    measured["cells"] = [one for one in measured["cells"] if key(one) != key(cell)] + [cell]
                    if given.json:  # after every cell: what is measured stays, whatever comes
                        write_json(given.json, measured)
    return measured


def main(arguments=None):
    def numbers(text):
        return [int(one) for one in text.split(",")]

    def words(text):
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=words, default=["Llama-3-8B", "SmolLM2-135M"], help=", ".join(SHAPES))
    parser.add_argument("--works", type=words, default=[DECODE, BATCH, PREFILL, QUANTISE], help="decode, batch, prefill, quantise")
    parser.add_argument("--contexts", type=numbers, default=[4096, 32768], help="of decoding")
    parser.add_argument("--batch-contexts", type=numbers, default=[2048], help="of each sequence of a batch")
    parser.add_argument("--sequences", type=int, default=16, help="of a batch")
    parser.add_argument("--prefill-contexts", type=numbers, default=[4096, 16384])
    parser.add_argument("--queries", type=numbers, default=[512, 2048], help="of a prompt")
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn", type=float, default=0.2, help="seconds that a contender runs before the next has its turn, or once")
    parser.add_argument("--limit", type=float, default=20, help="seconds after which one sits out the rest of a cell")
    parser.add_argument("--total", type=float, default=512, help="MB of cache that a round reads of each")
    parser.add_argument("--only", type=words, help="contenders whose names begin so: kvfast,llama.cpp q8")
    parser.add_argument("--json", metavar="FILE", help="where the figures go")
    parser.add_argument("--add", action="store_true", help="keep what else is in that file")
    parser.add_argument("--table", metavar="FILE", help="print the Markdown of such a file; nothing is measured")
    given = parser.parse_args(arguments)
    unknown = [*set(given.shapes) - set(SHAPES), *set(given.works) - {DECODE, BATCH, PREFILL, QUANTISE}]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    given.total = -(-int(given.total * 1e6) >> 20) << 20
    measured = json.loads(Path(given.table).read_text()) if given.table else measure(given)
    sys.stdout.write(tables(measured))


if __name__ == "__main__":
    main()
