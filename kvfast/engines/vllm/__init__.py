"""The plugin of vLLM. Public names are in `kvfast.vllm`.

versions -> formats, hybrids, memory, trial -> backend, mla
prompts -> connector
versions -> registration
"""
