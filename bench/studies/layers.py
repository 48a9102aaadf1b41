"""Whether formats that differ by layer lose less than int4 does in all layers, in as many bytes.

    python bench/studies/layers.py TEXT OTHER [OTHER ...] [--tokens 1024] [--others-tokens 4096] [--formats k4v2,k4v3,k4v5,k8v4] [--bits 4.44]

The KL divergence of the model's predictions on TEXT is measured with one layer in another format and all others in int4, for each layer
and format. A greedy choice takes the steps that change it most for their bits, to the bits of int4 and to `--bits`. Then both choices,
int4 and its neighbour k4v3 predict the other texts. All formats have the float tokens of int4: a cache reserves the rows of these tokens
for all layers alike.

Belongs to the commit "bench: formats that differ by layer, and what they gain".
"""

import argparse
from pathlib import Path

import numpy as np

import kvfast
from kvfast import evaluation, llama

CONTEXT = 4096  # tokens of a text in which bits count
AT_ONCE = 15  # caches in one pass over a text
CHANNELS = {"per_channel": True, "rotation": "v", "num_first_float_tokens": 4}
ROWS = {"rotation": "kv", "num_first_float_tokens": 4, "num_recent_float_tokens": 16}
FORMATS = {
    "k3v4": kvfast.KVFormat("int3/int4", codebook="gaussian", **CHANNELS),
    "k4v2": kvfast.KVFormat("int4/int2", codebook="gaussian", **CHANNELS),
    "k4v3": kvfast.KVFormat.of("k4v3"),
    "k4v5": kvfast.KVFormat("int4/int5", codebook="gaussian", **CHANNELS),
    "k8v4": kvfast.KVFormat("int8/int4", codebook="gaussian", clip_search=True, **ROWS),
    "int8": kvfast.KVFormat("int8", **ROWS),
}


def bits_of(fmt, shape):
    """Bits per element of a layer with `CONTEXT` tokens, float rows included."""
    cache, rows = kvfast.KVCache(1, *shape[1:], dtype=fmt), np.ones((16, *shape[1:]), np.float32)
    for _ in range(CONTEXT // 16):
        cache.append(0, rows, rows)
        cache.advance(16)
    return 8 * cache.nbytes_used / (2 * rows[0].size * CONTEXT)


def scores(model, tokens, mixtures):
    """The score of each list of formats on a text."""
    found = []
    for first in range(0, len(mixtures), AT_ONCE):
        some = mixtures[first : first + AT_ONCE]
        caches = [kvfast.KVCache(*model.cache_shape, max_seq_len=len(tokens), dtype=one) for one in some]
        found += evaluation.evaluate(model, tokens, caches)
    return found


def choose(losses, bits, budget):
    """A format for each layer, of `losses[format][layer]` and `bits[format]`: from the fewest bits on, the steps with the best ratio."""
    num_layers = len(next(iter(losses.values())))
    chosen, left = [min(bits, key=bits.get)] * num_layers, budget * num_layers
    left -= sum(bits[one] for one in chosen)
    while True:
        steps = [
            ((losses[now][i] - losses[new][i]) / (bits[new] - bits[now]), i, new)
            for i, now in enumerate(chosen)
            for new in bits
            if 0 < bits[new] - bits[now] <= left + 1e-9 and losses[new][i] < losses[now][i]
        ]
        if not steps:
            return chosen
        _, layer, new = max(steps)
        left -= bits[new] - bits[chosen[layer]]
        chosen[layer] = new


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("others", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--others-tokens", type=int, default=CONTEXT)
    parser.add_argument("--formats", default="k4v2,k4v3,k4v5,k8v4")
    parser.add_argument("--bits", type=float, default=4.44)
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (default: SmolLM2-135M-Instruct)")
    args = parser.parse_args()
    model, tokenizer = llama.load(args.model)
    num_layers = model.cache_shape[0]
    formats = {name: FORMATS[name] for name in args.formats.split(",")} | {"int4": kvfast.KVFormat.of("int4")}
    bits = {name: bits_of(fmt, model.cache_shape) for name, fmt in formats.items()}
    base = ["int4"] * num_layers
    changed = [(name, i) for name in formats if name != "int4" for i in range(num_layers)]
    mixtures = [base, *([*base[:i], name, *base[i + 1 :]] for name, i in changed)]
    tokens = tokenizer.encode(args.text.read_text("utf-8"))[: args.tokens]
    found = scores(model, tokens, [[formats[one] for one in mixture] for mixture in mixtures])
    losses = {name: [0.0] * num_layers for name in formats}
    for (name, i), score in zip(changed, found[1:]):
        losses[name][i] = score.kl - found[0].kl
    for name in formats:
        print(f"{name}: {bits[name]:.3f} bits; change of the KL by layer: {' '.join(f'{1e6 * one:.0f}' for one in losses[name])} e-6")
    plans = {"int4": base, "by layer": choose(losses, bits, bits["int4"]), "k4v3": ["k4v3"] * num_layers}
    plans[f"by layer, {args.bits}"] = choose(losses, bits, args.bits)
    for name, plan in plans.items():
        print(f"{name}: {' '.join(plan)}; KL expected: {found[0].kl + sum(losses[one][i] for i, one in enumerate(plan)):.6f}")
    for path in [args.text, *args.others]:
        tokens = tokenizer.encode(path.read_text("utf-8"))[: args.tokens if path == args.text else args.others_tokens]
        found = scores(model, tokens, [[formats[one] for one in plan] for plan in plans.values()])
        for name, score in zip(plans, found):
            cost = f"{score.bits_per_element:.3f} bits, KL {score.kl:.6f}, {score.kl / found[0].kl:.2f} times that of int4"
            print(f"{path.stem}, {len(tokens):,} tokens, {name}: {cost}", flush=True)


if __name__ == "__main__":
    main()
