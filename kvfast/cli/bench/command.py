"""The command `bench` of `python -m kvfast`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import kvfast
from kvfast.cli.bench.baseline import STANDARD, TOLERANCE, Baseline, check, find_baseline, short_of
from kvfast.cli.bench.cases import FORMATS, LEAST_BYTES, MODELS, WORKS, Case
from kvfast.cli.bench.json_file import write_json
from kvfast.cli.bench.measure import cpu_name, default_threads, measure
from kvfast.cli.bench.report import as_json, machine_text, plot, tables
from kvfast.evaluation.plotting import check_plot

# What is measured when nothing else is said: (contexts, most of prefill), and with --short.
CONTEXTS = (1024, 4096, 16384, 65536)
SHORT_CONTEXTS = (1024, 4096)
MOST_PREFILL = 16384
SHORT_SECONDS = 0.3


def run_bench(args):
    """Measure this machine; print tables, write files, or check against a baseline.

    Parameters
    ----------
    args : argparse.Namespace
    """
    chosen = [name for name in ("work", "model", "formats", "contexts", "tokens") if getattr(args, name) is not None]
    if args.check is not None:
        for name in (*chosen, "plot", "write_baseline", "megabytes"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} does not go with --check, which measures what its file says")
    if args.plot:
        check_plot(args.plot)
    for path in (args.json, args.write_baseline):
        _check_folder(path)
    options = {"rounds": args.rounds, "seconds": SHORT_SECONDS if args.short else 1.0}
    if args.check is not None:
        _run_check(args, options)
        return
    megabytes = args.megabytes or LEAST_BYTES // 10**6
    baseline = args.write_baseline and _baseline_to_write(args.write_baseline, megabytes)
    threads = args.threads or default_threads()
    cases = STANDARD if args.write_baseline and not chosen else _cases(args)
    with _bar(len(cases) * len(threads)) as progress:
        results = list(measure(cases, threads, least_bytes=megabytes * 10**6, progress=progress, **options))
    _print_results(results)
    _write_json(args.json, as_json(results, megabytes))
    if args.plot:
        plot(results, args.plot)
    if baseline:
        baseline.put(kvfast.active_isa(), results)
        baseline.save(args.write_baseline)


def _cases(args):
    """The cases that the arguments choose, those that differ in the format alone side by side."""
    works = _names(args.work or "decode,prefill", WORKS, "--work")
    model = MODELS[_known(args.model or "Llama-3-8B", MODELS, "--model")]
    formats = (args.formats or "float16,int8,k8v4,int4").replace("all", ",".join(FORMATS))
    formats = list(dict.fromkeys(name.strip() for name in formats.split(",")))
    for name in formats:
        kvfast.KVFormat.of(name)  # refuses an unknown one before anything is measured
    contexts, tokens = args.contexts or (SHORT_CONTEXTS if args.short else CONTEXTS), args.tokens or 512
    cases = []
    for work in works:
        n, ours = 1, contexts
        if work in ("prefill", "append"):
            n, ours = tokens, [context for context in contexts if context >= tokens]
        if work == "prefill" and not args.contexts:
            ours = [context for context in ours if context <= MOST_PREFILL]
        if not ours:
            raise ValueError(f"{work} of {n} tokens needs a context of at least as many, got {', '.join(map(str, contexts))}")
        cases += [Case(work, model, form, context, n) for context in ours for form in formats]
    return cases


def _names(text, known, option):
    return list(dict.fromkeys(_known(name.strip(), known, option) for name in text.split(",")))


def _known(name, known, option):
    if name not in known:
        raise ValueError(f"{option} must be one of {', '.join(known)}, got {name!r}")
    return name


def _print_results(results):
    print(f"{cpu_name()}, tier {kvfast.active_isa()}; medians; fractions are of what the machine did in the same rounds")
    print(machine_text(results))
    console = Console(width=None if sys.stdout.isatty() else 120)
    for table in tables(results):
        console.print()
        console.print(table)


def _run_check(args, options):
    path = Path(args.check or find_baseline())
    baseline, tier = Baseline.load(path), kvfast.active_isa()
    expected = baseline.expected(tier)
    if not expected:
        print(f"{path} holds nothing for the tier {tier} (it has {', '.join(baseline.tiers) or 'none'}): nothing to check")
        return
    most = kvfast.get_num_threads()
    left_out = sorted({n for _, n in expected if n > most or (args.threads and n not in args.threads)})
    expected = {key: fraction for key, fraction in expected.items() if key[1] not in left_out}
    if left_out:
        print(f"not checked: what {path} says of {', '.join(map(str, left_out))} threads")
    if args.short:
        expected = short_of(expected)
    with _bar(len(expected)) as progress:
        outcomes, results = check(expected, baseline.megabytes, progress=progress, **options)
    _write_json(args.json, as_json(results, baseline.megabytes))
    for outcome in outcomes:
        print(f"{'ok     ' if outcome.is_good else 'SLOWER '}{outcome}")
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    if bad:
        lines = "".join(f"\n  {outcome}" for outcome in bad)
        raise RuntimeError(f"{len(bad)} of {len(outcomes)} cases are more than {TOLERANCE:.0%} below {path}:{lines}")
    print(f"all {len(outcomes)} cases are within {TOLERANCE:.0%} of {path}")


def _baseline_to_write(path, megabytes):
    """What the file says so far: that of other tiers is to stay."""
    baseline = Baseline.load(path) if os.path.exists(path) else Baseline(megabytes)
    if baseline.megabytes != megabytes:
        raise ValueError(f"{path} was measured with {baseline.megabytes} megabytes a call, got {megabytes}: use another file")
    return baseline


def _write_json(path, report):
    if path:
        write_json(path, report)


def _check_folder(path):
    folder = os.path.dirname(path or "") or "."
    if not os.path.isdir(folder):
        raise ValueError(f"{path}: there is no folder {folder}")


class _bar:
    """A progress bar over `total` results, as a callable for `measure`."""

    def __init__(self, total):
        columns = [BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(), TextColumn("{task.description}")]
        self._progress, self._total = Progress(*columns, console=Console(stderr=True), transient=True), total

    def __enter__(self):
        self._progress.__enter__()
        task = self._progress.add_task("", total=self._total)

        def advance(text, done):
            self._progress.update(task, advance=done, **({"description": text} if text else {}))

        return advance

    def __exit__(self, *exc_info):
        self._progress.__exit__(*exc_info)
