"""Prompts of vLLM in a store of kvfast, for `KVFastConnector`.

    settings -> lookups (in vLLM's scheduler), layers -> transfers (in each of its workers), figures

A prompt is cut into chunks under a chain of digests, as in `kvfast.PromptCache`. Each worker keeps its part of a chunk, one value for
each group of layers: the bytes of vLLM's blocks as they are.
"""
