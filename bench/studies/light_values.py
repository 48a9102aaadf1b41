"""How many values of a decoding token weigh so little that they need one part of 8 bits, or need not be read.

    python bench/studies/light_values.py [--contexts 2048,7900] [--queries 40]

Rows are those of `python -m kvfast bench --rows real`: a novel, then declarations of C. Queries lie evenly in the last third of a context.
A tile has 256 tokens, a split 1,024. A tile counts if all query heads of its KV head can spare the same of it.

Belongs to the commit "bench: a count of values that weigh little".
"""

import argparse

import numpy as np

from kvfast.tools.cli.bench.cases import SMOLLM2_135M
from kvfast.tools.cli.bench.real_rows import real_rows

TILE, SPLIT = 256, 4
CODE_SIZE = 73 / 127  # of codes of 8 bits, next to the largest of their row
CONTRACT = 1e-3  # of the exact precision
EXACT, FAST = 5e-4, 1e-2  # what may be left out of an output


def spared(tiles, most):
    """The lightest tiles of each row, which add up to at most `most`."""
    order = np.argsort(tiles, axis=1)
    sums = np.take_along_axis(tiles, order, axis=1).cumsum(axis=1)
    found = np.zeros(tiles.shape, bool)
    np.put_along_axis(found, order, sums <= most, axis=1)
    return found


def rules(q, at, k, v):
    """The tiles that each rule spares, (rows, tiles), and the rows where its error is more than it may be; for the rows of one KV head."""
    scores = np.einsum("qd,td->qt", q, k) * k.shape[1] ** -0.5
    scores[np.arange(len(k)) > at[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    output, sizes = np.linalg.norm(weights @ v, axis=1, keepdims=True), np.linalg.norm(v, axis=1)
    sized = weights * sizes

    def splits(x):
        return np.pad(x, ((0, 0), (0, -len(k) % (SPLIT * TILE)))).reshape(len(x), -1, SPLIT, TILE)

    def is_light(x):  # next to the running maximum of a split, which begins with the first token
        most = splits(x).max(axis=3)
        return most < np.maximum.accumulate(np.maximum(most, x[:, :1, None]), axis=2) / 256

    near = (np.arange(len(k)) < 4) | (np.arange(len(k)) > at[:, None] - 32)  # to the start or the end
    sums = splits(sized).sum(axis=3)
    known = (sums.sum(axis=2) + (sized * near).sum(axis=1, keepdims=True))[:, :, None]
    known, sums = np.broadcast_to(known, sums.shape).reshape(len(q), -1), sums.reshape(len(q), -1)
    # Rotated values: the largest element of a row is about 2.5 times its root mean square.
    rounding = 0.29 / 126 * 2.5 * CODE_SIZE * TILE**0.5 * splits(sized).max(axis=3).reshape(sums.shape) / output
    for name, x in (("weight", weights), ("weight x value", sized)):
        found = is_light(x).reshape(sums.shape)
        yield f"one part, largest {name} below 1/256", found, np.sqrt((rounding**2 * found).sum(axis=1)) > CONTRACT
    for precision, most in (("exact", EXACT), ("fast", FAST)):
        for name, found in (
            ("output known", spared(sums / output, most)),
            ("all scores known", spared(sums / sums.sum(axis=1, keepdims=True), 0.3 * most)),
            ("scores of the split known", sums <= 0.3 * most / sums.shape[1] * known),
        ):
            yield f"not read, {precision}, {name}", found, (sums * found / output).sum(axis=1) > most


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="2048,7900")
    parser.add_argument("--queries", type=int, default=40)
    args = parser.parse_args()
    group = SMOLLM2_135M.num_q_heads // SMOLLM2_135M.num_kv_heads
    for context in map(int, args.contexts.split(",")):
        at, found = np.linspace(context * 2 // 3, context - 1, args.queries).astype(int), {}
        q, k, v = real_rows(SMOLLM2_135M, context, context)
        for layer in range(len(q)):
            for head in range(SMOLLM2_135M.num_kv_heads):
                rows = q[layer][at, head * group : (head + 1) * group].reshape(-1, q.shape[-1])
                seen = np.repeat(at, group)
                sides = (np.asarray(side[layer, :, head], np.float32) for side in (k, v))
                for name, tiles, broken in rules(rows, seen, *sides):
                    visible = np.arange(tiles.shape[1]) * TILE <= at[:, None]
                    shared = tiles.reshape(len(at), group, -1).all(axis=1)
                    found.setdefault(name, []).append((shared[visible].mean(), broken.mean()))
        print(f"after {context:,} tokens: tiles, and rows with more error than allowed")
        for name, figures in found.items():
            print(f"  {name:44s}", *(f"{figure:6.1%}" for figure in np.mean(figures, axis=0)))


if __name__ == "__main__":
    main()
