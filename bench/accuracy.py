"""What formats cost a model in accuracy on four kinds of text, and the bits that they take:

    python bench/accuracy.py --model model.gguf --texts texts --json bench/texts.json

`bench/texts.py` writes the texts, and the one that calibrates.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from simulated_cache import SimulatedCache

import kvfast
from kvfast import evaluation, llama
from kvfast.tools.cli.bench.json_file import write_json

TEXTS = ("austen", "python", "german", "chinese")
FORMATS = ("int8", "int8-centred", "int8-rotated", "k8v4", "k8v4-rotated", "int4", "int4-recent", "k4v3", "int3", "int2")
CALIBRATED = ("int4", "int3", "int2")
CALIBRATION_TOKENS = 3072
FLOATS = {"num_first_float_tokens": 16, "num_recent_float_tokens": 48}  # as int4 has them
TILES = FLOATS | {"num_recent_float_tokens": 1, "block_size": 128}  # KVarN encodes a tile when it is full
RIVALS = [((kind, kind), floats) for floats in ({}, FLOATS) for kind in ("q8_0", "q4_1", "q4_0")]
RIVALS += [(("kvarn4", "kvarn4"), TILES), (("kvarn4", "kvarn2"), TILES)]
CONTEXTS = (128, 512, 2048, 8192, 32768)
SHAPE = (2, 64)  # KV heads and head_dim of the caches whose bits are counted


def scores(model, tokens, calibration):
    """A row for each cache."""
    shape, room = model.cache_shape, len(tokens)
    calibrated = [replace(kvfast.PRESETS[name], calibration=calibration) for name in CALIBRATED]
    caches = [kvfast.KVCache(*shape, max_seq_len=room, dtype=dtype) for dtype in (*FORMATS, *calibrated)]
    simulated = [SimulatedCache(shape, room, kinds, **floats) for kinds, floats in RIVALS]
    found = evaluation.evaluate(model, tokens, [*caches, *simulated])
    rows = [row_of(one) for one in found]
    for row, one in zip(rows[len(caches) :], simulated):
        row |= {"runtime": "simulated", "floats": bool(one.num_recent_float_tokens)}
    return rows, found[0].nll_float32


def row_of(score):
    names = ("bits_per_element", "kl", "kl_999")
    return {
        "runtime": score.runtime,
        "dtype": score.dtype,
        "bits_per_element": round(score.bits_per_element, 2),
        "nll_difference": round(score.nll_difference, 5),
        "kl": float(f"{score.kl:.3g}"),
        "kl_999": float(f"{score.kl_999:.3g}"),
        "top1": round(score.top1, 4),
        "lengths": [
            {"num_tokens": part["num_tokens"]} | {name: float(f"{part[name]:.3g}") for name in names} for part in score.lengths
        ],
    }


def bits(dtype, context):
    """Bits per element of a cache of `context` tokens that came 16 at a time: used, and allocated."""
    cache, rows = kvfast.KVCache(1, *SHAPE, max_seq_len=context, dtype=dtype), np.ones((16, *SHAPE), np.float32)
    for _ in range(0, context, len(rows)):
        cache.append(0, rows, rows)
        cache.advance(len(rows))
    return [round(8 * nbytes / (2 * context * cache.entry_size), 2) for nbytes in (cache.nbytes_used, cache.nbytes)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", choices=("bits", *TEXTS), help="measure this alone, and keep the rest of the file")
    args = parser.parse_args()
    report = json.loads(args.json.read_text()) if args.json.exists() else {}
    report |= {"model": Path(args.model).stem, "tokens": args.tokens}
    if args.only in (None, "bits"):
        report["bits"] = {dtype: {context: bits(dtype, context) for context in CONTEXTS} for dtype in FORMATS}
        write_json(args.json, report)
    if args.only == "bits":
        return
    model, tokenizer = llama.load(args.model)

    def tokens_of(name, count):
        return tokenizer.encode((args.texts / f"{name}.txt").read_text("utf-8"))[:count]

    calibration = evaluation.calibrate_on_text(model, tokens_of("calibration", CALIBRATION_TOKENS))
    for name in [args.only] if args.only else TEXTS:
        rows, nll = scores(model, tokens_of(name, args.tokens), calibration)
        report.setdefault("texts", {})[name] = {"nll_float32": round(nll, 4), "results": rows}
        print(name, *rows, sep="\n", flush=True)
        write_json(args.json, report)


if __name__ == "__main__":
    main()
