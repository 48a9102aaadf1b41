"""Markdown tables of what bench/peers.py measured."""

from contenders import BATCH, DECODE, PREFILL, QUANTISE, SAME_WIDTH

# What kvfast is held against: its storage, and which peers the fastest is taken of.
_AIMS = [
    ("int8", "any peer, any precision", lambda peer, storage: True),
    ("int4", "any peer, any precision", lambda peer, storage: True),
    ("fast int8", "any peer, any precision", lambda peer, storage: True),
    ("fast int4", "any peer, any precision", lambda peer, storage: True),
    ("int8", "any peer of 8 bits", lambda peer, storage: SAME_WIDTH[storage] == "int8"),
    ("int4", "any peer of 4 bits", lambda peer, storage: SAME_WIDTH[storage] == "int4"),
    ("float16", "llama.cpp f16", lambda peer, storage: (peer, storage) == ("llama.cpp", "f16")),
    ("int8", "llama.cpp q8_0", lambda peer, storage: (peer, storage) == ("llama.cpp", "q8_0")),
    ("int4", "llama.cpp q4_0", lambda peer, storage: (peer, storage) == ("llama.cpp", "q4_0")),
    ("float16", "ik_llama.cpp f16", lambda peer, storage: (peer, storage) == ("ik_llama.cpp", "f16")),
    ("int8", "ik_llama.cpp q8_0", lambda peer, storage: (peer, storage) == ("ik_llama.cpp", "q8_0")),
    ("int4", "ik_llama.cpp q4_0", lambda peer, storage: (peer, storage) == ("ik_llama.cpp", "q4_0")),
    ("int8", "PyTorch SDPA bfloat16", lambda peer, storage: (peer, storage) == ("PyTorch SDPA", "bfloat16")),
]


def _tokens(n):
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def _column(cell):
    threads = f"{cell['threads']} thread" + "s" * (cell["threads"] > 1)
    if cell["kind"] == QUANTISE:
        return threads
    what = {PREFILL: f"{cell['queries']} queries at ", BATCH: f"{cell['queries']} sequences of "}.get(cell["kind"], "")
    return f"{what}{_tokens(cell['context'])}, {threads}"


def _time(seconds):
    return f"{seconds * 1e6:,.0f} us" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def partner(kind, storage):
    """The storage of kvfast that a peer's is compared with."""
    same = SAME_WIDTH[storage]
    if kind != QUANTISE:
        return same
    return f"quantize {same}" if storage.startswith("quantize_") else f"append {same}-plain"


def compared(kind, peer, storage):
    """All storages of kvfast that a peer's is compared with here."""
    return {partner(kind, storage)} | (set() if kind == QUANTISE else {own for own, _, wanted in _AIMS if wanted(peer, storage)})


def _entry(cell, result):
    if result is None or result["status"] == "missing":
        return "-"
    if result["status"] != "timed":
        return result["status"]
    time = _time(result["seconds"] / result["layers"])
    if cell["kind"] == PREFILL:
        entry = f"{result['gflops']:,.0f} GFLOP/s ({time})"
    else:
        entry = f"{result['bandwidth_fraction']:.2f} ({time})"
    if result["peer"] == "kvfast":
        return entry
    ratio = result["times_kvfast"].get(partner(cell["kind"], result["storage"]))
    return entry if ratio is None else f"{entry}, {ratio:.1f}x"


def _rows(header, rows):
    lines = [" | ".join(header), " | ".join("---" for _ in header), *map(" | ".join, rows)]
    return "\n".join(f"| {line} |" for line in lines)


def _find(cell, peer, storage):
    found = (one for one in cell["results"] if (one["peer"], one["storage"]) == (peer, storage))
    return next(found, None)


def _main_table(cells):
    names = {(one["peer"], one["storage"]): None for cell in cells for one in cell["results"] if one["status"] != "missing"}
    rows = [[" ".join(name), *(_entry(cell, _find(cell, *name)) for cell in cells)] for name in names]
    return _rows(["cache" if cells[0]["kind"] != QUANTISE else "rows", *map(_column, cells)], rows)


def _aim(cell, own, wanted):
    """How many times as long the fastest of the wanted peers takes, and who that is."""
    ratios = [
        (one["times_kvfast"][own], f"{one['peer']} {one['storage']}")
        for one in cell["results"]
        if one["peer"] != "kvfast" and one["status"] == "timed" and one["times_kvfast"].get(own) and wanted(one["peer"], one["storage"])
    ]
    return min(ratios, default=None)


def _aims_table(cells):
    rows = []
    for own, against, wanted in _AIMS:
        found = [_aim(cell, own, wanted) for cell in cells]
        if any(found):
            named = against.startswith("any")
            entries = ["-" if one is None else f"{one[0]:.1f}x" + f" ({one[1]})" * named for one in found]
            rows.append([f"{own} against {against}", *entries])
    return _rows(["kvfast is faster by", *map(_column, cells)], rows) if rows else ""


def _heading(cell):
    shape = f"{cell['model']}: {cell['num_q_heads']} query and {cell['num_kv_heads']} KV heads of {cell['head_dim']}"
    if cell["kind"] == DECODE:
        return (
            f"**Decoding one token**, {shape}. Fraction of the read bandwidth that each cache's own bytes make, time "
            f"of one layer, and how many times that of kvfast's cache of the same width:"
        )
    if cell["kind"] == BATCH:
        return (
            f"**Decoding one token of each of {cell['queries']} sequences**, which share nothing, {shape}. Fraction of the read bandwidth "
            f"that the caches' own bytes make, time of one layer, and how many times that of kvfast's cache of the same width:"
        )
    if cell["kind"] == PREFILL:
        return (
            f"**Prompts**, {shape}. Arithmetic of the visible pairs per second, time of one layer, and how many times "
            f"that of kvfast's cache of the same width:"
        )
    return (
        f"**Rows quantised** from float32, {shape}. Bytes read and written as a fraction of the read bandwidth, time "
        f"of {cell['context']:,} tokens, and how many times that of kvfast's like: `append` in a plain format for "
        f"copies into a cache, `quantize`, whose result is new memory, for functions:"
    )


def _missing(cells):
    where = {}
    for cell in cells:
        for one in cell["results"]:
            if one["status"] != "timed":
                name = one["peer"], one["storage"], one["status"], one["reason"]
                where.setdefault(name, []).append(_column(cell))
    storages = {}
    for (peer, storage, status, reason), columns in where.items():
        columns = "" if len(columns) == len(cells) else f" ({'; '.join(columns)})"
        storages.setdefault((peer, f"{status}, {reason}{columns}"), []).append(storage)
    return "\n".join(f"- {peer} {', '.join(names)}: {reason}" for (peer, reason), names in storages.items())


def tables(measured):
    """Markdown of what `peers.py` wrote."""
    machine = measured["machine"]
    versions = "; ".join(measured["versions"].values())
    rounds, size = measured["rounds"], measured["total"] / 1e6
    parts = [f"{machine['cpu']}, {machine['cores']} cores; {versions}."]
    parts += [f"Medians of up to {rounds} interleaved rounds; caches that are decoded from have at least {size:.0f} MB each."]
    groups = {}
    for cell in measured["cells"]:
        groups.setdefault((cell["kind"], cell["model"]), []).append(cell)
    for cells in groups.values():
        cells.sort(key=lambda cell: (cell["queries"], cell["context"], cell["threads"]))
        bandwidths = ", ".join(f"{cell['read_GBps']:.1f}" for cell in cells)
        parts += [_heading(cells[0]), _main_table(cells), f"Read bandwidth: {bandwidths} GB/s."]
        parts += [_aims_table(cells) if cells[0]["kind"] != QUANTISE else "", _missing(cells)]
    return "\n\n".join(filter(None, parts)) + "\n"
