"""Text generation: tokens, each drawn from the model's logits, one at a time or checked several at once."""

import numpy as np

from kvfast.engine import MAX_FLOAT_TOKENS
from kvfast.tools.llama.documents import shift_context
from kvfast.tools.llama.model import FEW_TOKENS
from kvfast.tools.llama.speculative import SpeculationStats
from kvfast.tools.llama.trees import DraftTree


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
            raise ValueError(f"temperature must be at least 0, got {temperature}")
        if top_k < 0:
            raise ValueError(f"top_k must be at least 0 (no limit), got {top_k}")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self._random = np.random.default_rng(seed)

    def __call__(self, logits):
        """The token that follows, an int, from logits of shape (vocab_size,), float32."""
        if self.temperature == 0:
            return int(logits.argmax())
        candidates = np.argsort(-logits, kind="stable")[: self.top_k or None]
        scores = logits[candidates].astype(np.float64)
        probabilities = np.exp((scores - scores[0]) / self.temperature)
        probabilities /= probabilities.sum()
        kept = np.searchsorted(probabilities.cumsum(), self.top_p) + 1
        probabilities = probabilities[:kept] / probabilities[:kept].sum()
        return int(self._random.choice(candidates[:kept], p=probabilities))


def generate(model, tokens, cache, *, max_tokens=128, sampler=None, end_ids=(), drafter=None, stats=None, history=(), keep=None):
    """Continue a context token by token.

    With a drafter, tokens are guessed and then checked together in one call of the model (speculative
    decoding, arXiv 2211.17192). The sampler chooses every token from the model's logits, in the order of
    the text, and guesses count while they are what it chose: the tokens are those of plain generation, and
    so are the draws of a seeded sampler.

    Parameters
    ----------
    model : LlamaModel
    tokens : sequence of int
        The prompt; it follows whatever the cache holds.
    cache : kvfast.KVCache, kvfast.RingKVCache or kvfast.Sequence
        Holds the prompt and every yielded token but the last one afterwards, also when generation is
        closed early; between two tokens it may hold guesses as well, those of a tree uncounted. When it is full, generation ends,
        unless `keep` is given.
    max_tokens : int
        Yield at most this many.
    sampler : callable, optional
        From logits, (vocab_size,) float32, to a token; the likeliest token when omitted.
    end_ids : collection of int
        Tokens that end the text. They are not yielded.
    drafter : PromptLookup, TreeLookup or the like, optional
        What guesses: ``draft(context, cache, limit)`` returns a list of at most `limit` tokens that may
        follow `context`, a list of all tokens so far; or a `DraftTree` of at most `limit` tokens. The cache has
        all tokens but the last. Only the first branch of a tree is checked where the cache cannot keep any
        other: in a spliced cache, which `keep` makes, and in the first tokens of a text.
    stats : SpeculationStats, optional
        Gets the counts of this generation added.
    history : sequence of int
        The tokens that the cache holds already, for the drafter to know.
    keep : int, optional
        When the cache is full, go on: keep this number of its first tokens, and drop half of the others (context shift).

    Yields
    ------
    int
        Token ids.
    """
    sampler, stats = sampler or Sampler(), stats or SpeculationStats()
    hidden = model.prefill(tokens, cache)[None]
    context, draft, remaining = [int(token) for token in (*history, *tokens)], DraftTree(), max_tokens
    while remaining > 0:
        length, row, right = len(cache), -1, []
        try:
            logits = model.logits(hidden)
            while row is not None:
                token = sampler(logits[row + 1])
                if token in end_ids:
                    return
                remaining -= 1
                context.append(token)
                row = draft.child(row, token)
                stats.num_accepted += row is not None
                yield token
                if row is not None:
                    right.append(row)
        finally:  # also when generation is closed at a yield; a cache that was changed meanwhile is left alone
            if len(cache) == length:
                _keep_right(cache, draft, right)
        if remaining == 0:
            return
        if len(cache) == cache.max_seq_len:
            if keep is None:
                return
            del context[keep : keep + shift_context(model, cache, keep)]
        limit = _draft_limit(cache, remaining - 1) if drafter is not None else 0
        draft = DraftTree.of(drafter.draft(context, cache, limit)).cut(limit) if limit > 0 else DraftTree()
        if draft.has_branches and not _takes_trees(cache):
            draft = draft.first_branch()
        hidden = model.forward([token, *draft.tokens], cache, draft.parents if draft.has_branches else None)
        stats.num_steps += 1
        stats.num_drafted += len(draft.tokens)


def _keep_right(cache, draft, right):
    """Keep of the drafts those that were right, unless they are gone."""
    if draft.has_branches:  # none of them is counted
        if cache.layer_length(0) != len(cache) + 1 + len(draft.tokens):
            return
        cache.truncate(len(cache), [0, *(row + 1 for row in right)])
        cache.advance(1 + len(right))
    elif len(right) < len(draft.tokens):
        cache.truncate(len(cache) - len(draft.tokens) + len(right))


def _takes_trees(cache):
    """Whether a cache can keep any branch: no guess moves to first tokens that stay floats, and each part of a spliced cache has some."""
    formats = cache.format if isinstance(cache.format, tuple) else (cache.format,)
    return not any(one.num_first_float_tokens for one in formats) or (not cache.is_spliced and len(cache) >= MAX_FLOAT_TOKENS)


def _draft_limit(cache, limit):
    """How many guesses, at most `limit`, can follow one token into the cache, and leave it again exactly."""
    limit = min(limit, FEW_TOKENS - 1)
    if getattr(cache, "rollback", None) is not None:
        limit = min(limit, cache.rollback)
    if cache.max_seq_len is not None:
        limit = min(limit, cache.max_seq_len - len(cache) - 1)
    if cache.is_paged:
        while limit > 0 and not cache.can_append(1 + limit):
            limit -= 1
    return limit
