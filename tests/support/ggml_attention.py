"""Attention by a backend of ggml, in the ggml of llama-cpp-python; tests/llama_cpp compares it with NumPy."""

import ctypes
import math
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint8, c_void_p, cast
from functools import cached_property

import numpy as np

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}


class _Settings(Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


_I, _P = c_int64, c_void_p
_SIGNATURES = {
    "ggml_init": (_P, _Settings),
    "ggml_free": (None, _P),
    "ggml_new_tensor_4d": (_P, _P, c_int, _I, _I, _I, _I),
    "ggml_permute": (_P, _P, _P, c_int, c_int, c_int, c_int),
    "ggml_cpy": (_P, _P, _P, _P),
    "ggml_flash_attn_ext": (_P, _P, _P, _P, _P, _P, c_float, c_float, c_float),
    "ggml_flash_attn_ext_add_sinks": (None, _P, _P),
    "ggml_new_graph": (_P, _P),
    "ggml_build_forward_expand": (None, _P, _P),
    "ggml_get_data": (_P, _P),
    "ggml_nbytes": (c_size_t, _P),
    "ggml_row_size": (c_size_t, c_int, _I),
    "ggml_backend_graph_compute": (c_int, _P, _P),
    "ggml_backend_dev_by_name": (_P, c_char_p),
    "ggml_backend_dev_init": (_P, _P, c_char_p),
    "ggml_backend_dev_supports_op": (c_bool, _P, _P),
    "ggml_backend_dev_backend_reg": (_P, _P),
    "ggml_backend_reg_get_proc_address": (_P, _P, c_char_p),
    "ggml_backend_free": (None, _P),
}


def declare(library):
    """Tell ctypes the signatures of those functions of ggml that a library has."""
    for name, (result, *arguments) in _SIGNATURES.items():
        if function := getattr(library, name, None):
            function.restype, function.argtypes = result, arguments
    return library


class Backend:
    """A device of ggml by its name, "CPU" or "KVFAST"."""

    def __init__(self, library, name):
        self.ggml = declare(library)
        self.device = library.ggml_backend_dev_by_name(name.encode())
        assert self.device, f"ggml has no device {name}"
        self.backend = library.ggml_backend_dev_init(self.device, None)

    def function(self, name, result, *arguments):
        """A function that the backend gives by name."""
        address = self.ggml.ggml_backend_reg_get_proc_address(self.ggml.ggml_backend_dev_backend_reg(self.device), name.encode())
        assert address, f"the backend has no {name}"
        return ctypes.CFUNCTYPE(result, *arguments)(address)

    def use_precision(self, name):
        """Let kvfast compute in a precision, in the whole process."""
        return self.function("kvfast_use_precision", c_int, c_char_p)(name.encode())

    def set_num_threads(self, num_threads):
        self.function("ggml_backend_set_n_threads", None, _P, c_int)(self.backend, num_threads)

    def run(self, memory, result):
        graph = self.ggml.ggml_new_graph(memory)
        self.ggml.ggml_build_forward_expand(graph, result)
        assert self.ggml.ggml_backend_graph_compute(self.backend, graph) == 0

    def free(self):
        self.ggml.ggml_backend_free(self.backend)


class Problem:
    """Queries, a cache in a storage type of ggml, and what the kernels may have to mind.

    Parameters
    ----------
    cpu : Backend
        The CPU, which quantises the rows.
    q : ndarray, (streams, queries, q_heads, k_dim)
    k, v : ndarray, (streams, tokens, kv_heads, dim)
    k_type, v_type : str
    mask : ndarray, optional
        (streams or 1, heads or 1, queries, tokens).
    sinks : ndarray, optional
        (q_heads,).
    """

    def __init__(self, cpu, q, k, v, k_type="f16", v_type=None, mask=None, sinks=None, scale=None, max_bias=0.0, softcap=0.0):
        self.cpu, self.ggml = cpu, cpu.ggml
        arrays = [q, k, v, k, v] + [x for x in (mask, sinks) if x is not None]
        nbytes = sum(4 * x.size + 4096 for x in arrays) + 8 * math.prod(q.shape[:3]) * v.shape[3] + (8 << 20)
        self.memory = self.ggml.ggml_init(_Settings(nbytes, None, False))
        assert self.memory
        self.scale, self.max_bias, self.softcap = q.shape[3] ** -0.5 if scale is None else scale, max_bias, softcap
        self.q = np.asarray(q, np.float32)
        self.tensors = [self._heads(self._filled(self.q))]
        self.stored = []
        for x, storage in ((k, k_type), (v, v_type or k_type)):
            tensor, floats = self._new(storage, x.shape), self._filled(np.asarray(x, np.float32))
            cpu.run(self.memory, self.ggml.ggml_cpy(self.memory, floats, tensor))
            if storage != "f32":
                cpu.run(self.memory, self.ggml.ggml_cpy(self.memory, tensor, floats))
            self.stored.append(self._array(floats, x.shape).astype(np.float64))
            self.tensors.append(self._heads(tensor))
        self.mask = None if mask is None else np.asarray(mask, np.float16)
        self.tensors.append(None if mask is None else self._filled(self.mask, "f16"))
        self.sinks = None if sinks is None else np.asarray(sinks, np.float32)
        self.sink_tensor = None if sinks is None else self._filled(self.sinks)

    def _new(self, storage, shape):
        return self.ggml.ggml_new_tensor_4d(self.memory, TYPES[storage], *(*reversed(shape), 1, 1, 1)[:4])

    def _array(self, tensor, shape, dtype=np.float32):
        return (
            np.ctypeslib.as_array(cast(self.ggml.ggml_get_data(tensor), POINTER(c_uint8)), (self.ggml.ggml_nbytes(tensor),))
            .view(dtype)
            .reshape(shape)
        )

    def _filled(self, x, storage="f32"):
        tensor = self._new(storage, x.shape)
        self._array(tensor, x.shape, x.dtype)[:] = x
        return tensor

    def _heads(self, tensor):
        return self.ggml.ggml_permute(self.memory, tensor, 0, 2, 1, 3)

    @cached_property
    def operation(self):
        result = self.ggml.ggml_flash_attn_ext(self.memory, *self.tensors, self.scale, self.max_bias, self.softcap)
        if self.sink_tensor:
            self.ggml.ggml_flash_attn_ext_add_sinks(result, self.sink_tensor)
        return result

    def compute(self, backend):
        """The output of a backend: (streams, queries, q_heads, v_dim)."""
        result = self.operation
        shape = *self.q.shape[:3], self.stored[1].shape[3]
        self._array(result, shape)[:] = np.nan
        backend.run(self.memory, result)
        return self._array(result, shape).copy()

    def supported_by(self, backend):
        return self.ggml.ggml_backend_dev_supports_op(backend.device, self.operation)

    def reference(self):
        """The same in float64, on the stored values."""
        k, v = self.stored
        streams, queries, heads, _ = self.q.shape
        out = np.zeros((streams, queries, heads, v.shape[3]))
        power = 2 ** math.floor(math.log2(heads))
        for stream in range(streams):
            for head in range(heads):
                at = stream * k.shape[0] // streams, slice(None), head * k.shape[2] // heads
                scores = self.q[stream, :, head].astype(np.float64) @ k[at].T * self.scale
                if self.softcap:
                    scores = self.softcap * np.tanh(scores / self.softcap)
                slope = 1.0
                if self.max_bias:
                    base, exponent = (self.max_bias, head + 1) if head < power else (self.max_bias / 2, 2 * (head - power) + 1)
                    slope = 2.0 ** (-base / power * exponent)
                if self.mask is not None:
                    scores += slope * self.mask[stream % len(self.mask), head % self.mask.shape[1], :queries].astype(np.float64)
                top = scores.max(axis=1, keepdims=True)
                if self.sinks is not None:
                    top = np.maximum(top, self.sinks[head])
                top = np.where(np.isfinite(top), top, 0)
                weights = np.exp(scores - top)
                total = weights.sum(axis=1, keepdims=True)
                if self.sinks is not None:
                    total += np.exp(self.sinks[head] - top)
                out[stream, :, head] = weights @ v[at] / np.where(total == 0, 1, total)
        return out

    def free(self):
        self.ggml.ggml_free(self.memory)
