"""A cache of other codes, simulated: its rows are float32 numbers that a quantiser has rounded.

It takes the place of a `kvfast.KVCache` in `evaluation.evaluate`. So it shows the loss of the types of llama.cpp with first and newest
tokens in float, and that of KVarN (arXiv 2606.03458).
"""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

import kvfast

# KVarN's types -> bits of a code. A tile is a block of the cache.
KVARN = {"kvarn4": 4, "kvarn2": 2}
_LIMITS = np.exp([-0.3, 10])  # of a scale of KVarN


class SimulatedCache:
    """Rows of ggml's types or of KVarN's, rotated before they are rounded, as llama.cpp and KVarN do.

    Parameters
    ----------
    shape : tuple of int
        (num_layers, num_kv_heads, head_dim).
    room : int
        Most tokens.
    kinds : (str, str)
        Types of keys and of values: names of ggml's, or of `KVARN`.
    num_first_float_tokens, num_recent_float_tokens, block_size : int
        As in `kvfast.KVFormat`. With `num_recent_float_tokens` 0 each token is rounded when it comes.
    """

    def __init__(self, shape, room, kinds, num_first_float_tokens=0, num_recent_float_tokens=0, block_size=64):
        self.num_layers, self.num_kv_heads, self.head_dim = shape
        self.v_head_dim, self.sliding_window = self.head_dim, None
        self.kinds, self.dtype_name = kinds, "/".join(dict.fromkeys(kinds))
        self.num_first_float_tokens, self.num_recent_float_tokens, self.block_size = (
            num_first_float_tokens,
            num_recent_float_tokens,
            block_size,
        )
        self.entry_size = self.num_kv_heads * self.head_dim
        self._rows = np.zeros((2, self.num_layers, room, self.num_kv_heads, self.head_dim), np.float32)
        self._lengths, self._rounded = [0] * self.num_layers, [0] * self.num_layers
        self._length = 0

    def __len__(self):
        return self._length

    @property
    def bytes_per_token(self):
        """Bytes of the codes of a token."""
        sides = zip(self.kinds, (self.block_size, self.head_dim), (self.head_dim, self.block_size))
        return round(self.num_layers * self.entry_size * sum(_bits(*side) for side in sides) / 8)

    @property
    def nbytes_used(self):
        """Bytes of all tokens, float rows as float16."""
        floats = self._length - self._rounded[0] + min(self.num_first_float_tokens, self._rounded[0])
        return (self._length - floats) * self.bytes_per_token + floats * 4 * self.num_layers * self.entry_size

    def write(self, layer, qkv, **transform):
        """As `KVCache.write`."""
        num_q_heads = qkv.shape[1] // self.head_dim - 2 * self.num_kv_heads
        sizes = {"num_q_heads": num_q_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        q, *pair = kvfast.split_qkv_norm_rope(qkv, **sizes, **transform)
        first, end = self._lengths[layer], self._lengths[layer] + len(q)
        for rows, new in zip(self._rows[:, layer], pair):
            rows[first:end] = new.astype(np.float16)
        # What the first of these tokens sees as codes.
        settled = (
            max(0, first - self.num_recent_float_tokens) // self.block_size * self.block_size if self.num_recent_float_tokens else end
        )
        begin = max(self._rounded[layer], self.num_first_float_tokens)
        for start in range(begin // self.block_size * self.block_size, settled, self.block_size):
            part = slice(max(start, begin), min(start + self.block_size, settled))
            for rows, kind, axis in zip(self._rows[:, layer], self.kinds, (1, 2)):
                rows[part] = _rounded(rows[part], kind, axis)
        self._lengths[layer], self._rounded[layer] = end, max(settled, self._rounded[layer])
        return q

    def attend(self, layer, q):
        """As `KVCache.attend`."""
        k, v = self._rows[:, layer, : self._lengths[layer]]
        return kvfast.attention(q, k, v)

    def advance(self, n):
        """As `KVCache.advance`."""
        self._length += n


def _bits(kind, with_range, with_scale):
    """Bits per element. KVarN has a range for each `with_range` elements (float16 scale and least), and a scale for `with_scale`."""
    if kind in KVARN:
        return KVARN[kind] + 32 / with_range + 16 / with_scale
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return 8 * size / block


def _rounded(rows, kind, axis):
    """Rows of a type, rotated by a Hadamard matrix and back. A range of KVarN is along `axis` of (heads, tokens, channels)."""
    rotation = np.ones((1, 1), np.float32)
    while len(rotation) < rows.shape[-1]:
        rotation = np.block([[rotation, rotation], [rotation, -rotation]])
    rotation /= np.sqrt(len(rotation), dtype=np.float32)
    rotated = rows @ rotation
    if kind in KVARN:
        return _kvarn(rotated.transpose(1, 0, 2), 2 ** KVARN[kind] - 1, axis).transpose(1, 0, 2) @ rotation
    kind = GGMLQuantizationType[kind.upper()]
    return quants.dequantize(quants.quantize(rotated.reshape(len(rows), -1), kind), kind).reshape(rows.shape) @ rotation


def _kvarn(tiles, largest, axis):
    """Tiles as KVarN decodes them: tokens and channels are divided in turns by their deviation, 16 times, and the scales at which the
    deviations differ least are taken. Then codes up to `largest` divide each range evenly. Scales stay float64."""
    by_token, by_channel = np.ones((*tiles.shape[:2], 1)), np.ones((len(tiles), 1, tiles.shape[2]))
    best, scales = np.inf, 1.0
    for _ in range(17):
        of_token, of_channel = (np.maximum((tiles / by_token / by_channel).std(axis, keepdims=True), 1e-8) for axis in (2, 1))
        uneven = sum(one.max(axis=(1, 2), keepdims=True) / one.min(axis=(1, 2), keepdims=True) for one in (of_token, of_channel))
        scales, best = np.where(uneven <= best, by_token * by_channel, scales), np.minimum(uneven, best)
        by_token = np.clip(by_token * of_token, *_LIMITS)
        by_channel = np.clip(by_channel * (tiles / by_token / by_channel).std(1, keepdims=True), *_LIMITS)
    even = tiles / scales
    least = even.min(axis, keepdims=True)
    step = np.maximum((even.max(axis, keepdims=True) - least) / largest, 1e-10)
    return ((np.rint((even - least) / step) * step + least) * scales).astype(np.float32)
