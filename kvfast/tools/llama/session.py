"""A text and its cache in a file, to go on where it was left."""

from pathlib import Path

import numpy as np

import kvfast


class Session:
    """A text that is written in several sittings, in a file; a new text begins where there is none.

    `token_ids` is the text so far, and `cache`, which `open` makes, holds exactly these tokens.
    """

    def __init__(self, model, path):
        self.model, self.path = model, Path(path).absolute()  # a program may change its directory
        self.token_ids, self.cache, self._snapshot = [], None, None
        if not self.path.exists():
            return
        self._snapshot = kvfast.Snapshot.load(self.path)
        if self._snapshot.metadata.get("model") != model.fingerprint or self._snapshot.token_ids is None:
            raise kvfast.IncompatibleSnapshotError(f"{self.path} is not a session of this model")
        self.token_ids = self._snapshot.token_ids.tolist()

    def open(self, max_seq_len, **storage):
        """Make the cache, and fill it with what the file holds.

        Parameters
        ----------
        max_seq_len : int
            Room for the text so far and what is to come.
        **storage
            Storage dtypes of a `kvfast.KVCache`; without them those of the file.

        Raises
        ------
        kvfast.IncompatibleSnapshotError
            If the file has other storage dtypes, or more tokens.
        """
        if self._snapshot is not None:
            storage = {"dtype": self._snapshot.format} | storage
        self.cache = kvfast.KVCache(*self.model.cache_shape, max_seq_len=max_seq_len, **storage)
        if self._snapshot is not None:
            self.cache.restore(self._snapshot)
        self._snapshot = None

    def save(self, token_ids):
        """Write the file, with the token ids of all of the text. The cache holds the first of them: tokens that it lacks are
        computed if it has room, else left out."""
        missing = token_ids[len(self.cache) :]
        if missing and len(token_ids) <= self.cache.max_seq_len:
            self.model.prefill(missing, self.cache)
        self.token_ids = list(token_ids[: len(self.cache)])
        self.cache.save(self.path, np.array(self.token_ids, np.int64), {"model": self.model.fingerprint})
