"""kvfast inside other engines: vLLM, transformers, PyTorch and llama.cpp.

    torch -> transformers
    vllm
    llama_cpp

They use the public names of `kvfast`, and those of `kvfast.engine`, which are for engines. The modules `kvfast.vllm`, `kvfast.transformers`,
`kvfast.torch` and `kvfast.llama_cpp` have what users import.
"""
