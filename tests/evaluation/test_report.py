"""The report of `python -m kvfast eval`: the table and the plot."""

import itertools

import pytest

pytest.importorskip("rich")

from kvfast import evaluation
from kvfast.tools.evaluation import report


def score(dtype, bits, kl, runtime="kvfast", count=10):
    return evaluation.CacheScore(dtype, count, 3.0 + kl, 3.0, kl, 0.9, 100, bits, runtime)


SCORES = [
    score("bfloat16", 16, 6e-5),
    score("int8", 8.5, 1e-3),
    score("int8/int4", 6.5, 6.2e-3),
    score("int4", 4.5, 0.055),
    score("int4-plain", 4.5, 0.33),
    score("f16", 16, 8e-7, "llama.cpp"),
    score("q8_0", 8.5, 9e-4, "llama.cpp"),
    score("q8_0/q4_0", 6.5, 6e-3, "llama.cpp"),
    score("q4_0", 4.5, 0.06, "llama.cpp"),
    score("iq4_nl", 4.5, 0.05, "llama.cpp"),
]


def test_table_has_a_float_row_for_each_runtime():
    table = report.score_table(SCORES, (30, 3, 64))
    names, bits = (list(table.columns[index].cells) for index in (0, 6))
    assert names[:2] == ["float32", "bfloat16"] and names[6:8] == ["llama.cpp f32", "llama.cpp f16"]
    assert (bits[0], bits[2], bits[6]) == ("32.00", "8.50", "32.00")


def test_labels_of_the_plot_do_not_collide(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation, Text

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: figures.append(self))
    report.plot_scores([*SCORES, score("float32", 32, 0.0)], tmp_path / "kl.png", "a title")
    (figure,) = figures
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    assert "bits" in axes.get_xlabel() and "nats" in axes.get_ylabel()
    assert "float32" in figure.get_supxlabel()
    labels = [child for child in axes.get_children() if isinstance(child, Annotation)]
    assert [label.get_text() for label in labels] == [shown.dtype for shown in SCORES]
    assert len({line.get_marker() for line in axes.lines}) == 2
    boxes = [Text.get_window_extent(label) for label in labels]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    points = [axes.transData.transform((shown.bits_per_element, shown.kl)) for shown in SCORES]
    assert not any(box.contains(*point) for box in boxes for point in points)
    frame = axes.get_window_extent()
    assert all(frame.contains(*corner) for box in boxes for corner in (box.min, box.max))
