"""What `fuzz_caches` does to caches: it keeps the rows that were given, and compares the cache's answers with them."""

import os
import tempfile

import ml_dtypes
import numpy as np
from dict_store import DictStore
from fuzz_inputs import as_given, often, one_of, random_choice, told
from fuzz_oracle import Finding, allowed, check_output, contract, from_storage
from fuzz_refusals import check_uncounted
from reference import exact_attention, norms

import kvfast

STEPS = [1, 1, 1, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100]
LARGE_STEPS = [128, 200, 257, 700]
SOFTCAPS = [0.5, 2, 15, 30, 50, 300, 1e3, 1e4, 1e5]
NO_DIFFERENCE = "return_lse", "num_splits", "num_threads", "precision"  # options that change nothing of what is computed, but bits
FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None


class Held:
    """A sequence in some cache, what it was given, and where its rows come from."""

    def __init__(self, cache, track, source, prompt=None):
        self.cache, self.track, self.source, self.prompt = cache, track, source, prompt
        self.is_known = prompt is not None  # so far all its tokens came with their ids


class World:
    """Caches of one kind. A subclass says what they are, and what may be done to them; this does it."""

    num_sink_tokens, windows, latent = 0, None, False

    def __init__(self, case):
        self.case, self.rng = case, case.rng

    # What latent rows do differently.

    def write(self, held, layer, k, v):
        rng, cache = self.rng, held.cache
        if often(rng, 0.08):
            heads = self.heads * int(rng.integers(1, 5))
            q = held.source.queries(len(k), heads, (k, v))
            qkv = np.concatenate([one.reshape(len(k), -1) for one in (q, k, v)], axis=1)
            got = cache.write(layer, qkv)
            if not np.array_equal(got, q):
                raise Finding(f"queries of write | {self.name}")
            return k, v
        (k, kept_k), (v, kept_v) = (as_given(rng, one, held.prompt is None) for one in (k, v))
        cache.append(layer, k, v)
        return kept_k, kept_v

    def decoded(self, cache, layer):
        return cache.k(layer), cache.v(layer)

    def where(self, layer):
        return f"{self.name} {told(self.formats[layer])}"

    def positions(self, held, layer):
        return np.arange(held.track.layer_length(layer))

    def check(self, held, layer):
        """The rows of a layer, which are held to what was given, and their positions."""
        self.case.calls += 2
        rows, positions = self.decoded(held.cache, layer), self.positions(held, layer)
        for values, one in enumerate(rows):
            held.track.check(layer, values, one, positions, self.where(layer))
        return rows, positions

    def check_all(self, held):
        self.case.note("check")
        if len(held.cache) != held.track.length:
            raise Finding(f"length | {self.name}", f"{len(held.cache)} for {held.track.length}")
        for layer in range(len(self.formats)):
            if held.cache.layer_length(layer) != held.track.layer_length(layer):
                raise Finding(f"layer_length | {self.name}")
            if held.track.layer_length(layer):
                self.check(held, layer)

    def options(self, num_q_heads, window=None):
        """Random options of attend, with the out that was asked for."""
        rng, options = self.rng, {}
        if often(rng, 0.3):
            options["scale"] = float(one_of(rng, [0.01, 0.05, 0.2, 0.5])) * (1 if often(rng, 0.95) else -1)
        if often(rng, 0.25):
            options["softcap"] = float(one_of(rng, SOFTCAPS))
        if often(rng, 0.1):
            options["causal"] = False
        if self.takes_windows:
            if often(rng, 0.2):
                options["sliding_window"] = int(rng.integers(1, window or 100) if (window or 100) > 1 else 1)
                if often(rng, 0.5):
                    most = self.num_sink_tokens if window else 20
                    options["num_sink_tokens"] = int(rng.integers(most + 1))
            if often(rng, 0.15):
                options["sinks"] = (rng.standard_normal(num_q_heads) * one_of(rng, [1, 5])).astype(np.float32)
            if often(rng, 0.15):
                options["alibi_slopes"] = np.float32(2.0) ** -rng.uniform(0, 8, num_q_heads).astype(np.float32)
            if often(self.case.later, 0.1) and options.get("causal", True):
                options["attention_chunk_size"] = int(self.case.later.integers(1, 100))
        if often(rng, 0.3):
            options["return_lse"] = True
        if often(rng, 0.2):
            options["num_splits"] = int(rng.integers(1, 9))
        if often(rng, 0.2):
            options["num_threads"] = int(rng.integers(1, 4))
        if often(self.case.precision, 0.15):
            options["precision"] = str(one_of(self.case.precision, ["fast", "fast", "exact"]))
            if options["precision"] == "fast" and often(self.case.threads, 0.5):  # where rounded queries would move scores by units
                options["scale"] = float(one_of(self.case.threads, [2, 10, 50, 400]))
        return options

    takes_windows = takes_spans = takes_chosen = True

    def narrow(self, options, length, n, window):
        """Add spans, a tree of drafts, or a choice, to the options of the last `n` queries, now and then."""
        later = self.case.later
        if self.takes_spans and self.takes_windows and often(later, 0.1) and options.get("causal", True):
            options["spans"] = self.spans(length, n, window)
            options["clamp_spans"] = often(later, 0.3)
        elif self.takes_spans and self.takes_windows and often(later, 0.1) and options.get("causal", True):
            drafts = int(later.integers(1, min(n, 64) + 1))
            options["tree_parents"] = [int(later.integers(-1, i)) for i in range(drafts)]
        elif self.takes_chosen and "alibi_slopes" not in options and often(later, 0.5 if self.latent else 0.1):
            defaults = {"sliding_window": window, "num_sink_tokens": self.num_sink_tokens if window else 0}
            options |= random_choice(later, length, n, self.heads, **defaults | options)

    def spans(self, length, n, window):
        """A span or two with some of the last `n` positions. A ring may have dropped what is before them."""
        later, first = self.case.later, length - n
        start = int(later.integers(first if window else max(0, first - 40), length))
        stop = int(later.integers(max(start, first) + 1, length + 1))
        return [(start, stop)] + ([(stop, length)] if stop < length and often(later, 0.5) else [])

    def random_heads(self):
        group = int(one_of(self.rng, [1, 1, 2, 3, 4, 8, 16] if often(self.rng, 0.9) else [5, 7, 17, 32]))
        return self.heads * group

    def queries_of(self, held, layer, most=None):
        """How many queries may be asked for."""
        rng, length = self.rng, held.track.layer_length(layer)
        n = int(one_of(rng, [1, 1, 1, 1, 2, 3, 4, 8, 15, 16, 17, 33])) if often(rng, 0.97) else int(rng.integers(1, 129))
        return min(n, length, most or length)

    def attend(self, held, layer=None):
        rng, track = self.rng, held.track
        layers = [one for one in range(len(self.formats)) if track.layer_length(one)]
        if not layers:
            return
        layer = int(one_of(rng, layers)) if layer is None else layer
        window = self.windows[layer] if self.windows else None
        n, num_q_heads = self.queries_of(held, layer), self.random_heads()
        q, exact_q = as_given(rng, held.source.queries(n, num_q_heads, track.rows[layer]))
        options = self.options(num_q_heads, window)
        self.narrow(options, track.layer_length(layer), n, window)
        if options.get("scale", 0) >= 2 and self.takes_windows and often(self.case.threads, 0.5):  # sinks take most of the weight
            k = np.repeat(track.rows[layer][0], num_q_heads // self.heads, axis=1)
            options["sinks"] = np.minimum(options["scale"] * np.einsum("qhd,khd->hqk", exact_q, k).max((1, 2)) + 10, 1e6)
        out, out_dtype = self.random_out((n, num_q_heads, self.out_dim))
        self.case.note("attend", layer, n, num_q_heads, out_dtype, options)
        try:
            got = held.cache.attend(layer, q, out=out, **options)
        except kvfast.NonFiniteInputError:
            self.explain_refusal(held, layer, exact_q, options, out_dtype)
            return
        except ValueError as error:
            if (
                window and "dropped" in str(error) and n + track.longest - track.length > self.rollback
            ):  # earlier queries need what is gone
                return
            raise
        self.verify(held, layer, exact_q, got, options, out_dtype)

    @property
    def out_dim(self):
        return self.dims[1]

    def random_out(self, shape):
        name = str(one_of(self.rng, ["", "", "", "", "float32", "float16", "bfloat16"]))
        if not name:
            return None, "float32"
        return np.empty(shape, ml_dtypes.bfloat16 if name == "bfloat16" else name), name

    def explain_refusal(self, held, layer, q, options, out_dtype):
        """Finite numbers are refused only where scores, sums or outputs go beyond their floats."""
        k, v = held.track.rows[layer]
        most = np.abs(q).max() * np.abs(k).max(initial=0) * k.shape[2] * max(abs(options.get("scale") or 1), 1)
        if most < 1e37 and np.abs(v).max(initial=0) < (6e4 if out_dtype == "float16" else 1e37):
            raise Finding(f"refused although finite | {self.where(layer)}", f"scores up to {most:.3g}")

    def verify(self, held, layer, q, got, options, out_dtype="float32"):
        """Hold an output to exact attention over the stored rows, and over what was given."""
        self.case.calls += 1
        track, length, n = held.track, held.track.layer_length(layer), len(q)
        out, lse = got if options.get("return_lse") else (got, None)
        (k, v), positions = self.check(held, layer)
        at = np.arange(length - n, length)
        exact_options = {name: value for name, value in options.items() if name not in NO_DIFFERENCE}
        if self.windows and self.windows[layer]:
            exact_options.setdefault("sliding_window", self.windows[layer])
            exact_options.setdefault("num_sink_tokens", self.num_sink_tokens)
        limit, fast = contract(track.sides[layer]), options.get("precision") == "fast"
        suffix = self.where(layer) + (", softcap" if options.get("softcap", 0) >= 300 else "")
        shows_all = self.shows_all(positions, at[0], exact_options)
        if shows_all and self.reads_what_is_shown(track, layer, at):
            exact = exact_attention(q, *self.sides_of(k, v), positions, at, **exact_options)
            check_output(out, lse, exact, limit, f"attend is not attention over k() and v() | {suffix}", out_dtype=out_dtype, fast=fast)
            if often(self.rng, 0.6):
                return
        if not shows_all:
            positions = np.arange(length)
        self.verify_given(track, layer, q, out, positions, exact_options, out_dtype, suffix, fast)

    def verify_given(self, track, layer, q, out, positions, options, out_dtype, where, fast):
        """Hold an output to exact attention over what was given at some positions, within what storage may have changed of it."""
        limit, length = contract(track.sides[layer]), track.layer_length(layer)
        errors = [track.reach(layer, values, positions) for values in (False, True)]
        given_k, given_v = (one[positions] for one in track.rows[layer])
        exact = exact_attention(q, *self.sides_of(given_k, given_v), positions, np.arange(length - len(q), length), **options)
        scale = options.get("scale") or self.default_scale
        more, factor = from_storage(exact, q, *self.errors_of(*errors), scale)
        more = more + (factor - 1) * (allowed(exact, limit, fast=fast)[0] + norms(exact.out))
        if factor.max(initial=1) < 100:
            check_output(out, None, exact, limit, f"attend is not attention over what was given | {where}", more, out_dtype, fast)

    @property
    def default_scale(self):
        return self.dims[0] ** -0.5

    def sides_of(self, k, v):
        """Keys and values that attention sees."""
        return k, v

    def errors_of(self, k, v):
        return k, v

    def shows_all(self, positions, first, options):
        """Whether the rows shown are all that queries from `first` on see."""
        if len(positions) == 0 or positions[-1] + 1 == len(positions):
            return True
        window = options.get("sliding_window")
        shown_from = positions[-1] - np.argmin(np.append(np.diff(positions)[::-1] == 1, False))
        sinks = options.get("num_sink_tokens") or 0
        return window is not None and first - window + 1 >= shown_from and np.isin(np.arange(sinks), positions).all()

    def reads_what_is_shown(self, track, layer, at):
        """Whether all queries read floats and codes where k() and v() do, as the query of the last token does."""
        return bool(np.all(track.read_from(layer, at) == track.read_from(layer, track.layer_length(layer) - 1)))

    # What is done to one sequence.

    def grow(self, held, n=None):
        """Append to all layers, in parts, with attention in between, and advance."""
        rng = self.rng
        n = int(one_of(rng, LARGE_STEPS if often(rng, 0.01) else STEPS)) if n is None else n
        n = min(n, self.room(held))
        if n <= 0:
            return
        self.case.note("append", n)
        rows, ids = self.next_rows(held, n)
        for layer, (k, v) in enumerate(rows):
            cut = int(rng.integers(n + 1)) if often(rng, 0.2) else 0
            for part in (slice(0, cut), slice(cut, n)):
                if part.stop > part.start:
                    self.case.calls += 1
                    held.track.append(layer, *self.write(held, layer, k[part], v[part]))
                    if often(rng, 0.25):
                        self.attend(held, layer)
        if often(rng, 0.05):  # they are never complete
            self.case.note("forget")
            held.cache.truncate(held.track.length)
            held.track.truncate(held.track.length)
            return
        if often(self.case.newest, 0.05):
            check_uncounted(self, held, n, self.case.newest)
        if often(self.case.newest, 0.1):
            n, ids = self.keep_branch(held, n, ids)
        if n == 0:
            return
        self.case.calls += 1
        held.cache.advance(n, **ids)
        held.track.advance(n)

    def keep_branch(self, held, n, ids):
        """Keep some of the `n` newest tokens, none of which is complete; returns how many, and their ids."""
        newest, start = self.case.newest, held.track.length
        branch = np.flatnonzero(newest.random(n) < newest.choice([0.1, 0.5, 0.9]))
        self.case.note("keep", start, branch)
        self.case.calls += 1
        try:
            held.cache.truncate(start, branch)
        except ValueError as error:
            if "a spliced cache" in str(error) and len(branch) or "as floats" in str(error) and start < 16:
                return n, ids
            raise
        held.track.keep(start, branch)
        return len(branch), {name: array[branch] for name, array in ids.items()}

    def next_rows(self, held, n):
        return held.source.take(n), {}

    def room(self, held):
        return 1 << 30

    def back(self, held):
        """Truncate, mostly by a little."""
        rng, length = self.rng, held.track.length
        n = int(rng.integers(max(length - 40, 0), length + 1)) if often(rng, 0.7) else int(rng.integers(length + 1))
        self.case.note("truncate", n)
        self.case.calls += 1
        try:
            held.cache.truncate(n)
        except ValueError as error:
            if self.windows and "go back" in str(error) and n < held.track.longest - self.rollback:
                return
            raise
        held.track.truncate(n)
        if often(rng, 0.5):
            self.check_all(held)

    def edit(self, held):
        """Regenerate the last few tokens, again and again."""
        if held.track.length < 2:
            return
        for _ in range(int(self.rng.integers(2, 7))):
            self.back(held)
            self.grow(held, int(self.rng.integers(1, 70)))

    def through_bytes(self, held):
        """The same cache, by way of plain arrays, a file, or a store of prompts."""
        self.case.calls += 2
        if held.track.length > 1 and often(self.case.later, 0.4):
            return self.through_store(held)
        if often(self.rng, 0.5):
            self.case.note("state_dict")
            cache = self.plain_class.from_state_dict(held.cache.state_dict())
        else:
            self.case.note("save")
            with tempfile.NamedTemporaryFile(dir=FOLDER) as file:
                held.cache.save(file.name)
                cache = kvfast.load(file.name, mmap=often(self.rng, 0.5))
        return Held(cache, held.track.copy(), held.source)

    def through_store(self, held):
        """The first tokens of a cache, by way of a store of prompts that has lost some of its values."""
        later, length, size = self.case.later, held.track.length, held.cache.block_size
        cache, token_ids = kvfast.load(held.cache.snapshot().truncated(0)), np.arange(length)
        asked = int(later.integers(1, length + 1)) if often(later, 0.5) else length
        with kvfast.PromptCache(DictStore(), chunk_tokens=max(64, size), secret=b"s" * int(later.integers(2))) as prompts:
            if not prompts.save(held.cache, token_ids) or not prompts.store.values:
                raise Finding("a prompt was not saved", f"{length} tokens")
            prompts.flush()
            for key in list(prompts.store.values):
                if often(later, 0.08):
                    del prompts.store.values[key]
            prompts.store.used.clear()
            found = prompts.restore(cache, [*token_ids[:asked], length])
        self.case.note("store", asked, found)
        track = held.track.copy()
        track.truncate(found)
        if not any(key.startswith("e-") for key in prompts.store.used):  # full blocks of a chunk have their codes alone
            track.settle(found // track.block_size * track.block_size)
        return Held(cache, track, held.source)
