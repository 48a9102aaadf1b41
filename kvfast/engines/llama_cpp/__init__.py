"""The backend of ggml, rows and states of llama.cpp, prompts in stores. Public names are in `kvfast.llama_cpp`.

- backend: attention for ggml, in C
- installed, headers, building, loading: the ggml that is there, its headers, the backend compiled and loaded
- amx: whether this ggml can compute with AMX
- ggml: rows of ggml's types
- state, form: states of a sequence, and which of their bytes belong to which token
- prompt_cache, prompt_settings, prompt_states: `LlamaPromptCache`, what its keys cover, states in chunks
- served_llama, serving, serving_figures: contexts over one model, the app that `python -m kvfast serve` runs, figures for Prometheus
"""
