"""Drafters for speculative decoding: they guess the next tokens, and the model checks all guesses at once.

A drafter has one method, ``draft(context, cache, limit)``; `generate` says what it gets and gives. A wrong
guess costs time and nothing else, so these guess as far ahead as they have reason to.
"""

from collections import defaultdict, deque
from dataclasses import dataclass

from kvfast.engine import check_size
from kvfast.tools.llama.model import FEW_TOKENS


@dataclass
class SpeculationStats:
    """Counts of speculative decoding: calls of the model after the prompt, tokens that were guessed, and those of them that became
    text.

    The counts of several texts may be added up in one.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def acceptance_rate(self):
        """Fraction of the drafted tokens that became text; 0 without any."""
        return self.num_accepted / max(1, self.num_drafted)

    @property
    def tokens_per_step(self):
        """Tokens that a call of the model brings on average: 1 without drafts."""
        return 1 + self.num_accepted / max(1, self.num_steps)


def count_alike(context, start, limit):
    """How many tokens before `start` are those at the end of the text; at most `limit`, beyond which it does not matter."""
    alike = 0
    while alike < min(limit, start) and context[start - alike - 1] == context[-alike - 1]:
        alike += 1
    return alike


def continuation(context, start, count):
    """The `count` tokens from `start` on. A passage that reaches the end of the text goes on with its own continuation: a loop."""
    period = len(context) - start
    return [context[start + i % period] for i in range(count)]


class Passages:
    """The places where a text went on after its last tokens, by n-grams of `least` to `most` tokens, up to `count` of each."""

    def __init__(self, least, most, count):
        self.least, self.most, self.count = least, most, count
        self._read(None)

    def find(self, context):
        """The places with most tokens in common first, then the latest. The same list, longer, is not read again from the start."""
        if context is not self._context or len(context) < self._indexed:
            self._read(context)
        for position in range(self._indexed, len(context)):
            for n in range(self.least, min(self.most, position) + 1):
                self._following[tuple(context[position - n : position])].append(position)
        self._indexed = len(context)
        found = {}
        for n in range(self.most, self.least - 1, -1):
            found |= dict.fromkeys(reversed(self._following.get(tuple(context[-n:]), ())))
        return list(found)[: self.count]

    def _read(self, context):
        self._context, self._indexed = context, 0
        self._following = defaultdict(lambda: deque(maxlen=self.count))


class PromptLookup:
    """Guesses that the text repeats itself: what followed the last time that its last tokens were there.

    Prompt lookup decoding (Apoorv Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding). It guesses at
    most as many tokens as the passage has in common with the end of the text (SuffixDecoding, arXiv
    2411.04975), so drafts grow while they are accepted, and a wrong guess ends them.

    Parameters
    ----------
    ngram : int
        Number of tokens that must be the same. The guess is taken from the latest place where they are.
    max_draft : int
        Guess at most this many tokens.

    Examples
    --------
    >>> PromptLookup(ngram=2).draft([5, 6, 7, 8, 9, 5, 6], cache=None, limit=7)
    [7, 8]
    """

    def __init__(self, ngram=3, max_draft=FEW_TOKENS - 1):
        self.ngram, self.max_draft = check_size(ngram, "ngram", 1), check_size(max_draft, "max_draft", 1)
        self._passages = Passages(ngram, ngram, 1)

    def draft(self, context, cache, limit):
        """Guess the next tokens.

        Parameters
        ----------
        context : list of int
            All tokens so far. The same list with more tokens at its end is not read again from the start.
        cache : ignored
        limit : int

        Returns
        -------
        list of int
        """
        for start in self._passages.find(context):
            return continuation(context, start, count_alike(context, start, min(limit, self.max_draft)))
        return []
