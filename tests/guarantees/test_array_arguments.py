"""Every public function that takes arrays, with every kind of array: the result is that of a plain copy, or a clear refusal.

As a program it makes the calls of the names it is given, and prints what came of each: in a process of its own, as a call
that does not return cannot be told from within.
"""

import faulthandler
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("support", "fuzz")]  # as a program

import fuzz_names

import kvfast
from kvfast.caches.multi_head import MultiHeadConfig
from kvfast.engines.llama_cpp import ggml

SECONDS = 60  # for all calls of a name; each takes milliseconds
TOKENS, HEADS, GROUP, DIM = 70, 2, 2, 32  # more tokens than a tile
RANK, ROPE = 32, 8
CHOSEN = np.array([[21, 25, 22, 60], [33, 20, 44, 47], [23, 22, 61, 66]])  # by three queries, within the window of the ring

try:
    from ml_dtypes import bfloat16
except ModuleNotFoundError:
    bfloat16 = None
try:
    import torch
except ModuleNotFoundError:
    torch = None


# Kinds of arrays. ----------------------------------------------------------------------------------------------------------


def stepped(a, axis):
    """The same numbers, every second of an axis of a larger array."""
    return a.repeat(2, axis)[(slice(None),) * axis + (slice(None, None, 2),)]


def far(a, _):
    """Tokens 3 MiB apart, most of which nobody has touched."""
    row = a[0].size if len(a) else 0
    whole = np.zeros((len(a), (3 << 20) // a.itemsize), a.dtype)
    whole[:, :row] = a.reshape(len(a), row)
    return whole[:, :row].reshape(a.shape)


def unaligned(a, _):
    moved = np.empty(a.nbytes + 1, np.uint8)[1:].view(a.dtype).reshape(a.shape)
    moved[...] = a
    return moved


def read_only(a, _):
    a = a.copy()
    a.flags.writeable = False
    return a


def sliding(a, _):
    """Each token begins one element after the token before it."""
    copy = a.copy()  # whose strides stay in its memory, where those of `a` may not
    return as_strided(copy, a.shape, (a.itemsize, *copy.strides[1:]), writeable=False)


def swapped(a, _):
    return a if a.dtype == bfloat16 else a.astype(a.dtype.newbyteorder())


# {name: (function of an array and an axis, whether it is made for every axis)}. What they return may hold other numbers.
KINDS = {
    "repeated": (lambda a, axis: np.broadcast_to(a.take([0], axis), a.shape), True),
    "reversed": (lambda a, axis: np.flip(a, axis), True),
    "stepped": (stepped, True),
    "far": (far, False),
    "turned": (lambda a, _: np.asfortranarray(a), False),
    "unaligned": (unaligned, False),
    "read-only": (read_only, False),
    "sliding": (sliding, False),
    "swapped": (swapped, False),
    "empty": (lambda a, axis: a.take([], axis), True),
}


def kinds_of(array):
    """(name, array of this kind, its plain copy) of every kind that an array can be of."""
    for name, (make, every_axis) in KINDS.items():
        for axis in range(array.ndim if every_axis else 1) if array.size else ():
            one = make(array, axis)
            yield f"{name} {axis}", one, np.array(one, array.dtype, order="C")


def not_arrays_of(array):
    """(name, what stands for an array of this kind and is to be refused)."""
    yield "masked", np.ma.masked_array(array, mask=np.ones_like(array, bool))
    yield "masked in a list", [np.ma.masked_array(row, mask=np.ones_like(row, bool)) for row in array]
    if array.dtype.kind in "iu":
        yield from ((f"of {dtype.__name__}", array.astype(dtype)) for dtype in (bool, object, float))
        if array.ndim == 1 and array.dtype != np.uint8:  # bytes are as good in a matrix
            yield "a matrix", np.asmatrix(array)


# Every call. -------------------------------------------------------------------------------------------------------------


def seen(cache):
    """What a cache holds."""
    layers = range(getattr(cache, "num_layers", 1))
    return [cache._decoded(layer) for layer in layers] if hasattr(cache, "_decoded") else [(cache.k(i), cache.v(i)) for i in layers]


def filled(cache, advance=True):
    cache.append(0, *kv())
    if advance:
        cache.advance(TOKENS)
    return cache


def kv(seed=1, tokens=TOKENS):
    return floats(tokens, HEADS, DIM, seed=seed), floats(tokens, HEADS, DIM, seed=seed + 1)


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rotation():
    """What `write` takes to rotate and norm."""
    tables = {"cos": floats(2 * TOKENS, DIM // 2), "sin": floats(2 * TOKENS, DIM // 2, seed=1)}
    return {**tables, "positions": np.arange(TOKENS)[::-1].copy(), "q_norm": floats(DIM), "k_norm": floats(DIM, seed=1)}


def caches():
    """(class name, what else tells it, function that makes an empty cache with one layer)."""
    yield "KVCache", "", lambda: kvfast.KVCache(1, HEADS, DIM)
    yield "RingKVCache", "", lambda: kvfast.RingKVCache(1, HEADS, DIM, 50)
    yield "RingKVCache", " with rope", lambda: kvfast.RingKVCache(1, HEADS, DIM, 50, 4, rope=kvfast.Rope())
    yield "Sequence", "", lambda: kvfast.PagedKVCache(1, HEADS, DIM, 8).new_sequence()


def latent_caches(rope=ROPE):
    yield "MLAKVCache", lambda: kvfast.MLAKVCache(1, RANK, rope)
    yield "MLASequence", lambda: kvfast.PagedMLAKVCache(1, RANK, rope, 8).new_sequence()


def calls():
    """{public name: (function of arrays, arrays that fit)}; the functions return what can be seen of the call."""
    q, (k, v) = floats(3, HEADS * GROUP, DIM), kv()
    per_head = {"sinks": floats(HEADS * GROUP), "alibi_slopes": abs(floats(HEADS * GROUP))}
    rotary = rotation()
    qkv = floats(TOKENS, (HEADS * GROUP + 2 * HEADS) * DIM)
    found = {
        "attention": (kvfast.attention, {"q": q, "k": k, "v": v, **per_head}),
        "attention with indices": (lambda indices: kvfast.attention(q, k, v, indices=indices), {"indices": CHOSEN}),
        "merge_states": (kvfast.merge_states, {"out_a": q, "lse_a": q[..., 0], "out_b": q + 1, "lse_b": q[..., 1]}),
        "split_qkv_norm_rope": (
            lambda qkv, **rotary: kvfast.split_qkv_norm_rope(qkv, HEADS * GROUP, HEADS, DIM, **rotary),
            {"qkv": qkv, **rotary},
        ),
        "quantize": (lambda x: [*kvfast.quantize(x, 8), *kvfast.quantize(x, 4)], {"x": k}),
        "dequantize": (kvfast.dequantize, dict(zip(("codes", "scales"), kvfast.quantize(k, 4)))),
        "calibrate": (
            lambda q, k: kvfast.calibrate([q], [k]).digest,
            {"q": floats(140, HEADS * GROUP, DIM), "k": floats(140, HEADS, DIM)},
        ),
        "fidelity": (lambda q, k, v: repr(kvfast.fidelity(q, k, v, ["int8-rotated", "int4"])), {"q": q, "k": k, "v": v}),
        "choose_format": (lambda q, k, v: kvfast.choose_format(q, k, v, 0.5), {"q": q, "k": k, "v": v}),
        "ggml.to_ggml": (lambda rows: ggml.to_ggml(rows, "q8_0"), {"rows": k}),
        "ggml.from_ggml": (lambda blocks: ggml.from_ggml(blocks, "q8_0", HEADS, DIM), {"blocks": ggml.to_ggml(k, "q8_0")}),
        "Rope": (
            lambda frequencies: seen(filled(kvfast.RingKVCache(1, HEADS, DIM, 90, rope=kvfast.Rope(frequencies=frequencies)))),
            {"frequencies": np.linspace(1, 0.01, DIM // 2)},
        ),
    }
    for make in (heads_calls, compression_calls, paged_calls, latent_calls, prompt_calls):
        found |= make()

    for name, more, new in caches():

        def append(k, v, new=new):
            cache = new()
            cache.append(0, k, v)
            return seen(cache)

        def write(qkv, new=new, **rotary):
            cache = new()
            return cache.write(0, qkv, **rotary), seen(cache)

        turns = {key: array for key, array in rotary.items() if "norm" in key or not more}
        found |= {
            f"{name}.append{more}": (append, {"k": k, "v": v}),
            f"{name}.write{more}": (write, {"qkv": qkv, **turns}),
            f"{name}.attend{more}": (
                lambda q, new=new, **more: filled(new()).attend(0, q, return_lse=True, **more),
                {"q": q, **per_head},
            ),
            f"{name}.explain{more}": (lambda q, new=new: repr(filled(new()).explain(0, q)), {"q": q}),
            **({} if more else chosen_calls(name, lambda new=new: filled(new()), q)),  # refused by a ring with a rope
            **whole_cache_calls(name, lambda new=new: filled(new())),
        }
    return found


def heads_calls():
    config = MultiHeadConfig(DIM, num_q_heads=HEADS * GROUP)
    queries = floats(HEADS * GROUP, DIM)

    def push(*pairs):
        cache = kvfast.MultiHeadKVCache(HEADS, config)
        for pair in pairs:
            cache.push_token(*pair)
        return cache

    def pushed(keys, values):
        cache = push((keys, values))
        return cache.k(), cache.v()

    def pushed_together(keys, values):
        cache = push()
        cache.push_tokens(keys, values)
        return cache.k(), cache.v()

    def attend(queries):
        return push(*zip(*kv())).attend(queries)

    return {
        "MultiHeadKVCache.push_token": (pushed, {"keys": queries[:HEADS], "values": queries[HEADS:]}),
        "MultiHeadKVCache.push_tokens": (pushed_together, dict(zip(("keys", "values"), kv()))),
        "MultiHeadKVCache.attend": (attend, {"queries": queries}),
        "MultiHeadKVCache.attention_scores": (lambda queries: push(*zip(*kv())).attention_scores(queries), {"queries": queries}),
        "HeadView.attend": (lambda queries: push(*zip(*kv())).head(1).attend(queries), {"queries": queries[:GROUP]}),
        "HeadView.attention_scores": (
            lambda queries: push(*zip(*kv())).head(1).attention_scores(queries),
            {"queries": queries[:GROUP]},
        ),
    }


def compression_calls():
    compressor = kvfast.KVCacheCompressor(kvfast.Hybrid(8))
    k, v = (one.transpose(1, 0, 2).copy() for one in kv())
    q, qkv = floats(3, HEADS * GROUP, DIM), floats(3, (HEADS * GROUP + 2 * HEADS) * DIM)
    tables = {name: rotation()[name] for name in ("cos", "sin")}

    def prefixed():
        return kvfast.PrefixKVCache([compressor.compress_kv_3d(k, v)])

    def opened(**arrays):
        with np.errstate(all="ignore"):  # bytes that are whole floats tell any numbers
            return kvfast.CompressedKV.from_state_dict(arrays).decode()

    def append(k, v):
        cache = prefixed()
        cache.append(0, k, v)
        return seen(cache)

    def write(qkv, **rotary):
        cache = prefixed()
        return cache.write(0, qkv, **rotary), seen(cache)

    def attend(q, **options):
        cache = prefixed()
        cache.append(0, *kv())
        return cache.attend(0, q, return_lse=True, **options)

    return {
        "KVCacheCompressor.compress_kv": (lambda k, v: compressor.compress_kv(k, v).decode(), {"k": k[None], "v": v[None]}),
        "KVCacheCompressor.compress_kv_3d": (lambda k, v: compressor.compress_kv_3d(k, v).decode(), {"k": k, "v": v}),
        "CompressedKV.attend": (lambda q: compressor.compress_kv_3d(k, v).attend(q, return_lse=True), {"q": q}),
        "CompressedKV.from_state_dict": (opened, compressor.compress_kv_3d(k, v).state_dict()),
        "PrefixKVCache.append": (append, dict(zip("kv", kv()))),
        "PrefixKVCache.attend": (attend, {"q": q}),
        "PrefixKVCache.write": (write, {"qkv": qkv, **tables}),
        "PrefixKVCache.write with positions": (
            lambda positions: write(qkv, positions=positions, **tables),
            {"positions": np.array([5, 3, 9])},
        ),
    }


def paged_calls():
    """A batch of two sequences, and another scheduler's tables."""
    q, (k, v), counts = floats(5, HEADS * GROUP, DIM), kv(), [30, 40]
    qkv = floats(TOKENS, (HEADS * GROUP + 2 * HEADS) * DIM)
    rotary = rotation()
    latent, latent_q = floats(TOKENS, RANK + ROPE), floats(5, HEADS, RANK + ROPE)
    plain = {"block_table": np.array([[4, 1], [2, 3]], np.int32), "seq_lens": np.array([30, 20]), "cu_seqlens_q": np.array([0, 2, 5])}
    slots = np.concatenate([4 * 64 + np.arange(30), 2 * 64 + np.arange(40)])
    ids, some = np.arange(TOKENS) % 7, np.array([[3, 0, 9]] * 5)

    def pool(latents):
        if latents:
            return kvfast.PagedMLAKVCache(1, RANK, ROPE, 8, 64)
        return kvfast.PagedKVCache(1, HEADS, DIM, 8, 64, dtype="int8-rotated")

    def held(one, latents):
        for slot, *rows in zip(slots, latent) if latents else zip(slots, k, v):
            one.append_batch(0, *[row[None] for row in rows], slot_mapping=[slot])
        return one

    def written(pool, how):
        """Into sequences of the pool."""
        sequences = [pool.new_sequence() for _ in counts]
        result = how(pool.slot_mapping(sequences, counts))
        return result, [pool.block_table(sequences), *(seen(one) for one in sequences)]

    found = {}
    for name, latents in (("PagedKVCache", False), ("PagedMLAKVCache", True)):
        rows, queries = ({"latent": latent}, latent_q) if latents else ({"k": k, "v": v}, q)

        def append(latents=latents, slot_mapping=None, **rows):
            one = pool(latents)
            if slot_mapping is None:
                return written(one, lambda slots: one.append_batch(0, **rows, slot_mapping=slots))
            one.append_batch(0, **rows, slot_mapping=slot_mapping)
            return one.attend_batch(0, latent_q if latents else q, **plain)

        def attend(q, latents=latents, **options):
            return held(pool(latents), latents).attend_batch(0, q, **options)

        def prepare(slot_mapping, latents=latents, **tables):
            one, rows = held(pool(latents), latents), (latent,) if latents else (k, v)
            batch = one.prepare_batch(**tables, slot_mapping=slot_mapping)
            one.append_batch(0, *[each[: len(slot_mapping)] for each in rows], batch)
            return one.attend_batch(0, latent_q if latents else q, batch)

        def explain(q, latents=latents, **options):
            return repr(held(pool(latents), latents).explain_batch(0, q, **options))

        def match(token_ids, latents=latents):
            one = pool(latents)
            sequence = one.new_sequence()
            sequence.append(0, latent) if latents else sequence.append(0, k, v)
            sequence.advance(TOKENS, ids)
            return len(one.match_prefix(token_ids))

        found |= {
            f"{name}.append_batch": (append, rows),
            f"{name}.append_batch with slots": (
                lambda slot_mapping, append=append, rows=rows: append(slot_mapping=slot_mapping, **rows),
                {"slot_mapping": slots},
            ),
            f"{name}.attend_batch": (attend, {"q": queries, **plain}),
            f"{name}.prepare_batch": (prepare, {**plain, "slot_mapping": slots[:40]}),
            f"{name}.explain_batch": (explain, {"q": queries, **plain}),
            f"{name}.attend_batch with indices": (functools.partial(attend, queries, **plain), {"indices": some}),
            f"{name}.explain_batch with indices": (functools.partial(explain, queries, **plain), {"indices": some}),
            f"{name}.match_prefix": (match, {"token_ids": ids}),
        }

    def write(qkv, slot_mapping, **rotary):
        one = pool(False)
        return one.write_batch(0, qkv, slot_mapping, **rotary), one.attend_batch(0, q, **plain)

    found["PagedKVCache.write_batch"] = write, {"qkv": qkv, "slot_mapping": slots, **rotary}

    def best(q, weights, **tables):
        one = kvfast.PagedMLAKVCache(1, RANK, 0, 8, 64)
        one.append_batch(0, latent[:, :RANK], slot_mapping=slots[:TOKENS])
        return one.top_k_batch(0, q, weights, 5, **tables)

    found["PagedMLAKVCache.top_k_batch"] = (
        best,
        {
            "q": floats(4, HEADS, RANK),
            "weights": floats(4, HEADS),
            "block_table": np.array([[4]], np.int32),
            "seq_lens": np.array([20]),
            "cu_seqlens_q": np.array([0, 4]),
        },
    )
    found["PagedKVCache.attend_batch with sinks"] = (
        lambda **per_head: held(pool(False), False).attend_batch(0, q, **plain, **per_head),
        {"sinks": floats(HEADS * GROUP), "alibi_slopes": abs(floats(HEADS * GROUP))},
    )
    return found


def latent_calls():
    k = np.concatenate((floats(TOKENS, HEADS, 9), np.repeat(floats(TOKENS, 1, ROPE), HEADS, 1)), axis=2)
    pairs = {"k": k, "v": floats(TOKENS, HEADS, 5), "down_k": floats(HEADS, 9, RANK), "down_v": floats(HEADS, 5, RANK)}
    latent, q = floats(TOKENS, RANK + ROPE), floats(3, HEADS, RANK + ROPE)
    found = {}
    for (name, new), (_, indexer) in zip(latent_caches(), latent_caches(0)):

        def keys(new=indexer):
            cache = new()
            cache.append(0, latent[:, :RANK])
            return cache

        def filled(new=new):
            cache = new()
            cache.append(0, latent)
            cache.advance(TOKENS)
            return cache

        def append(latent, new=new):
            cache = new()
            cache.append(0, latent)
            return cache.get_latent(0)

        def append_kv(new=new, **pairs):
            cache = new()
            cache.append_kv(0, **pairs)
            return cache.get_latent(0)

        found |= {
            f"{name}.append": (append, {"latent": latent}),
            f"{name}.append_kv": (append_kv, pairs),
            f"{name}.get_kv": (
                lambda up_k, up_v, filled=filled: filled().get_kv(0, up_k, up_v),
                {"up_k": floats(RANK, HEADS, 9), "up_v": floats(RANK, HEADS, 5)},
            ),
            f"{name}.attend": (lambda q, filled=filled, **options: filled().attend(0, q, return_lse=True, **options), {"q": q}),
            f"{name}.explain": (lambda q, filled=filled: repr(filled().explain(0, q)), {"q": q}),
            **chosen_calls(name, filled, q),
            f"{name}.top_k": (
                lambda q, weights, keys=keys: keys().top_k(0, q, weights, 5),
                {"q": floats(3, HEADS, RANK), "weights": floats(3, HEADS)},
            ),
            **whole_cache_calls(name, filled),
        }
    return found


def chosen_calls(name, filled, q):
    """Those with tokens that were chosen for three queries."""
    return {
        f"{name}.attend with indices": (lambda indices: filled().attend(0, q, indices=indices), {"indices": CHOSEN}),
        f"{name}.explain with indices": (lambda indices: repr(filled().explain(0, q, indices=indices)), {"indices": CHOSEN}),
    }


def whole_cache_calls(name, filled):
    """Those of a class with its tokens: ids, and arrays of state."""
    ids = np.random.default_rng(2).integers(0, 9, TOKENS)

    def snapshot(token_ids):
        return filled().snapshot(token_ids).token_ids

    def save(token_ids, name="save"):
        with tempfile.TemporaryDirectory() as folder:
            filled().save(f"{folder}/one", token_ids)
            return kvfast.Snapshot.load(f"{folder}/one").token_ids

    def advance(token_ids):
        cache = filled()
        cache.append(0, *(floats(TOKENS, RANK + ROPE),) if hasattr(cache, "latent_dim") else kv())
        cache.advance(TOKENS, token_ids)
        return len(cache)

    kind = type(filled())
    found = {f"{name}.snapshot": (snapshot, {"token_ids": ids}), f"{name}.save": (save, {"token_ids": ids})}
    if "Sequence" in name:
        return found | {f"{name}.advance": (advance, {"token_ids": ids})}
    return found | {f"{name}.from_state_dict": (lambda **arrays: seen(kind.from_state_dict(arrays)), filled().state_dict())}


def prompt_calls():
    k, v = (one.reshape(TOKENS, -1) for one in kv())
    ids = np.random.default_rng(2).integers(0, 9, TOKENS)

    def made(keys, values, token_ids):
        return kvfast.Snapshot.from_arrays([keys], [values], HEADS, "int8-rotated", token_ids=token_ids).to_arrays()

    def save(token_ids, name="save"):
        with tempfile.TemporaryDirectory() as folder:
            cache = kvfast.KVCache(1, HEADS, DIM)
            with kvfast.PromptCache(folder) as prompts:
                getattr(prompts, name)(filled(kvfast.KVCache(1, HEADS, DIM)), token_ids)
                return prompts.restore(cache, np.append(token_ids, 1)), seen(cache)

    def restore(token_ids):
        with tempfile.TemporaryDirectory() as folder:
            cache = kvfast.KVCache(1, HEADS, DIM)
            with kvfast.PromptCache(folder) as prompts:
                prompts.save(filled(kvfast.KVCache(1, HEADS, DIM)), ids)
                return prompts.restore(cache, token_ids), seen(cache)

    def extended(token_ids):
        pool = kvfast.PagedKVCache(1, HEADS, DIM, num_blocks=10)
        with tempfile.TemporaryDirectory() as folder, kvfast.PromptCache(folder, chunk_tokens=64) as prompts:
            prompts.save(filled(kvfast.KVCache(1, HEADS, DIM)), ids)
            return seen(prompts.extended(pool.new_sequence(), token_ids))

    state = kvfast.Snapshot.from_arrays([k], [v], HEADS).state_dict()
    return {
        "Snapshot.from_arrays": (made, {"keys": k, "values": v, "token_ids": ids}),
        "Snapshot.from_state_dict": (lambda **arrays: kvfast.Snapshot.from_state_dict(arrays).to_arrays(), state),
        "PromptCache.save": (save, {"token_ids": ids}),
        "PromptCache.save_chunks": (functools.partial(save, name="save_chunks"), {"token_ids": ids}),
        "PromptCache.restore": (restore, {"token_ids": ids}),
        "PromptCache.extended": (extended, {"token_ids": ids}),
    }


# {name: shape of what it writes into `out`}
OUTS = {
    "dequantize": (TOKENS, HEADS, DIM),
    "attention": (3, HEADS * GROUP, DIM),
    **{f"{name}.attend": (3, HEADS * GROUP, DIM) for name in ("KVCache", "RingKVCache", "Sequence", "PrefixKVCache")},
    **{f"{name}.write": (TOKENS, HEADS * GROUP, DIM) for name in ("KVCache", "RingKVCache", "Sequence")},
    "PrefixKVCache.write": (3, HEADS * GROUP, DIM),
    "PagedKVCache.attend_batch": (5, HEADS * GROUP, DIM),
    "PagedKVCache.attend_batch with sinks": (5, HEADS * GROUP, DIM),
    "PagedKVCache.write_batch": (TOKENS, HEADS * GROUP, DIM),
    **{f"{name}.attend": (3, HEADS, RANK) for name in ("MLAKVCache", "MLASequence")},
    "PagedMLAKVCache.attend_batch": (5, HEADS, RANK),
}
# Parameters that are arrays, and public names that are tried by another's: what a class has inherited, what refuses always.
INTEGERS = {"positions", "block_table", "seq_lens", "cu_seqlens_q", "slot_mapping", "token_ids", "indices"}
ARRAYS = {
    *(*INTEGERS, "q", "k", "v"),
    *("x", "qkv", "latent", "keys", "values", "queries", "down_k", "down_v", "up_k", "up_v", "codes"),
    *("scales", "out", "out_a", "out_b", "lse_a", "lse_b", "cos", "sin", "q_norm", "k_norm", "sinks"),
    *("alibi_slopes", "arrays", "frequencies", "weights"),
}
NUMBERS = {("MLAKVCache.top_k", "k"), ("MLASequence.top_k", "k"), ("PagedMLAKVCache.top_k_batch", "k")}  # of the same names
UNTRIED = {"Sequence.from_state_dict", "MLASequence.from_state_dict", "MLAKVCache.write", "MLASequence.write"}  # which refuse
# Arrays that may be bfloat16: rows of tokens, and other arrays that models keep.
ROWS = ARRAYS - INTEGERS - {"codes", "scales", "out", "lse_a", "lse_b", "arrays", "frequencies"} | {"rows"}


# The program. ------------------------------------------------------------------------------------------------------------


def outcome(function, arrays):
    """What a call returns, as bytes, or what it raises."""
    try:
        return "returned", flat(function(**arrays))
    except Exception as error:  # noqa: BLE001  (whatever it is, the same of a plain copy)
        return type(error).__name__, str(error)


def flat(result):
    if isinstance(result, np.ndarray):
        return f"{result.dtype} {result.shape} {result.tobytes().hex()}"
    return [flat(one) for one in result] if isinstance(result, (list, tuple)) else repr(result)


ERRORS = {
    *("DimensionMismatchError", "NonFiniteInputError", "ValueError", "TypeError", "CacheFullError"),
    *("CorruptFileError", "IncompatibleSnapshotError", "IndexError"),
}


def findings(name):
    """What is wrong with a call, as lines; it is tried with each array in each kind."""
    function, arrays = CALLS[name]
    expected = outcome(function, arrays)
    if expected[0] != "returned":
        yield f"does not take plain arrays: {expected}"
        return
    kept = {key: one.copy() for key, one in arrays.items()}
    for key, array in arrays.items():
        for kind, given, plain in kinds_of(array):
            wanted, got = outcome(function, arrays | {key: plain}), outcome(function, arrays | {key: given})
            # Bytes in another order may be refused, by their dtype; of what is empty the text tells the strides, perhaps.
            refused = kind.startswith("swapped") and got[0] in ("TypeError", "CorruptFileError") and str(given.dtype) in got[1]
            if got[0] not in ERRORS | {"returned"}:
                yield f"{key}, {kind}: {got}"
            elif not refused and got != wanted and not (kind.startswith("empty") and got[0] == wanted[0] in ERRORS):
                yield f"{key}, {kind}: {got[0]} {got[1][:200]}, a plain copy {wanted[0]} {wanted[1][:200]}"
        for kind, given in not_arrays_of(array):
            got = outcome(function, arrays | {key: given})
            wanted = key.rpartition(".")[2] + ".* must not be a masked array" * (kind == "masked")
            if got[0] not in ERRORS or not re.search(wanted, got[1]):
                yield f"{key}, {kind}: {got[0]} {got[1][:200]}"
        if key in ROWS:
            yield from (f"{key}, {line}" for line in bfloat16_findings(function, arrays, key))
    if name in OUTS:
        yield from out_findings(function, arrays, OUTS[name], expected)
    if any(not np.array_equal(arrays[key], one) for key, one in kept.items()):
        yield "the arrays were changed"


def bfloat16_findings(function, arrays, key):
    """bfloat16 of every library is what its bits are."""
    bits = (arrays[key].astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    wanted = outcome(function, arrays | {key: bits})
    rounded = outcome(function, arrays | {key: (bits.astype(np.uint32) << 16).view(np.float32)})
    if wanted[0] != "returned" or rounded[0] != "returned":
        yield f"bits of bfloat16: {wanted[0]} {wanted[1][:200]}, as float32 {rounded[0]}"
    kinds = {}
    if bfloat16 is not None:
        kinds["ml_dtypes"] = bits.view(bfloat16)
    if torch is not None:
        kinds["torch"] = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    for library, given in kinds.items():
        got = outcome(function, arrays | {key: given})
        if got != wanted:
            yield f"bfloat16 of {library}: {got[0]} {got[1][:200]}, its bits {wanted[0]}"


def out_findings(function, arrays, shape, expected):
    """What is wrong with where the result is written."""
    good = np.zeros(shape, np.float32)
    outs = {kind: one for kind, one, _ in kinds_of(good)} | {
        "itself": as_strided(np.zeros(good.size + 9, np.float32), shape, (4, 4, 4))
    }
    must_refuse = {"unaligned 0", "read-only 0", "swapped 0", "empty 0", "reversed 2", "stepped 2", "repeated 0", "sliding 0", "itself"}
    outs["masked"] = np.ma.masked_array(good, mask=np.ones_like(good, bool))
    must_refuse.add("masked")
    for key, array in arrays.items():
        if array.nbytes >= 256 or key in ("sinks", "alibi_slopes"):
            memory = np.zeros(array.nbytes + good.nbytes, np.uint8)
            given = memory[: array.nbytes].view(array.dtype).reshape(array.shape)
            given[...] = array
            at = array.nbytes - min(array.nbytes, good.nbytes) // 2 // 16 * 16
            outs[f"that shares memory with {key}"] = memory[at : at + good.nbytes].view(np.float32).reshape(shape), {key: given}
    for kind, out in outs.items():
        out, given = out if isinstance(out, tuple) else (out, {})
        before = out.copy()
        got = outcome(function, arrays | given | {"out": out})
        if got[0] == "returned":
            if kind in must_refuse or got != expected:
                yield f"out, {kind}: taken, and the result is {'right' if got == expected else 'another'}"
        elif got[0] not in ERRORS or not np.array_equal(out, before):
            yield f"out, {kind}: {got}{'' if np.array_equal(out, before) else ', and it was changed'}"


CALLS = calls()

if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", PendingDeprecationWarning)  # NumPy's, of each matrix
    for name in sys.argv[1:]:
        print(json.dumps({"begins": name}), flush=True)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        print(json.dumps({"ends": name, "findings": list(findings(name))}), flush=True)
        faulthandler.cancel_dump_traceback_later()


# The tests. ----------------------------------------------------------------------------------------------------------------


# Without huge pages, as those of tokens that lie far apart would all be cleared; and without threads of the BLAS.
CHILD = {"NUMPY_MADVISE_HUGEPAGE": "0", "OPENBLAS_NUM_THREADS": "1"}


@pytest.fixture(scope="module", params=[kvfast.available_isas()[0], pytest.param("scalar", marks=pytest.mark.exhaustive)])
def found(request):
    """{name: findings} of all calls, each made in a child; what ends a child counts for the call that it was at."""
    results, left = {}, list(CALLS)
    while left:
        child = subprocess.run(
            [sys.executable, __file__, *left],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | CHILD | {"KVFAST_ISA": request.param},
        )
        lines = [json.loads(line) for line in child.stdout.splitlines()]
        results |= {line["ends"]: line["findings"] for line in lines if "ends" in line}
        if child.returncode:
            assert lines, child.stderr
            results[lines[-1]["begins"]] = [f"the process ended: {child.stderr}"]
        left = [name for name in left if name not in results]
    return results


def test_every_public_array_is_tried():
    """A new function, or an argument of one, that takes an array is found here; as where `fuzz_recipes` makes one."""
    tried = {(call.split(" with ")[0], key) for call, (_, arrays) in CALLS.items() for key in arrays}
    tried |= {(call.split(" with ")[0], "out") for call in OUTS} | {(call, "arrays") for call in CALLS}
    assert OUTS.keys() <= CALLS.keys()
    public = {name: function for name, (function, _) in fuzz_names.public_names().items() if function}
    arrays = {
        (name, key)
        for name in public.keys() - UNTRIED - fuzz_names.RECORDS
        for key in fuzz_names.parameters(public[name])
        if key in ARRAYS
    }
    assert arrays - tried - NUMBERS == set()


@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_array(found, name):
    assert found[name] == []
