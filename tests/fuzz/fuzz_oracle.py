"""What `fuzz_caches` holds caches to: bounds of what is stored, and of attention over it, from the inputs alone.

The bounds are those that docs/concepts/precision.md and formats.md promise, worked out for each format; none of them is
taken from what the code gives.
"""

import functools

import numpy as np
from reference import norms

INTEGERS = ("int2", "int3", "int4", "int5", "int6", "int7", "int8")
NEVER = 1 << 60
NOTHING = 1e-28  # queries and values below may count as nothing
HALF = 2.0**-11  # share of a number by which float16 rounds it, and bfloat16:
BRAIN = 2.0**-8
# Half of the widest gap between levels of packed and Gaussian codes, relative to the largest element. Their scale is the one
# of least squared error among several of which one clips nothing, so this bounds the root mean square of a row.
GAPS = {
    ("int4", "uniform"): 0.5 / 7,
    ("int4", "gaussian"): 15.5 / 127,
    ("int2", "gaussian"): 42 / 120,
    ("int3", "gaussian"): 23 / 122,
    ("int5", "gaussian"): 10.5 / 119,
}


def open_tokens(form):
    """Tokens that follow others before these are read as codes."""
    return max(16 if form.seals else 0, form.num_recent_float_tokens)


def coded_at(form, position, block_size, kept=0):
    """First token that a query at a position reads as a float, or with `kept` more of them: with `seals` whole blocks, else sixteens."""
    border = block_size if form.seals else 16
    return np.maximum(position - open_tokens(form) - kept, 0) // border * border if open_tokens(form) else position


def released_at(form, length, block_size):
    """Tokens without float rows once `length` are counted: where queries have floats of their own, 16 more stay for a rollback."""
    return coded_at(form, length, block_size, 16 if form.recent_by_query else 0)


class Finding(AssertionError):
    """What kvfast must not do; `signature` is the same for what probably has the same cause."""

    def __init__(self, signature, told=""):
        super().__init__(f"{signature}: {told}" if told else signature)
        self.signature = signature


def rows_of(result, first, last):
    """The outputs of some queries, with their log-sum-exps if these were asked for."""
    return tuple(one[first:last] for one in result) if isinstance(result, tuple) else result[first:last]


@functools.cache
def rotation(dim):
    """The orthogonal, symmetric matrix that rows of a rotated side are turned by: Hadamard's in Hartley's, between signs."""
    size = dim & -dim
    turn = np.ones((1, 1))
    while len(turn) < size:
        turn = np.block([[turn, turn], [turn, -turn]])
    angles = 2 * np.pi * np.outer(np.arange(dim // size), np.arange(dim // size)) / (dim // size)
    signs = np.array([(-1) ** (i & i >> 1).bit_count() for i in range(dim)])
    return signs[:, None] * np.kron(np.cos(angles) + np.sin(angles), turn) / np.sqrt(dim) * signs


def rounded(rows, dtype):
    """float32 of what a float dtype keeps of rows."""
    rows = np.asarray(rows, np.float32)
    if dtype == "float32":
        return rows
    if dtype == "float16":
        return rows.astype(np.float16).astype(np.float32)
    bits = rows.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


class Side:
    """How keys or values are stored: what a KVFormat says of one of them."""

    def __init__(self, form, values):
        self.dtype = form.v_dtype if values else form.k_dtype
        self.rotated = "v" in form.rotation if values else "k" in form.rotation
        self.is_float = self.dtype not in INTEGERS
        self.per_channel, self.centred = form.per_channel and not values, form.centring and not values
        self.seals, self.newest, self.num_first_float_tokens = form.seals, open_tokens(form) > 0, form.num_first_float_tokens
        codebook = form.codebook if self.dtype in ("int2", "int3", "int4", "int5") else "uniform"
        self.codebook = codebook
        # Whether a row's scale clips nothing, so that each of its elements is within half a step.
        self.by_element = self.dtype == "int8" or self.dtype == "int4" and codebook == "uniform" and not form.clip_search
        if self.dtype == "int8":
            self.gap = 0.5 / 127
        elif not self.is_float:
            self.gap = GAPS.get((self.dtype, codebook), 0.5 ** int(self.dtype[3:])) + (0 if self.by_element else 2.0**-8)

    def turned(self, rows):
        return rows @ rotation(rows.shape[-1]) if self.rotated and rows.size else rows

    def code_bounds(self, rows, spans):
        """How far from rows, which are turned, their codes may be, each element; `spans`: the range of each of their channels
        over the blocks that they are in, where these have statistics."""
        if self.is_float or rows.shape[-1] == 0:
            return np.zeros_like(rows)
        slack = 2e-6 * norms(rows, True) + 1e-36
        if self.seals:  # float16 before they are coded, and again where a block that was cut is written to
            slack = slack + 2 * HALF * np.abs(rows).max(-1, keepdims=True) + 2.0**-22
        if self.per_channel:
            # Up to 1.25 steps outside of the codes, of the 7 steps that a channel of INT4 has at least, or the 3 of INT3; float16
            # offsets, and scales in 16,383rds of the largest.
            steps = 7 if self.dtype == "int4" else 3
            return spans * (1.27 / steps + 2 * HALF) + spans.max(-1, keepdims=True) / 16383 + slack
        # Less a mean of float16, no element is larger than its channel's range.
        size = spans.max(-1, keepdims=True) * (1 + HALF) if self.centred else np.abs(rows).max(-1, keepdims=True)
        return np.broadcast_to(size * self.gap * 1.002 + slack, rows.shape)

    def reach(self, given, spans):
        """How far rows may be from what was given, whether floats or codes of them are read: (tokens, heads)."""
        rows = self.turned(given.astype(np.float64))
        codes = norms(self.code_bounds(rows, spans))
        return np.maximum(codes, norms(self.float_bounds(rows)))

    def float_bounds(self, rows):
        """How far from rows, which are turned, their floats may be."""
        if self.is_float:
            return np.abs(rows - rounded(rows, self.dtype))
        return np.abs(rows) * (HALF * 1.001) + 2.0**-24 + 2e-6 * norms(rows, True)

    def check(self, got, given, positions, spans, lossy, where, either=NEVER):
        """Hold decoded rows to what was given: (tokens, heads, dim). Tokens from `lossy` on have their floats yet; from `either` on they
        may have them."""
        if got.shape != given.shape:
            raise Finding(f"shape of rows | {where}", f"{got.shape}, of {given.shape} given")
        if not got.size:
            return
        if not np.isfinite(got).all():
            raise Finding(f"rows that are not finite | {where}")
        rows, error = self.turned(given.astype(np.float64)), np.abs(self.turned(got.astype(np.float64) - given))
        floats = positions < (1 << 62 if self.is_float else self.num_first_float_tokens)
        if self.newest:
            floats = floats | (positions >= lossy)
        excess = error - self.float_bounds(rows)
        are_floats = (excess <= 0).all((1, 2))
        bad = floats & ~are_floats
        if bad.any():
            at = int(np.argmax(bad))
            raise Finding(
                f"floats are not what was given | {where}", f"token {positions[at]}: {_worst(got[at], given[at], excess[at])}"
            )
        bounds = self.code_bounds(rows, spans)
        if not (self.by_element or self.per_channel):
            error, bounds = norms(error, True), norms(bounds, True)
        excess = error - bounds
        bad = ~floats & (excess > 0).any((1, 2)) & ~(are_floats & (positions >= either))
        if bad.any():
            at = int(np.argmax(bad))
            place = np.unravel_index(np.argmax(excess[at]), excess[at].shape)
            raise Finding(
                f"code is not within its step | {where}",
                f"token {positions[at]}, head {int(place[0])}: error {error[at][place]:.4g}, bound {bounds[at][place]:.4g}",
            )


def _worst(got, given, error):
    at = np.unravel_index(np.argmax(error), got.shape)
    return f"element {tuple(map(int, at))} is {got[at]:.7g}, given {given[at]:.7g}"


def contract(sides):
    """The relative error that `attend` may add."""
    return 1e-5 if all(side.dtype == "float32" for side in sides) else 1e-3


def allowed(exact, limit, out_dtype="float32", fast=False):
    """How far an output may be from exact attention over the stored rows, and its log-sum-exp: (queries, query heads).

    Both grow with the products that a score is a sum of, which may have left little of each other.
    """
    relative, size = limit * np.maximum(1, exact.reach / 16), exact.norm
    if fast:
        relative, size = 0.03 + 0.02 * exact.reach, np.maximum(exact.norm, exact.weighted)
    rounding = {"float32": 1e-7, "float16": HALF, "bfloat16": BRAIN}[out_dtype]
    least = 2.0**-24 * np.sqrt(exact.out.shape[-1]) if out_dtype == "float16" else 0
    return (
        relative * size + rounding * norms(exact.out) + NOTHING * np.sqrt(exact.out.shape[-1]) + least,
        relative + 1e-6 * np.abs(exact.lse),
    )


def check_output(out, lse, exact, limit, where, more=0.0, out_dtype="float32", fast=False):
    """Hold an output to exact attention; `more` is what may come of the errors of keys and values: (queries, query heads)."""
    out = out.astype(np.float64)
    if not np.isfinite(out).all() or lse is not None and not np.isfinite(lse).all():
        raise Finding(f"output is not finite | {where}")
    tolerance, of_lse = allowed(exact, limit, out_dtype, fast)
    error = norms(out - exact.out)
    if (error > tolerance + more).any():
        at = np.unravel_index(np.argmax(error / (tolerance + more)), error.shape)
        raise Finding(
            where,
            f"query {int(at[0])}, head {int(at[1])}: relative error {error[at] / exact.norm[at]:.2e} where "
            f"{(tolerance + more)[at] / exact.norm[at]:.1e} is allowed; "
            f"largest score {exact.largest[at]:.3g}, got {out[at][:3]} for {exact.out[at][:3]}",
        )
    if lse is not None:
        error = np.abs(lse - exact.lse)
        if (error > of_lse).any():
            at = np.unravel_index(np.argmax(error / of_lse), error.shape)
            raise Finding(f"lse, {where}", f"{lse[at]} for {exact.lse[at]}, largest score {exact.largest[at]:.3g}")


def from_storage(exact, q, k_errors, v_errors, scale):
    """How far an output may be from attention to the inputs where keys and values are as far from theirs."""
    group = q.shape[1] // k_errors.shape[1]
    of_k = np.repeat(k_errors.max(0, initial=0), group)
    of_v = np.repeat(v_errors.max(0, initial=0), group)
    moved = np.abs(scale) * norms(q.astype(np.float64)) * of_k  # of scores: (queries, query heads)
    factor = np.exp(np.minimum(2 * moved, 700))
    return (factor - 1) * exact.spread + factor * of_v, factor
