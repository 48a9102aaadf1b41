"""The command `bench` of `python -m kvfast`."""

from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import kvfast
from kvfast.tools.cli.bench import scaling, stream
from kvfast.tools.cli.bench.cases import FORMATS, LEAST_BYTES, MODELS, SMOLLM2_135M, WORKS, Case
from kvfast.tools.cli.bench.json_file import write_json
from kvfast.tools.cli.bench.measure import cpu_name, default_threads, measure
from kvfast.tools.cli.bench.real_rows import real_rows
from kvfast.tools.cli.bench.report import as_json, as_report, machine_text, plot, tables
from kvfast.tools.evaluation.plotting import check_folder, check_plot
from kvfast.tools.evaluation.report import show

# What is measured when nothing else is said: (contexts, most of prefill), and with --short.
CONTEXTS = (1024, 4096, 16384, 65536)
SHORT_CONTEXTS = (1024, 4096)
MOST_PREFILL = 16384
SHORT_SECONDS = 0.3


def run_bench(args):
    """Measure this machine; print tables and write files."""
    if args.plot:
        check_plot(args.plot)
    for path in filter(None, (args.json, args.report)):
        check_folder(path)
    megabytes = args.megabytes or LEAST_BYTES // 10**6
    if args.stream:
        return _run_stream(args, megabytes * 10**6)
    threads = args.threads or (scaling.thread_counts(kvfast.get_num_threads()) if args.scaling else default_threads())
    cases, options = _cases(args), {"rounds": args.rounds, "seconds": SHORT_SECONDS if args.short else 1.0}
    isas = _vector_isas() if args.report else [kvfast.active_isa()]
    if real := [case.context for case in cases if case.rows == "real"]:
        real_rows(cases[0].model, max(real), 1)  # makes them before anything is measured
    by_isa = {}
    with progress_bar(len(cases) * len(threads) * len(isas)) as progress:
        for isa in isas:
            with kvfast.use_isa(isa):
                by_isa[isa] = list(measure(cases, threads, least_bytes=megabytes * 10**6, progress=progress, **options))
    for isa, of_isa in by_isa.items():
        _print_results(isa, of_isa, [scaling.scaling_table(of_isa)] if args.scaling else tables(of_isa))
    results = by_isa[kvfast.active_isa()]
    if args.json:
        write_json(args.json, as_json(results, megabytes))
    if args.report:
        write_json(args.report, as_report(by_isa, megabytes))
    if args.plot:
        (scaling.plot_scaling if args.scaling else plot)(results, args.plot)


def _run_stream(args, least_bytes):
    given = {**vars(args), "rows": args.rows != "random"}
    if refused := [name for name in ("work", "plot", "json", "report", "scaling", "short", "rows") if given[name]]:
        raise ValueError(f"--stream prints a table of one token on random rows, without --{refused[0]}")
    cases, threads = _cases(args), args.threads or [1]
    with progress_bar(len(cases)) as progress:
        table = stream.stream_table(cases, threads, rounds=args.rounds, least_bytes=least_bytes, progress=progress)
    print(f"{cpu_name()}, tier {kvfast.active_isa()}; medians of interleaved rounds")
    show(table)


def _cases(args):
    """The cases that the arguments choose, those that differ in the format or the rows alone side by side."""
    kind = scaling if args.scaling else stream if args.stream else None
    works = _names(args.work or (kind.WORKS if kind else "decode,prefill"), WORKS, "--work")
    rows = _names(args.rows, ("random", "real"), "--rows")
    model = MODELS[_known(args.model or ("SmolLM2-135M" if "real" in rows else "Llama-3-8B"), MODELS, "--model")]
    if "real" in rows and (model is not SMOLLM2_135M or {*works} - {"decode", "prefill"}):
        raise ValueError(f"--rows real is for decode and prefill of {SMOLLM2_135M.name}, got {', '.join(works)} of {model.name}")
    formats = (args.formats or (scaling.FORMATS if args.scaling else "float16,int8,k8v4,int4")).replace("all", ",".join(FORMATS))
    formats = list(dict.fromkeys(name.strip() for name in formats.split(",")))
    for name in formats:
        kvfast.KVFormat.of(name)  # refuses an unknown one before anything is measured
    contexts = args.contexts or (kind.CONTEXTS if kind else SHORT_CONTEXTS if args.short or "real" in rows else CONTEXTS)
    tokens = args.tokens or 512
    cases = []
    for work in works:
        n, ours = 1, contexts
        if work == "batch":
            n = args.sequences or 16
        elif work in ("prefill", "append"):
            n, ours = tokens, [context for context in contexts if context >= tokens]
        if work == "prefill" and not args.contexts:
            ours = [context for context in ours if context <= MOST_PREFILL]
        if not ours:
            raise ValueError(f"{work} of {n} tokens needs a context of at least as many, got {', '.join(map(str, contexts))}")
        cases += [Case(work, model, form, context, n, one) for context in ours for form in formats for one in rows]
    return cases


def _names(text, known, option):
    return list(dict.fromkeys(_known(name.strip(), known, option) for name in text.split(",")))


def _known(name, known, option):
    if name not in known:
        raise ValueError(f"{option} must be one of {', '.join(known)}, got {name!r}")
    return name


def _vector_isas():
    """The tiers of this processor, best first, and the one in use. Plain C takes much longer, and tells little."""
    in_use = kvfast.active_isa()
    return [isa for isa in kvfast.available_isas() if isa != "scalar" or isa == in_use]


def _print_results(isa, results, tables):
    print(f"{cpu_name()}, tier {isa}; medians; fractions are of what the machine did in the same rounds")
    print(machine_text(results))
    for table in tables:
        print()
        show(table)


@contextmanager
def progress_bar(total):
    """A progress bar over `total` results, as a callable for `measure`."""
    columns = [BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(), TextColumn("{task.description}")]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, done: bar.update(task, advance=done, **({"description": text} if text else {}))
