"""kvfast as operators of PyTorch, for models that are compiled or exported.

>>> import kvfast.torch, torch                                                                    # doctest: +SKIP
>>> blocks = kvfast.torch.new_blocks(64, num_kv_heads=2, head_dim=64, dtype="int8")               # doctest: +SKIP
>>> torch.ops.kvfast.append(blocks, k, v, slot_mapping, "int8")                                   # doctest: +SKIP
>>> out = torch.ops.kvfast.attend(blocks, q, block_table, seq_lens, "int8")                       # doctest: +SKIP

Importing it registers ``torch.ops.kvfast.append`` and ``torch.ops.kvfast.attend``, which `append` and `attend` of this module call. The
keys and values of a layer lie in a tensor, which the operators get with each call, so that a compiler sees what changes. Needs PyTorch;
nothing else in kvfast imports it.
"""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ModuleNotFoundError('kvfast.torch needs torch: pip install "kvfast[torch]"', name="torch")

from kvfast.engines.torch.operators import append, attend
from kvfast.engines.torch.pools import new_blocks

__all__ = ["append", "attend", "new_blocks"]
