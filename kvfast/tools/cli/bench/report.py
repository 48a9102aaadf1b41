"""Results as a table, as plain data, and as a plot (extra ``plot``)."""

import os
import platform
from itertools import groupby
from statistics import median

import numpy as np

import kvfast
from kvfast.engine import counted
from kvfast.tools.cli.bench.measure import cpu_name
from kvfast.tools.cli.bench.real_rows import NAME
from kvfast.tools.evaluation.plotting import new_figure
from kvfast.tools.evaluation.report import new_table

TITLES = {
    "decode": "decode: one token attends to the context",
    "cached": "decode out of the processor's caches: the same layer again and again",
    "batch": "batch: one token of each of {n} sequences of the context",
    "prefill": "prefill: the last {n} tokens of the context attend to all before them",
    "append": "append: {n} at a time",
    "read": "k() and v() of the whole context",
    "quantize": "quantize: keys",
    "dequantize": "dequantize: keys",
}
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:gray")


def seconds_per_token(result, seconds=None):
    """Time of one token in all layers of the model."""
    seconds = result.seconds if seconds is None else seconds
    tokens = result.case.num_tokens if result.case.work == "prefill" else 1
    return seconds * result.case.model.num_layers / tokens


def tables(results):
    """Yield a table for each work."""
    for (work, model, n), group in groupby(results, lambda one: (one.case.work, one.case.model, one.case.num_tokens)):
        group = list(group)
        title = f"{TITLES[work].format(n=n)} ({model.name}, {model.num_layers} layers)"
        columns = ["context", "threads", "format", "per token", "GB/s", "of bandwidth"]
        if group[0].operations:
            columns += ["GOP/s", "of peak"]
        table = titled_table(title, *columns, "float16 takes")
        of_floats = {_place(one): one.seconds for one in group if str(one.case.format) == "float16"}
        for _, rows in groupby(sorted(group, key=_place), _place):
            for one in rows:
                arithmetic = ()
                if one.operations:
                    arithmetic = f"{one.operations / one.seconds / 1e9:,.0f}", f"{one.compute_fraction:.2f}"
                table.add_row(
                    f"{one.case.context:,}",
                    str(one.num_threads),
                    one.case.label,
                    time_text(seconds_per_token(one)),
                    f"{one.nbytes / one.seconds / 1e9:.1f}",
                    f"{one.bandwidth_fraction:.2f}",
                    *arithmetic,
                    f"{of_floats[_place(one)] / one.seconds:.2f}x" if _place(one) in of_floats else "",
                )
            table.add_section()
        yield table


def titled_table(title, *headings):
    return new_table(*headings, left=("work", "format"), title=title, title_justify="left", title_style="bold")


def _place(result):
    return result.case.context, result.num_threads, result.case.rows


def time_text(seconds):
    """A time of three digits, with its unit."""
    for unit, size in (("s", 1), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds / size < 1000 else f"{seconds / size:,.0f} {unit}"
    return f"{seconds * 1e6:.3g} us"


def machine_text(results):
    """What the machine did between the calls, in one line for each number of threads."""
    lines = []
    for threads in sorted({one.num_threads for one in results}):
        ours = [one for one in results if one.num_threads == threads]
        parts = []
        if reads := [one.read_bandwidth for one in ours if one.case.work != "cached"]:
            parts.append(f"reads {median(reads) / 1e9:.1f} GB/s")
        for kind in ("int8", "float32"):
            if peaks := [one.peak_rate for one in ours if one.case.arithmetic == kind and one.peak_rate]:
                parts.append(f"{kind} {median(peaks) / 1e9:,.0f} GOP/s")
        if parts:
            lines.append(f"{counted(threads, 'thread')}: {', '.join(parts)}")
    return "\n".join(lines)


def as_json(results, megabytes):
    """The results as plain data; a call of `decode` read at least `megabytes`."""
    about = {"version": kvfast.__version__, "cpu": cpu_name(), "isa": kvfast.active_isa(), "megabytes": megabytes}
    return about | {"results": _rows(results)}


def as_report(by_isa, megabytes):
    """What to send to us from a machine that we do not have: `about_machine`, and the results by tier."""
    return about_machine() | {"megabytes": megabytes, "tiers": {isa: _rows(results) for isa, results in by_isa.items()}}


def about_machine():
    """The processor, versions and `kvfast.config`, but no name of a machine or a user, and no path."""
    config = kvfast.config()
    about = {"cpu": cpu_name(), "machine": platform.machine(), "system": platform.system(), "cpus": os.cpu_count()}
    versions = {"kvfast": config.pop("version"), "python": platform.python_version(), "numpy": np.__version__}
    return about | {"versions": versions, "config": config}


def _rows(results):
    rows = []
    for one in results:
        fields = {name: getattr(one, name) for name in one.__dataclass_fields__ if name != "case"}
        case = one.case
        place = {"work": case.work, "model": case.model.name, "format": str(case.format)}
        place |= {"context": case.context, "num_tokens": case.num_tokens, "rows": NAME if case.rows == "real" else case.rows}
        rows.append(place | fields)
    return rows


def plot(results, path):
    """Draw the time per token of `decode` and `prefill` over the context, with the most threads, and the line below which the
    machine lets nothing come."""
    drawn = [one for one in results if one.case.work in ("decode", "prefill")]
    if not drawn:
        raise ValueError("a plot shows decode and prefill, but neither was measured")
    threads = max(one.num_threads for one in drawn)
    works = [work for work in ("decode", "prefill") if any(one.case.work == work for one in drawn)]
    figure = new_figure((5.6 * len(works), 4.8))
    for place, work in enumerate(works):
        ours = [one for one in drawn if one.case.work == work and one.num_threads == threads]
        axes = figure.add_subplot(1, len(works), place + 1, xscale="log", yscale="log")
        _draw(axes, work, ours)
    model = drawn[0].case.model
    figure.suptitle(
        f"{model.name} ({model.num_layers} layers, {model.num_q_heads} query and {model.num_kv_heads} KV heads of "
        f"{model.head_dim}) on {cpu_name()}, {kvfast.active_isa()}, {counted(threads, 'thread')}",
        size=9,
    )
    figure.savefig(path)


def _ticks(low, high):
    """1, 2, 5, 10, 20, ... between two times, and their texts."""
    ticks = [digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    return ticks, [f"{tick:g}" for tick in ticks]


def _draw(axes, work, results):
    wall = "memory wall: bytes / read bandwidth" if work == "decode" else "bound: operations / peak rate"
    formats = dict.fromkeys(one.case.label for one in results)
    for form, colour in zip(formats, COLOURS * 2):
        ours = sorted((one for one in results if one.case.label == form), key=lambda one: one.case.context)
        contexts = [one.case.context for one in ours]
        times = [seconds_per_token(one) * 1e3 for one in ours]
        axes.plot(contexts, times, color=colour, marker="o", markersize=4, label=form)
        if work == "decode":
            bandwidth = median(one.read_bandwidth for one in results)
            bounds = [one.nbytes / bandwidth for one in ours]
        else:
            peak = median(one.peak_rate for one in results if one.case.arithmetic == ours[0].case.arithmetic)
            bounds = [one.operations / peak for one in ours]
        bounds = [seconds_per_token(one, bound) * 1e3 for one, bound in zip(ours, bounds)]
        axes.plot(contexts, bounds, color=colour, linestyle="--", linewidth=1)
    axes.plot([], [], color="black", linestyle="--", linewidth=1, label=wall)
    title = "decode" if work == "decode" else f"prefill, {results[0].case.num_tokens} queries at a time"
    axes.set_title(title, size=10)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("ms per token, attention of all layers")
    contexts = sorted({one.case.context for one in results})
    axes.set_xticks(contexts, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in contexts])
    draw_ticks(axes)


def draw_ticks(axes):
    """Ticks, a grid and a legend for times on a logarithmic axis."""
    axes.set_yticks(*_ticks(*axes.get_ylim()))
    axes.minorticks_off()
    axes.grid(True, which="major", color="0.88", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8)
