"""Text generation: one token at a time, each chosen from the model's logits."""

from __future__ import annotations

import numpy as np


class Sampler:
    """Chooses the next token.

    Parameters
    ----------
    temperature : float
        0 takes the likeliest token. Above 0, logits are divided by it and a token is drawn.
    top_k : int
        Draw only from the `top_k` likeliest tokens; 0 for no limit.
    top_p : float
        Draw only from the fewest likeliest tokens that together reach this probability, 0 < top_p <= 1.
    seed : int, optional
        Makes the draws repeatable.
    """

    def __init__(self, temperature=0.0, top_k=0, top_p=1.0, seed=None):
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature should be 0 or above, not {temperature}")
        if top_k < 0:
            raise ValueError(f"top_k should be 0 (no limit) or above, not {top_k}")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p should be above 0 and at most 1, not {top_p}")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self._random = np.random.default_rng(seed)

    def __call__(self, logits):
        """Choose a token.

        Parameters
        ----------
        logits : ndarray, shape (vocab_size,), float32

        Returns
        -------
        int
        """
        if self.temperature == 0:
            return int(logits.argmax())
        candidates = np.argsort(-logits, kind="stable")[: self.top_k or None]
        scores = logits[candidates].astype(np.float64)
        probabilities = np.exp((scores - scores[0]) / self.temperature)
        probabilities /= probabilities.sum()
        kept = np.searchsorted(probabilities.cumsum(), self.top_p) + 1
        probabilities = probabilities[:kept] / probabilities[:kept].sum()
        return int(self._random.choice(candidates[:kept], p=probabilities))


def generate(model, tokens, cache, *, max_tokens=128, sampler=None, end_ids=()):
    """Continue a context token by token.

    Parameters
    ----------
    model : LlamaModel
    tokens : sequence of int
        The prompt; it follows whatever the cache holds.
    cache : kvfast.KVCache, kvfast.RingKVCache or kvfast.Sequence
        Holds the prompt and every yielded token but the last one afterwards. When it is full,
        generation ends.
    max_tokens : int
        Yield at most this many.
    sampler : callable, optional
        From logits, (vocab_size,) float32, to a token; the likeliest token when omitted.
    end_ids : collection of int
        Tokens that end the text. They are not yielded.

    Yields
    ------
    int
        Token ids.
    """
    sampler = sampler or Sampler()
    hidden = model.prefill(tokens, cache)
    for remaining in range(max_tokens, 0, -1):
        token = sampler(model.logits(hidden))
        if token in end_ids:
            return
        yield token
        if remaining == 1 or len(cache) == cache.max_seq_len:
            return
        hidden = model.prefill([token], cache)
