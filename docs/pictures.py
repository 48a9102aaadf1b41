"""The pictures of the README and the pages, from what was measured.

    python docs/pictures.py

writes them to docs/pictures. A picture holds a checksum of the data that it shows, by which the tests know one that was
not drawn again; with the matplotlib that it names, it is drawn the same to the byte. The background is transparent, and all
colours can be read on white and on a dark page.
"""

import hashlib
import io
import json
from pathlib import Path

import diagrams
import matplotlib
from matplotlib.figure import Figure
from tables import load, tokens

import kvfast
from kvfast.tools.cli.bench.cases import MODELS

FOLDER = Path(__file__).parent / "pictures"
MODEL = MODELS["Llama-3-8B"]
INK = "#777777"  # of text and axes
OTHERS = "#8c8c8c"  # of other runtimes
COLOURS = {
    "float32": "#8c8c8c",
    "float16": "#686868",
    "bfloat16": "#a8801f",
    "int8": "#2f78bd",
    "k8v4": "#8a5fbf",
    "int4": "#c94747",
    "int8-plain": "#5b93c4",
    "int4-plain": "#d17a7a",
}
STYLE = {
    "savefig.transparent": True,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "kvfast",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def memory_data():
    """GB of a sequence of Llama-3-8B, from the bytes that caches tell."""
    contexts = [2**power for power in range(10, 18)]
    dtypes = ("float32", "float16", "int8", "k8v4", "int4")
    shape = MODEL.num_layers, MODEL.num_kv_heads, MODEL.head_dim
    per_token = {dtype: kvfast.KVCache(*shape, dtype=dtype).bytes_per_token for dtype in dtypes}
    return {"contexts": contexts, "gigabytes": {dtype: [n * size / 1e9 for n in contexts] for dtype, size in per_token.items()}}


def speed_data():
    """ms per token of the attention of all layers, one thread and two."""
    results = [one for one in load("decode")["results"] if one["work"] == "decode"]
    shown = ("float32", "float16", "int8", "k8v4", "int4")
    contexts = sorted({one["context"] for one in results})
    times = {}
    for one in results:
        if one["format"] in shown:
            times.setdefault(str(one["num_threads"]), {}).setdefault(one["format"], {})[one["context"]] = (
                one["seconds"] * MODEL.num_layers * 1e3
            )
    series = {threads: {form: [ours[form][n] for n in contexts] for form in shown} for threads, ours in times.items()}
    return {"contexts": contexts, "milliseconds": series}


def accuracy_data():
    return load("accuracy")["results"]


def texts_data():
    return load("texts")


def compression_data():
    return load("compression")["results"]


def precision_data():
    report = load("precision")
    worst = [
        {"format": one["format"], "context": one["context"], "queries": one["queries"], "error": max(one["errors"].values())}
        for one in report["attend"]
    ]
    return {"attend": worst, "fidelity": report["fidelity"]}


def peers_data():
    """ms of one layer of Llama-3-8B at 32k and one thread, by runtime and storage, the fastest first."""
    wanted = ("decode", "Llama-3-8B", 32768, 1)
    (cell,) = [one for one in load("peers_zen5")["cells"] if (one["kind"], one["model"], one["context"], one["threads"]) == wanted]
    timed = [one for one in cell["results"] if one["status"] == "timed"]
    rows = [(f"{one['peer']} {one['storage']}", one["seconds"] / one["layers"] * 1e3) for one in timed]
    return sorted(rows, key=lambda row: row[1])


def runtimes_data():
    """The same of three of kvfast's formats, and of the fastest cache of each other runtime."""
    shown = {f"kvfast {form}" for form in ("int4", "int8", "float16")}
    rows, others = [], set()
    for name, time in peers_data():
        runtime = name.split()[0]
        if name in shown or runtime != "kvfast" and runtime not in others:
            rows.append((name, time))
            others.add(runtime)
    return rows


def serve_data():
    return load("serve")


def memory(figure, data):
    axes = figure.add_subplot(xscale="log", yscale="log", title="Memory of one sequence, Llama-3-8B")
    _lines(axes, data["contexts"], data["gigabytes"])
    axes.set_ylabel("GB")
    axes.set_yticks([0.1, 1, 10], ["0.1", "1", "10"])


def speed(figure, data):
    for place, (threads, series) in enumerate(sorted(data["milliseconds"].items())):
        axes = figure.add_subplot(2, 1, place + 1, xscale="log", yscale="log")
        axes.set_title(f"Attention of one token, Llama-3-8B, {threads} thread{'s' * (threads != '1')}")
        _lines(axes, data["contexts"], series)
        axes.set_ylabel("ms, all layers")
        low, high = axes.get_ylim()
        ticks = [digit * 10**power for power in range(4) for digit in (1, 3) if low < digit * 10**power < high]
        axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])


def accuracy(figure, data):
    """KL divergence and change of NLL over bits."""
    places = {
        "bfloat16": (-6, 6),
        "int8": (7, -7),
        "int8-rotated": (7, -2),
        "k8v4": (-4, -14),
        "k8v4-rotated": (-14, 7),
        "int4": (6, 4),
        "k4v3": (-2, 6),
        "int4-plain": (7, -3),
        "q8_0": (-30, -4),
        "q8_0/q4_0": (7, -6),
        "q4_0": (7, -3),
    }
    above, below = figure.subplots(2, 1)
    for axes, name, label in ((above, "kl", "KL divergence from float32, nats"), (below, "nll_difference", "change of NLL, nats")):
        axes.set_yscale("log" if name == "kl" else "symlog", **({} if name == "kl" else {"linthresh": 1e-3}))
        _points(axes, data, name, places)
        axes.set_ylabel(label)
        axes.set_xlim(3.8, 17.2)
    below.set_yticks([0, 1e-3, 1e-2, 1e-1], ["0", "0.001", "0.01", "0.1"])
    above.legend(loc="upper right")
    figure.suptitle("SmolLM2-135M-Instruct, 16,000 tokens of two novels", size=10.5)


def texts(figure, data):
    """KL divergence of each cache on each text, by bits."""
    figure.suptitle(f"{data['model'].split('.')[0]}, {data['tokens']:,} tokens of each text", size=10.5)
    axes = figure.add_subplot(xscale="log")
    colours = ("int8", "bfloat16", "int4", "k8v4")
    first = next(iter(data["texts"].values()))["results"]
    shown = [i for i, one in enumerate(first) if "calibrated" not in one["dtype"]]
    order = sorted(shown, key=lambda i: first[i]["bits_per_element"])
    more = {None: "", False: ", simulated", True: ", simulated, with floats"}
    names = [first[i]["dtype"] + more[first[i].get("floats")] for i in order]
    for (name, one), colour in zip(data["texts"].items(), colours):
        losses = [one["results"][i]["kl"] for i in order]
        axes.plot(losses, range(len(order)), marker="o", markersize=5, linestyle="none", color=COLOURS[colour], label=name)
    axes.set_yticks(range(len(order)), [f"{name}, {first[i]['bits_per_element']:.2f} bits" for name, i in zip(names, order)], size=8.5)
    axes.set_xlabel("KL divergence from a float32 cache, nats")
    axes.legend(loc="upper right")
    _grid(axes)


def compression(figure, data):
    places = {
        "int4": (6, -4),
        "pq:16:64": (7, 0),
        "hybrid:4": (7, 0),
        "pq:256:32": (7, -6),
        "int4-plain": (7, -3),
        "pq:16:32": (-4, 6),
        "hybrid:48:4": (6, 3),
        "pq:256:16": (-22, -13),
        "lowrank:56": (-56, -3),
    }
    axes = figure.add_subplot(yscale="log", title="A finished prompt of 5,488 tokens, SmolLM2-135M-Instruct")
    _points(axes, data, "kl", places)
    axes.set_ylabel("KL divergence from a float32 cache, nats")


def precision(figure, data):
    for place, queries in enumerate((1, 64)):
        axes = figure.add_subplot(2, 1, place + 1, xscale="log", yscale="log", title=f"{queries} quer{'y' if queries == 1 else 'ies'}")
        ours = [one for one in data["attend"] if one["queries"] == queries]
        for form in dict.fromkeys(one["format"] for one in ours):
            rows = [one for one in ours if one["format"] == form]
            axes.plot(
                [one["context"] for one in rows],
                [one["error"] for one in rows],
                color=COLOURS[form],
                marker="o",
                markersize=3,
                label=form,
            )
        for bound, text in ((1e-3, "contract"), (1e-5, "contract of float32")):
            axes.axhline(bound, color=INK, linewidth=0.8, linestyle="--")
            axes.annotate(text, (0, bound), (3, 3), xycoords=("axes fraction", "data"), textcoords="offset points", size=8)
        contexts = sorted({one["context"] for one in ours})
        axes.set_xticks(contexts, [tokens(n) for n in contexts])
        axes.minorticks_off()
        axes.set_ylim(1e-7, 3e-3)
        axes.set_xlabel("tokens of context")
        axes.set_ylabel("largest relative error of attend")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)


def fidelity(figure, data):
    axes = figure.add_subplot(yscale="log", title="Gaussian tensors, 4,096 tokens of head_dim 128")
    for one in data["fidelity"]:
        axes.plot(one["bits_per_element"], one["output_error"], "o", color=INK, markersize=4)
        above = one["format"] in ("int4-plain", "int8-plain", "bfloat16")
        axes.annotate(
            one["format"], (one["bits_per_element"], one["output_error"]), (5, 4 if above else -10), textcoords="offset points", size=8
        )
    axes.set_xlabel("bits per element, all that is stored")
    axes.set_ylabel("relative error of outputs")
    axes.set_ylim(1e-4, 1)
    axes.set_xlim(1.5, 17.5)
    _grid(axes)


def peers(figure, data):
    axes = figure.add_subplot(xscale="log", title="One token attends to 32,768, one layer of Llama-3-8B, one thread")
    _bars(axes, data, 8)
    axes.set_xlim(1, 280)
    axes.set_xticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
    axes.tick_params(axis="y", labelsize=8.5, length=0)


def runtimes(figure, data):
    axes = figure.add_subplot(title="One token attends to 32,768: one layer of Llama-3-8B, one thread")
    _bars(axes, data, 10)
    axes.set_xlim(0, 80)
    axes.set_xticks([0, 20, 40, 60])
    axes.tick_params(axis="y", length=0)


def serve(figure, data):
    axes = figure.add_subplot(xscale="log", yscale="log", title="From a request to the first token: SmolLM2-135M, one request")
    for (name, seconds), colour in zip(data["seconds"].items(), (OTHERS, COLOURS["int8"])):
        axes.plot(data["tokens"], seconds, color=colour, marker="o", markersize=3.5, label=name)
    axes.set_xticks(data["tokens"], [f"{n:,}" for n in data["tokens"]])
    axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.minorticks_off()
    axes.set_ylim(0.1, 100)
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("seconds")
    axes.legend(loc="upper left")
    _grid(axes)


def _bars(axes, rows, size):
    names, times = zip(*reversed(rows))
    axes.barh(names, times, color=[COLOURS["int8"] if name.startswith("kvfast") else OTHERS for name in names], height=0.7)
    for place, time in enumerate(times):
        axes.annotate(f"{time:,.1f}", (time, place), (3, 0), textcoords="offset points", va="center", size=size)
    axes.set_xlabel("ms")


def _lines(axes, contexts, series):
    for form, values in series.items():
        axes.plot(contexts, values, color=COLOURS[form], marker="o", markersize=3.5, label=form)
    axes.set_xticks(contexts, [tokens(n) for n in contexts])
    axes.minorticks_off()
    axes.set_xlabel("tokens of context")
    axes.legend(loc="upper left")
    _grid(axes)


def _points(axes, rows, name, places):
    runtimes = dict.fromkeys(one.get("runtime", "kvfast") for one in rows)
    for runtime in runtimes:
        ours = [one for one in rows if one.get("runtime", "kvfast") == runtime]
        style = {"marker": "o", "color": COLOURS["int8"]} if runtime == "kvfast" else {"marker": "s", "color": OTHERS}
        axes.plot(
            [one["bits_per_element"] for one in ours],
            [one[name] for one in ours],
            linestyle="none",
            markersize=5,
            label=runtime,
            **style,
        )
        for one in ours:
            axes.annotate(
                one["dtype"], (one["bits_per_element"], one[name]), places.get(one["dtype"], (6, 4)), textcoords="offset points", size=8
            )
    axes.set_xlabel("bits per element, scales included")
    _grid(axes)


def _grid(axes):
    axes.grid(True, which="major", color=INK, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


# name: (what it shows, how, inches)
PICTURES = {
    "memory": (memory_data, memory, (5.6, 3.8)),
    "speed": (speed_data, speed, (5.6, 7.2)),
    "accuracy": (accuracy_data, accuracy, (5.6, 7)),
    "texts": (texts_data, texts, (6, 5.6)),
    "compression": (compression_data, compression, (7, 4)),
    "precision": (precision_data, precision, (5.6, 7)),
    "fidelity": (precision_data, fidelity, (7, 3.8)),
    "peers": (peers_data, peers, (7.4, 5.4)),
    "runtimes": (runtimes_data, runtimes, (7.4, 2.9)),
    "serve": (serve_data, serve, (5.6, 3)),
    "rooms": (diagrams.rooms_data, diagrams.rooms, (9, 12)),
    "life": (diagrams.life_data, diagrams.life, (10, 3.6)),
    "nouns": (diagrams.nouns_data, diagrams.nouns, (10, 3.1)),
    "sees": (diagrams.sees_data, diagrams.sees, (10, 3.1)),
}


def checksum(data):
    """A checksum of what a picture shows, to five digits."""
    return hashlib.sha256(json.dumps(_rounded(data)).encode()).hexdigest()[:16]


def _rounded(data):
    if isinstance(data, float):
        return f"{data:.5g}"
    if isinstance(data, dict):
        return {str(name): _rounded(value) for name, value in data.items()}
    return [_rounded(value) for value in data] if isinstance(data, (list, tuple)) else data


def draw(name):
    """The SVG of a picture: bytes."""
    data_of, draw_on, size = PICTURES[name]
    data, file = data_of(), io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw_on(figure, data)
        about = {"Date": None, "Creator": f"matplotlib {matplotlib.__version__}", "Description": f"data {checksum(data)}"}
        figure.savefig(file, format="svg", metadata=about)
    return "\n".join(line.rstrip() for line in file.getvalue().decode().splitlines()).encode() + b"\n"


def main():
    FOLDER.mkdir(exist_ok=True)
    for name in PICTURES:
        (FOLDER / f"{name}.svg").write_bytes(draw(name))


if __name__ == "__main__":
    main()
