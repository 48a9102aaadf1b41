"""The fractions that this machine's tier is expected to reach, in `bench/baseline.json`, and the check against them.

    python bench/baseline.py [--short]     # fails if a case is more than 15 % below the file, as often as it is measured
    python bench/baseline.py --write       # the same cases become what is expected of this tier; that of others stays

The file is JSON: {"megabytes": what a call of decode reads at least, "tiers": {tier: {case: {threads: fraction}}}}.
Fractions of what the machine could do, not times, so that it holds on other machines of the tier.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import kvfast
from kvfast.tools.cli.bench.cases import LEAST_BYTES, LLAMA_3_8B, SMOLLM2_135M, Case
from kvfast.tools.cli.bench.command import progress_bar
from kvfast.tools.cli.bench.json_file import write_json
from kvfast.tools.cli.bench.measure import default_threads, measure
from kvfast.tools.cli.bench.report import as_json

FILE = Path(__file__).with_name("baseline.json")
TOLERANCE = 0.15
TRIES = 3

STANDARD = [
    *(Case("decode", LLAMA_3_8B, form, n) for n in (4096, 32768) for form in ("int4", "k8v4", "int8", "float16", "float32")),
    *(Case("decode", SMOLLM2_135M, form, n) for n in (4096, 32768) for form in ("int4", "int8", "float16")),
    *(Case("cached", LLAMA_3_8B, form, 4096) for form in ("int4", "k8v4", "int8", "float16")),
    *(Case("prefill", LLAMA_3_8B, form, 4096, 512) for form in ("int4", "k8v4", "int8", "float16")),
    *(Case("prefill", LLAMA_3_8B, form, 16384, 2048) for form in ("int4", "int8")),
    *(Case("append", LLAMA_3_8B, form, 4096, 512) for form in ("int4", "k8v4", "int8", "float16")),
    *(Case("append", LLAMA_3_8B, form, 4096) for form in ("int4", "int8")),
    *(Case("read", LLAMA_3_8B, form, 4096) for form in ("int4", "int8", "float16")),
    *(Case(work, LLAMA_3_8B, form, 16384) for work in ("quantize", "dequantize") for form in ("int8", "int4")),
]
"""What a baseline holds."""


@dataclass
class Outcome:
    """The fraction of a case that a baseline states, and the one that was found."""

    case: Case
    num_threads: int
    expected: float
    found: float

    @property
    def is_good(self):
        return self.found >= self.expected * (1 - TOLERANCE)

    def __str__(self):
        threads = f"{self.num_threads} thread{'s' * (self.num_threads > 1)}"
        return f"{self.case}, {threads}: expected {self.expected:.3f}, found {self.found:.3f} ({self.found / self.expected - 1:+.0%})"


class Baseline:
    """What a file says of every tier.

    Parameters
    ----------
    megabytes : int
        What a call of `decode` reads at least.
    tiers : dict
        Tier -> {case as str: {number of threads as str: fraction}}.
    """

    def __init__(self, megabytes, tiers=None):
        self.megabytes, self.tiers = megabytes, tiers or {}

    @classmethod
    def load(cls, path):
        """Read a file.

        Raises
        ------
        OSError
        ValueError
            If it is not a baseline.
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            baseline = cls(int(fields["megabytes"]), dict(fields["tiers"]))
            for tier in baseline.tiers:
                baseline.expected(tier)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not a baseline: {error}") from None
        return baseline

    def save(self, path):
        """Write the file, a case a line."""
        tiers = []
        for tier, cases in self.tiers.items():
            lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(fractions)}" for name, fractions in cases.items())
            tiers.append(f"  {json.dumps(tier)}: {{\n{lines}\n  }}")
        tiers = ",\n".join(tiers)
        text = f'{{\n "megabytes": {self.megabytes},\n "tiers": {{\n{tiers}\n }}\n}}\n'
        Path(path).write_text(text, encoding="utf-8")

    def put(self, tier, results):
        """Let the results be what is expected of a tier."""
        cases = self.tiers[tier] = {}
        for result in results:
            cases.setdefault(str(result.case), {})[str(result.num_threads)] = float(f"{result.fraction:.3g}")

    def expected(self, tier):
        """What is expected of a tier.

        Returns
        -------
        dict of (Case, int) to float
            Fractions by case and number of threads.
        """
        expected = {}
        for name, fractions in self.tiers.get(tier, {}).items():
            for threads, fraction in fractions.items():
                if int(threads) < 1 or not fraction > 0:
                    raise ValueError(f"{name}: {fraction!r} with {threads} threads")
                expected[Case.parse(name), int(threads)] = float(fraction)
        return expected


def short_of(expected):
    """The first case of each work and format, with the most threads."""
    first = {}
    for case, num_threads in expected:
        key = case.work, str(case.format)
        if key not in first or (first[key][0] == case and num_threads > first[key][1]):
            first[key] = case, num_threads
    return {key: expected[key] for key in first.values()}


def check(expected, megabytes, *, progress=None, **options):
    """Measure what is expected of the tier in use.

    A case that is more than TOLERANCE below is measured again, up to TRIES times in all; the best counts.

    Parameters
    ----------
    expected : dict
        See `Baseline.expected`.
    megabytes : int
    progress, **options
        See `measure`.

    Returns
    -------
    outcomes : list of Outcome
    results : list of Result
        Of the first time.
    """
    options["least_bytes"] = megabytes * 10**6
    outcomes, results = [], []
    for threads in sorted({num_threads for _, num_threads in expected}):
        cases = [case for case, num_threads in expected if num_threads == threads]
        for result in measure(cases, [threads], progress=progress, **options):
            results.append(result)
            outcomes.append(Outcome(result.case, threads, expected[result.case, threads], result.fraction))
    for outcome in outcomes:
        for _ in range(TRIES - 1):
            if outcome.is_good:
                break
            (result,) = measure([outcome.case], [outcome.num_threads], progress=progress and _again(progress), **options)
            outcome.found = max(outcome.found, result.fraction)
    return outcomes, results


def _again(progress):
    return lambda text, done: progress(f"again: {text}" if text else "", 0)


def write(path, megabytes, cases=STANDARD, threads=None, **options):
    """Measure cases, and let the results be what a file expects of the tier in use."""
    baseline, threads = Baseline.load(path) if path.exists() else Baseline(megabytes), threads or default_threads()
    if baseline.megabytes != megabytes:
        raise ValueError(f"{path} was measured with {baseline.megabytes} megabytes a call, got {megabytes}: use another file")
    with progress_bar(len(cases) * len(threads)) as progress:
        results = list(measure(cases, threads, least_bytes=megabytes * 10**6, progress=progress, **options))
    baseline.put(kvfast.active_isa(), results)
    baseline.save(path)


def run_check(path, threads=None, short=False, report=None, **options):
    """Measure what a file expects of the tier in use, and print what was found.

    Raises
    ------
    RuntimeError
        If a case is more than TOLERANCE below.
    """
    baseline, tier = Baseline.load(path), kvfast.active_isa()
    expected = baseline.expected(tier)
    if not expected:
        print(f"{path} holds nothing for the tier {tier} (it has {', '.join(baseline.tiers) or 'none'}): nothing to check")
        return
    most = kvfast.get_num_threads()
    left_out = sorted({n for _, n in expected if n > most or (threads and n not in threads)})
    expected = {key: fraction for key, fraction in expected.items() if key[1] not in left_out}
    if left_out:
        print(f"not checked: what {path} says of {', '.join(map(str, left_out))} threads")
    if short:
        expected = short_of(expected)
    with progress_bar(len(expected)) as progress:
        outcomes, results = check(expected, baseline.megabytes, progress=progress, **options)
    if report:
        write_json(report, as_json(results, baseline.megabytes))
    for outcome in outcomes:
        print(f"{'ok     ' if outcome.is_good else 'SLOWER '}{outcome}")
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    if bad:
        lines = "".join(f"\n  {outcome}" for outcome in bad)
        raise RuntimeError(f"{len(bad)} of {len(outcomes)} cases are more than {TOLERANCE:.0%} below {path}:{lines}")
    print(f"all {len(outcomes)} cases are within {TOLERANCE:.0%} of {path}")


def main(args=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--write", action="store_true", help="write the file instead")
    add("--file", type=Path, default=FILE, help="another baseline")
    add("--short", action="store_true", help="check one case of each kind, in half a minute")
    add("--threads", type=int, nargs="+", help="check these numbers only")
    add("--rounds", type=int, help="timed rounds (default: 3 to 15, for about a second)")
    add("--json", metavar="FILE", help="write the results of a check as JSON")
    args = parser.parse_args(args)
    options = {"rounds": args.rounds, "seconds": 0.3 if args.short else 1.0}
    try:
        if args.write:
            write(args.file, LEAST_BYTES // 10**6, threads=args.threads, **options)
        else:
            run_check(args.file, args.threads, args.short, args.json, **options)
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
