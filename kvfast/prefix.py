"""Full blocks found again by the tokens that led to them."""

import os
from collections import OrderedDict

import numpy as np


def checked_token_ids(token_ids, count=None):
    """Token ids as a new int64 array, `count` of them if given; else ValueError."""
    array = np.asarray(token_ids)
    if array.ndim != 1 or count is not None and len(array) != count or array.size and array.dtype.kind not in "iu":
        wanted = "integers of shape (num_tokens,)" if count is None else f"{count} integers"
        raise ValueError(f"token_ids must be {wanted}, got {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


class PrefixIndex:
    """Which block holds the keys and values of which prefix.

    A full block is known by the digest of its tokens and of the digest before it: keyed BLAKE2b with a secret
    of this index, so that no prompt finds a block by collision or by choice. Blocks without an owner stay
    known, the least recently used first in line for other use.
    """

    def __init__(self):
        self._secret = os.urandom(32)
        self._block_of = {}
        self._digest_of = {}
        self._idle = OrderedDict()

    def digests(self, token_ids, block_size, salt=b"", known=()):
        """Digests of the full blocks of `token_ids`; `known` are the first of them."""
        from hashlib import blake2b  # 10 ms, for those who ask for prefixes

        tokens = np.ascontiguousarray(token_ids, np.int64)
        digests = list(known)
        last = digests[-1] if digests else blake2b(salt, key=self._secret, person=b"salt").digest()
        for start in range(len(digests) * block_size, len(tokens) - block_size + 1, block_size):
            last = blake2b(last + tokens[start : start + block_size].tobytes(), key=self._secret).digest()
            digests.append(last)
        return digests

    def find(self, digests):
        """Blocks of the longest known run of `digests`."""
        blocks = []
        for digest in digests:
            if digest not in self._block_of:
                break
            blocks.append(self._block_of[digest])
        return blocks

    def add(self, digest, block):
        """Make a full block known, unless its contents are already, in another block."""
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def __contains__(self, block):
        return block in self._digest_of

    def __len__(self):
        return len(self._digest_of)

    @property
    def num_idle(self):
        """Known blocks without an owner."""
        return len(self._idle)

    def keep(self, block):
        """Whether a block that lost its last owner is known, and so stays."""
        if block not in self._digest_of:
            return False
        self._idle[block] = None
        return True

    def reuse(self, block):
        """A block has an owner again."""
        self._idle.pop(block, None)

    def evict(self):
        """Forget the least recently used block without an owner, and return it."""
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._digest_of.pop(block)]
        return block
