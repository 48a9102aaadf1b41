"""Float64 oracle of what the kernels compute."""

from typing import Any, NamedTuple

import numpy as np

import kvfast


def attention(q, k, v, **options):
    """Attention of the last tokens: q (n, Hq, D), k (L, Hkv, D), v (L, Hkv, E) -> out (n, Hq, E), lse (n, Hq)."""
    exact = exact_attention(q, k, v, np.arange(len(k)), np.arange(len(k) - len(q), len(k)), **options)
    return exact.out, exact.lse


def norms(rows, keepdims=False):
    """Norms over the last axis; numpy.linalg.norm takes three times as long."""
    squares = np.sqrt(np.einsum("...i,...i", rows, rows))
    return squares[..., None] if keepdims else squares


class Exact(NamedTuple):
    """Attention in float64, and what its bounds are relative to."""

    out: Any  # (queries, query heads, dim)
    lse: Any  # (queries, query heads)
    norm: Any  # (queries, query heads): what an error of the output is relative to
    spread: Any  # the same of how far they are from the output
    largest: Any  # largest score, by itself
    reach: Any  # the largest that it could be of a query and keys of these norms
    weighted: Any  # the norms of values, by their weights


def exact_attention(
    q,
    k,
    v,
    positions,
    at,
    *,
    scale=None,
    causal=True,
    softcap=None,
    sliding_window=None,
    num_sink_tokens=0,
    sinks=None,
    alibi_slopes=None,
    attention_chunk_size=None,
    spans=None,
    clamp_spans=False,
    tree_parents=None,
    indices=None,
    index_block=1,
):
    """Attention of queries at the positions `at` to keys at `positions`; otherwise as `attention`."""
    q, k, v = (np.asarray(one, np.float64) for one in (q, k, v))
    n, num_q_heads, dim = q.shape
    length, heads = k.shape[:2]
    group = num_q_heads // heads
    scale = dim**-0.5 if scale is None else scale
    q = q.reshape(n, heads, group, dim).transpose(1, 2, 0, 3)
    score = scale * (q @ k.transpose(1, 2, 0)[:, None])  # (heads, group, queries, keys)
    size = np.abs(score)
    reach = np.abs(scale) * norms(q) * norms(k).max(0)[:, None, None]
    if softcap:
        score = softcap * np.tanh(score / softcap)
        size = np.abs(score)
    rows = positions
    if tree_parents is not None and len(tree_parents):
        places, keys, unrelated = tree(int(positions[-1]) + 1, n, tree_parents)
        at, positions, unrelated = places[:, 0], keys[0][rows], unrelated[:, rows]
    distance = positions[None] - at[:, None]
    if alibi_slopes is not None:
        slope = np.asarray(alibi_slopes, np.float64).reshape(heads, group, 1, 1)
        score = score + slope * distance
        size = size + np.abs(slope * distance)
    gone = np.zeros((n, length), bool)
    if sliding_window:
        gone |= (distance <= -sliding_window) & (positions >= (num_sink_tokens or 0))
    if attention_chunk_size:
        first = at[:, None] // attention_chunk_size * attention_chunk_size
        gone |= (positions[None] < first) & (positions >= (num_sink_tokens or 0))
    hidden = gone | (distance > 0) if causal else gone
    for start, stop in () if spans is None else spans:
        hidden = hidden & ~np.logical_and.outer((start <= at) & (at < stop), (start <= positions) & (positions < stop))
    if clamp_spans:
        hidden = hidden | gone
    if tree_parents is not None and len(tree_parents):
        hidden = hidden | unrelated
    if indices is not None:
        hidden = hidden | ~among(rows, indices, index_block)[:, None]
    score, size = np.where(hidden, -np.inf, score), np.where(hidden, 0, size)
    top, largest = score.max(-1), size.max(-1)
    if sinks is not None:
        logit = np.asarray(sinks, np.float64).reshape(heads, group, 1)
        top, largest = np.maximum(top, logit), np.maximum(largest, np.abs(logit))
    weight = np.exp(score - top[..., None])
    total = weight.sum(-1)
    if sinks is not None:
        total = total + np.exp(logit - top)
    weight /= total[..., None]
    v = v.transpose(1, 0, 2)[:, None]
    out = weight @ v
    sizes = norms(v)  # (heads, 1, keys)
    square = (out**2).sum(-1)
    spread = (weight * sizes[:, :, None] ** 2).sum(-1) + (weight.sum(-1) - 2) * square
    lse = top + np.log(total)
    # The norm of the output, which is at least what it were if values had nothing to do with each other; where they nearly
    # cancel, so that it is less than half of that, their mean norm. What weighs less than a ten-thousandth of all, next to values near 0,
    # need not be as precise.
    weighted, norm = weight * sizes[:, :, None], np.sqrt(square)
    apart = norms(weighted)
    norm = np.where(norm < 0.5 * apart, weighted.sum(-1), np.maximum(norm, apart))
    norm = np.maximum(norm, 1e-4 * sizes.max(-1)[..., None])
    back = (
        out.transpose(2, 0, 1, 3).reshape(n, num_q_heads, -1),
        *(
            one.transpose(2, 0, 1).reshape(n, num_q_heads)
            for one in (lse, norm, np.sqrt(np.maximum(spread, 0)), largest, np.maximum(reach, largest), weighted.sum(-1))
        ),
    )
    return Exact(*back)


def among(positions, indices, run=1):
    """Which positions are chosen, (KV heads or 1, queries, positions)."""
    indices = np.asarray(indices)
    indices = indices[:, None] if indices.ndim == 2 else indices
    return (indices.swapaxes(0, 1)[..., None] == positions // run * run).any(2)


def tree(length, n, parents):
    """Positions of queries and keys whose last ones are drafts, by their depth, and which keys a draft must not see."""
    first, depths, family = length - len(parents), [], []
    for i, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        family.append({i} | (family[parent] if parent >= 0 else set()))
    at = np.arange(length)
    at[first:] = first + np.array(depths)
    unrelated = np.zeros((length, length), bool)
    for i, own in enumerate(family):
        unrelated[first + i, [first + j for j in range(len(parents)) if j not in own]] = True
    unrelated[:first, first:] = True
    return at[length - n :, None], at[None], unrelated[length - n :]


def relative_error(got, expected):
    """Largest error of an output row, relative to its norm."""
    norm = np.linalg.norm(expected, axis=-1)
    return (np.linalg.norm(got - expected, axis=-1) / np.maximum(norm, 1e-30)).max()


def bound(*dtypes):
    """The precision contract: relative error of `attend` on the stored codes."""
    return 1e-5 if all(dtype == "float32" for dtype in dtypes) else 1e-3


# For many queries on float16 and bfloat16, which are cut there: by a matrix unit to 17 bits, by AVX-512 VNNI to words of 13 to 16.
HALVES_BOUNDS = {"amx": 1e-4, "avx512_vbmi": 5e-4, "avx512_vnni": 5e-4}


def halves_bound():
    """Bound of `attend` on float16 and bfloat16, for any number of queries."""
    return HALVES_BOUNDS.get(kvfast.active_isa(), 1e-5)


def ways_agree(one, other, dtype, rtol=1e-5, atol=1e-5):
    """Whether two ways of computing the same attention do: many queries and a few, prefixes read together and apart.

    Many queries are rounded elsewhere than a few are, by a matrix unit and by AVX-512 VNNI, but on float32. There both are held to
    the precision contract alone, and to a part of it what no matrix unit multiplies as integers.
    """
    if dtype == "float32" or kvfast.active_isa() not in HALVES_BOUNDS:
        return np.allclose(one, other, rtol=rtol, atol=atol)
    codes_by_matrix = kvfast.active_isa() == "amx" and not str(dtype).startswith(("float", "bfloat"))
    return relative_error(one, other) < (bound("int8") if codes_by_matrix else halves_bound())
