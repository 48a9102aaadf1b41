"""A cache of other codes, simulated: its rows are float32 numbers that a quantiser has rounded.

It takes the place of a `kvfast.KVCache` in `evaluation.evaluate`, which shows what first and newest tokens in float would do for the
types of llama.cpp.
"""

import numpy as np

import kvfast
from kvfast.engines.llama_cpp import ggml


class SimulatedCache:
    """Rows of ggml's types, rotated before they are rounded, as llama.cpp has them.

    Parameters
    ----------
    shape : tuple of int
        (num_layers, num_kv_heads, head_dim).
    room : int
        Most tokens.
    kinds : (str, str)
        Types of ggml, of keys and of values.
    num_first_float_tokens, num_recent_float_tokens, block_size : int
        As in `kvfast.KVFormat`. With `num_recent_float_tokens` 0 each token is rounded when it comes.
    """

    def __init__(self, shape, room, kinds, num_first_float_tokens=0, num_recent_float_tokens=0, block_size=64):
        self.num_layers, self.num_kv_heads, self.head_dim = shape
        self.kinds, self.dtype = kinds, "/".join(dict.fromkeys(kinds))
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
        return self.num_layers * sum(ggml.row_bytes(kind, self.entry_size) for kind in self.kinds)

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
        if begin < settled:
            for rows, kind in zip(self._rows[:, layer], self.kinds):
                rows[begin:settled] = _rounded(rows[begin:settled], kind)
        self._lengths[layer], self._rounded[layer] = end, max(settled, self._rounded[layer])
        return q

    def attend(self, layer, q):
        """As `KVCache.attend`."""
        k, v = self._rows[:, layer, : self._lengths[layer]]
        return kvfast.attention(q, k, v)

    def advance(self, n):
        """As `KVCache.advance`."""
        self._length += n


def _rounded(rows, kind):
    """Rows of a type, rotated by a Hadamard matrix and back."""
    heads, dim = rows.shape[1:]
    rotation = np.ones((1, 1), np.float32)
    while len(rotation) < dim:
        rotation = np.block([[rotation, rotation], [rotation, -rotation]])
    rotation /= np.sqrt(dim, dtype=np.float32)
    return ggml.from_ggml(ggml.to_ggml(rows @ rotation, kind), kind, heads, dim) @ rotation
