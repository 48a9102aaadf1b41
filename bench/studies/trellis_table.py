"""Trains levels for the trellis of kvfast/simd/trellis.h on Gaussian rows, and tells what they leave of the energy.

    python bench/studies/trellis_table.py [--rows 1000] [--rounds 40]

Rows of 128 are coded by Viterbi's search, and each level becomes the mean of what it stands for, by turns. The first levels
are evenly likely ones of a Gaussian 1.3 times as wide, dealt out so that those of a context and bit lie far from each other. The table there was trained in this way on 1,500 rows, in the last rounds
each with the best of three scales; rows that it has not seen leave 0.0050 with one scale and 0.0048 with the best of three.

Belongs to the commit 20c22a5, "Trellis-coded INT4: codebook="trellis" in KVFormat and MultiHeadConfig".
"""

import argparse
from statistics import NormalDist

import numpy as np

STATES, LENGTH = 128, 128
MASKS = (0x06, 0x34, 0x49)  # of the state, for the bits of its context
CONTEXTS = np.array([sum(((s & mask).bit_count() & 1) << i for i, mask in enumerate(MASKS)) for s in range(STATES)])


def first_levels():
    """(8 contexts, 16 codes)."""
    codes, contexts = np.arange(16), np.arange(8)[:, None]
    low, middle, high = contexts & 1, contexts >> 1 & 1, contexts >> 2
    place = codes << 3 | (low ^ middle) | low << 1 | (middle ^ high) << 2
    return np.vectorize(NormalDist(0, 1.3).inv_cdf)((place + 0.5) / 128)


def code(rows, levels):
    """Contexts and codes of the best paths of rows (n, LENGTH), each (n, LENGTH)."""
    n = len(rows)
    costs = np.where(np.arange(STATES), 1e9, 0.0) * np.ones((n, 1))
    nearest = np.empty((LENGTH, n, 8, 2), np.int8)
    upper = np.empty((LENGTH, n, STATES // 2, 2), bool)
    for t in range(LENGTH):
        errors = ((rows[:, t, None, None] - levels) ** 2).reshape(n, 8, 8, 2)
        nearest[t] = errors.argmin(2)
        paths = costs[:, :, None] + errors.min(2)[:, CONTEXTS]  # of each state and bit
        low, high = paths[:, : STATES // 2], paths[:, STATES // 2 :]
        upper[t] = high < low
        costs = np.minimum(low, high).reshape(n, STATES)
    each, state = np.arange(n), costs.argmin(1)
    contexts, codes = np.empty((2, n, LENGTH), int)
    for t in reversed(range(LENGTH)):
        bit, state = state & 1, state >> 1
        state = state + upper[t, each, state, bit] * (STATES // 2)
        contexts[:, t] = CONTEXTS[state]
        codes[:, t] = nearest[t, each, CONTEXTS[state], bit] * 2 + bit
    return contexts, codes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    rows = np.random.default_rng(0).standard_normal((arguments.rows, LENGTH))
    rows /= np.sqrt(np.mean(rows**2, axis=1, keepdims=True))
    levels = first_levels()
    for turn in range(arguments.rounds):
        contexts, codes = code(rows, levels)
        print(f"round {turn}: {np.mean((levels[contexts, codes] - rows) ** 2):.6f} of the energy", flush=True)
        sums, counts = np.zeros((2, 8, 16))
        np.add.at(sums, (contexts, codes), rows)
        np.add.at(counts, (contexts, codes), 1)
        levels = np.where(counts > 0, sums / np.maximum(counts, 1), levels)
        levels.reshape(8, 8, 2).sort(axis=1)
    unit = np.abs(levels).max() / 127
    print(f"unit {unit * 127:.4f} / 127, levels + 128 by context and code:")
    print(np.rint(levels / unit).astype(int) + 128)


if __name__ == "__main__":
    main()
