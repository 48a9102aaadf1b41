"""The memory that a cache will take (`plan`, `model_shape`, `memory`), and the accuracy of a storage format (`fidelity`)."""

from kvfast.planning.fidelity import Fidelity
from kvfast.planning.model_shape import LayerShape, ModelShape
from kvfast.planning.plan import DtypePlan, MemoryPlan

__all__ = ["DtypePlan", "Fidelity", "LayerShape", "MemoryPlan", "ModelShape"]
