"""The plugin of vLLM. Public names are in `kvfast.vllm`.

- registration, versions, trial: how vLLM finds kvfast, what it must have, one call on a version that was not tested
- backend, mla: attention and the layout of blocks, of keys and values and of latent rows
- formats, by_layer, hybrids, memory: the format of a layer, what is asked for single ones, layers that share a block, the pool over vLLM's tensors
- connector, prompts: vLLM's KV connector, and prompts in a store
"""
