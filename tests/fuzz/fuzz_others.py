"""What `fuzz_caches` does to everything but caches of whole sequences: heads, plain arrays, compressed tokens."""

import copy

import numpy as np
from fuzz_histories import World
from fuzz_inputs import DIMS, Rows, as_given, often, one_of, random_dim, random_dims, random_format, told
from fuzz_oracle import Finding, Side, allowed, check_output
from fuzz_refusals import bits, check_refused
from reference import exact_attention, norms

import kvfast
from kvfast.caches.multi_head import MultiHeadConfig
from kvfast.codec.multi_head import signs_of


class HeadsWorld(World):
    """A MultiHeadKVCache, token by token."""

    name, takes_windows, takes_chosen = "MultiHeadKVCache", False, False

    def run(self):
        rng = self.rng
        dim, heads = random_dim(rng), int(rng.integers(1, 5))
        bits = int(rng.integers(2, 9)) if often(rng, 0.5) else tuple(map(int, rng.integers(2, 9, 2)))
        codebook = str(one_of(rng, ["gaussian", "uniform"]))
        config = MultiHeadConfig(dim, bits, often(rng, 0.7), codebook, heads * int(one_of(rng, [1, 2, 4])), int(rng.integers(1 << 30)))
        form = config.format
        self.case.note(self.name, heads, config)
        cache, source = kvfast.MultiHeadKVCache(heads, config), Rows(rng, [form], 1, heads, dim, dim)
        signs = signs_of(config.seed, heads, dim) if config.rotation else np.ones((heads, dim))
        sides, kept = [Side(form, False), Side(form, True)], [np.empty((0, heads, dim), np.float32)] * 2
        seen, taken = kept, []  # rows as they were first decoded; snapshots
        where = f"{self.name} {told(form)}"
        for _ in range(int(rng.integers(1, 6))):
            k, v = source.take(int(one_of(rng, [1, 5, 16, 33, 70])))[0]
            for pair in zip(k, v):
                cache.push_token(*pair)
            kept = [np.concatenate(pair) for pair in zip(kept, (k, v))]
            seen = [np.concatenate([before, got[-len(k) :]]) for before, got in zip(seen, (cache.k(), cache.v()))]
            if often(rng, 0.3):
                window = int(rng.integers(1, len(kept[0]) + 20))
                if cache.evict_outside_window(window) != max(len(kept[0]) - window, 0):
                    raise Finding(f"evict_outside_window | {where}")
                kept, seen = ([one[-window:] for one in both] for both in (kept, seen))
            if often(rng, 0.2):
                cache = cache.copy()
            self.case.calls += len(k) + 4
            rows, positions = [cache.k(), cache.v()], np.arange(len(kept[0])) + 16
            for side, got, given in zip(sides, rows, kept):
                side.check(got * signs, given * signs, positions, np.zeros(1), 1 << 60, where)
            q = source.queries(1, config.num_q_heads, kept)
            exact = exact_attention(q, *rows, positions, positions[-1:], causal=False)
            check_output(cache.attend(q[0])[None], None, exact, 1e-3, f"attend is not attention over decoded rows | {where}")
            weights = cache.attention_scores(q[0], softmax=True)
            if not np.allclose(weights.sum(1), 1, atol=1e-4):
                raise Finding(f"weights do not sum up to 1 | {where}")
            head = int(rng.integers(heads))
            group = config.num_q_heads // heads
            one = cache.head(head).attend(q[0, head * group : (head + 1) * group])
            error = np.linalg.norm(one - exact.out[0, head * group : (head + 1) * group], axis=-1)
            if (error > allowed(exact, 1e-3)[0][0, head * group : (head + 1) * group]).any():
                raise Finding(f"attend of one head | {where}")
            if often(self.case.fresh, 0.7):
                cache, state = self.change(cache, source, [*kept, *seen], taken)
                kept, seen = state[:2], state[2:]

    def change(self, cache, source, state, taken):
        """Whatever is done to a cache, its tokens stay what they were when they were pushed: given and decoded keys and values."""
        fresh, n = self.case.fresh, len(state[0])
        way = str(
            one_of(fresh, ["truncate", "snapshot", "restore", "restore", "refuse", "refuse", "evict", "clear", "copy", "many", "many"])
        )
        k, v = source.take(int(one_of(fresh, [2, 17, 70])))[0]
        self.case.note(way, n)
        if way == "truncate":
            n = int(fresh.integers(n + 1))
            cache.truncate(n)
            state = [one[:n] for one in state]
        elif way == "snapshot":
            taken.append((cache.snapshot(), state))
        elif way == "restore" and taken:
            snapshot, state = one_of(fresh, taken)
            how = str(one_of(fresh, ["same", "load", "bytes", "state", "another"]))
            if how == "bytes":
                snapshot = kvfast.Snapshot.from_bytes(snapshot.to_bytes())
            elif how == "state":
                snapshot = kvfast.Snapshot.from_state_dict(snapshot.state_dict())
            if how in ("load", "another"):
                cache = kvfast.load(snapshot) if how == "load" else kvfast.MultiHeadKVCache(cache.num_heads, cache.config)
            cache.restore(snapshot)
        elif way == "refuse":
            self.refuse(cache, [k[0], v[0]], fresh)
        elif way == "evict":
            window = int(fresh.integers(n + 20))
            if cache.evict_outside_window(window) != max(0, n - window):
                raise Finding("evict_outside_window | a history of heads")
            state = [one[max(0, n - window) :] for one in state]
        elif way == "clear":
            cache.clear()
            state = [one[:0] for one in state]
        elif way == "copy":
            other = one_of(fresh, [type(cache).copy, type(cache).fork, copy.copy, copy.deepcopy])(cache)
            cache.push_token(k[0], v[0])
            cache.evict_outside_window(1)
            cache = other
        elif way == "many":
            other = cache.copy()
            for pair in zip(k, v):
                other.push_token(*pair)
            cache.push_tokens(k, v)
            state = [np.concatenate([one, more]) for one, more in zip(state, (k, v, other.k()[n:], other.v()[n:]))]
        if len(cache) != len(state[0]) or bits(cache.k()) != bits(state[2]) or bits(cache.v()) != bits(state[3]):
            raise Finding(f"heads hold other tokens than were pushed | {way}")
        return cache, state

    def refuse(self, cache, given, rng):
        side = int(rng.integers(2))
        good, given[side] = given[1 - side], given[side].copy()
        given[side].flat[int(rng.integers(given[side].size))] = one_of(rng, [np.nan, np.inf, -np.inf, 7e35])
        look = lambda: {"bytes": cache.nbytes_used, "rows": (bits(cache.k()), bits(cache.v()))}
        for name, call in (
            ("push of what is not finite", lambda: cache.push_token(*given)),
            ("push of other shapes", lambda: cache.push_token(good, good[:-1] if rng.integers(2) else good[:, :-1])),
            ("truncate", lambda: cache.truncate(len(cache) + 1)),
        ):
            check_refused(name, call, look)


class PlainWorld(World):
    """`kvfast.attention` on arrays of any dtype and strides."""

    name = "attention"

    def run(self):
        rng = self.rng
        self.heads, self.dims, self.formats = int(rng.integers(1, 4)), random_dims(self.case), [kvfast.KVFormat("float32")]
        length = int(one_of(rng, [1, 2, 15, 16, 17, 64, 100, 129, 300]))
        source = Rows(rng, self.formats, 1, self.heads, *self.dims)
        k, v = source.take(length)[0]
        strides = str(one_of(rng, ["broadcast tokens", "broadcast heads", "backwards"])) if often(rng, 0.25) else ""
        num_q_heads = self.random_heads()
        n = min(int(one_of(rng, [1, 2, 5, 16, 40])), length)
        q, exact_q = as_given(rng, source.queries(n, num_q_heads, (k, v)))
        options = self.options(num_q_heads)
        out, out_dtype = self.random_out((n, num_q_heads, self.dims[1]))
        self.case.note("attention", length, n, num_q_heads, strides, options)
        if strides == "broadcast tokens":
            k = kept_k = np.broadcast_to(k[:1], k.shape)
            v = kept_v = np.broadcast_to(v[:1], v.shape)
        elif strides == "broadcast heads":
            k = kept_k = np.broadcast_to(k[:, :1], k.shape)
            v = kept_v = np.broadcast_to(v[:, :1], v.shape)
        elif strides == "backwards":
            k = kept_k = k[::-1]
            v = kept_v = v[::-1]
        else:
            (k, kept_k), (v, kept_v) = as_given(rng, k), as_given(rng, v)
        self.case.calls += 1
        try:
            got = kvfast.attention(q, k, v, out=out, **options)
        except kvfast.NonFiniteInputError:
            if np.abs(kept_v).max() < 6e4 and np.abs(kept_k).max() < 1e30:
                raise
            return
        out, lse = got if options.pop("return_lse", False) else (got, None)
        for name in ("num_splits", "num_threads", "precision"):
            options.pop(name, None)
        exact = exact_attention(exact_q, kept_k, kept_v, np.arange(length), np.arange(length - n, length), **options)
        limit = 1e-5 if k.dtype == v.dtype == np.float32 else 1e-3
        check_output(
            out,
            lse,
            exact,
            limit,
            f"attention | {k.dtype}/{v.dtype}{', softcap' if options.get('softcap', 0) >= 300 else ''}",
            out_dtype=out_dtype,
        )


class CompressedWorld(World):
    """A CompressedKV, and a PrefixKVCache with it: attention over what `decode` tells, and the error that is told."""

    name = "CompressedKV"

    def run(self):
        rng = self.rng
        heads, dim, n = int(rng.integers(1, 3)), int(one_of(rng, DIMS[4:])), int(one_of(rng, [20, 40, 65, 130]))
        bits = int(one_of(rng, [4, 8]))
        method = [
            kvfast.Quantize(),
            kvfast.Hybrid(),
            kvfast.Hybrid(rank=max(dim // 2, 1)),
            kvfast.LowRank(max(dim // 2, 1)),
            kvfast.LowRank(energy=0.9),
            kvfast.VectorQuantization(4, seed=1),
        ][int(rng.integers(6))]
        form = random_format(rng)
        source = Rows(rng, [form], 2, heads, dim, dim)
        while source.flavour in ("denormal", "large", "tiny"):
            source = Rows(rng, [form], 2, heads, dim, dim)
        rows = source.take(n)
        self.case.note(self.name, method, bits, heads, dim, n, repr(form))
        compressor = kvfast.KVCacheCompressor(method, bits)
        layers = [compressor.compress_kv_3d(*(one.swapaxes(0, 1) for one in pair)) for pair in rows]
        where = f"CompressedKV {type(method).__name__}"
        for one, pair in zip(layers, rows):
            if often(rng, 0.3):
                one = kvfast.CompressedKV.from_state_dict(one.state_dict())
            decoded = [array.swapaxes(0, 1) for array in one.decode()]
            for got, given, told_error in zip(decoded, pair, one.reconstruction_error):
                error = np.linalg.norm(got.astype(np.float64) - given) / max(np.linalg.norm(given), 1e-30)
                if not abs(error - told_error) <= 1e-3 * error + 1e-5 and np.linalg.norm(given):
                    raise Finding(f"reconstruction_error | {where}", f"{told_error} for {error}")
            queries = int(rng.integers(1, min(n, 6)))
            q = source.queries(queries, heads * int(one_of(rng, [1, 2, 3])), pair)
            causal = often(rng, 0.7)
            exact = exact_attention(q, *decoded, np.arange(n), np.arange(n - queries, n), causal=causal)
            self.case.calls += 3
            more = self.of_mean(method, decoded[1], q)
            check_output(
                *one.attend(q, causal=causal, return_lse=True), exact, 1e-3, f"attend is not attention over decode() | {where}", more
            )
        self.prefix(layers, source, form, heads, dim, n, method)

    def of_mean(self, method, v, q):
        """A Hybrid has values relative to their mean: what is near 0 is what the two leave of each other."""
        if not isinstance(method, kvfast.Hybrid):
            return 0.0
        return 1e-3 * np.repeat(norms(v.mean(0)), q.shape[1] // v.shape[1])

    def prefix(self, layers, source, form, heads, dim, n, method):
        cache, rng = kvfast.PrefixKVCache(layers, dtype=form), self.rng
        where = f"PrefixKVCache {told(form)}"
        for _ in range(int(rng.integers(1, 5))):
            count = int(one_of(rng, [1, 2, 17, 70]))
            for layer, pair in enumerate(source.take(count)):
                cache.append(layer, *pair)
            layer, queries = int(rng.integers(2)), int(rng.integers(1, min(count, 8) + 1))
            q = source.queries(queries, heads * int(one_of(rng, [1, 2])), pair)
            k, v = cache.k(layer), cache.v(layer)
            length = cache.layer_length(layer)
            exact = exact_attention(q, k, v, np.arange(length), np.arange(length - queries, length))
            self.case.calls += 5
            before = length - n - count
            # As in `World.reads_what_is_shown`: queries that look back from tokens that are not complete.
            if not form.open_tokens or length - n < (form.block_size or 16) or before == 0:
                more = self.of_mean(method, v[:n], q)
                check_output(
                    *cache.attend(layer, q, return_lse=True), exact, 1e-3, f"attend is not attention over k() and v() | {where}", more
                )
            cache.advance(count)
            if often(rng, 0.3):
                cache.truncate(n + int(rng.integers(len(cache) - n + 1)))
