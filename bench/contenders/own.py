"""kvfast itself, and the machine's read bandwidth."""

import numpy as np

import kvfast
from contenders import BATCH, QUANTISE, relative
from kvfast.core.hardware import read_bandwidth

CHUNK = 1024


def version():
    return f"kvfast {kvfast.__version__}, tier {kvfast.active_isa()}"


def _fill(cache, k, v):
    for start in range(0, len(k), CHUNK):
        n = min(CHUNK, len(k) - start)
        for layer in range(cache.num_layers):
            cache.append(layer, k[start : start + n], v[start : start + n])
        cache.advance(n)


def Contender(work, name, storage):
    if storage == "bandwidth":
        return _Bandwidth(work)
    *way, dtype = storage.split()
    if work.kind != QUANTISE:
        made = _Batch(work, dtype) if work.kind == BATCH else _Attention(work, dtype)
        made.cache.precision = "fast" if way else "exact"
        return made
    (way,) = way
    return _Quantize(work, dtype) if way == "quantize" else _Append(work, dtype)


class _Bandwidth:
    layers = 1

    def __init__(self, work):
        self.nbytes = work.total  # whole MiB

    def run(self, num_threads):
        read_bandwidth(self.nbytes, num_threads)

    def check(self):
        return 0.0


class _Attention:
    def __init__(self, work, dtype):
        shape = work.num_kv_heads, work.head_dim
        k, v, self.q = work.tensors()
        self.work = work
        one = kvfast.KVCache(1, *shape, max_seq_len=work.context, dtype=dtype)
        self.layers = work.layers(one.bytes_per_token * work.context)
        self.cache = kvfast.KVCache(self.layers, *shape, max_seq_len=work.context, dtype=dtype)
        _fill(self.cache, k, v)
        self.nbytes = self.cache.bytes_per_token * work.context

    def run(self, num_threads):
        self.outputs = [self.cache.attend(layer, self.q, num_threads=num_threads) for layer in range(self.layers)]

    def check(self):
        return self.work.error(self.outputs[0], self.outputs[-1])


class _Batch:
    """A token of each of several sequences, which share nothing."""

    def __init__(self, work, dtype):
        shape = work.num_kv_heads, work.head_dim
        k, v, self.q = work.tensors()
        self.work = work
        per_layer = kvfast.KVCache(1, *shape, max_seq_len=work.context, dtype=dtype).bytes_per_token * work.context * work.sequences
        self.layers = work.layers(per_layer)
        self.nbytes = self.layers * per_layer
        blocks = work.sequences * (-(-work.context // 64) + 1)
        self.cache = kvfast.PagedKVCache(self.layers, *shape, num_blocks=blocks, block_size=64, dtype=dtype)
        self.sequences = [self.cache.new_sequence() for _ in range(work.sequences)]
        for sequence in self.sequences:
            _fill(sequence, k, v)

    def run(self, num_threads):
        self.outputs = [self.cache.attend_batch(i, self.q, self.sequences, num_threads=num_threads) for i in range(self.layers)]

    def check(self):
        return self.work.error(self.outputs[0], self.outputs[-1])


class _Append:
    """Rows into a cache, a prompt's chunk at a time."""

    layers = 1

    def __init__(self, work, dtype):
        self.k, self.v, _ = work.tensors()
        self.cache = kvfast.KVCache(1, work.num_kv_heads, work.head_dim, max_seq_len=work.context, dtype=dtype)
        self.nbytes = self.k.nbytes + self.v.nbytes + self.cache.bytes_per_token * work.context

    def run(self, num_threads):
        kvfast.set_num_threads(num_threads)
        self.cache.clear()
        _fill(self.cache, self.k, self.v)

    def check(self):
        return max(relative(self.cache.k(0), self.k), relative(self.cache.v(0), self.v))


class _Quantize:
    layers = 1

    def __init__(self, work, dtype):
        self.rows = np.stack(work.tensors()[:2])
        self.bits = int(dtype[3:])
        self.nbytes = 0

    def run(self, num_threads):
        kvfast.set_num_threads(num_threads)
        self.codes, self.scales = kvfast.quantize(self.rows, bits=self.bits)
        self.nbytes = self.rows.nbytes + self.codes.nbytes + self.scales.nbytes

    def check(self):
        return relative(kvfast.dequantize(self.codes[:, -CHUNK:], self.scales[:, -CHUNK:]), self.rows[:, -CHUNK:])
