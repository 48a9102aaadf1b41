"""What a cache costs a model on texts. Public names are in `kvfast.evaluation`.

perplexity -> compressed_prompts, retrieval -> llama_cpp_caches
calibration
plotting -> report
"""
