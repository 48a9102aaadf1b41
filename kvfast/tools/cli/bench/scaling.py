"""How time falls with the number of threads: ``python -m kvfast bench --scaling``."""

from itertools import groupby

import kvfast
from kvfast.engine import counted
from kvfast.tools.cli.bench.measure import cpu_name
from kvfast.tools.cli.bench.report import COLOURS, TITLES, draw_ticks, time_text, titled_table
from kvfast.tools.evaluation.plotting import new_figure

WORKS = "decode,batch,prefill"
FORMATS = "int8,int4"
CONTEXTS = (4096,)


def thread_counts(most):
    """1, 2, 4, 8 and so on, and the most."""
    return sorted({1 << i for i in range(most.bit_length())} | {most})


def bound(result):
    """Seconds below which the machine lets a call not come, with as many threads: its bytes at the rate that memory was read in the same
    rounds, or its operations at the peak rate."""
    if result.case.is_compute_bound:
        return result.operations / result.peak_rate
    return result.nbytes / result.read_bandwidth


def scaling_table(results):
    """Times of a layer by threads, and how many times as fast as with the fewest that is."""
    title = f"time of a layer by threads, times as fast as with the fewest, and bound / time ({results[0].case.model.name})"
    counts = sorted({one.num_threads for one in results})
    table = titled_table(title, "work", "context", "format", *(counted(n, "thread") for n in counts))
    for work, of_work in groupby(results, lambda one: one.case.work):
        for case, of_case in _by_case(of_work):
            cells = [f"{time_text(one.seconds)} {of_case[0].seconds / one.seconds:5.2f}x {one.fraction:5.2f}" for one in of_case]
            name = f"{case.work} {case.num_tokens}" if case.num_tokens > 1 else case.work
            table.add_row(name, f"{case.context:,}", case.label, *cells)
        table.add_section()
    return table


def _by_case(results):
    """The results of each case, by their number of threads."""
    by_case = {}
    for one in results:
        by_case.setdefault(one.case, []).append(one)
    return [(case, sorted(of_case, key=lambda one: one.num_threads)) for case, of_case in by_case.items()]


def plot_scaling(results, path):
    """Draw the time of each case over the number of threads: the ideal line, and the bound by memory or arithmetic."""
    works = list(dict.fromkeys(one.case.work for one in results))
    figure = new_figure((4.4 * len(works), 4.4))
    for place, work in enumerate(works):
        axes = figure.add_subplot(1, len(works), place + 1, xscale="log", yscale="log")
        _draw(axes, _by_case([one for one in results if one.case.work == work]))
    model = results[0].case.model
    figure.suptitle(f"a layer of {model.name} on {cpu_name()}, {kvfast.active_isa()}", size=9)
    figure.savefig(path)


def _draw(axes, cases):
    for (case, results), colour in zip(cases, COLOURS * len(cases)):
        threads = [one.num_threads for one in results]
        times = [one.seconds * 1e3 for one in results]
        axes.plot(threads, times, color=colour, marker="o", markersize=4, label=f"{case.label}, {case.context:,}")
        axes.plot(threads, [times[0] * threads[0] / n for n in threads], color=colour, linestyle=":", linewidth=1)
        axes.plot(threads, [bound(one) * 1e3 for one in results], color=colour, linestyle="--", linewidth=1)
    axes.plot([], [], color="black", linestyle=":", linewidth=1, label="ideal")
    wall = "operations / peak rate" if cases[0][0].is_compute_bound else "memory wall"
    axes.plot([], [], color="black", linestyle="--", linewidth=1, label=wall)
    axes.set_title(TITLES[cases[0][0].work].split(":")[0].format(n=cases[0][0].num_tokens), size=10)
    axes.set_xlabel("threads")
    axes.set_ylabel("ms, attention of a layer")
    threads = sorted({one.num_threads for _, results in cases for one in results})
    axes.set_xticks(threads, map(str, threads))
    draw_ticks(axes)
