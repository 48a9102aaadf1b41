"""The cache and the attention function for transformers. Public names are in `kvfast.transformers`.

- versions, trial: supported versions, one call on a version that was not tested
- cache, layers, states: the cache that `generate` takes, its layers, their recurrent states
- rows: a kvfast cache for each row of a batch
- attention, received: the attention function, and the tensors that stand for stored keys
- masks, spans: what a mask shows each query
- comparison: its logits against those of transformers' own cache
- static: a cache for steps that PyTorch compiles
"""
