"""ONNX Runtime: com.microsoft's GroupQueryAttention, one node per layer, on caches bound in place.

Scales are part of the graph there, one per channel over the whole cache; here they are the best ones in hindsight.
"""

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from contenders import Missing

_TYPES = {"f32": TensorProto.FLOAT, "int8": TensorProto.INT8, "int4": TensorProto.UINT8}


def version():
    return f"ONNX Runtime {ort.__version__}"


def _model(work, layers, storage):
    def value(name, dtype, *shape):
        return helper.make_tensor_value_info(name, dtype, shape)

    rows = work.sequences, work.new_tokens
    width = work.head_dim // 2 if storage == "int4" else work.head_dim
    attributes = {"num_heads": work.num_q_heads, "kv_num_heads": work.num_kv_heads}
    inputs = [value("q", TensorProto.FLOAT, *rows, work.num_q_heads * work.head_dim)]
    inputs += [value(name, TensorProto.FLOAT, *rows, work.num_kv_heads * work.head_dim) for name in "kv"]
    inputs += [value("last", TensorProto.INT32, work.sequences), value("length", TensorProto.INT32, 1)]
    scales = []
    if storage != "f32":
        scales = ["", "", "", "", "", "k_scale", "v_scale"]
        inputs += [value(name, TensorProto.FLOAT, 1, work.num_kv_heads, 1, work.head_dim) for name in scales[-2:]]
        attributes.update(k_quant_type="PER_CHANNEL", v_quant_type="PER_CHANNEL", kv_cache_bit_width=int(storage[3:]))
    nodes, outputs = [], []
    for i in range(layers):
        shape = work.sequences, work.num_kv_heads, work.context, width
        inputs += [value(f"past_{name}{i}", _TYPES[storage], *shape) for name in "kv"]
        outputs += [value(f"present_{name}{i}", _TYPES[storage], *shape) for name in "kv"]
        outputs += [value(f"out{i}", TensorProto.FLOAT, *rows, work.num_q_heads * work.head_dim)]
        names = ["q", "k", "v", f"past_k{i}", f"past_v{i}", "last", "length", *scales]
        results = [f"out{i}", f"present_k{i}", f"present_v{i}"]
        nodes.append(helper.make_node("GroupQueryAttention", names, results, domain="com.microsoft", **attributes))
    graph = helper.make_graph(nodes, "attention", inputs, outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def _encoded(x, storage):
    """Rows (context, heads, dim) as the operation stores them, and the scale of each channel."""
    x = np.ascontiguousarray(x.transpose(1, 0, 2))[None]
    if storage == "f32":
        return x, None
    top = 127 if storage == "int8" else 7
    scale = np.abs(x).max(2, keepdims=True) / top
    codes = np.rint(x / scale).astype(np.int8)
    if storage == "int4":  # two codes + 8 a byte, the even one low
        codes = (codes + 8).astype(np.uint8)
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes, scale


class Contender:
    def __init__(self, work, name, storage):
        k, v, q = work.tensors()
        arrays = {"q": q, **{one: np.concatenate([x[-work.new_tokens :]] * work.sequences) for one, x in (("k", k), ("v", v))}}
        arrays = {one: x.reshape(work.sequences, work.new_tokens, -1) for one, x in arrays.items()}
        arrays.update(last=np.full(work.sequences, work.context - 1, np.int32), length=np.array([work.context], np.int32))
        codes = {}
        for one, x in (("k", k), ("v", v)):
            codes[one], scale = _encoded(x, storage)
            codes[one] = np.repeat(codes[one], work.sequences, axis=0)
            if scale is not None:
                arrays[f"{one}_scale"] = scale
        per_layer = sum(x.nbytes for x in codes.values())
        self.work, self.storage = work, storage
        self.layers = work.layers(per_layer)
        self.nbytes = self.layers * per_layer
        make = ort.OrtValue.ortvalue_from_numpy
        self.values = {one: make(x) for one, x in arrays.items()}
        self.caches = [{one: make(x.copy()) for one, x in codes.items()} for _ in range(self.layers)]
        shape = [work.sequences, work.new_tokens, work.num_q_heads * work.head_dim]
        empty = ort.OrtValue.ortvalue_from_shape_and_type
        self.outputs = [empty(shape, np.float32, "cpu", 0) for _ in range(self.layers)]
        self.sessions = {}

    def _session(self, num_threads):
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
        model = _model(self.work, self.layers, self.storage)
        try:
            session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise Missing(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
        binding = session.io_binding()
        for name, value in self.values.items():
            binding.bind_ortvalue_input(name, value)
        for i, (cache, output) in enumerate(zip(self.caches, self.outputs)):
            for name, value in cache.items():  # the same memory in and out: rows are written in place
                binding.bind_ortvalue_input(f"past_{name}{i}", value)
                binding.bind_ortvalue_output(f"present_{name}{i}", value)
            binding.bind_ortvalue_output(f"out{i}", output)
        return session, binding

    def ready(self, num_threads):
        if num_threads not in self.sessions:
            self.sessions[num_threads] = self._session(num_threads)

    def run(self, num_threads):
        session, binding = self.sessions[num_threads]
        session.run_with_iobinding(binding)

    def check(self):
        shape = self.work.queries, self.work.num_q_heads, self.work.head_dim
        return self.work.error(*(self.outputs[i].numpy().reshape(shape) for i in (0, -1)))
