"""What documents in any order, and context shift, change in a model's answers: NLL of the text that follows.

    python bench/studies/splicing.py --text emma.txt persuasion.txt --json bench/splicing.json

A passage of each text is cut into two documents and the text that follows them. The model predicts that text after

- both documents, computed in one piece: the reference;
- both, computed apart and spliced, with no, 16 and 64 tokens of each computed again;
- the second document alone, and nothing.

For context shift the model reads a passage, half of it after the first tokens is dropped, and the text that follows is predicted
from the shifted cache, from the same tokens computed anew, and from the whole passage: the reference.

Belongs to the commit 8c001f6, "The example runtime splices documents, and goes on beyond a full cache; a script measures what that
changes".
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np

import kvfast
from kvfast import llama
from kvfast.tools.cli.bench.json_file import write_json
from kvfast.tools.evaluation.perplexity import compare

KEEP = 16


def documents(model, tokens, size, dtype):
    """{name: cache} with the first two `size` tokens of a passage in several ways."""
    first, second = tokens[:size], tokens[size : 2 * size]
    chunks = [llama.compute_document(model, one, dtype=dtype) for one in (first, second)]
    ways = {"full prefill": new_cache(model, dtype)}
    model.prefill(tokens[: 2 * size], ways["full prefill"])
    for recompute in (0, 16, 64):
        name = f"spliced, {recompute} recomputed" if recompute else "spliced"
        ways[name] = new_cache(model, dtype)
        llama.splice_documents(model, ways[name], chunks, recompute=recompute)
    ways["second document alone"] = kvfast.load(chunks[1])
    ways["no document"] = new_cache(model, dtype)
    return ways


def shifted(model, tokens, size, dtype):
    """{name: cache} of a passage, and of what context shift leaves of it."""
    ways = {"whole context": new_cache(model, dtype), "computed anew": new_cache(model, dtype)}
    model.prefill(tokens[: 2 * size], ways["whole context"])
    ways["shifted"] = ways["whole context"].copy()
    dropped = llama.shift_context(model, ways["shifted"], KEEP)
    model.prefill(np.concatenate((tokens[:KEEP], tokens[KEEP + dropped : 2 * size])), ways["computed anew"])
    return ways


def new_cache(model, dtype):
    return kvfast.KVCache(*model.cache_shape, dtype=dtype)


def predict(model, caches, chunk):
    """What `compare` takes."""
    hidden = model.forward_each(chunk, caches)
    return lambda rows: model.logits(hidden[:, rows])


def measure(model, passages, size, dtype, ways_of):
    """Means over all passages: {way: {nll, kl, top1}}. KL and top1 compare with the first way."""
    totals = {}
    for tokens in passages:
        caches = ways_of(model, tokens, size, dtype)
        found = compare(tokens[2 * size :], partial(predict, model, list(caches.values())), chunk_size=64)
        for name, mean in zip(caches, [{"nll": found[0]["nll_float32"], "kl": 0.0, "top1": 1.0}, *found], strict=True):
            totals.setdefault(name, []).append({key: mean[key] for key in ("nll", "kl", "top1")})
    return {name: {key: float(np.mean([one[key] for one in given])) for key in given[0]} for name, given in totals.items()}


def table(report):
    """The report as lines of Markdown."""
    lines = []
    for title, key in (("what the model has read", "documents"), ("context", "shift")):
        lines += [f"| {title} | {' | '.join(f'`{one}` NLL | KL | same top token' for one in report['formats'])} |"]
        lines += ["| --- |" + " --- | --- | --- |" * len(report["formats"])]
        for name in report[key][report["formats"][0]]:
            cells = [report[key][one][name] for one in report["formats"]]
            lines.append(f"| {name} | " + " | ".join(f"{one['nll']:.4f} | {one['kl']:.4f} | {one['top1']:.1%}" for one in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="UTF-8 text files")
    parser.add_argument("--passages", type=int, default=4, help="passages of each text (default: 4)")
    parser.add_argument("--size", type=int, default=768, help="tokens of a document (default: 768)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens that follow (default: 512)")
    parser.add_argument("--formats", default="float32,int4")
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    model, tokenizer = llama.load(args.model)
    passages = []
    for path in args.text:
        tokens = np.array(tokenizer.encode(Path(path).read_text(encoding="utf-8")))
        need = 2 * args.size + args.tokens
        passages += [tokens[start : start + need] for start in np.linspace(2000, len(tokens) - need, args.passages).astype(int)]
    formats = args.formats.split(",")
    report = {"texts": [Path(path).stem for path in args.text], "passages": len(passages), "size": args.size, "tokens": args.tokens}
    report |= {"keep": KEEP, "formats": formats, "documents": {}, "shift": {}}
    for dtype in formats:
        report["documents"][dtype] = measure(model, passages, args.size, dtype, documents)
        report["shift"][dtype] = measure(model, passages, args.size, dtype, shifted)
    print(table(report))
    if args.json:
        write_json(args.json, report)


if __name__ == "__main__":
    main()
