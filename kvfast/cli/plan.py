"""The command `plan` of `python -m kvfast`."""

from __future__ import annotations

import json

from kvfast.planning.plan import plan
from kvfast.planning.plan_text import cells, columns, conditions, title


def run_plan(args):
    """Print what a model's cache will take: in colours if rich is installed, otherwise as plain text.

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
        weight_bytes_read=args.weights_read,
        engine=args.engine,
        checkpoints=args.checkpoints,
    )
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        print(found)
        return
    console = Console()
    console.print(table(found))
    console.print(conditions(found), style="dim", highlight=False, markup=False)


def table(found):
    """A `MemoryPlan` as a table for the screen.

    Parameters
    ----------
    found : MemoryPlan

    Returns
    -------
    rich.table.Table
    """
    from rich import box
    from rich.table import Table

    rows = Table(title=title(found), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in columns(found):
        # Where the screen is too narrow a number is broken, and never cut.
        rows.add_column(name, justify="left" if name == "dtype" else "right", overflow="fold", no_wrap=name == "dtype")
    for one in found.dtypes:
        rows.add_row(*cells(found, one), style=None if one.fits is not False else "dim")
    return rows
