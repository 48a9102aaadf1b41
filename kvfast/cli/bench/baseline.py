"""Fractions in a file, and the check against them.

The file is JSON: {"megabytes": what a call of decode reads at least, "tiers": {tier: {case: {threads: fraction}}}}.
Fractions of what the machine could do, not times, so that it holds on other machines of the tier.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvfast.cli.bench.cases import LLAMA_3_8B, SMOLLM2_135M, Case
from kvfast.cli.bench.measure import measure

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
"""What a baseline holds unless other cases are chosen."""


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
            cases.setdefault(str(result.case), {})[str(result.num_threads)] = round(result.fraction, 3)

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


def find_baseline():
    """Path of ``bench/baseline.json`` of the checkout that the current directory is in.

    Raises
    ------
    ValueError
    """
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (path := folder / "bench" / "baseline.json").is_file():
            return path
    raise ValueError(f"there is no bench/baseline.json in {here} or above; name a file, which --write-baseline makes")


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
