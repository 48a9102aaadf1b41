"""OpenVINO: the PagedAttention operation in a model of its own, a layer after the other.

"sage u8" has its option for prompts on, products of quantised queries and keys (SageAttention, arXiv 2410.02367).

The operation writes the new rows into its blocks before it attends. That also fills the cache: a block is one sequence
of its own, so that no attention over the whole prompt is paid for.
"""

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from contenders import Missing

try:
    from openvino.op import _PagedAttentionExtension as PagedAttention
except ImportError as error:
    raise Missing("this version has no PagedAttention in Python") from error

BLOCK = 32  # tokens; the CPU plugin has no other size
# The inputs that this script does not use, in the operation's order after max_context_len, and the inputs between them.
_BEHIND = [
    (0, "i32", ()),
    ([], "i32", (0,)),
    ([], "i32", (0,)),
    ([], "f32", (0,)),
    ([], "f32", (0,)),
    (0, "i32", ()),
    (0, "i32", ()),
    ([], "f32", (0,)),
    (0, "i32", ()),
    ([], "i32", (0,)),
    ([], "i32", (0,)),
    ([], "i32", (0,)),
    ([], "i32", (0,)),
    ([], "u8", (0,)),
    ([], "i32", (0,)),
]
_TABLES = {"past_lens": [-1], "subsequence_begins": [-1], "block_indices": [-1], "block_indices_begins": [-1]}


def version():
    return f"OpenVINO {ov.__version__.split('-')[0]}"


def _constant(value, dtype, shape):
    return ops.constant(np.array(value).reshape(shape), getattr(ov.Type, dtype))


def _parameter(name, shape, dtype):
    one = ops.parameter(shape, dtype, name)
    one.output(0).get_tensor().set_names({name})
    return one


def _model(work, layers):
    q = _parameter("q", [-1, work.num_q_heads * work.head_dim], ov.Type.f32)
    k, v = (_parameter(name, [-1, work.num_kv_heads * work.head_dim], ov.Type.f32) for name in "kv")
    tables = [_parameter(name, shape, ov.Type.i32) for name, shape in _TABLES.items()]
    longest = _parameter("max_context_len", [], ov.Type.i32)
    scale, window = _constant(work.head_dim**-0.5, "f32", ()), _constant(0, "i32", ())
    slopes, unused = _constant([], "f32", (0,)), [_constant(*one) for one in _BEHIND]
    parameters, results = [q, k, v, *tables, longest], []
    for layer in range(layers):
        blocks = [_parameter(f"{name}_cache.{layer}", [-1] * 4, ov.Type.dynamic) for name in ("key", "value")]
        inputs = [q, k, v, *blocks, *tables, scale, window, slopes, longest, *unused]
        attention = PagedAttention([one.output(0) for one in inputs])
        for name in "kv":  # the plugin lays the cache out by these
            attention.get_rt_info()[f"num_{name}_heads"] = work.num_kv_heads
            attention.get_rt_info()[f"{name}_head_size"] = work.head_dim
        results.append(ops.result(attention.output(0)))
        parameters += blocks
    return ov.Model(results, parameters, "attention")


class Contender:
    def __init__(self, work, name, storage):
        if work.context % BLOCK:
            raise Missing(f"context must be a multiple of {BLOCK}")
        self.work, self.core, self.requests = work, ov.Core(), {}
        has_bf16 = "BF16" in self.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if storage == "bf16" and not has_bf16:
            raise Missing("this CPU has no bfloat16")
        # Arithmetic in what the plugin would choose by itself, but for the float32 cache, which it refuses otherwise.
        self.settings = {
            "KV_CACHE_PRECISION": getattr(ov.Type, storage.split()[-1]),
            "ENABLE_SAGE_ATTN": "sage" in storage,
            "INFERENCE_PRECISION_HINT": ov.Type.bf16 if has_bf16 and storage != "f32" else ov.Type.f32,
            "ENABLE_CPU_PINNING": False,
        }
        self.layers = 1
        k, v, q = work.tensors()
        self._allocate(1)
        self.layers = work.layers(sum(one.byte_size for one in self.blocks.values()))
        self._allocate(self.layers)
        self.nbytes = sum(one.byte_size for one in self.blocks.values())
        k, v = k.reshape(work.context, -1), v.reshape(work.context, -1)
        request = self._request(1)
        for block in range(work.context // BLOCK):
            rows = slice(block * BLOCK, (block + 1) * BLOCK)
            self._give(request, np.zeros((BLOCK, q[0].size), np.float32), k[rows], v[rows], 0, [block])
            request.infer()
        self.new = q.reshape(work.queries, -1), k[-work.queries :], v[-work.queries :]

    def _allocate(self, layers):
        self.layers, self.requests = layers, {}
        inputs = {one.get_any_name(): one for one in self._compiled(1).inputs}
        self.blocks = {}
        for name, one in inputs.items():
            if "_cache." in name:
                shape = [self.work.context // BLOCK, *(d.get_length() for d in list(one.get_partial_shape())[1:])]
                self.blocks[name] = ov.Tensor(one.get_element_type(), ov.Shape(shape))

    def _compiled(self, num_threads):
        settings = {**self.settings, "INFERENCE_NUM_THREADS": num_threads}
        return self.core.compile_model(_model(self.work, self.layers), "CPU", settings)

    def _give(self, request, q, k, v, past, blocks):
        tables = [past], [0, len(q)], blocks, [0, len(blocks)]
        tables = {name: np.array(table, np.int32) for name, table in zip(_TABLES, tables)}
        tables["max_context_len"] = np.array(past + len(q), np.int32)
        for name, array in {"q": q, "k": k, "v": v, **tables}.items():
            request.set_tensor(name, ov.Tensor(array))

    def _request(self, num_threads):
        request = self._compiled(num_threads).create_infer_request()
        for name, blocks in self.blocks.items():
            request.set_tensor(name, blocks)
        return request

    def ready(self, num_threads):
        if num_threads not in self.requests:
            self.requests[num_threads] = self._request(num_threads)
            past = self.work.context - self.work.queries
            self._give(self.requests[num_threads], *self.new, past, range(self.work.context // BLOCK))

    def run(self, num_threads):
        self.request = self.requests[num_threads]
        self.request.infer()

    def check(self):
        shape = self.work.queries, self.work.num_q_heads, self.work.head_dim
        outputs = (self.request.get_output_tensor(i).data.reshape(shape) for i in (0, self.layers - 1))
        return self.work.error(*outputs)
