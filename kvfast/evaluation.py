"""The quality that a model loses with a compressed cache, measured on texts against a float32 cache.

A model is anything with the methods `cache_shape`, `forward`, `forward_each` and `logits` of `kvfast.llama.LlamaModel`. The caches of
llama.cpp need the extra ``llama-cpp``, tables the extra ``llama``, plots the extra ``plot``.

>>> from kvfast import KVCache, evaluation, llama
>>> model, tokenizer = llama.load()
>>> tokens = tokenizer.encode(text)
>>> (score,) = evaluation.evaluate(model, tokens, [KVCache(*model.cache_shape, dtype="int4")])
>>> score.kl, score.nll_difference
"""

from kvfast.tools.evaluation.calibration import calibrate_on_text
from kvfast.tools.evaluation.compressed_prompts import CompressionScore, evaluate_compressed
from kvfast.tools.evaluation.perplexity import CacheScore, evaluate, mean_score
from kvfast.tools.evaluation.retrieval import RetrievalScore, RetrievalTask, retrieval_scores, retrieval_task, retrieve

__all__ = [
    "CacheScore",
    "CompressionScore",
    "RetrievalScore",
    "RetrievalTask",
    "calibrate_on_text",
    "evaluate",
    "evaluate_compressed",
    "mean_score",
    "retrieval_scores",
    "retrieval_task",
    "retrieve",
]
