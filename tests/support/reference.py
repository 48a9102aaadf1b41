"""Float64 oracle of what the kernels compute."""

import numpy as np

import kvfast


def attention(
    q,
    k,
    v,
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
    parents=None,
    chosen=None,
    chosen_run=1,
):
    """Attention of the last tokens: q (n, Hq, D), k (L, Hkv, D), v (L, Hkv, E) -> out (n, Hq, E), lse (n, Hq)."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    n, num_q_heads, dim = q.shape
    length, num_kv_heads = k.shape[:2]
    group = num_q_heads // num_kv_heads
    scale = dim**-0.5 if scale is None else scale
    at, key = length - n + np.arange(n)[:, None], np.arange(length)[None]
    unrelated = np.zeros((n, length), bool)
    if parents is not None and len(parents):
        at, key, unrelated = tree(length, n, parents)
    gone = np.zeros((n, length), bool)  # before a window or a chunk
    if sliding_window:
        gone |= (key <= at - sliding_window) & (key >= num_sink_tokens)
    if attention_chunk_size:
        gone |= (key < at // attention_chunk_size * attention_chunk_size) & (key >= num_sink_tokens)
    hidden = gone | (key > at) if causal else gone
    for start, stop in () if spans is None else spans:
        hidden = hidden & ~((start <= at) & (at < stop) & (start <= key) & (key < stop))
    if clamp_spans:
        hidden = hidden | gone
    hidden = hidden | unrelated
    hidden = hidden[None] | (False if chosen is None else ~among(np.arange(length), chosen, chosen_run))
    out, lse = np.zeros((n, num_q_heads, v.shape[2])), np.zeros((n, num_q_heads))
    for kv_head in range(num_kv_heads):  # with all heads of queries that read it
        heads = slice(kv_head * group, (kv_head + 1) * group)
        score = (scale * q[:, heads].swapaxes(0, 1)).reshape(group * n, dim) @ k[:, kv_head].T
        score = score.reshape(group, n, length)
        if softcap:
            score = softcap * np.tanh(score / softcap)
        if alibi_slopes is not None:
            score += np.asarray(alibi_slopes[heads], np.float64)[:, None, None] * (key - at)
        score[:, hidden[kv_head % len(hidden)]] = -np.inf
        top = score.max(2)
        if sinks is not None:
            sink = np.asarray(sinks[heads], np.float64)[:, None]
            top = np.maximum(top, sink)
        weight = np.exp(score - top[:, :, None])
        total = weight.sum(2)
        if sinks is not None:
            total = total + np.exp(sink - top)
        weight /= total[:, :, None]
        out[:, heads] = (weight.reshape(group * n, length) @ v[:, kv_head]).reshape(group, n, -1).swapaxes(0, 1)
        lse[:, heads] = (top + np.log(total)).T
    return out, lse


def among(positions, chosen, run=1):
    """Which positions are chosen, (KV heads or 1, queries, positions)."""
    chosen = np.asarray(chosen)
    chosen = chosen[:, None] if chosen.ndim == 2 else chosen
    return (chosen.swapaxes(0, 1)[..., None] == positions // run * run).any(2)


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
