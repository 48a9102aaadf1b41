"""How far llama.cpp with kvfast's attention is from llama.cpp without it: distributions, log-likelihoods and texts of one model.

    python -m kvfast llama-cpp build
    python bench/texts.py packages texts
    python bench/studies/llama_cpp_fidelity.py MODEL.gguf texts/austen.txt texts/python.txt texts/german.txt texts/chinese.txt

For each pair of types of K and V: `flash` is ggml's own flash attention, `exact` and `fast` are kvfast's in these precisions, and
`plain` is ggml without flash attention, which needs V in floats. `flash` and `plain` are two implementations of one author, so what lies
between them is the measure for what may lie between `flash` and kvfast. The reference is `plain` on a cache of f32.

Belongs to the commit that gives llama.cpp the fast precision.
"""

import argparse
import ctypes
import itertools
import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench_llama_cpp import BATCH, Session, open_model, tokens_of

import kvfast.llama_cpp

BLOCK = 64  # tokens whose log-likelihoods count as one observation, as those of neighbours depend on each other


class KvfastSession(Session):
    """One that kvfast attends for, in a precision, which is that of the process."""

    def __init__(self, precision, *arguments):
        super().__init__(*arguments)
        self.precision = precision

    def append(self, *arguments, **options):
        kvfast.llama_cpp.load(precision=self.precision)
        return super().append(*arguments, **options)


def log_softmax(logits):
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def divergences(p, q):
    """KL of each row's distribution q from p, in nats."""
    return (np.exp(p) * (p - q)).sum(axis=1)


def score(sessions, tokens):
    """{(name, name): KL of the second from the first, of each token}, {name: log-likelihoods of the tokens but for the first}."""
    kl, likelihoods = {pair: [] for pair in itertools.combinations(sessions, 2)}, {name: [] for name in sessions}
    for session in sessions.values():
        session.clear()
    for start in range(0, len(tokens) - 1, BATCH):
        part = tokens[start : start + BATCH + 1]
        found = {name: log_softmax(session.append(part[:-1], every=True)) for name, session in sessions.items()}
        for (one, other), parts in kl.items():
            parts.append(divergences(found[one], found[other]))
        for name, rows in found.items():
            likelihoods[name].append(rows[np.arange(len(rows)), part[1:]].astype(np.float64))
    return {pair: np.concatenate(parts) for pair, parts in kl.items()}, {
        name: np.concatenate(parts) for name, parts in likelihoods.items()
    }


def with_error(values):
    """Mean, and half of its interval of 95 %, from means of blocks of tokens."""
    blocks = np.add.reduceat(values, np.arange(0, len(values), BLOCK)) / BLOCK
    return float(values.mean()), float(1.96 * blocks.std(ddof=1) / len(blocks) ** 0.5)


def greedy(session, prompt, count):
    """The tokens after a prompt, and how far the best of each is before the second, in logits."""
    session.clear()
    tokens, gaps, logits = [], [], session.append(prompt)[-1]
    for _ in range(count):
        second, best = np.partition(logits, -2)[-2:]
        tokens.append(int(logits.argmax()))
        gaps.append(float(best - second))
        logits = session.append(tokens[-1:])[-1]
    return tokens, gaps


def first_differences(texts, other):
    """For each pair of different texts, the gap of the first at the token where they part."""
    found = []
    for (tokens, gaps), (others, _) in zip(texts, other):
        at = next((i for i, pair in enumerate(zip(tokens, others)) if pair[0] != pair[1]), None)
        if at is not None:
            found.append(gaps[at])
    return found


def compare(types, sessions, texts, given):
    """One record: what lies between each two of the sessions, the first of which is the reference."""
    kl, likelihoods, written = {}, {}, {}
    for tokens in texts:
        for found, into in zip(score(sessions, tokens), (kl, likelihoods)):
            for name, values in found.items():
                into.setdefault(name, []).append(values)
    prompts = [tokens[i * given.prompt : (i + 1) * given.prompt] for i in range(-(-given.prompts // len(texts))) for tokens in texts]
    for name, session in sessions.items():
        written[name] = [greedy(session, prompt, given.tokens) for prompt in prompts[: given.prompts]]
    record = {"types": types, "tokens": sum(map(len, texts)), "pairs": []}
    for (one, other), parts in kl.items():
        difference, error = with_error(np.concatenate(likelihoods[one]) - np.concatenate(likelihoods[other]))
        apart = first_differences(written[one], written[other])
        record["pairs"].append(
            {
                "from": one,
                "to": other,
                "kl": float(np.concatenate(parts).mean()),
                "kl_of_texts": [float(part.mean()) for part in parts],
                "log_perplexity": difference,
                "error": error,
                "same_texts": given.prompts - len(apart),
                "gaps": sorted(apart),
            }
        )
    return record


def report(record):
    print(f"{record['types']}, {record['tokens']} tokens")
    for pair in record["pairs"]:
        print(
            f"  {pair['from']} to {pair['to']}: KL {pair['kl']:.2g}, log perplexity {pair['log_perplexity']:+.5f} +- {pair['error']:.5f}, "
            f"{pair['same_texts']} texts the same, gaps of the others {' '.join(f'{gap:.2f}' for gap in pair['gaps']) or 'none'}",
            flush=True,
        )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("texts", nargs="+", help="files")
    parser.add_argument("--types", type=lambda text: text.split(","), default=["f16", "q8_0/f16", "q8_0", "q4_0/f16", "q4_0"])
    parser.add_argument("--context", type=int, default=2048, help="tokens of each text")
    parser.add_argument("--prompts", type=int, default=20, help="that are continued greedily")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="that continue a prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args(arguments)
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = open_model(given.model)
    texts = [tokens_of(model, Path(path).read_text("utf-8")[: 16 * given.context], given.context) for path in given.texts]

    def opened(types, flash=True):
        return Session(model, types, given.context + 256, given.threads, flash)

    reference = opened("f32", flash=False)
    sessions = {types: {"reference": reference, "flash": opened(types)} for types in given.types}
    for types, found in sessions.items():
        if types.split("/")[-1] in ("f32", "f16", "bf16"):
            found["plain"] = opened(types, flash=False)
    kvfast.llama_cpp.load()  # contexts that were opened before go without it
    records = []
    for types, found in sessions.items():
        quantised = all(one.startswith("q") for one in types.split("/"))
        for precision in ("exact", "fast") if quantised else ("exact",):
            found[precision] = KvfastSession(precision, model, types, given.context + 256, given.threads)
        records.append(compare(types, found, texts, given))
        report(records[-1])
        if given.json:
            Path(given.json).write_text(json.dumps(records, indent=1))
        for name, session in found.items():
            if name != "reference":
                session.free()
    reference.free()
    llama_cpp.llama_model_free(model)


if __name__ == "__main__":
    main()
