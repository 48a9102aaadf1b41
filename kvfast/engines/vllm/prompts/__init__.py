"""Prompts of vLLM in a store of kvfast, for `KVFastConnector`.

- settings: what the user asks for, and what stored bytes depend on
- lookups: in vLLM's scheduler: which chunks are fetched and stored
- layers, transfers: in each worker: blocks as parts of chunks, to the store and back
- figures: vLLM's metrics

A prompt is cut into chunks under a chain of digests, as in `kvfast.PromptCache`. Each worker keeps its part of a chunk, one value for
each group of layers: the bytes of vLLM's blocks as they are.
"""
