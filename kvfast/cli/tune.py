"""Measures how attention asks for memory best on this machine: `python -m kvfast tune`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvfast.cli.bench.cases import LLAMA_3_8B, Case
from kvfast.cli.bench.measure import cpu_name, default_threads, interleaved, using_threads
from kvfast.core import tuning
from kvfast.core.kernels import active_isa

FORMATS = ("float32", "float16", "k8v4", "int8", "int4")
CONTEXT = 16384
ROUNDS = 7
CHOICES = {"prefetch_level": tuning.LEVELS, "int8_order": tuning.ORDERS}

LEAST_GAIN = 0.02  # share of the time, over all formats, that another choice must save
MOST_LOSS = 0.03  # share of the time that one format may lose


@dataclass(frozen=True)
class Trial:
    """One choice in the place of another.

    Attributes
    ----------
    name, value : str and object
        A member of `Prefetching` and what it was.
    ratios : dict
        From (format, threads) to the time divided by the time with the table's choice, the median of interleaved rounds.
    """

    name: str
    value: object
    ratios: dict

    @property
    def mean(self):
        """The geometric mean of the ratios."""
        return float(np.exp(np.mean(np.log(list(self.ratios.values())))))

    @property
    def is_better(self):
        return self.mean < 1 - LEAST_GAIN and max(self.ratios.values()) < 1 + MOST_LOSS


def run_tune(args):
    """Measure the choices, print them, and keep the best.

    Parameters
    ----------
    args : argparse.Namespace
    """
    if args.forget:
        path = tuning.file()
        print(f"removed {path}" if tuning.forget() else f"{path} has nothing for {tuning.processor()}")
        return
    base, source = tuning.from_table()
    threads = args.threads or default_threads()
    print(
        f"{cpu_name()}, tier {active_isa()}; one token after {args.context:,}, from memory, {' and '.join(map(str, threads))} threads"
    )
    print(f"compared with {base} (from {source}); ratios of times, below 1 is faster\n")

    def measured(trials, formats=FORMATS):
        return measure(base, trials, formats, threads, args.context, args.rounds, args.megabytes * 10**6)

    trials = measured([(name, value) for name, values in CHOICES.items() for value in values if value != getattr(base, name)])
    print(f"{'':24}{'mean':>7}  " + "".join(f"{form:>10} {n}" for form in FORMATS for n in threads))
    for trial in trials:
        ratios = (f"{trial.ratios[form, n]:12.3f}" if (form, n) in trial.ratios else " " * 12 for form in FORMATS for n in threads)
        print(f"{f'{trial.name}={trial.value}':24}{trial.mean:7.3f}  {''.join(ratios)}")
    best = best_of(base, trials)
    if best != base:
        (both,) = measured([("all", best)])
        print(f"\n{best}: {1 - both.mean:.1%} less time")
        if not both.is_better:
            best = base
    print(f"\nbest: {best}")
    if args.keep:
        print(f"kept in {tuning.keep(best)}")


def best_of(base, trials):
    """`base` with the choice of each member that is better than its own, if one is."""
    for name in CHOICES:
        better = [trial for trial in trials if trial.name == name and trial.is_better]
        if better:
            base = replace(base, **{name: min(better, key=lambda trial: trial.mean).value})
    return base


def measure(base, trials, formats, threads, context, rounds, least_bytes):
    """Measure trials and `base` in interleaved rounds.

    Parameters
    ----------
    base : Prefetching
    trials : list of tuple
        Name and value of the member of `base` to replace; or "all" and another Prefetching.
    formats : sequence of str
    threads : sequence of int
    context, rounds, least_bytes : int
        Tokens; rounds; what a call reads at least.

    Returns
    -------
    list of Trial
    """
    found = [Trial(name, value, {}) for name, value in trials]
    before = tuning.in_use()
    try:
        for form in formats:
            work = Case("decode", LLAMA_3_8B, form, context).prepare(least_bytes)
            here = [trial for trial in found if form == "int8" or trial.name != "int8_order"]
            these = [base, *(trial.value if trial.name == "all" else replace(base, **{trial.name: trial.value}) for trial in here)]
            for n in threads:
                with using_threads(n):
                    times = interleaved([_call(work, prefetching) for prefetching in these], rounds)
                for trial, ratio in zip(here, np.median(times[:, 1:] / times[:, :1], axis=0)):
                    trial.ratios[form, n] = float(ratio)
    finally:
        tuning.use(*before)
    return found


def _call(work, prefetching):
    def call():
        tuning.use(prefetching, "python -m kvfast tune")
        work.call()

    return call
