"""Keys, values and queries of the tests of what a query sees."""

import numpy as np

TOKENS, HEADS, DIM = 300, 2, 32


def tokens(rng, count=TOKENS):
    return rng.standard_normal((2, count, HEADS, DIM)).astype(np.float32)


def queries(rng, count, group=3):
    return rng.standard_normal((count, group * HEADS, DIM)).astype(np.float32)
