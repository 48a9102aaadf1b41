"""What the precision contract comes to: errors of `attend`, and of what is stored, on Gaussian tensors and on harder ones.

    python bench/precision.py --json bench/precision.json
    KVFAST_PRECISION=fast python bench/precision.py --json bench/precision_fast.json
    python bench/precision.py --cancelling 1500 [--v-head-dim 1]

Largest error of an output row, relative to its norm, against float64 attention over the decoded cache: for each
format and context over all heads, queries and tiers of this machine; where one channel of the keys is louder than the others
and the greatest score is 15; and where many weights are smaller than a step of 15 bits. And `kvfast.fidelity` of all formats.
With KVFAST_PRECISION=fast those of the fast precision, which has another contract and is checked by tests/attention/test_fast.py.
Or a search, on this machine's best tier, among rows whose values are nearly multiples of one vector and cancel.
"""

import argparse

import numpy as np

import kvfast
from kvfast.tools.cli.bench.json_file import write_json
from kvfast.tools.cli.bench.measure import cpu_name

FORMATS = ("int4", "k8v4", "int8", "int4-plain", "int8-plain", "float16", "bfloat16", "float32")
CODED = ("int2-plain", "int3-plain", "int4-plain", "int4", "int5", "int6", "k8v4", "int7", "int8-plain", "int8", "float16", "bfloat16")
CONTEXTS = (16, 64, 256, 1024, 4096, 16384)
QUERIES = (1, 64)
LOUD = (1, 3, 10, 20, 40)
LARGEST_SCORE = 15
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 128
CONTRACT = {"float32": 1e-5}  # of every other format 1e-3


def exact_attention(q, k, v):
    """Causal attention of the last tokens in float64: (tokens, heads, head_dim)."""
    q, k, v = (one.astype(np.float64).transpose(1, 0, 2) for one in (q, k, v))
    k, v = (one.repeat(NUM_Q_HEADS // NUM_KV_HEADS, axis=0) for one in (k, v))
    scores = q @ k.transpose(0, 2, 1) * HEAD_DIM**-0.5
    n, length = scores.shape[1:]
    scores[:, np.arange(length) > length - n + np.arange(n)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    return (weights / weights.sum(axis=2, keepdims=True) @ v).transpose(1, 0, 2)


def attend_errors(form):
    """Rows of JSON for one format."""
    rng = np.random.default_rng(0)
    for context in CONTEXTS:
        cache = kvfast.KVCache(1, NUM_KV_HEADS, HEAD_DIM, context, form)
        cache.append(0, *rng.standard_normal((2, context, NUM_KV_HEADS, HEAD_DIM), np.float32))
        cache.advance(context)
        for n in QUERIES:
            if n > context:
                continue
            q = rng.standard_normal((n, NUM_Q_HEADS, HEAD_DIM), np.float32)
            exact = exact_attention(q, cache.k(0), cache.v(0))
            errors = {}
            for isa in kvfast.available_isas():
                with kvfast.use_isa(isa):
                    out = cache.attend(0, q)
                errors[isa] = float((np.linalg.norm(out - exact, axis=2) / np.linalg.norm(exact, axis=2)).max())
            yield {"format": form, "context": context, "queries": n, "bound": CONTRACT.get(form, 1e-3), "errors": errors}


def _error(cache, q, scale=1.0):
    """The largest on any tier of this machine."""
    exact, worst = exact_attention(q * scale, cache.k(0), cache.v(0)), 0.0
    for isa in kvfast.available_isas():
        with kvfast.use_isa(isa):
            out = cache.attend(0, q, scale=scale * HEAD_DIM**-0.5)
        worst = max(worst, float((np.linalg.norm(out - exact, axis=2) / np.linalg.norm(exact, axis=2)).max()))
    return worst


def hard_errors(form):
    """A row of JSON for one format: the largest errors with a loud channel of the keys, with one large weight, and with one
    loud element of the values."""
    rng = np.random.default_rng(2)
    row = {"format": form, "bound": CONTRACT.get(form, 1e-3), "loud": {}, "peaked": 0.0, "lone": 0.0}
    for loud in LOUD:
        k, v = rng.standard_normal((2, 1000, NUM_KV_HEADS, HEAD_DIM), np.float32)
        k[:, :, 5] *= loud
        cache = kvfast.KVCache(1, NUM_KV_HEADS, HEAD_DIM, 1000, form)
        cache.append(0, k, v)
        cache.advance(1000)
        errors = []
        for n in QUERIES:
            q = rng.standard_normal((n, NUM_Q_HEADS, HEAD_DIM), np.float32)
            scores = np.einsum("qhd,khd->qhk", q, cache.k(0).repeat(NUM_Q_HEADS // NUM_KV_HEADS, axis=1)) * HEAD_DIM**-0.5
            errors.append(_error(cache, q * (LARGEST_SCORE / np.abs(scores).max(2))[:, :, None]))
        row["loud"][loud] = max(errors)
    for below in (6, 9, 10.5, 11.5, 13):
        k, v = rng.standard_normal((2, 1000, NUM_KV_HEADS, HEAD_DIM), np.float32) * np.float32(0.02)
        k[:, :, 3] -= below
        k[900, :, 3] += below
        v[:, :, 5] += 1
        v[900, :, 5] = -0.2
        cache = kvfast.KVCache(1, NUM_KV_HEADS, HEAD_DIM, 1000, form)
        cache.append(0, k, v)
        cache.advance(1000)
        for n in QUERIES:
            q = np.zeros((n, NUM_Q_HEADS, HEAD_DIM), np.float32)
            q[:, :, 3] = 1
            row["peaked"] = max(row["peaked"], _error(cache, q, HEAD_DIM**0.5))
    for loud in (40, 300, 3000):
        for rows in ((1.0,), (-1.0, 1.0)):
            k = rng.standard_normal((160, NUM_KV_HEADS, HEAD_DIM), np.float32)
            v = rng.choice(rows, k.shape).astype(np.float32)
            v[100], v[100, :, 5] = 0, loud
            cache = kvfast.KVCache(1, NUM_KV_HEADS, HEAD_DIM, 160, form)
            cache.append(0, k, v)
            cache.advance(160)
            for n in QUERIES:
                q = rng.standard_normal((n, NUM_Q_HEADS, HEAD_DIM), np.float32)
                row["lone"] = max(row["lone"], _error(cache, q))
    return row


def cancelling_error(form, n, trials, v_dim):
    """The largest error, divided by the contract's terms, of `n` queries of 4 heads on random caches of 16 elements, with values of `v_dim`
    elements, one of which is loud: these are nearly multiples of one vector."""
    rng, worst, dim = np.random.default_rng(5), 0.0, 16
    for _ in range(trials):
        length, loud = int(rng.integers(100, 400)), rng.choice([10.0, 30.0, 100.0, 300.0])
        k, v = rng.standard_normal((2, length, 1, dim)) * rng.choice([[0.3, 1, 2], [0.01, 0.1, 1]], axis=1)[:, None, None, None]
        v = v[..., :v_dim]
        v[..., rng.integers(v_dim)] += loud * rng.standard_normal((length, 1))
        cache = kvfast.KVCache(1, 1, dim, length, form, v_head_dim=v_dim)
        cache.append(0, k.astype(np.float32), v.astype(np.float32))
        cache.advance(length)
        q = rng.standard_normal((n, 4, dim), np.float32)
        k, v = (one[:, 0].astype(np.float64) for one in (cache.k(0), cache.v(0)))
        scores = q.astype(np.float64) @ k.T * dim**-0.5
        scores[np.arange(length) > (length - n + np.arange(n))[:, None, None] + np.zeros((1, 4, 1))] = -np.inf
        weights = np.exp(scores - scores.max(2, keepdims=True))
        weights /= weights.sum(2, keepdims=True)
        exact = weights @ v
        norm, mean = np.linalg.norm(exact, axis=2), weights @ np.linalg.norm(v, axis=1)
        terms = np.linalg.norm(q, axis=2) * np.linalg.norm(k, axis=1).max() * dim**-0.5 / 16
        size = np.where(norm < 0.1 * mean, mean, norm) * np.maximum(1, terms)
        worst = max(worst, float((np.linalg.norm(cache.attend(0, q) - exact, axis=2) / size).max()))
    return worst


def fidelity():
    """Rows of JSON: what storing costs."""
    rng = np.random.default_rng(1)
    q, k, v = (
        rng.standard_normal((n, heads, HEAD_DIM), np.float32)
        for n, heads in ((64, NUM_Q_HEADS), (4096, NUM_KV_HEADS), (4096, NUM_KV_HEADS))
    )
    for one in kvfast.fidelity(q, k, v, CODED):
        row = {name: getattr(one, name) for name in ("bits_per_element", "k_error", "v_error", "output_error", "kl")}
        yield {"format": str(one.format)} | {name: float(value) for name, value in row.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--json", metavar="FILE", help="write the results there")
    what.add_argument("--cancelling", type=int, metavar="N", help="only search N caches whose values cancel")
    parser.add_argument("--v-head-dim", type=int, default=16, metavar="E", help="elements of the values of these caches")
    args = parser.parse_args()
    if args.cancelling:
        for form in (*CODED, "k4v3", "int3", "int2"):
            errors = ", ".join(f"{n}: {cancelling_error(form, n, args.cancelling, args.v_head_dim):.1e}" for n in QUERIES)
            print(f"{form:>10} values that cancel, of queries {errors}", flush=True)
        return
    report = {
        "version": kvfast.__version__,
        "precision": kvfast.config()["precision"],
        "cpu": cpu_name(),
        "tiers": list(kvfast.available_isas()),
        "num_q_heads": NUM_Q_HEADS,
        "num_kv_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "attend": [row for form in FORMATS for row in attend_errors(form)],
        "hard": [hard_errors(form) for form in CODED + ("float32",)],
        "fidelity": list(fidelity()),
    }
    for row in report["attend"]:
        worst = max(row["errors"].values())
        print(f"{row['format']:>10} {row['context']:>6} tokens, {row['queries']:>2} queries: {worst:.1e} (at most {row['bound']:.0e})")
    for row in report["hard"]:
        loud = ", ".join(f"{loud}: {error:.1e}" for loud, error in row["loud"].items())
        print(
            f"{row['format']:>10} loud channel {loud}; many small weights {row['peaked']:.1e}, "
            f"a lone loud value {row['lone']:.1e} (at most {row['bound']:.0e})"
        )
    write_json(args.json, report)


if __name__ == "__main__":
    main()
