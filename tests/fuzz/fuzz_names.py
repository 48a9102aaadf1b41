"""The public names of kvfast, and their parameters, for the fuzzers of calls."""

import functools
import inspect

import kvfast
from kvfast.attention.explained import AttendItem, AttendPlan
from kvfast.caches.buffer_layout import BufferLayout, buffer_layout
from kvfast.caches.multi_head import MultiHeadConfig
from kvfast.caches.paged_mla import MLASequence
from kvfast.compression import CompressedShape, ReconstructionError
from kvfast.core.hardware import peak_rate, read_bandwidth
from kvfast.core.kernels import cpu_features
from kvfast.planning import DtypePlan, Fidelity, LayerShape, MemoryPlan, ModelShape
from kvfast.prompts.stats import PromptCacheStats
from kvfast.storage.batches.prepared_batch import PreparedBatch

# Public, in their modules.
IN_MODULES = [
    *(AttendItem, AttendPlan, BufferLayout, CompressedShape, DtypePlan, Fidelity, LayerShape, MLASequence),
    *(MemoryPlan, ModelShape, MultiHeadConfig, PreparedBatch, PromptCacheStats, ReconstructionError),
    *(buffer_layout, cpu_features, peak_rate, read_bandwidth),
]
# Made by kvfast alone, for reading: they check nothing, and are made but not used.
RECORDS = {one.__name__ for one in IN_MODULES if isinstance(one, type)} - {"MultiHeadConfig"}
RECORDS |= {"Snapshot", "CompressedKV", "Sequence", *(name for name in kvfast.__all__ if name.endswith("Error"))}


def public_names():
    """Every public function, class, method and property: {name: (function of a target, or None for a property; its class)}."""
    names = {}
    public = {name: getattr(kvfast, name) for name in kvfast.__all__} | {one.__name__: one for one in IN_MODULES}
    classes = {name: one for name, one in public.items() if inspect.isclass(one)}
    classes["HeadView"] = type(kvfast.MultiHeadKVCache(1, MultiHeadConfig(1)).head(0))
    for name, one in public.items():
        if callable(one):
            names[name] = one, None
    for name, kind in classes.items():
        if issubclass(kind, BaseException):
            continue  # nothing but its attributes
        for member in dir(kind):
            if not member.startswith("_"):
                found = inspect.getattr_static(kind, member)
                bound = isinstance(found, classmethod | staticmethod)
                function = getattr(kind, member)
                names[f"{name}.{member}"] = (function if callable(function) else None), (None if bound else name)
    return names


@functools.cache
def parameters(function):
    """{name: whether it may be left out} of a function that is called on an object, or without."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # errors made in C
        return {}
    found = {}
    for name, one in signature.parameters.items():
        if name != "self" and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            found[name] = one.default is not one.empty
    return found
