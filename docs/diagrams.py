"""The drawings of `docs/architecture.md`: the floors, read from the sources, the nouns of storage and the life of a token; and which
tokens a query sees. See `pictures.py`."""

import textwrap

from matplotlib.patches import FancyBboxPatch, Rectangle
from rooms import FLOORS, arrows

# What stands in each package, in a few words.
WORDS = {
    "simd": "C kernels: one row or one tile, once per instruction set",
    "errors": "exceptions",
    "core": "kernel table, threads, array arguments, checks, interrupts",
    "codec": "formats, blocks, encode, seal, decode, projection",
    "attention": "request, plan, run; tasks, spans, tiles",
    "storage.memory": "blocks, float rows, known prefixes, who may enter",
    "storage.tables": "positions to blocks, the life of tokens, rings",
    "storage.sequences": "all layers of a text, its segments, its heads",
    "storage.batches": "sequences together, the blocks of another scheduler",
    "storage": "settings, and the storage of each kind of cache",
    "files": "bytes of blocks, header, safetensors",
    "caches": "KVCache, RingKVCache, PagedKVCache, MLAKVCache, Snapshot, ...",
    "compression": "low rank, product quantisation, hybrid",
    "prompts": "PromptCache, stores",
    "handles": "what C holds: a cache, a pool, rows and options",
    "capi": "kvfast.h for C and Cython",
    "planning": "plan, fidelity",
    "__init__": "import kvfast",
    "engine": "the names that engines use besides",
    "engines.llama_cpp": "a backend for llama.cpp, its states, its prompts",
    "engines.torch": "operators of PyTorch",
    "engines.transformers": "a cache for Hugging Face",
    "engines.vllm": "attention and prompts for vLLM",
    "tools.llama": "the example runtime",
    "tools.evaluation": "perplexity, KL divergence, retrieval, reports",
    "tools.cli": "python -m kvfast, bench",
}
# Not drawn: maps, and modules that only name what others have.
DOORS = {"__main__", "engines", "tools", "evaluation", "llama", "llama_cpp", "torch", "transformers", "vllm"}
EDGE, INK = "#2f78bd", "#777777"  # which can be read on white and on a dark page


def rooms_data():
    """Packages by floor, and what each imports. ValueError for a package that `WORDS` does not have."""
    floors = [[room for room in floor if room not in DOORS] for floor in FLOORS]
    if missing := sorted({room for floor in floors for room in floor} ^ set(WORDS)):
        raise ValueError(f"WORDS must have the words of each package and no others, got a difference of {', '.join(missing)}")
    return {"floors": floors, "arrows": arrows(), "words": WORDS}


def rooms(figure, data):
    """Floor above floor; under its name each package says what it imports of those below."""
    floors = [floor for floor in data["floors"] if floor]
    axes = _empty(figure, 12, len(floors))
    for level, floor in enumerate(floors):
        width = 12 / len(floor)
        for place, room in enumerate(floor):
            below = [other for other in data["arrows"].get(room, ["errors"] if room == "simd" else []) if other != "errors"]
            _box(axes, place * width + 0.06, level + 0.07, width - 0.12, 0.86)
            middle = place * width + width / 2
            axes.text(middle, level + 0.77, _name(room), ha="center", va="center", size=10.5, weight="bold", color=INK)
            axes.text(middle, level + 0.54, data["words"][room], ha="center", va="center", size=7.5, color=INK)
            if below:
                text = textwrap.fill("imports " + ", ".join(map(_name, below)), round(12 * width))
                axes.text(middle, level + 0.26, text, ha="center", va="center", size=6.5, color=INK, linespacing=1)


def _name(room):
    return "kvfast" if room == "__init__" else room


LIFE = (
    ("float row", "append writes the token\nas float16, in pieces of 16", "appended"),
    ("open block", "append encodes the block when\nit is full: channel scales from\nits float rows, which stay", "read as float16"),
    ("sealed block", "48 counted tokens follow it:\nadvance gives its float rows\nback", "read as INT4 codes"),
    ("shared block", "fork, snapshot and prefix\nuse it as it is; it never\nchanges again", "one more owner"),
)
BACK = (
    ("reopened block", "truncate cut a sealed block:\nthe kept tokens keep their codes,\nand get float rows from them"),
    ("patched block", "full again, but new tokens do\nnot fit the block's scales:\nthey stay float16"),
)


def life_data():
    return {"life": LIFE, "back": BACK}


def life(figure, data):
    """The states of an INT4 token in a format that seals blocks."""
    axes = _empty(figure, 12.2, 3.9)
    for place, (name, text, note) in enumerate(data["life"]):
        x = place * 3.1
        _state(axes, x, 2.1, name, text)
        axes.text(x + 1.25, 3.6, note, ha="center", va="bottom", size=7.5, color=INK)
        if place:
            _arrow(axes, (x - 0.58, 2.85), (x - 0.02, 2.85))
    for place, (name, text) in enumerate(data["back"]):
        _state(axes, 3.1 + place * 3.1, 0, name, text)
    _arrow(axes, (6.5, 2.08), (5.3, 1.43))
    _arrow(axes, (5.62, 1.05), (7.2, 2.08))
    _arrow(axes, (5.62, 0.5), (6.18, 0.5))
    axes.text(5.6, 1.8, "truncate", ha="right", va="center", size=7.5, color=INK)
    axes.text(6.95, 1.62, "full again", ha="left", va="center", size=7.5, color=INK)


NOUNS = {
    "sequence": (0, "the tokens of one text;\nforks and snapshots\nare sequences, too", "has"),
    "block table": (1, "from position to block:\none for layers of\nthe same shape", "lists"),
    "block": (2, "codes and scales of\n64 tokens, every layer\nand KV head", "lies in"),
    "pool": (3, "memory and owners of\nblocks, free blocks,\nknown prefixes", ""),
}
BESIDES = {"batch": (0, "sequences that one call\nwrites and reads"), "float rows": (2, "tokens as float16 whose\nblock is still open")}


def nouns_data():
    return {"nouns": NOUNS, "besides": BESIDES}


def nouns(figure, data):
    """What owns the tokens of a text, from left to right."""
    axes = _empty(figure, 12.2, 3.6)
    for name, (place, text, verb) in data["nouns"].items():
        _state(axes, place * 3.1, 2.1, name, text)
        if verb:
            _arrow(axes, (place * 3.1 + 2.52, 2.8), (place * 3.1 + 3.08, 2.8))
            axes.text(place * 3.1 + 2.8, 2.9, verb, ha="center", va="bottom", size=7.5, color=INK)
    for name, (place, text) in data["besides"].items():
        _state(axes, place * 3.1, 0, name, text)
        _arrow(axes, (place * 3.1 + 1.25, 1.42), (place * 3.1 + 1.25, 2.08))


QUERY = 59  # the position of the query, of 64 tokens
SEEN = (  # what attend is given, the visible tokens, the tokens that a ring keeps besides
    ("causal", lambda t: t <= QUERY, None),
    ("sliding_window=16", lambda t: QUERY - 16 < t <= QUERY, None),
    ("sliding_window=16, num_sink_tokens=4", lambda t: t < 4 or QUERY - 16 < t <= QUERY, None),
    ("the same in a ring, rollback=8", lambda t: t < 4 or QUERY - 16 < t <= QUERY, lambda t: QUERY - 24 < t),
    ("attention_chunk_size=24", lambda t: 48 <= t <= QUERY, None),
    ("causal=False", lambda t: True, None),
    ("spans=[(44, 62)]", lambda t: t < 62, None),
    ("tree_parents=[-1, 0, 0, 1, 1, ...]", lambda t: t < 56 or t in (56, 57, 59), None),
    ("indices=[[52, 3, 30, ...]]", lambda t: t in (3, 11, 12, 30, 41, 52, 58, 59), None),
)


def sees_data():
    return {name: "".join("#" if seen(t) else "-" if kept is None or kept(t) else " " for t in range(64)) for name, seen, kept in SEEN}


def sees(figure, data):
    """A row of 64 tokens for each way: filled if the query sees it, empty if it is kept, nothing if it is gone."""
    axes = _empty(figure, 88, len(data) + 1.2)
    for row, (name, marks) in enumerate(data.items()):
        y = len(data) - 1 - row
        axes.text(22.5, y + 0.4, name, ha="right", va="center", size=8, color=INK)
        for token, mark in enumerate(marks):
            if mark != " ":
                face = EDGE if mark == "#" else "none"
                axes.add_patch(Rectangle((24 + token, y + 0.1), 0.8, 0.6, facecolor=face, edgecolor=EDGE, linewidth=0.5))
    axes.text(24 + QUERY + 0.4, len(data) + 0.1, "query", ha="center", va="bottom", size=8, color=INK)
    axes.text(24, len(data) + 0.1, "first token", ha="left", va="bottom", size=8, color=INK)


def _empty(figure, width, height):
    axes = figure.add_subplot(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return axes


def _box(axes, x, y, width, height):
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.06", facecolor="none", edgecolor=EDGE, linewidth=0.8
        )
    )


def _state(axes, x, y, name, text):
    _box(axes, x, y, 2.5, 1.4)
    axes.text(x + 1.25, y + 1.16, name, ha="center", va="center", size=10, weight="bold", color=INK)
    axes.text(x + 1.25, y + 0.53, text, ha="center", va="center", size=7.5, color=INK)


def _arrow(axes, begin, end):
    axes.annotate("", end, begin, arrowprops={"arrowstyle": "-|>", "color": EDGE, "linewidth": 1.2})
