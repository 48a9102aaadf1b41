"""Stores: the compressed tokens of all heads of one sequence.

A store has `attend`, `decode`, `nbytes`, `num_tokens` and `arrays`; `open` makes a store from the arrays. A store holds the
tokens that are not kept exactly, in their order.
"""

from dataclasses import replace
from itertools import chain

import numpy as np

from kvfast.caches.contiguous import KVCache
from kvfast.caches.loading import load
from kvfast.codec.formats import KVFormat
from kvfast.compression.basis import Basis, eigen, rank_of_energy
from kvfast.core.limits import LANES
from kvfast.core.text import shown
from kvfast.errors import CorruptFileError

# Formats of the coordinates of a Hybrid: the presets without float rows for the first tokens, which are exact anyway.
HYBRID_FORMATS = {8: KVFormat("int8", rotation="kv"), 4: KVFormat("int4", rotation="v", codebook="gaussian", per_channel=True)}
BLOCKS_OF_CHANNELS = (64, 32)


class CacheStore:
    """Keys and values in a `KVCache`, in their own coordinates."""

    def __init__(self, cache):
        self.cache = cache

    @classmethod
    def of(cls, k, v, dtype):
        """k, v: (heads, tokens, dim), float32."""
        heads, tokens, dim = k.shape
        form = KVFormat.of(dtype)
        form = replace(form, num_recent_float_tokens=0, recent_by_query=form.seals and form.recent_by_query)  # no tokens follow
        if not form.seals:
            cache = KVCache(1, heads, dim, tokens, dtype=form, block_size=_block_size(tokens))
            cache.append(0, k.swapaxes(0, 1), v.swapaxes(0, 1))
            cache.advance(tokens)
            return cls(cache)
        # No tokens follow, so the last block must be sealed now. Repeated tokens fill it, and one more block after it, because
        # a block is read as float rows until further tokens follow. The repeated tokens are then truncated.
        form = replace(form, block_size=min(BLOCKS_OF_CHANNELS, key=lambda size: _channel_bits(tokens, size)))
        filled = -(-tokens // form.block_size) * form.block_size
        again = np.arange(filled + form.block_size) % tokens
        cache = KVCache(1, heads, dim, dtype=form)
        cache.append(0, k.swapaxes(0, 1)[again], v.swapaxes(0, 1)[again])
        cache.advance(len(again))
        cache.truncate(tokens)
        return cls(load(cache.snapshot(), max_seq_len=tokens))

    @property
    def num_tokens(self):
        return len(self.cache)

    @property
    def nbytes(self):
        return self.cache.nbytes_used

    def attend(self, q, visible, scale, num_threads=None):
        """Attention of queries (num_queries, num_q_heads, dim) to the first tokens: output and log-sum-exp.

        `visible` is the number of tokens that each query sees: the same as for the query before it, or one more.
        """
        out, lse = np.zeros(q.shape, np.float32), np.full(q.shape[:2], -np.inf, np.float32)
        for first, last, causal in runs_of(visible):
            if visible[last - 1]:
                cache, rows = _first_tokens(self.cache, int(visible[last - 1])), slice(first, last)
                options = {"scale": scale, "causal": causal, "return_lse": True, "num_threads": num_threads}
                if causal or last - first <= len(cache):
                    _, lse[rows] = cache.attend(0, q[rows], out=out[rows], **options)
                else:
                    out[rows], lse[rows] = self._attend_many(cache, q[rows], options)
        return out, lse

    @staticmethod
    def _attend_many(cache, q, options):
        """Attend with more queries than the cache has tokens, passed as heads of one query."""
        n, heads, group = len(q), cache.num_kv_heads, q.shape[1] // cache.num_kv_heads
        together = q.reshape(n, heads, group, -1).swapaxes(0, 1).reshape(1, heads * n * group, -1)
        out, lse = cache.attend(0, together, **options)
        back = (array.reshape(heads, n, group, -1).swapaxes(0, 1) for array in (out, lse))
        return [array.reshape(shape) for array, shape in zip(back, (q.shape, q.shape[:2]))]

    def decode(self):
        """Decoded keys and values, float32 of shape (heads, tokens, dim)."""
        return self.cache.k(0).swapaxes(0, 1), self.cache.v(0).swapaxes(0, 1)

    def settings(self):
        return {}

    def arrays(self):
        return self.cache.state_dict()

    @classmethod
    def open(cls, arrays, settings, layout, num_tokens):
        return cls(open_cache(arrays, (1, layout.num_heads, layout.head_dim), num_tokens))


def _block_size(tokens):
    """Tokens of a block: a small number if many slots of the last block would stay empty."""
    return next((size for size in (64, 32) if -tokens % size * 16 <= tokens), 16)


def _channel_bits(tokens, block):
    """Bits of a channel of INT4 keys and values: the codes of whole blocks, and a scale and an offset per block."""
    return -(-tokens // block) * (2 * 4 * block + 2 * 16)


class RankStore:
    """Coordinates in the bases of the heads. Heads of the same rank share a `KVCache`.

    A group has the indices of its heads, the bases of their keys and values, and a `CacheStore` of their coordinates.
    """

    def __init__(self, groups, num_heads):
        self.groups, self.num_heads = groups, num_heads

    @classmethod
    def of(cls, k, v, ranks, centred, dtype):
        """`ranks`: one rank per head, at most the number of tokens rounded up to whole lanes."""
        groups, most = [], -(-k.shape[1] // LANES) * LANES
        ranks = [min(rank, most) for rank in ranks]
        of_basis = np.float32 if str(dtype) == "float32" else np.float16
        for rank in sorted(set(ranks)):
            heads = np.flatnonzero(np.equal(ranks, rank))
            bases = [Basis.fit(x[heads], rank, centred, of_basis) for x in (k, v)]
            coordinates = [basis.coordinates(x[heads]) for basis, x in zip(bases, (k, v))]
            groups.append((heads, *bases, CacheStore.of(*coordinates, dtype)))
        return cls(groups, len(k))

    @staticmethod
    def ranks_of_energy(k, v, energy):
        """Rank of each head that keeps this share of the sum of squares of its keys, and of its values. The rank is rounded
        up to the padded width, which is stored in any case."""
        ranks = [max(rank_of_energy(eigen(x)[0], energy) for x in pair) for pair in zip(k, v)]
        return [min(k.shape[2], -(-rank // LANES) * LANES) for rank in ranks]

    @property
    def num_tokens(self):
        return self.groups[0][3].num_tokens

    @property
    def nbytes(self):
        return sum(keys.nbytes + values.nbytes + store.nbytes for _, keys, values, store in self.groups)

    def attend(self, q, visible, scale, num_threads=None):
        group = q.shape[1] // self.num_heads
        out, lse = np.empty(q.shape, np.float32), np.empty(q.shape[:2], np.float32)
        for heads, keys, values, store in self.groups:
            of_heads = (heads[:, None] * group + np.arange(group)).reshape(-1)
            rotated, offsets = keys.of_queries(q[:, of_heads], group)
            inner, inner_lse = store.attend(rotated.reshape(len(q), len(of_heads), -1), visible, scale, num_threads)
            out[:, of_heads] = values.of_outputs(inner, group)
            lse[:, of_heads] = inner_lse + np.float32(scale) * offsets.reshape(len(q), -1)
        return out, lse

    def decode(self):
        pair = [np.empty((self.num_heads, self.num_tokens, self.groups[0][1].mean.shape[1]), np.float32) for _ in "kv"]
        for heads, *bases, store in self.groups:
            for target, basis, coordinates in zip(pair, bases, store.decode()):
                target[heads] = basis.vectors(coordinates)
        return tuple(pair)

    def settings(self):
        return {
            "heads": [heads.tolist() for heads, *_ in self.groups],
            "ranks": [keys.rank for _, keys, *_ in self.groups],
            "basis": self.groups[0][1].lift.dtype.name,
        }

    def arrays(self):
        parts = {}
        for i, (_, *parts_of_group) in enumerate(self.groups):
            for name, part in zip(("k", "v", "coordinates"), parts_of_group):
                parts |= {f"{i}.{name}.{key}": array for key, array in part.arrays().items()}
        return parts

    @classmethod
    def open(cls, arrays, settings, layout, num_tokens):
        heads, ranks = settings["heads"], settings["ranks"]
        numbers = list(chain.from_iterable(heads))
        known = len(numbers) == layout.num_heads and sorted(numbers) == list(range(layout.num_heads))
        if not known or len(heads) != len(ranks):
            raise CorruptFileError(
                f"{len(ranks)} ranks must be those of groups that hold each of {layout.num_heads} heads once, got "
                f"{len(heads)} groups of {len(numbers)} heads"
            )
        groups, dtype = [], {"float16": np.float16, "float32": np.float32}[settings["basis"]]
        for i, (group, rank) in enumerate(zip(heads, ranks)):
            if rank > layout.head_dim:
                raise CorruptFileError(f"a rank must be between 1 and {layout.head_dim}, got {rank}")
            bases = [Basis.open(arrays.part(f"{i}.{side}."), len(group), rank, layout.head_dim, dtype) for side in "kv"]
            cache = open_cache(arrays.part(f"{i}.coordinates."), (1, len(group), rank), num_tokens)
            groups.append((np.array(group), *bases, CacheStore(cache)))
        return cls(groups, layout.num_heads)


def open_cache(arrays, shape, num_tokens):
    """A `KVCache` from its `state_dict`. Its layers, heads, head_dim and tokens are checked."""
    cache = KVCache.from_state_dict(arrays.take_all())
    found = cache.num_layers, cache.num_kv_heads, cache.head_dim
    if found != shape or cache.v_head_dim != cache.head_dim or len(cache) != num_tokens:
        raise CorruptFileError(f"a cache of shape {shape} with {num_tokens} tokens was expected, got {shown(cache)}")
    return cache


def runs_of(visible):
    """Cut queries into runs, (first, last, causal): every query sees the same number of tokens, or in a causal run one token more
    than the query before it."""
    first = 0
    while first < len(visible):
        last = first + 1
        while last < len(visible) and visible[last] - visible[last - 1] == visible[first + 1] - visible[first]:
            last += 1
        causal = last > first + 1 and visible[first + 1] > visible[first]
        # In a causal call a query sees at least one token, so a query that sees none is a run of its own.
        if causal and visible[first] == 0:
            last, causal = first + 1, False
        yield first, last, causal
        first = last


def _first_tokens(cache, n):
    if n == len(cache):
        return cache
    first = cache.fork()
    first.truncate(n)
    return first
