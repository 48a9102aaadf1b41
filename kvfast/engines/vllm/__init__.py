"""The plugin of vLLM. Public names are in `kvfast.vllm`.

- registration, versions, trial: how vLLM finds kvfast, what it must have, one call on a version that was not tested
- backend, mla: attention of keys and values, and of latent rows
- formats, memory, hybrids: the format of a layer, the layout of vLLM's blocks, blocks of models with recurrent states
- connector, prompts: vLLM's KV connector, and prompts in a store
"""
