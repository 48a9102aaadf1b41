"""kvfast as the KV cache of vLLM on CPUs.

vLLM finds it by itself once both are installed (``pip install "kvfast[vllm]"``): its processes call `register` by way of
``kvfast_vllm``, an entry point of the group ``vllm.general_plugins``. From then on, layers whose attention kvfast carries keep their
keys and values in kvfast's format, in the memory that vLLM allocates, and all others in vLLM's own. ``KVFAST_VLLM=0`` turns it off. On
a version of vLLM that was not tested, it is used if vLLM has all that it needs and one attention call gives vLLM's own result; a line of
the log says so.
"""

from kvfast.engines.vllm.registration import register

__all__ = ["register"]
