"""The command `plan` of `python -m kvfast`."""

from __future__ import annotations

import json
from collections import Counter

from kvfast.core.text import size_text
from kvfast.planning.plan import plan


def run_plan(args):
    """Print what a model's cache will take.

    Parameters
    ----------
    args : argparse.Namespace
    """
    dtype = None if args.dtype is None else [name.strip() for name in args.dtype.split(",")]
    found = plan(
        args.model,
        context=args.context,
        batch=args.batch,
        dtype=dtype,
        memory=args.memory,
        bandwidth=args.bandwidth,
        weight_bytes=args.weights,
        engine=args.engine,
    )
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    from rich.console import Console

    console = Console()
    console.print(table(found, with_gib=args.engine == "vllm"))
    console.print(conditions(found), style="dim", highlight=False)


def table(found, with_gib=False):
    """A `MemoryPlan` as a table for the screen.

    Parameters
    ----------
    found : MemoryPlan
    with_gib : bool
        With the tokens of a gibibyte.

    Returns
    -------
    rich.table.Table
    """
    from rich import box
    from rich.table import Table

    with_weights = found.model.weight_bytes_read is not None or found.dtypes[0].tokens_per_second_with_weights is not None
    title = f"{found.model.name}: {layers_text(found.model.layers)}\n{_count(found.batch, 'sequence')} of {found.context:,} tokens"
    rows = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    names = ["dtype", "bytes a\ntoken", "one\nsequence", "all", "fits", "longest\ncontext", "largest\nbatch", "tokens\nper s"]
    if found.batch == 1:
        names.remove("one\nsequence")  # which is all
    if with_gib:
        names.insert(2, "tokens\na GiB")
    for name in [*names, "with\nweights"] if with_weights else names:
        # Where the screen is too narrow a number is broken, and never cut.
        rows.add_column(name, justify="left" if name == "dtype" else "right", overflow="fold")
    for one in found.dtypes:
        cells = [one.dtype, f"{one.bytes_per_token:,}"] + [f"{one.tokens_per_gib:,}"] * with_gib
        cells += [size_text(one.bytes_per_sequence)] * (found.batch > 1) + [size_text(one.nbytes)]
        cells += [_known(one.fits, lambda fits: "yes" if fits else "no")]
        cells += ["any" if found.memory is not None and one.longest_context is None else _known(one.longest_context, "{:,}".format)]
        cells += [_known(one.largest_batch, "{:,}".format), _rate(one.tokens_per_second)]
        if with_weights:
            cells.append(_known(one.tokens_per_second_with_weights, _rate))
        rows.add_row(*cells, style=None if one.fits is not False else "dim")
    return rows


def conditions(found):
    """What the figures of a `MemoryPlan` rest on, for reading."""
    memory = "memory unknown" if found.memory is None else f"{size_text(found.memory)} of memory for keys and values"
    lines = [f"{memory}; {found.bandwidth / 1e9:.1f} GB/s read. Tokens per second, of all sequences, are what reading allows at most."]
    if found.model.weight_bytes is not None:
        lines.append(
            f"Weights: {size_text(found.model.weight_bytes)}, of which a token reads {size_text(found.model.weight_bytes_read)}."
        )
    prompts = [
        f"{one.dtype} {size_text(one.bytes_of_prompt)}" for one in found.dtypes if one.bytes_of_prompt > 1.1 * one.bytes_per_sequence
    ]
    if prompts:
        lines.append(f"A sequence whose {found.context:,} tokens come in one append takes more until `advance`: {', '.join(prompts)}.")
    return "\n".join(lines + [f"Note: {note}." for note in found.notes])


def layers_text(layers):
    """Layers for reading, those of one shape together."""
    parts = []
    for layer, count in Counter(layers).items():
        if layer.rope_dim is not None:
            shape = f"latent rows of {layer.head_dim} + {layer.rope_dim}"
        else:
            shape = f"{_count(layer.num_kv_heads, 'KV head')} of {layer.head_dim}"
            if layer.v_head_dim is not None:
                shape += f" and {layer.v_head_dim}"
        window = "" if layer.window is None else f", window {layer.window:,}"
        parts.append(f"{_count(count, 'layer')} x {shape}{window}")
    return "; ".join(parts)


def _count(number, one):
    return f"{number:,} {one if number == 1 else one + 's'}"


def _known(value, text):
    return "?" if value is None else text(value)


def _rate(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
