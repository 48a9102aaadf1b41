"""Tables of the pages, from what was measured.

    python docs/tables.py

writes them into the README and the pages, between ``<!-- table: NAME -->`` and ``<!-- end -->``, and long ones into files of
bench/. The site fills them in again when it is built, and the tests fail where a page says something else than the JSON.
"""

import json
import re
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

from kvfast.attention.families import families
from kvfast.codec.dtypes import DTYPE_TABLE

import kvfast
from kvfast.tools.cli.bench.cases import MODELS

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
_MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n)(?:(?!<!-- ).)*(<!-- end -->)", re.DOTALL)


def load(name):
    """What stands in bench/NAME.json."""
    return json.loads((BENCH / f"{name}.json").read_text(encoding="utf-8"))


def fill(text):
    """A page with its tables as they are now. A table that this build cannot tell stays as it is."""

    def filled(found):
        table = TABLES[found[2]]()
        return found[0] if table is None else f"{found[1]}\n{table.rstrip()}\n\n{found[3]}"

    return _MARKED.sub(filled, text)


def pages():
    """The README and the sources of the site."""
    return [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)]


def _table(header, rows):
    lines = [" | ".join(header), " | ".join("---" for _ in header), *map(" | ".join, rows)]
    return "\n".join(f"| {line} |" for line in lines)


def _percent(fraction):
    return f"{fraction * 100:.1f} %"


def tokens(n):
    return f"{n // 1024}k" if n % 1024 == 0 else f"{n:,}"


def bytes_per_token(model, dtype):
    """Bytes of a token in all layers of a model."""
    cache = kvfast.KVCache(model.num_layers, model.num_kv_heads, model.head_dim, dtype=dtype)
    return round(cache.bytes_per_token)


def memory():
    rows = []
    for name in ("SmolLM2-135M", "Llama-3.2-1B", "Llama-3-8B", "Qwen3-30B-A3B"):
        model = MODELS[name]
        halves = bytes_per_token(model, "float16")
        row = [f"{name} ({model.num_layers}, {model.num_kv_heads} x {model.head_dim})"]
        for dtype in ("float32", "float16", "int8", "k8v4", "int4"):
            stored = bytes_per_token(model, dtype)
            row.append(f"{stored:,}" + (f" ({halves / stored:.2f}x)" if stored < halves else ""))
        rows.append(row)
    return _table(["model (layers, KV heads x head_dim)", "float32", "float16", "int8", "k8v4", "int4"], rows)


def dtypes():
    """The storage dtypes."""
    families = {"float": "as it is", "tiled": "multiplied as stored", "packed": "becomes INT8 when it is read"}
    few_bits = "unpacked in registers as it is multiplied"  # KV_FEW_BITS of kvfast/simd
    rows = []
    for row in DTYPE_TABLE:
        codebooks = ", ".join(row.codebooks) or "-"
        levels, scale = (f"{row.levels}", f"{row.scale_bytes} bytes") if row.levels else ("-", "-")
        codes = few_bits if row.bits in (2, 3) else families[row.family]
        rows.append([f"`{row.name}`", codebooks, f"{row.bits}", levels, scale, f"{row.limit:g}", codes])
    return _table(["dtype", "codebook", "bits", "levels", "scale of a token", "largest magnitude", "codes"], rows)


def kernels():
    """The family of kernels that takes many query rows, by tier and dtype."""
    exact, fast = families(), families("fast")
    if "amx" not in exact:  # not a build for x86-64, or by an old compiler
        return None
    columns = {"`float32`": "float32", "`float16`, `bfloat16`": "float16", "`int8`, `int4`": "int8", "other integers": "int5"}

    def cell(tier, dtype):
        other = fast[tier][dtype]
        return exact[tier][dtype] + f", fast: {other}" * (other != exact[tier][dtype])

    tiers = {}
    for tier in exact:
        tiers.setdefault(tuple(cell(tier, dtype) for dtype in columns.values()), []).append(f"`{tier}`")
    return _table(["tier", *columns], [[", ".join(names), *cells] for cells, names in tiers.items()])


def _cache(one):
    """What a row is called."""
    form, _, calibrated = one["dtype"].partition(" ")
    if one["runtime"] == "simulated":
        return f"{form}, simulated" + ", with floats" * one["floats"]
    return (f"`{form}`" + f", {calibrated}" * bool(calibrated)) if one["runtime"] == "kvfast" else f"{one['runtime']} {form}"


def _kl(one):
    """A mean KL divergence and, where it was measured, the 99.9 % value."""
    return " / ".join(f"{one[name]:.5f}" if one[name] < 1e-4 else f"{one[name]:.4f}" for name in ("kl", "kl_999") if name in one)


def accuracy():
    rows = []
    for one in load("accuracy")["results"]:
        rows.append([_cache(one), f"{one['bits_per_element']:.2f}", f"{one['nll_difference']:+.4f}", _kl(one), _percent(one["top1"])])
    return _table(["cache", "bits per element", "NLL change", "KL divergence", "same top token"], rows)


def texts():
    """What formats cost on texts of several kinds."""
    texts = load("texts")["texts"]
    rows = []
    for same in zip(*(one["results"] for one in texts.values())):
        rows.append([_cache(same[0]), f"{same[0]['bits_per_element']:.2f}", *(f"{_kl(one)} ({_percent(one['top1'])})" for one in same)])
    return _table(["cache", "bits", *texts], rows)


def _stored(one, kl):
    """The bits per element, and what they cost."""
    return f"{one['bits_per_element']:.2f}: {_kl(kl)}"


def lengths():
    """What formats cost in the parts of a text: means of all texts."""
    rows = []
    for same in zip(*(one["results"] for one in load("texts")["texts"].values())):
        parts = list(zip(*(one["lengths"] for one in same)))
        means = [{name: sum(part[name] for part in of_texts) / len(same) for name in ("kl", "kl_999")} for of_texts in parts]
        rows.append([_cache(same[0]), *(_stored(one[0], mean) for one, mean in zip(parts, means))])
    ends = [0, *(part[0]["num_tokens"] for part in parts)]
    return _table(["cache", *(f"tokens {first + 1:,} to {end:,}" for first, end in pairwise(ends))], rows)


def models():
    """Reports of `python -m kvfast eval --novel --report`, one in each file of bench/models."""
    reports, rows = [load(f"models/{path.stem}") for path in sorted((BENCH / "models").glob("*.json"))], {}
    for place, report in enumerate(reports):
        for one in report["texts"][0]["results"]:
            if one["dtype"].endswith(("-plain", "-rotated", "bfloat16")):  # in other tables
                continue
            rows.setdefault(_cache(one), ["-"] * len(reports))[place] = _stored(one, one)
    given = (report["model"] for report in reports)
    heads = (f"{model['name']} ({model['num_layers']}, {model['num_kv_heads']} x {model['head_dim']})" for model in given)
    return _table(["cache", *heads], [[name, *cells] for name, cells in rows.items()])


def bits():
    """Bits per element of a cache that is filled."""
    found = load("texts")["bits"]
    contexts = list(next(iter(found.values())))
    rows = [[f"`{dtype}`", *(f"{used:.2f} / {allocated:.2f}" for used, allocated in found[dtype].values())] for dtype in found]
    return _table(["tokens", *(tokens(int(n)) for n in contexts)], rows)


def retrieval():
    """Numbers that were hidden in a text."""
    lengths = load("retrieval")["lengths"]
    rows = {}
    for i, length in enumerate(lengths):
        for one in length["results"]:
            cells = rows.setdefault(_cache(one) + ", fast" * ("precision" in one), ["-"] * len(lengths))
            cells[i] = f"{one['difference']:+.3f} +- {one['interval']:.3f}, {one['num_exact']} of {one['num_answers']}"
    first = [one["results"][0] for one in lengths]
    floats = [f"{one['log_prob_float32']:.3f}, {one['num_exact_float32']} of {one['num_answers']}" for one in first]
    rows = [["`float32`", *floats], *([name, *cells] for name, cells in rows.items())]
    return _table(["cache", *(f"{one['tokens']:,} tokens" for one in lengths)], rows)


def cycles():
    """Cycles of the scores of a tile (64 tokens, keys of 128) on ARM processors, by LLVM's models of them; and what bounds them."""
    found, columns = {}, {}
    for one in load("cycles")["results"]:
        if not one["tier"].startswith("neon") or one["precision"] == "fast" or one["keys"].startswith("values"):
            continue
        columns[one["core"] + (", matrix products" if one["tier"] != "neon_dotprod" else ", dot products")] = None
        place = f"`{one['keys']}`", f"{one['rows']}"
        found.setdefault(place, []).append(f"{one['cycles']:,} ({one['bound']})")
    return _table(["keys", "query rows", *columns], [[*place, *cells] for place, cells in found.items()])


def fast_cycles():
    """Cycles of a tile in both precisions, by the same models."""
    found, columns = {}, {}
    for one in load("cycles")["results"]:
        if one["tier"] in ("neon_i8mm", "neon_bf16") or one["keys"] == "bfloat16":
            continue
        core = f"{one['core']}, `{one['tier']}`"
        columns[core] = None
        found.setdefault((f"`{one['keys']}`".replace("`values of int4`", "values of `int4`"), f"{one['rows']}"), {}).setdefault(
            core, []
        ).append(f"{one['cycles']:,}")
    rows = [[*place, *(" to ".join(cells.get(core, ["-"])) for core in columns)] for place, cells in found.items()]
    return _table(["", "query rows", *columns], rows)


def compression():
    rows = []
    for one in load("compression")["results"]:
        kl = f"{one['kl']:.{6 if one['kl'] < 1e-4 else 3 if one['kl'] > 0.1 else 4}f}"
        errors = [_percent(one[name]) for name in ("k_error", "v_error", "output_error")]
        name = f"`{one['dtype']}`" + (f" ({one['note']})" if one["note"] else "")
        rows.append([name, f"{one['bits_per_element']:.2f}", *errors, f"{one['nll_difference']:+.4f}", kl, _percent(one["top1"])])
    return _table(
        ["method", "bits per element", "error of K", "of V", "of outputs", "NLL change", "KL divergence", "same top token"], rows
    )


def _ways(report, key, title):
    formats = report["formats"]
    header = [title, *(f"`{name}`: {what}" for name in formats for what in ("NLL", "KL", "same top token"))]
    rows = [[way, *(cell for name in formats for cell in _way(report[key][name][way]))] for way in report[key][formats[0]]]
    return _table(header, rows)


def _way(one):
    return f"{one['nll']:.4f}", f"{one['kl']:.4f}", _percent(one["top1"])


def documents():
    """What the text after two documents costs."""
    return _ways(load("splicing"), "documents", "what the model has read")


def shift():
    """What the text after a context shift costs."""
    return _ways(load("splicing"), "shift", "context")


def _results(work, name="decode"):
    """Those of a JSON of `python -m kvfast bench` by format, context and threads; the formats, the contexts and the threads."""
    results = [one for one in load(name)["results"] if one["work"] == work]
    found = {(one["format"], one["context"], one["num_threads"]): one for one in results}
    formats, contexts, threads = (list(dict.fromkeys(key)) for key in zip(*found))
    return found, formats, sorted(contexts), sorted(threads)


def speed(name="decode"):
    """One token and a prompt by format and context, with one thread and two."""
    decode, formats, contexts, threads = _results("decode", name)
    prompts, _, prompt_contexts, _ = _results("prefill", name)
    contexts = [context for context in contexts if context in (4096, 32768)]
    prompt_contexts = [context for context in prompt_contexts if context in (4096, 16384)]
    rows = []
    for form in formats:
        row = [f"`{form}`"]
        row += [" / ".join(f"{decode[form, context, n]['seconds'] * 1e6:,.0f}" for n in threads) for context in contexts]
        row.append(" / ".join(f"{decode[form, 32768, n]['bandwidth_fraction']:.2f}" for n in threads))
        ratios = (decode["float16", 32768, n]["seconds"] / decode[form, 32768, n]["seconds"] for n in threads)
        row.append(" / ".join(f"{ratio:.1f}" for ratio in ratios))
        for context in prompt_contexts:
            cells = [prompts[form, context, n] for n in threads if (form, context, n) in prompts]
            rates = " / ".join(f"{one['operations'] / one['seconds'] / 1e9:,.0f}" for one in cells)
            row.append(f"{rates} ({cells[0]['compute_fraction']:.2f})" if cells else "-")
        rows.append(row)
    header = ["storage", *(f"{tokens(context)}, us" for context in contexts), "of bandwidth at 32k", "speed at 32k, float16 = 1"]
    return _table([*header, *(f"prompt at {tokens(context)}, GOP/s (of peak)" for context in prompt_contexts)], rows)


def precision():
    """The largest error over contexts and tiers, by format and number of queries."""
    results = load("precision")["attend"]
    rows = []
    for form in dict.fromkeys(one["format"] for one in results):
        ours = [one for one in results if one["format"] == form]
        worst = [max(max(one["errors"].values()) for one in ours if one["queries"] == n) for n in (1, 64)]
        rows.append([f"`{form}`", *(f"{error:.1e}" for error in worst), f"{ours[0]['bound']:.0e}"])
    return _table(["storage", "1 query", "64 queries", "contract"], rows)


def hard():
    """The largest error over tiers, for one query and 64, with a loud channel of the keys, small weights next to a large
    one, and one loud element of the values. Formats of the fast precision have a second row."""
    results, fast = ({one["format"]: one for one in load(name)["hard"]} for name in ("precision", "precision_fast"))

    def row(name, one, bound):
        return [name, *(f"{error:.1e}" for error in (*one["loud"].values(), one["peaked"], one["lone"])), bound]

    rows = []
    for form, one in results.items():
        rows.append(row(f"`{form}`", one, f"{one['bound']:.0e}"))
        if form in ("int4", "k8v4", "int8"):
            rows.append(row(f"`{form}`, fast", fast[form], "of its own"))
    loud = [f"loud by {loud}" for loud in results["int8"]["loud"]]
    return _table(["storage", *loud, "small weights", "lone value", "contract"], rows)


def _contenders():
    """The module that makes tables of what bench/peers.py measured."""
    sys.path.insert(0, str(BENCH))
    try:
        from contenders import table
    finally:
        sys.path.remove(str(BENCH))
    return table


def peers_file(name):
    """All that a JSON of bench/peers.py holds, as a page of its own."""
    return f"# All figures of bench/{name}.json\n\nWritten by docs/tables.py.\n\n{_contenders().tables(load(name))}"


_PEERS = {"Zen 5": "peers_zen5", "Zen 4": "peers_zen4", "Xeon": "peers_xeon"}


def _case(cell):
    shape = "" if cell["model"] == "Llama-3-8B" else f", {cell['model']}"
    if cell["kind"] == "batch":
        return f"{cell['queries']} sequences of {cell['context']:,}{shape}"
    what = "1 token" if cell["kind"] == "decode" else f"{cell['queries']:,} queries"
    return f"{what} at {cell['context']:,}{shape}"


def _lead(cell, storage):
    """How many times as long the fastest peer takes, whatever its storage."""
    times = {True: [], False: []}
    for one in cell["results"]:
        if one["status"] == "timed" and (one["peer"] != "kvfast" or one["storage"] == storage):
            times[one["peer"] == "kvfast"].append(one["seconds"] / one["layers"])
    ratio = min(times[False]) / times[True][0]
    return f"{ratio:.2f}" if ratio < 1.25 else f"{ratio:.1f}"


def peers():
    """kvfast against the fastest peer of any storage, on all machines."""
    columns = [(machine, storage) for machine in _PEERS for storage in ("float16", "int8", "int4")]
    columns += [("Xeon", "fast int8"), ("Xeon", "fast int4")]
    kinds = ("decode", "batch", "prefill")
    found, order = {}, {}
    for machine, storage in columns:
        for cell in load(_PEERS[machine])["cells"]:
            order[_case(cell)] = (kinds.index(cell["kind"]), cell["model"] != "Llama-3-8B", cell["context"], cell["queries"])
            found.setdefault((_case(cell), machine, storage), {})[cell["threads"]] = _lead(cell, storage)
    rows = []
    for case in sorted(order, key=lambda case: (order[case], case)):
        cells = [found.get((case, *column), {}) for column in columns]
        rows.append([case, *(", ".join(cell.get(threads, "-") for threads in (1, 2)) if cell else "-" for cell in cells)])
    return _table(["times as fast, 1 and 2 threads", *(f"{machine} `{storage}`" for machine, storage in columns)], rows)


def architectures(reasons=False):
    """What came of each architecture of transformers, those of one outcome together; with `reasons`, apart by reason."""
    kept = json.loads((ROOT / "tests" / "support" / "architectures.json").read_text(encoding="utf-8"))
    outcomes = {}
    for name, found in kept["architectures"].items():
        text = found.get("kvfast", found.get("not tried"))
        outcome = next((outcome for start, outcome in _OUTCOMES.items() if text.startswith(start)), None) or f"refused: {_reason(text)}"
        if not reasons and outcome.startswith(("refused", "not tried")):
            outcome = outcome.partition(":")[0] + (", with an error that names the reason" if outcome.startswith("refused") else "")
        if text.startswith("refused") and found["eager"].startswith("same"):
            outcome += ' (with "sdpa" or "eager" and the same cache: the same tokens)'
        outcomes.setdefault(outcome, []).append(name)
    order = sorted(outcomes, key=lambda one: (one.startswith("not"), one.startswith("refused"), -len(outcomes[one]), one))
    rows = [[outcome, str(len(outcomes[outcome])), ", ".join(outcomes[outcome])] for outcome in order]
    return _table([f"transformers {kept['transformers']}", "", "`model_type`"], rows)


# By what the results begin with; of two that fit, the longer stands first.
_OUTCOMES = {
    "same, decoded": "the same tokens, all of the cache decoded at each step: these models ask for no attention by its name",
    "same": "the same tokens, attended to on the stored bytes",
    "unused": "not tried: keeps its tokens elsewhere, whatever cache it is given",
    "transformers cannot": "not tried: takes no `DynamicCache` either",
    "a small": "not tried: large in its smallest configuration",
    "cannot be built": "not tried: no small configuration was found that builds",
}


def _reason(text):
    """The text of an error, as it is for all that are refused alike."""
    text = re.split(": use |, and under ", text.split(": ", 2)[2])[0]
    return re.sub(r"layer \d+( of \w+)?", "a layer", re.sub(r"\w+Attention", "its attention", text))


TABLES = {
    function.__name__: function
    for function in (memory, dtypes, kernels, accuracy, texts, models, retrieval, compression, speed, precision, peers, architectures)
}


def table_file(name, *tables):
    """Tables as a page of its own."""
    return f"# All figures of {name}\n\nWritten by docs/tables.py.\n\n" + "\n\n".join(table() for table in tables) + "\n"


# Long tables, which are not pages of the site.
FILES = {BENCH / f"{name}.md": partial(peers_file, name) for name in (*_PEERS.values(), "peers_amx")}
FILES |= {
    BENCH / f"{name}.md": partial(table_file, name, *tables)
    for name, tables in {
        "decode_avx512": [partial(speed, "decode_avx512")],
        "decode_zen4": [partial(speed, "decode_zen4")],
        "decode_zen5": [partial(speed, "decode_zen5")],
        "splicing": [documents, shift],
        "precision": [hard],
        "bits": [bits, lengths],
        "cycles": [cycles, fast_cycles],
        "architectures": [partial(architectures, reasons=True)],
    }.items()
}


def main():
    texts = {path: fill(path.read_text(encoding="utf-8")) for path in pages()} | {path: text() for path, text in FILES.items()}
    for path, text in texts.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
