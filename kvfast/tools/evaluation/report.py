"""Scores of caches as a table, as plain data, and as a plot (extra ``plot``)."""

import sys
from dataclasses import asdict
from itertools import groupby, product

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvfast.tools.evaluation.plotting import new_figure

# Names of the caches that the others are compared with.
REFERENCES = {"kvfast": "float32", "llama.cpp": "llama.cpp f32"}

# Where a plot's label may stand, the best first: points from its point, and which way (right, up).
_DISTANCES = (6, 14, 22, 30, 42, 56)
_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))


def as_rows(scores):
    """The scores as dicts, for JSON."""
    return [asdict(score) | {"nll_difference": score.nll_difference} for score in scores]


def float_bytes(cache_shape, itemsize):
    """Bytes per token of a cache of plain floats."""
    num_layers, num_kv_heads, head_dim = cache_shape
    return 2 * num_layers * num_kv_heads * head_dim * itemsize


def memory_text(cache):
    """A text: the bytes of a cache's tokens, with partly empty blocks and float rows, and the ratios of float16 and float32 to that."""
    tokens, nbytes = len(cache), cache.nbytes_used
    if not tokens:
        return f"{cache.dtype}: no tokens"
    each = float_bytes((cache.num_layers, cache.num_kv_heads, cache.head_dim), 2)
    text = (
        f"{cache.dtype}: {tokens:,} tokens take {nbytes:,} bytes, {nbytes / tokens:,.0f} each; "
        f"float16 takes {each * tokens / nbytes:.2f} times as many, float32 {2 * each * tokens / nbytes:.2f} times"
    )
    if nbytes > each * tokens and cache.bytes_per_token < each:
        text += (
            f". The text is short: its blocks are not full, and its newest tokens may be floats. In a long text {cache.dtype} takes "
            f"{each / cache.bytes_per_token:.1f}x fewer bytes than float16"
        )
    return text


def new_table(*headings, left=("cache", "method"), **options):
    """An empty table with numbers on the right of all columns but some."""
    table = Table(box=SIMPLE_HEAD, **options)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table


def show(table):
    """Print a table. Without a terminal rich assumes 80 columns and would fold it."""
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _fill(table, scores, of_reference, of_score):
    """Add the scores of each runtime's caches, below its float32 cache."""
    for runtime, group in groupby(scores, key=lambda score: score.runtime):
        group = list(group)
        table.add_row(REFERENCES[runtime], *of_reference(group[0]))
        for score in group:
            table.add_row(score.name, *of_score(score))
    return table


def score_table(scores, cache_shape):
    """The scores as a table, below those of each runtime's float32 cache."""

    def cells(quality, bits, stored):
        ratios = (f"{float_bytes(cache_shape, itemsize) / stored:.2f}x" for itemsize in (4, 2))
        return *quality, f"{bits:.2f}", f"{stored:,}", *ratios

    def of_reference(score):
        return cells((f"{score.nll_float32:.5f}", "", "", "", ""), 32, float_bytes(cache_shape, 4))

    table = new_table("cache", *_QUALITY, "bits", "bytes/token", "float32 takes", "float16 takes")
    return _fill(table, scores, of_reference, lambda score: cells(_quality(score), score.bits_per_element, score.bytes_per_token))


_QUALITY = ("NLL", "- float32", "KL", "KL 99.9 %", "top-1")


def _quality(score):
    """Cells below `_QUALITY`."""
    return f"{score.nll:.5f}", f"{score.nll_difference:+.5f}", f"{score.kl:.6f}", f"{score.kl_999:.5f}", f"{score.top1:.2%}"


def compression_table(scores):
    """The scores of `evaluate_compressed` as a table."""
    table = new_table("method", "bits", "K error", "V error", "output error", *_QUALITY)
    for score in scores:
        errors = (f"{error:.2%}" for error in (score.k_error, score.v_error, score.output_error))
        table.add_row(score.name, f"{score.bits_per_element:.2f}", *errors, *_quality(score))
    return table


def retrieval_table(scores):
    """The scores of retrieval as a table, below those of each runtime's float32 cache."""

    def of_reference(score):
        return f"{score.log_prob_float32:.4f}", "", "", f"{score.num_exact_float32} of {score.num_answers}", "", "32.00"

    def of_score(score):
        log_probs = (f"{score.log_prob:.4f}", f"{score.difference:+.4f}", f"{score.interval:.4f}")
        exact = (f"{score.num_exact} of {score.num_answers}", f"{score.exact_low:.0%} to {score.exact_high:.0%}")
        return *log_probs, *exact, f"{score.bits_per_element:.2f}"

    table = new_table("cache", "log-prob", "- float32", "+-", "exact answers", "of all", "bits")
    return _fill(table, scores, of_reference, of_score)


def reports_table(reports):
    """The parts of texts in reports that `eval --report` wrote, the same text, cache and length of all models together."""
    rows = []
    for report in reports:
        for text in report["texts"]:
            for score in text.get("results", ()):  # those of tasks are elsewhere
                for part in score["lengths"]:
                    place = text["sha256"][:8], score["runtime"], score["dtype"], part["num_tokens"]
                    rows.append((place, report["model"]["name"], part))
    table = new_table("text", "cache", "tokens", "model", "bits", "KL", "KL 99.9 %", "top-1", left=("text", "cache", "model"))
    for (text, _, cache, tokens), model, part in sorted(rows, key=lambda row: row[:2]):
        quality = f"{part['kl']:.6f}", f"{part['kl_999']:.5f}", f"{part['top1']:.2%}"
        table.add_row(text, cache, f"{tokens:,}", model, f"{part['bits_per_element']:.2f}", *quality)
    return table


def plot_scores(scores, path, title):
    """Draw KL divergence over bits per element, a labelled point for each score. Scores without divergence do not fit a
    logarithmic scale, and are listed below the plot."""
    shown = [score for score in scores if score.kl > 0]
    figure = new_figure((7, 4.6))
    axes = figure.add_subplot(title=title, yscale="log")
    axes.set_xlabel("bits per element of keys and values, scales included")
    axes.set_ylabel("KL divergence from a float32 cache\n(nats per token)")
    axes.grid(True, which="major", color="0.88", linewidth=0.6)
    axes.set_axisbelow(True)
    for runtime, style in [
        ("kvfast", {"marker": "o", "markersize": 5, "color": "black"}),
        ("llama.cpp", {"marker": "s", "markersize": 8, "markerfacecolor": "none", "markeredgecolor": "black"}),
    ]:
        points = [(score.bits_per_element, score.kl) for score in shown if score.runtime == runtime]
        if points:
            axes.plot(*zip(*points), linestyle="none", label=runtime, **style)
    if len({score.runtime for score in shown}) > 1:
        axes.legend(loc="upper right", frameon=False)
    axes.margins(x=0.12, y=0.12)
    if hidden := [score.name for score in scores if score.kl <= 0]:
        figure.supxlabel(f"no divergence: {', '.join(hidden)}", size=8)
    _label(figure, axes, shown)
    figure.savefig(path)


def _label(figure, axes, scores):
    """Write each score's dtype near its point, at a place that covers no point and no other label."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # settles where things are
    renderer, radius = figure.canvas.get_renderer(), 5 * figure.dpi / 72
    frame = axes.get_window_extent(renderer)
    centres = [axes.transData.transform((score.bits_per_element, score.kl)) for score in scores]
    taken = [Bbox([centre - radius, centre + radius]) for centre in centres]
    if axes.get_legend():
        taken.append(axes.get_legend().get_window_extent(renderer))
    for score in scores:
        label = axes.annotate(
            score.dtype,
            (score.bits_per_element, score.kl),
            (0, 0),
            textcoords="offset points",
            size=8,
            arrowprops={"arrowstyle": "-", "color": "0.5", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
        )
        label.set_in_layout(False)  # nothing moves any more
        for distance, (right, up) in product(_DISTANCES, _DIRECTIONS):
            label.set_position((right * distance, up * distance))
            label.set(ha=("center", "left", "right")[right], va=("center", "bottom", "top")[up])
            label.update_positions(renderer)
            box = Text.get_window_extent(label, renderer)  # without the line to the point
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not box.count_overlaps(taken):
                break
        label.arrow_patch.set_visible(distance > _DISTANCES[0])
        taken.append(box)
