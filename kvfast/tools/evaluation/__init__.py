"""What a cache costs a model on texts. Public names are in `kvfast.evaluation`.

- perplexity, retrieval: predictions of a text, numbers hidden in it
- compressed_prompts, llama_cpp_caches: the same of compressed prompts and of llama.cpp's caches
- calibration: the moments of a model's keys and queries
- wrapped, report, plotting: caches that are observed or timed, tables and plots
"""
