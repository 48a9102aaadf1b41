"""kvfast inside other engines. They use the public names of `kvfast`, and those of `kvfast.engine`, which are for engines.

- vllm: a plugin of vLLM
- transformers: a cache for Hugging Face models
- torch: operators of PyTorch
- llama_cpp: a backend of ggml, states of llama.cpp, prompts of llama-cpp-python

The modules `kvfast.vllm`, `kvfast.transformers`, `kvfast.torch` and `kvfast.llama_cpp` have what users import.
"""
