"""Contenders in any ggml, by its C interface: flash attention, and rows that are quantised.

Keys and values lie as llama.cpp's own cache lays them: all heads of a token side by side, seen through a permutation.
"""

import math
from ctypes import POINTER, Structure, c_bool, c_float, c_int, c_int64, c_size_t, c_uint8, c_void_p, cast

import numpy as np

from contenders import QUANTISE, Missing, relative

_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30, "q8_KV": 151}  # the last in ik_llama.cpp
_FEATURES = ["avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_int8", "neon", "dotprod"]
_MASK_ROWS = 16  # ik_llama.cpp wants a multiple


class _Settings(Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


_P, _I = c_void_p, c_int64
_SIGNATURES = {
    "ggml_init": (_P, _Settings),
    "ggml_free": (None, _P),
    "ggml_new_tensor_4d": (_P, _P, c_int, _I, _I, _I, _I),
    "ggml_view_1d": (_P, _P, _P, _I, c_size_t),
    "ggml_permute": (_P, _P, _P, c_int, c_int, c_int, c_int),
    "ggml_cpy": (_P, _P, _P, _P),
    "ggml_flash_attn_ext": (_P, _P, _P, _P, _P, _P, c_float, c_float, c_float),
    "ggml_flash_attn_ext_set_prec": (None, _P, c_int),
    "ggml_new_graph_custom": (_P, _P, c_size_t, c_bool),
    "ggml_build_forward_expand": (None, _P, _P),
    "ggml_get_data": (_P, _P),
    "ggml_nbytes": (c_size_t, _P),
    "ggml_row_size": (c_size_t, c_int, _I),
    "ggml_backend_graph_compute": (c_int, _P, _P),
    "ggml_backend_cpu_set_n_threads": (None, _P, c_int),
    "ggml_backend_cpu_init": (_P,),
}


class Library:
    """The functions of a ggml, as attributes without their prefix, from one or more of its files; and its CPU. The forks have different
    numbers for GGML_PREC_F32, `full_precision`."""

    def __init__(self, *files, full_precision):
        self.files, self.full_precision = files, full_precision
        for name, signature in _SIGNATURES.items():
            setattr(self, name.removeprefix("ggml_"), self.function(name, *signature))
        self.backend = self.backend_cpu_init()

    def function(self, name, result, *arguments):
        found = next((getattr(file, name) for file in self.files if hasattr(file, name)), None)
        if found is None:
            raise Missing(f"this ggml has no {name}")
        found.restype, found.argtypes = result, arguments
        return found

    def features(self):
        """What of the CPU it was compiled for."""
        has = []
        for name in _FEATURES:
            try:
                if self.function(f"ggml_cpu_has_{name}", c_int)():
                    has.append(name)
            except Missing:
                pass
        return " ".join(has) or "any CPU"

    def array(self, tensor, shape, dtype=np.float32):
        data = cast(self.get_data(tensor), POINTER(c_uint8))
        return np.ctypeslib.as_array(data, (self.nbytes(tensor),)).view(dtype).reshape(shape)

    def size(self, storage, *shape):
        """Bytes of a tensor, with what ggml keeps for it."""
        return self.row_size(_TYPES[storage], shape[-1]) * math.prod(shape[:-1]) + 1024

    def run(self, graph, num_threads):
        self.backend_cpu_set_n_threads(self.backend, num_threads)
        status = self.backend_graph_compute(self.backend, graph)
        if status != 0:
            raise RuntimeError(f"ggml_backend_graph_compute: status {status}")


class _Memory:
    """Tensors, and graphs of them, in one piece of memory."""

    def __init__(self, ggml, nbytes):
        self.ggml = ggml
        self.memory = ggml.init(_Settings(nbytes + (1 << 20), None, False))
        if not self.memory:
            raise MemoryError(f"ggml_init of {nbytes:,} bytes")

    def new(self, storage, *shape):
        """A tensor of a NumPy shape, the last dimension innermost."""
        sizes = (*reversed(shape), 1, 1, 1)[:4]
        return self.ggml.new_tensor_4d(self.memory, _TYPES[storage], *sizes)

    def graph(self, results):
        graph = self.ggml.new_graph_custom(self.memory, 16 * len(results) + 64, False)
        for one in results:
            self.ggml.build_forward_expand(graph, one)
        return graph

    def free(self):
        self.ggml.free(self.memory)


def contender(ggml, work, storage):
    """The contender of a work in a Library."""
    if work.head_dim % 32 and storage not in ("f16", "bf16"):
        raise Missing("head_dim must be a multiple of 32")
    if work.kind != QUANTISE:
        return _Attention(ggml, work, storage)
    return _Function(ggml, work, storage) if storage.startswith("quantize_") else _Rows(ggml, work, storage)


class _Attention:
    def __init__(self, ggml, work, storage):
        k, v, q = work.tensors()
        self.ggml, self.work = ggml, work
        mask_rows = -(-work.new_tokens // _MASK_ROWS) * _MASK_ROWS
        shape = work.sequences, *k.shape
        q = q.reshape(work.sequences, work.new_tokens, *q.shape[1:])
        self.layers = work.layers(2 * ggml.size(storage, *shape))
        per_layer = 2 * ggml.size(storage, *shape) + ggml.size("f32", *q.shape) + (1 << 14)
        memory = _Memory(ggml, self.layers * per_layer + ggml.size("f32", *q.shape) + ggml.size("f16", mask_rows, work.context))
        cache = [[memory.new(storage, *shape) for _ in "kv"] for _ in range(self.layers)]
        source = _Memory(ggml, 2 * ggml.size("f32", *shape) + self.layers * (1 << 14))
        tensors = [source.new("f32", *shape) for _ in "kv"]
        for tensor, x in zip(tensors, (k, v)):
            ggml.array(tensor, shape)[:] = x
        copies = [ggml.cpy(source.memory, x, y) for layer in cache for x, y in zip(tensors, layer)]
        ggml.run(source.graph(copies), 1)
        source.free()
        queries = memory.new("f32", *q.shape)
        ggml.array(queries, q.shape)[:] = q
        mask = memory.new("f16", mask_rows, work.context)
        seen = ggml.array(mask, (mask_rows, work.context), np.float16)
        seen[:] = 0
        seen[: work.new_tokens] = np.where(work.mask(), 0, -np.inf)
        self.outputs = []
        for layer in cache:
            heads = [ggml.permute(memory.memory, x, 0, 2, 1, 3) for x in (queries, *layer)]
            self.outputs.append(ggml.flash_attn_ext(memory.memory, *heads, mask, work.head_dim**-0.5, 0, 0))
            ggml.flash_attn_ext_set_prec(self.outputs[-1], ggml.full_precision)
        self.graph = memory.graph(self.outputs)
        self.nbytes = sum(ggml.nbytes(x) for layer in cache for x in layer)

    def run(self, num_threads):
        self.ggml.run(self.graph, num_threads)

    def check(self):
        shape = self.work.queries, self.work.num_q_heads, self.work.head_dim
        return self.work.error(*(self.ggml.array(self.outputs[i], shape) for i in (0, -1)))


class _Rows:
    """Float rows copied into a quantised tensor by a graph, as rows get into llama.cpp's cache."""

    layers = 1

    def __init__(self, ggml, work, storage):
        self.ggml = ggml
        self.rows = np.stack(work.tensors()[:2])
        shape = self.rows.shape
        self.memory = _Memory(ggml, ggml.size("f32", *shape) + ggml.size(storage, *shape) + (1 << 16))
        source, self.target = self.memory.new("f32", *shape), self.memory.new(storage, *shape)
        ggml.array(source, shape)[:] = self.rows
        self.rows = ggml.array(source, shape)
        self.graph = self.memory.graph([ggml.cpy(self.memory.memory, source, self.target)])
        self.nbytes = ggml.nbytes(source) + ggml.nbytes(self.target)

    def run(self, num_threads):
        self.ggml.run(self.graph, num_threads)

    def check(self):
        size = min(self.rows.size, 1 << 20)
        some = _Memory(self.ggml, self.ggml.size("f32", size) + (1 << 16))
        floats = some.new("f32", size)
        self.ggml.run(some.graph([self.ggml.cpy(some.memory, self.ggml.view_1d(some.memory, self.target, size, 0), floats)]), 1)
        error = relative(self.ggml.array(floats, size), self.rows.reshape(-1)[:size])
        some.free()
        return error


class _Function(_Rows):
    """The function that quantises rows of a model file; it has no threads."""

    def __init__(self, ggml, work, storage):
        super().__init__(ggml, work, storage.removeprefix("quantize_"))
        self.function = ggml.function(storage, c_size_t, _P, _P, _I, _I, _P)
        self.arguments = self.rows.ctypes.data, ggml.get_data(self.target), self.rows.size // work.head_dim, work.head_dim, None

    def run(self, num_threads):
        if num_threads > 1:
            raise Missing("one thread only")
        self.function(*self.arguments)
