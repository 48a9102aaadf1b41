"""The ids of the tokens of a sequence, by which its pool finds its blocks."""

import numpy as np


class TokenIds:
    """The ids of one sequence's tokens, and the digests of its full blocks.

    All methods run while no other thread is in the pool. `ids` is None after tokens came without ids: later blocks cannot be indexed
    by their tokens. It also becomes None if memory runs out. Without ids, the blocks only cannot be found. A sequence with an empty
    `salt` may hold tokens of another one, of a tenant's snapshot or store.
    """

    __slots__ = ("_digests", "_index", "_known_states", "_own_salt", "_storage", "ids", "salt")

    def __init__(self, storage, index, known_states, salt):
        self._storage, self._index, self._known_states = storage, index, known_states
        self.ids, self._digests, self.salt, self._own_salt = [], [], salt, salt

    def begin(self, token_ids, digests):
        """Take the ids of the tokens that the pool had, all in full blocks."""
        self.ids, self._digests = np.asarray(token_ids, np.int64).tolist(), list(digests)

    def add(self, before, token_ids):
        """Keep the ids of the tokens after the first `before`.

        An interrupted call may have left more or fewer ids than tokens; all ids are then dropped.
        """
        if token_ids is None or self.ids is None or len(self.ids) != before:
            self.ids = None
            return
        try:
            del self._digests[before // self._storage.block_size :]
            self.ids.extend(token_ids.tolist())
            self._make_known()
        except MemoryError:
            self.ids = None

    def _make_known(self):
        """Let `match_prefix` find the blocks that have filled up since the last call."""
        size, first = self._storage.block_size, len(self._digests)
        if len(self.ids) // size > first:
            self._digests = self._index.digests(self.ids, size, self.salt, self._digests)
            for i in range(first, len(self._digests)):
                block = self._storage.tables[0].knowable_block(i)
                if block >= 0:
                    self._index.add(self._digests[i], block)

    def know_states(self):
        """Let `match_prefix` find the newest checkpoint."""
        self._make_states_known([self._storage.length])

    def _make_states_known(self, positions):
        """Let `match_prefix` find checkpoints that are at ends of blocks."""
        size = self._storage.block_size
        if self._are_complete():
            for n in positions:
                if n % size == 0:
                    self._known_states.add(self._digests[n // size - 1], self._storage.checkpoints.held[n])

    def _are_complete(self):
        return self.ids is not None and len(self.ids) == self._storage.length

    def cut(self, n):
        """Keep the ids of the first `n` tokens."""
        if self.ids is not None:
            del self._digests[n // self._storage.block_size :]  # first, so that no digest is wrong if the next line fails
            del self.ids[n:]
        if n == 0:
            self.ids, self._digests, self.salt = [], [], self._own_salt

    def move(self, first, positions):
        """Let the ids at some positions follow on the `first` ones. All later ids are dropped."""
        if self.ids is not None:
            moved = [self.ids[position] for position in positions]
            del self._digests[first // self._storage.block_size :]
            self.ids[first:] = moved
        if first == 0 and not positions:
            self.cut(0)

    def forget(self):
        """Forget all ids, which only a sequence in one piece has."""
        self.ids = None

    def told(self, token_ids):
        """The ids and the salt of a snapshot that is given `token_ids`, or None."""
        if token_ids is None and self._are_complete():
            token_ids = np.array(self.ids, np.int64)
        return token_ids, self.salt

    def set(self, token_ids, salt):
        """Replace the ids of all tokens. None: they are not known.

        `salt` is that of who had the tokens before, for a sequence without its own. If that is None, nobody finds them.
        """
        length = self._storage.length
        self.ids, self._digests, self.salt = None if length else [], [], self._own_salt
        if length:
            self.salt = self._own_salt or salt
        try:
            # The blocks of a spliced sequence do not follow from the tokens before them.
            if token_ids is not None and self.salt is not None and not self._storage.is_spliced:
                self.ids = token_ids.tolist()
                self._make_known()
                checkpoints = self._storage.checkpoints
                self._make_states_known(() if checkpoints is None else checkpoints.positions)
        except MemoryError:
            self.ids = None

    def copy_from(self, other):
        """Take over the ids of a sequence with the same tokens."""
        self.ids, self._digests = None if other.ids is None else other.ids.copy(), other._digests.copy()
        self.salt, self._own_salt = other.salt, other._own_salt
