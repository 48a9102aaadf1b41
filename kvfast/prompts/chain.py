"""The keys of a prompt: digests of all tokens up to a point, of the model, and of the cache's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

# A tail of at least this number of tokens is listed under its first ones, so that prompts without a common beginning do not share a list.
LISTED_TOKENS = 16


def digest_of(key: str) -> bytes:
    """The digest that a key has after its kind: "c" for a chunk, "e" for the end of a prompt, "s" for states after one of both, "t" for
    a list of tails."""
    return bytes.fromhex(key[2:])


def common_length(a: NDArray[np.integer], b: NDArray[np.integer]) -> int:
    """Length of the prefix that two arrays share."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n


class Chain:
    """The keys of a prompt.

    Node i stands for the first ``i * chunk_tokens`` tokens. Its digest covers the node before it, as in vLLM and SGLang. With a
    secret, nobody else can compute a digest, or learn from one which prompt it is. `settings` are all that must be equal for stored bytes to
    be usable.
    """

    def __init__(self, settings: str, token_ids: NDArray[np.int64], chunk_tokens: int, secret: bytes) -> None:
        self.token_ids, self.chunk_tokens, self._secret = token_ids[:0], chunk_tokens, secret
        self.nodes = [self._digest(b"prompts", settings.encode(), chunk_tokens.to_bytes(8, "little"))]
        self.grow(token_ids)

    def grow(self, token_ids: NDArray[np.int64], others: Callable[[int, int], bytes] | None = None) -> None:
        """Go on to the last full chunk of `token_ids`, which begin with those of before. `others` takes the first token of a chunk and the
        one after its last, and returns all that the chunk depends on besides tokens, such as the images that they stand for."""
        self.token_ids, size = token_ids, self.chunk_tokens
        for start in range((len(self.nodes) - 1) * size, len(token_ids) - size + 1, size):
            more = others(start, start + size) if others else b""
            self.nodes.append(self._digest(b"node", self.nodes[-1], self._bytes(start, start + size), more))

    def chunk(self, index: int) -> str:
        """The key of a chunk: the tokens between the nodes `index` and ``index + 1``."""
        return "c-" + self._digest(b"chunk", self.nodes[index + 1]).hex()

    def chunks(self, count: int) -> list[str]:
        """The keys of the first `count` chunks."""
        return [self.chunk(i) for i in range(count)]

    def end(self, node: int, tail: NDArray[np.int64]) -> str:
        """The key of the end of a prompt with these tokens after a node."""
        return "e-" + self._digest(b"end", self.nodes[node], tail.astype("<i8").tobytes()).hex()

    def states(self, node: int, tail: NDArray[np.int64] | None = None) -> str:
        """The key of the recurrent states after a node, or after the end of a prompt with these tokens after it."""
        return "s-" + self._digest(b"states", self.nodes[node] if tail is None else digest_of(self.end(node, tail))).hex()

    def tails(self, node: int, length: int | None = None) -> list[str]:
        """The keys of the lists in which a prompt finds tails after a node; with `length`, only of the one that has its own tail of
        `length` tokens."""
        start, digests = node * self.chunk_tokens, []
        if length is None or length < LISTED_TOKENS:
            digests.append(self._digest(b"tails", self.nodes[node]))
        if (len(self.token_ids) - start if length is None else length) >= LISTED_TOKENS:
            digests.append(self._digest(b"tails", self.nodes[node], self._bytes(start, start + LISTED_TOKENS)))
        return [f"t-{digest.hex()}" for digest in digests]

    def _bytes(self, start, end):
        return self.token_ids[start:end].astype("<i8").tobytes()

    def _digest(self, person, *parts):
        return _digest(self._secret, person, *parts)


def part_of(node: bytes, name: str, secret: bytes) -> str:
    """The key of a part of the chunk that ends at a node."""
    return "c-" + _digest(secret, b"part", node, name.encode()).hex()


def _digest(secret, person, *parts):
    from hashlib import blake2b  # slow to import, and only prefixes need it

    state = blake2b(digest_size=32, key=secret, person=person)
    for part in parts:
        state.update(part)
    return state.digest()
