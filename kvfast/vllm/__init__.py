"""kvfast as the KV cache of vLLM on CPUs.

    versions, formats, hybrids, memory -> backend, mla
    prompts -> connector

vLLM finds it by itself once both are installed (``pip install "kvfast[vllm]"``): its processes call `register`, an entry point of
the group ``vllm.general_plugins``. From then on, layers whose attention kvfast carries keep their keys and values in kvfast's
format, in the memory that vLLM allocates, and all others in vLLM's own. ``KVFAST_VLLM=0`` turns it off.
"""

from kvfast.vllm.versions import register

__all__ = ["register"]
