"""Whether the llama.cpp that is installed can compute with AMX. In GCC's `_tile_loadconfig` only 8 bytes of the configuration are an operand,
so GCC drops the others, ggml loads what the stack had there, and the process ends."""

import ctypes
import subprocess
import sys

from kvfast.engines.llama_cpp.installed import SUFFIX, installed

CPU, Q8_0, F32 = 0, 8, 0


def crashes_with_amx():
    """Whether a product with weights in the layout for AMX ends a process, which is another one."""
    import llama_cpp

    if sys.platform != "linux" or b"AMX_INT8 = 1" not in llama_cpp.llama_print_system_info():
        return False
    library = str(installed().folder / f"libllama{SUFFIX}")
    return subprocess.run([sys.executable, "-m", __name__, library], check=False, capture_output=True).returncode != 0


class _Pointer(ctypes.c_void_p):
    """One that ctypes does not turn into a number."""


def multiply(path):
    """Multiply two rows by weights in the first layout of their own that this ggml has: that for AMX, if it was built for AMX."""
    library = ctypes.CDLL(path)

    def ggml(name, *args):
        function = getattr(library, f"ggml_{name}")
        function.restype = _Pointer
        return function(*args)

    def tensor(context, kind, *shape):
        return ggml("new_tensor_2d", context, kind, *map(ctypes.c_int64, shape))

    fields = [("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]
    settings = type("ggml_init_params", (ctypes.Structure,), {"_fields_": fields})(1 << 20, None, True)
    cpu = ggml("backend_init_by_type", CPU, None)
    device = ggml("backend_get_device", cpu)
    layouts = ggml("backend_reg_get_proc_address", ggml("backend_dev_backend_reg", device), b"ggml_backend_dev_get_extra_bufts")
    first = ctypes.CFUNCTYPE(ctypes.POINTER(_Pointer), _Pointer)(layouts.value)(device)[0]
    weights, others = (ggml("init", settings) for _ in range(2))
    matrix, rows = tensor(weights, Q8_0, 256, 32), tensor(others, F32, 256, 2)
    product, graph = ggml("mul_mat", others, matrix, rows), ggml("new_graph", others)
    ggml("build_forward_expand", graph, product)
    ggml("backend_alloc_ctx_tensors_from_buft", weights, first)
    ggml("backend_alloc_ctx_tensors", others, cpu)
    ggml("backend_graph_compute", cpu, graph)


if __name__ == "__main__":
    multiply(sys.argv[1])
