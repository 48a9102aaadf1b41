# cython: language_level=3
"""Finds full blocks by the token ids of their prefix."""
import os

import numpy as np

from libc.stdint cimport int32_t
from libc.stdlib cimport free, malloc

cdef extern from "Python.h" nogil:
    void *PyList_GET_ITEM(void *list, Py_ssize_t index)


cdef class PrefixIndex:
    """The known prefixes of `num_blocks` blocks.

    The key of a full block is the digest of its tokens and of the digest before it: keyed BLAKE2b with a secret of this index,
    so that no prompt finds a block by collision or by choice. Blocks without an owner stay known; the least recently used is
    evicted first.

    The calls by which a pool takes and releases blocks allocate nothing, so they cannot fail.
    """

    def __cinit__(self, Py_ssize_t num_blocks):
        self._secret = os.urandom(32)
        self._block_of = {}
        self._digest_of = [None] * num_blocks
        self._next = <int32_t *>malloc((num_blocks + 1) * sizeof(int32_t))
        self._previous = <int32_t *>malloc((num_blocks + 1) * sizeof(int32_t))
        if self._next == NULL or self._previous == NULL:
            raise MemoryError("cannot allocate the index of known prefixes")
        self._next[0] = self._previous[0] = 0

    def __dealloc__(self):
        free(self._next)
        free(self._previous)

    def digests(self, token_ids, Py_ssize_t block_size, salt=b"", known=()):
        """Digests of the full blocks of `token_ids`. `known` are the first digests, if computed already."""
        from hashlib import blake2b  # here, as it is slow to import and only prefixes need it

        cdef Py_ssize_t start
        tokens = np.asarray(token_ids, np.int64)
        digests = list(known)
        last = digests[-1] if digests else blake2b(salt, key=self._secret, person=b"salt").digest()
        for start in range(len(digests) * block_size, len(tokens) - block_size + 1, block_size):
            last = blake2b(last + tokens[start:start + block_size].tobytes(), key=self._secret).digest()
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

    def look_up(self, digests):
        """The block of each digest, or None if it is not known."""
        return [self._block_of.get(digest) for digest in digests]

    def add(self, digest, int32_t block):
        """Make a full block known, unless another block with the same prefix is."""
        if digest not in self._block_of and self._digest_of[block] is None:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def __len__(self):
        return len(self._block_of)

    cdef bint knows(self, int32_t block) noexcept nogil:
        return PyList_GET_ITEM(<void *>self._digest_of, block) != <void *>None

    cdef bint retain_known(self, int32_t block) noexcept:
        """Keep a block that lost its last owner, if it is known; else False."""
        cdef int32_t entry = block + 1, newest = self._previous[0]
        if not self.knows(block):
            return False
        self._next[newest] = self._previous[0] = entry
        self._next[entry], self._previous[entry] = 0, newest
        self.num_idle += 1
        return True

    cdef void take_known(self, int32_t block) noexcept:
        """Take a block that was kept: it has an owner again."""
        cdef int32_t entry = block + 1
        self._next[self._previous[entry]] = self._next[entry]
        self._previous[self._next[entry]] = self._previous[entry]
        self.num_idle -= 1

    cdef int32_t evict(self) except -1:
        """Forget the least recently used block without an owner, and return it."""
        cdef int32_t block = self._next[0] - 1
        del self._block_of[self._digest_of[block]]
        self._digest_of[block] = None
        self.take_known(block)
        return block
