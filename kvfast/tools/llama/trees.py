"""Trees of drafts: where a text may go on in several ways, the model checks them in one call."""

from dataclasses import dataclass, field

from kvfast.engine import check_size
from kvfast.tools.llama.model import FEW_TOKENS
from kvfast.tools.llama.speculative import Passages, continuation, count_alike


@dataclass
class DraftTree:
    """Guesses of the next tokens that branch: their tokens, and for each the number of the guess that it follows, or -1 for the text.

    A guess comes before those that follow it.
    """

    tokens: list = field(default_factory=list)
    parents: list = field(default_factory=list)

    @classmethod
    def of(cls, draft):
        """A tree as it is; a list of tokens as a tree in which each follows the one before it."""
        return draft if isinstance(draft, cls) else cls(list(draft), list(range(-1, len(draft) - 1)))

    @property
    def has_branches(self):
        """Whether a guess follows another than the one before it."""
        return self.parents != list(range(-1, len(self.parents) - 1))

    def child(self, parent, token):
        """The number of the guess `token` after another, or after the text (-1); None if there is none."""
        for number, (other, guess) in enumerate(zip(self.parents, self.tokens, strict=True)):
            if other == parent and guess == token:
                return number
        return None

    def add(self, tokens, limit):
        """Add tokens that may follow the text one after another, as far as the tree gets no more than `limit` guesses."""
        parent = -1
        for token in tokens:
            number = self.child(parent, token)
            if number is None:
                if len(self.tokens) == limit:
                    return
                number = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
            parent = number

    def cut(self, limit):
        """The first `limit` guesses."""
        return DraftTree(self.tokens[:limit], self.parents[:limit])

    def first_branch(self):
        """The guesses of the branch that begins the tree, as a tree."""
        parent, tokens = -1, []
        while parent in self.parents:
            parent = self.parents.index(parent)
            tokens.append(self.tokens[parent])
        return DraftTree.of(tokens)


class TreeLookup:
    """Guesses what followed the last times that the last tokens of the text were there, where `PromptLookup` takes one of them.

    A passage that has more tokens in common with the end of the text comes first, and then the later one. Each
    brings one token more than it has in common, and what they agree in is guessed once. The first branch has the
    bits of plain generation. Another is rounded otherwise in its last bits, and so are the codes of its keys and
    values, so that the model may choose another of two tokens that are nearly as likely.

    Parameters
    ----------
    ngram : int
        Look for the passages that have this number of tokens in common with the end of the text, then for those
        with one token less.
    least : int
        At least this number of tokens must be the same.
    max_passages : int
        Look at this number of passages.
    max_draft : int
        Guess at most this many tokens.

    Examples
    --------
    >>> TreeLookup(ngram=2).draft([5, 6, 7, 8, 5, 6, 9, 8, 5, 6], cache=None, limit=7)
    DraftTree(tokens=[9, 8, 5, 6, 7, 8, 5], parents=[-1, 0, 1, 2, -1, 4, 5])
    """

    def __init__(self, ngram=3, least=2, max_passages=8, max_draft=FEW_TOKENS - 1):
        if not 1 <= least <= ngram:
            raise ValueError(f"least must be between 1 and ngram, got {least} and {ngram}")
        self.ngram, self.least = ngram, least
        self.max_passages, self.max_draft = check_size(max_passages, "max_passages", 1), check_size(max_draft, "max_draft", 1)
        self._passages = Passages(least, ngram, max_passages)

    def draft(self, context, cache, limit):
        """Guess the next tokens: as `PromptLookup.draft`, but a `DraftTree`."""
        tree, limit = DraftTree(), min(limit, self.max_draft)
        passages = [(count_alike(context, start, limit), start) for start in self._passages.find(context)]
        for alike, start in sorted(passages, reverse=True):
            tree.add(continuation(context, start, min(limit, alike + 1)), limit)
        return tree
