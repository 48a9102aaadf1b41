"""The backend of ggml, rows and states of llama.cpp, and prompts of llama-cpp-python in stores. Public names are in `kvfast.llama_cpp`.

installed, headers -> building, loading
prompt_states, prompt_settings -> prompt_cache
"""
