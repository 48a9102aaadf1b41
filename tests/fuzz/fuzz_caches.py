"""Every cache of kvfast against float64 attention over what it was given, at random.

    python tests/fuzz/fuzz_caches.py --seconds 3600 --processes 2 --seed 0

A case is a small world of caches of one kind, of random shapes and storage formats, and a history: tokens come in any
steps, are attended to with any options, taken back, and written again; sequences are copied, forked, freed, restored and
loaded. Rows are compared with the given ones: they must be within what their format promises, whatever was done since, and
attention within the contract of exact attention over the rows that the cache shows, and over those that it was given. Calls
that must be refused come in between, and leave no trace. Other cases are of caches that must have the bits of others, of
schedulers, splices, tenants, secrets, forged and damaged files, and of calls of everything public. Each case runs on one of the
tiers of this machine. ``--only DamagedWorld`` or another name lets one kind run alone.

Prints the number of cases, calls and cases on each tier. A case is always the same for its seed and number; what fails
tells both, and ``--case`` runs it again, with all that it did. Findings with the same signature are told once, and the run
goes on. A case that ends the process or never comes to its end is found by the process that waits for it.
"""

import argparse
import collections
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

from fuzz_api import CallsWorld
from fuzz_blocks import BlocksWorld
from fuzz_forged import DamagedWorld, ForgedWorld
from fuzz_inputs import often, one_of
from fuzz_layers import LayersWorld
from fuzz_oracle import Finding
from fuzz_others import CompressedWorld, HeadsWorld, PlainWorld
from fuzz_pools import LatentPoolWorld, PoolWorld
from fuzz_schedulers import PreparedWorld
from fuzz_secrets import SecretWorld
from fuzz_splices import SplicedWorld
from fuzz_stores import TenantsWorld
from fuzz_twins import Twins
from fuzz_worlds import LatentWorld, RingWorld, SingleWorld

import kvfast

# The shares of the kinds of caches.
WORLDS = {
    SingleWorld: 30,
    RingWorld: 14,
    PoolWorld: 24,
    LatentWorld: 8,
    LatentPoolWorld: 7,
    PreparedWorld: 5,
    HeadsWorld: 4,
    PlainWorld: 6,
    CompressedWorld: 2,
}
# Those that came later have a share of all cases. The other cases stay what they were.
LATER = {Twins: 8, PreparedWorld: 5, TenantsWorld: 6, SecretWorld: 1, SplicedWorld: 4, ForgedWorld: 10, LayersWorld: 8, BlocksWorld: 8}
LATER |= {DamagedWorld: 3, CallsWorld: 3}
SHARE = 0.4

# Seconds of processors for a case: a busy machine is not a finding. Denormals take a hundred times as long as other numbers, and
# rows of 511 of them that are rotated, all in all, 50 seconds.
SECONDS = 150
ASLEEP = 600  # seconds of the clock for a case that computes nothing


def watch():
    """Ends this process, and prints where it was, when the case that begins now takes too long."""
    faulthandler.register(signal.SIGPROF, chain=True)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    faulthandler.dump_traceback_later(ASLEEP, exit=True)


def end_watch():
    signal.setitimer(signal.ITIMER_PROF, 0)
    faulthandler.cancel_dump_traceback_later()


class Case:
    """One random history; what it did is in `log`."""

    def __init__(self, seed, number, loud=False):
        self.rng, self.number, self.loud = np.random.default_rng([seed, number]), number, loud
        # For choices that came later, so that the others stay the same.
        streams = (np.random.default_rng([seed, number, i]) for i in range(1, 7))
        self.later, self.widths, self.newest, self.precision, self.threads, self.fresh = streams
        self.calls, self.log, self.outcomes = 0, [], collections.Counter()

    def note(self, *did):
        self.log.append(did)
        if self.loud:
            print(*did, flush=True)

    def run(self):
        """Raises `Finding`, or whatever kvfast did."""
        rng = self.rng
        self.tier = str(rng.choice(kvfast.available_isas()))
        worlds = LATER if LATER and often(self.newest, SHARE) else WORLDS
        shares = np.array(list(worlds.values()), float)
        world = list(worlds)[rng.choice(len(worlds), p=shares / shares.sum())]
        self.note(self.tier, world.__name__)
        kvfast.set_num_threads(int(one_of(self.threads, [0, 0, 0, 8, 64])) or None)
        with kvfast.use_isa(self.tier), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            world(self).run()


def choose(name):
    """Let one kind of cases run alone."""
    global WORLDS, LATER
    WORLDS, LATER = {world: 1 for world in WORLDS | LATER if world.__name__ == name}, {}


def run_case(seed, number, loud=False):
    """The case, and None or (signature, what was found)."""
    case = Case(seed, number, loud)
    try:
        case.run()
    except Finding as finding:
        return case, (finding.signature, f"{case.tier}, {case.log[1:2]}: {finding}")
    except Exception as error:  # noqa: BLE001 (whatever it is, it is told)
        at = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{type(error).__name__} in {Path(at.filename).name}, {at.name}: {error}"
        return case, (
            f"{type(error).__name__} in {at.name}, line {at.lineno} | {case.log[0][1]}",
            f"{case.tier}, {case.log[1:2]}: {told}",
        )
    return case, None


class Report:
    """What came of all cases; as JSON from process to process."""

    def __init__(self):
        self.cases = self.calls = 0
        self.tiers, self.worlds, self.outcomes, self.findings = *(collections.Counter() for _ in range(3)), {}

    def add(self, case, found):
        self.cases, self.calls = self.cases + 1, self.calls + case.calls
        self.tiers[case.tier] += 1
        self.worlds[case.log[0][1]] += 1
        self.outcomes += case.outcomes

    def find(self, signature, number, told, seconds, count=1):
        known = self.findings.get(signature, (number, told, 0, seconds))
        first = known if known[0] <= number else (number, told, 0, min(seconds, known[3]))
        self.findings[signature] = (*first[:2], known[2] + count, first[3])

    def merge(self, fields, later):
        """What another process found, which began `later` seconds later."""
        self.cases, self.calls = self.cases + fields["cases"], self.calls + fields["calls"]
        self.tiers.update(fields["tiers"])
        self.worlds.update(fields["worlds"])
        self.outcomes.update(fields["outcomes"])
        for signature, (number, told, count, seconds) in fields["findings"].items():
            self.find(signature, number, told, seconds + later, count)

    def told(self, seed, seconds, only=""):
        only = f"--only {only} " if only else ""
        lines = [
            f"{signature}\n    {told}\n    {count} times, first after {at:.0f} s: "
            f"python tests/fuzz/fuzz_caches.py {only}--seed {seed} --case {number}"
            for signature, (number, told, count, at) in sorted(self.findings.items())
        ]
        tiers = ", ".join(f"{name} {count:,}" for name, count in self.tiers.most_common())
        worlds = ", ".join(f"{name.removesuffix('World')} {count:,}" for name, count in self.worlds.most_common())
        lines += [
            f"{self.cases:,} cases, {self.calls:,} calls in {seconds:.0f} s ({self.cases / seconds:.0f} cases a second), seed {seed}",
            f"tiers: {tiers}",
            f"caches: {worlds}",
            f"calls and files: {', '.join(f'{name} {count:,}' for name, count in self.outcomes.most_common())}",
            f"{len(self.findings)} findings",
        ]
        return "\n".join(lines)


def run_child(path, options):
    """Cases first, first + step, ... until time or cases are over. What came of it is in a file, also if this process ends
    in the middle: a second file has the number of the case that runs now."""
    faulthandler.enable()
    report, start, saved = Report(), time.perf_counter(), 0.0
    now = os.open(f"{path}.now", os.O_CREAT | os.O_WRONLY)

    def save():
        Path(f"{path}.new").write_text(json.dumps(vars(report)))
        os.replace(f"{path}.new", path)

    for number in range(options.first, options.cases, options.processes):
        seconds = time.perf_counter() - start
        if seconds > options.seconds:
            break
        os.pwrite(now, b"%20d" % number, 0)
        watch()
        case, found = run_case(options.seed, number)
        report.add(case, found)
        if found:
            report.find(found[0], number, found[1], seconds)
        if found or seconds - saved > 1:
            save()
            saved = seconds
    end_watch()
    save()


def run(options):
    """All processes; one that ends before its time is followed by another from the next case on."""
    report, start = Report(), time.perf_counter()
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # NumPy's threads would only be in the way of the other processes
    with tempfile.TemporaryDirectory() as folder:
        waiting = []

        def begin(i, first):
            path = Path(folder, f"{i}.{first}")
            arguments = {
                "seed": options.seed,
                "cases": options.cases,
                "processes": options.processes,
                "only": options.only,
                "first": first,
                "child": path,
                "seconds": max(options.seconds - (time.perf_counter() - start), 0),
            }
            command = [sys.executable, sys.argv[0], *(f"--{name}={value}" for name, value in arguments.items())]
            # A process that hangs inside of a call is ended by its own timer; the text says where.
            errors = open(f"{path}.errors", "w+")  # noqa: SIM115
            waiting.append(
                (i, first, path, errors, time.perf_counter() - start, subprocess.Popen(command, stderr=errors, env=environment))
            )

        for i in range(options.processes):
            begin(i, i)
        while waiting:
            ended = next((process for process in waiting if process[-1].poll() is not None), None)
            if ended is None:
                time.sleep(0.02)
                continue
            waiting.remove(ended)
            i, first, path, errors, later, child = ended
            code = child.returncode
            errors.seek(0)
            text = errors.read()
            errors.close()
            if path.exists():
                report.merge(json.loads(path.read_text()), later)
            if code == 0:
                continue
            now = Path(f"{path}.now")
            number = int(now.read_text() or first) if now.exists() else first
            end = "never came to its end" if "Timeout" in text or code == -signal.SIGPROF else f"ended with {code}"
            frames = re.findall(r'File "[^"]*?([^/"]+)", line (\d+) in (\w+)', text) + [("", 0, "")]
            report.find(
                f"{end} | {' '.join(map(str, frames[0]))}",
                number,
                text.strip().partition("\n\n")[0][-400:],
                time.perf_counter() - start,
            )
            begin(i, number + options.processes)
    print(report.told(options.seed, time.perf_counter() - start, options.only))
    return not report.findings


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--cases", type=int, default=1 << 40, help="end after this number of cases")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one alone, and tell what it does")
    parser.add_argument("--only", default="", help="a kind of cases alone, as DamagedWorld or CallsWorld")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        choose(options.only)
    if options.child:
        run_child(options.child, options)
    elif options.case is not None:
        watch()
        _, found = run_case(options.seed, options.case, loud=True)
        end_watch()
        print(*(found or ["nothing found"]), sep="\n")
        sys.exit(found is not None)
    else:
        sys.exit(not run(options))


if __name__ == "__main__":
    main()
