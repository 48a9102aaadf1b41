"""The memory that the cache of a model will take, and what a format costs in accuracy.

- model_shape, layer_kinds, states: what each layer stores, from a configuration
- gguf_file: GGUF files
- plan, plan_text, memory: `plan`, its table, and the memory that is free
- vllm_blocks: the names and blocks of vLLM's cache
- fidelity, key_bias: `fidelity` and `choose_format`, keys that some formats do not suit
"""

from kvfast.planning.fidelity import Fidelity
from kvfast.planning.model_shape import LayerShape, ModelShape
from kvfast.planning.plan import DtypePlan, MemoryPlan

__all__ = ["DtypePlan", "Fidelity", "LayerShape", "MemoryPlan", "ModelShape"]
