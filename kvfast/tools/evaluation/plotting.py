"""Files with plots (extra ``plot``)."""

import os


def check_plot(path):
    """Check before a measurement that a plot can be written to a file; raise an error if it cannot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    known = sorted(FigureCanvasAgg.filetypes)
    if os.path.splitext(path)[1][1:].lower() not in known:
        raise ValueError(f"{path}: a plot is a file of one of these types: {', '.join(known)}")
    check_folder(path)


def check_folder(path):
    """Check before a measurement that a file can have a path: its folder is there, and it is not a folder."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder) or os.path.isdir(path):
        raise ValueError(f"{path}: it is a folder" if os.path.isdir(path) else f"{path}: there is no folder {folder}")


def new_figure(size):
    """An empty figure of the given size in inches. It needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
