"""llama.cpp: flash attention of the ggml that llama-cpp-python was compiled with, by its C interface.

Keys and values lie as llama.cpp's own cache lays them: all heads of a token side by side, seen through a permutation.
"""

import ctypes
import math
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint8, c_void_p, cast
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from contenders import DECODE, QUANTISE, Missing, relative

_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
_FULL_PRECISION = 10
_FEATURES = ["avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_int8", "neon", "dotprod"]


class _Settings(Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


def _library():
    package = find_spec("llama_cpp")
    if package is None:
        raise ModuleNotFoundError("No module named 'llama_cpp'")
    for suffix in (".so", ".dylib"):
        files = [Path(package.origin).parent / "lib" / f"libggml-{part}{suffix}" for part in ("base", "cpu")]
        if all(file.exists() for file in files):
            return ctypes.CDLL(str(files[0]), ctypes.RTLD_GLOBAL), ctypes.CDLL(str(files[1]))
    raise Missing("llama-cpp-python has no libggml-base and libggml-cpu of its own")


_base, _cpu = _library()


def _function(library, name, result, *arguments):
    found = getattr(library, name)
    found.restype, found.argtypes = result, arguments
    return found


_init = _function(_base, "ggml_init", c_void_p, _Settings)
_free = _function(_base, "ggml_free", None, c_void_p)
_new_tensor = _function(_base, "ggml_new_tensor_4d", c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64, c_int64)
_view = _function(_base, "ggml_view_1d", c_void_p, c_void_p, c_void_p, c_int64, c_size_t)
_permute = _function(_base, "ggml_permute", c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_int)
_copy = _function(_base, "ggml_cpy", c_void_p, c_void_p, c_void_p, c_void_p)
_attention = _function(
    _base, "ggml_flash_attn_ext", c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_float, c_float
)
_set_precision = _function(_base, "ggml_flash_attn_ext_set_prec", None, c_void_p, c_int)
_new_graph = _function(_base, "ggml_new_graph_custom", c_void_p, c_void_p, c_size_t, c_bool)
_expand = _function(_base, "ggml_build_forward_expand", None, c_void_p, c_void_p)
_data = _function(_base, "ggml_get_data", c_void_p, c_void_p)
_nbytes = _function(_base, "ggml_nbytes", c_size_t, c_void_p)
_row_size = _function(_base, "ggml_row_size", c_size_t, c_int, c_int64)
_compute = _function(_base, "ggml_backend_graph_compute", c_int, c_void_p, c_void_p)
_set_threads = _function(_cpu, "ggml_backend_cpu_set_n_threads", None, c_void_p, c_int)
_backend = _function(_cpu, "ggml_backend_cpu_init", c_void_p)()


def version():
    has = [name for name in _FEATURES if _function(_cpu, f"ggml_cpu_has_{name}", c_int)()]
    try:
        ggml = _function(_base, "ggml_version", c_char_p)().decode()
    except AttributeError:
        ggml = "?"
    return f"llama-cpp-python {version_of('llama-cpp-python')}, ggml {ggml} built for {' '.join(has) or 'any CPU'}"


class _Memory:
    """Tensors, and graphs of them, in one piece of memory."""

    def __init__(self, nbytes):
        self.memory = _init(_Settings(nbytes + (1 << 20), None, False))
        if not self.memory:
            raise MemoryError(f"ggml_init of {nbytes:,} bytes")

    def new(self, storage, *shape):
        """A tensor of a NumPy shape, the last dimension innermost."""
        sizes = (*reversed(shape), 1, 1, 1)[:4]
        return _new_tensor(self.memory, _TYPES[storage], *sizes)

    def graph(self, results):
        graph = _new_graph(self.memory, 16 * len(results) + 64, False)
        for one in results:
            _expand(graph, one)
        return graph

    def free(self):
        _free(self.memory)


def _size(storage, *shape):
    """Bytes of a tensor, with what ggml keeps beside it."""
    return _row_size(_TYPES[storage], shape[-1]) * math.prod(shape[:-1]) + 1024


def _array(tensor, shape, dtype=np.float32):
    return np.ctypeslib.as_array(cast(_data(tensor), POINTER(c_uint8)), (_nbytes(tensor),)).view(dtype).reshape(shape)


def _run(graph, num_threads):
    _set_threads(_backend, num_threads)
    status = _compute(_backend, graph)
    if status != 0:
        raise RuntimeError(f"ggml_backend_graph_compute: status {status}")


def Contender(work, name, storage):
    if work.head_dim % 32 and storage != "f16":
        raise Missing("head_dim must be a multiple of 32")
    if work.kind != QUANTISE:
        return _Attention(work, storage)
    return _Function(work, storage) if storage.startswith("quantize_") else _Rows(work, storage)


class _Attention:
    def __init__(self, work, storage):
        k, v, q = work.tensors()
        self.work = work
        self.layers = work.layers(2 * _size(storage, *k.shape))
        per_layer = 2 * _size(storage, *k.shape) + _size("f32", *q.shape) + (1 << 14)
        memory = _Memory(self.layers * per_layer + _size("f32", *q.shape) + _size("f16", work.queries, work.context))
        cache = [[memory.new(storage, *k.shape) for _ in "kv"] for _ in range(self.layers)]
        source = _Memory(2 * _size("f32", *k.shape) + self.layers * (1 << 14))
        tensors = [source.new("f32", *x.shape) for x in (k, v)]
        for tensor, x in zip(tensors, (k, v)):
            _array(tensor, x.shape)[:] = x
        copies = [_copy(source.memory, x, y) for layer in cache for x, y in zip(tensors, layer)]
        _run(source.graph(copies), 1)
        source.free()
        queries = memory.new("f32", *q.shape)
        _array(queries, q.shape)[:] = q
        mask = None
        if work.kind != DECODE:
            mask = memory.new("f16", work.queries, work.context)
            _array(mask, (work.queries, work.context), np.float16)[:] = np.where(work.mask(), 0, -np.inf)
        self.outputs = []
        for layer in cache:
            heads = [_permute(memory.memory, x, 0, 2, 1, 3) for x in (queries, *layer)]
            self.outputs.append(_attention(memory.memory, *heads, mask, work.head_dim**-0.5, 0, 0))
            _set_precision(self.outputs[-1], _FULL_PRECISION)
        self.graph = memory.graph(self.outputs)
        self.nbytes = sum(_nbytes(x) for layer in cache for x in layer)

    def run(self, num_threads):
        _run(self.graph, num_threads)

    def check(self):
        shape = self.work.queries, self.work.num_q_heads, self.work.head_dim
        return self.work.error(*(_array(self.outputs[i], shape) for i in (0, -1)))


class _Rows:
    """Float rows copied into a quantised tensor by a graph, as rows get into llama.cpp's cache."""

    layers = 1

    def __init__(self, work, storage):
        self.rows = np.stack(work.tensors()[:2])
        shape = self.rows.shape
        self.memory = _Memory(_size("f32", *shape) + _size(storage, *shape) + (1 << 16))
        source, self.target = self.memory.new("f32", *shape), self.memory.new(storage, *shape)
        _array(source, shape)[:] = self.rows
        self.rows = _array(source, shape)
        self.graph = self.memory.graph([_copy(self.memory.memory, source, self.target)])
        self.nbytes = _nbytes(source) + _nbytes(self.target)

    def run(self, num_threads):
        _run(self.graph, num_threads)

    def check(self):
        size = min(self.rows.size, 1 << 20)
        some = _Memory(_size("f32", size) + (1 << 16))
        floats = some.new("f32", size)
        _run(some.graph([_copy(some.memory, _view(some.memory, self.target, size, 0), floats)]), 1)
        error = relative(_array(floats, size), self.rows.reshape(-1)[:size])
        some.free()
        return error


class _Function(_Rows):
    """The function that quantises rows of a model file; it has no threads."""

    def __init__(self, work, storage):
        super().__init__(work, storage.removeprefix("quantize_"))
        self.function = _function(_base, storage, c_size_t, c_void_p, c_void_p, c_int64, c_int64, c_void_p)
        self.arguments = self.rows.ctypes.data, _data(self.target), self.rows.size // work.head_dim, work.head_dim, None

    def run(self, num_threads):
        if num_threads > 1:
            raise Missing("one thread only")
        self.function(*self.arguments)
