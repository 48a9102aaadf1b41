# cython: language_level=3, boundscheck=False, cdivision=True
"""The ring: holds the last `window` tokens, the first `num_sink_tokens` (StreamingLLM, arXiv 2309.17453), and `rollback`
tokens before the window, so that going back that far is exact."""
from libc.stdint cimport int32_t

from kvfast.attention.options cimport kvfast_options
from kvfast.attention.refusals cimport VALUE, kv_refusal, refuse
from kvfast.core.checks cimport check_count
from kvfast.core.limits cimport KV_MAX_TOKENS, KV_UNLIMITED
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.tables.block_table cimport BlockTable

from kvfast.core.text import shown

cdef Py_ssize_t NO_WINDOW = KV_UNLIMITED


cdef class RingTable(BlockTable):
    """Without a window (0) it evicts on request alone, and each `evict` says what to keep."""

    def __cinit__(self, BlockPool pool, Py_ssize_t window, Py_ssize_t num_sink_tokens, Py_ssize_t rollback):
        self.window, self.num_sink_tokens, self.rollback = window or NO_WINDOW, num_sink_tokens, rollback
        self.map.sink_blocks = (num_sink_tokens + pool.block_size - 1) // pool.block_size

    cdef Py_ssize_t oldest(self, Py_ssize_t length) noexcept nogil:
        return min(self.evicted, length) if self.window == NO_WINDOW else max(<Py_ssize_t>0, length - self.window)

    cdef Py_ssize_t num_held(self) noexcept nogil:
        return max(<Py_ssize_t>0, self.length - self.evicted) if self.window == NO_WINDOW else self.length

    cdef int evict(self, Py_ssize_t window) except -1:
        """Keep the last `window` tokens."""
        if window == 0:
            return self.truncate(0)
        self.evicted = max(self.evicted, self.length - window)
        return self.release_evicted()

    cdef bint fit_window(self, kvfast_options *options, kv_refusal *refusal) noexcept nogil:
        if options.sliding_window > self.window:
            return refuse(refusal, VALUE, b"sliding_window must be at most the {0} tokens that the ring keeps, got {1}", self.window,
                          options.sliding_window)
        if options.num_sink_tokens > self.num_sink_tokens:
            return refuse(refusal, VALUE, b"num_sink_tokens must be at most the {0} that the ring keeps, got {1}",
                          self.num_sink_tokens, options.num_sink_tokens)
        options.sliding_window = options.sliding_window or self.window
        options.num_sink_tokens = options.num_sink_tokens or self.num_sink_tokens
        return True

    cdef Py_ssize_t _evicted_at(self, Py_ssize_t length) noexcept nogil:
        return max(self.evicted, length - self.window - self.rollback)

    cdef Py_ssize_t _gone(self, Py_ssize_t evicted) noexcept nogil:
        """Number of blocks to skip in addition, all of whose tokens are evicted."""
        return evicted // self.pool.block_size - self.map.sink_blocks - self.map.skipped

    cdef bint just_counts(self, Py_ssize_t n) noexcept nogil:
        return BlockTable.just_counts(self, n) and self._gone(self._evicted_at(self.length + n)) <= 0

    cdef void count_tokens(self, Py_ssize_t n) noexcept nogil:
        self.length += n
        self.evicted = self._evicted_at(self.length)

    cdef int ensure(self, Py_ssize_t num_blocks) except -1:
        return self.pool.ensure_apart(num_blocks)

    cdef Py_ssize_t _skipped_at(self, Py_ssize_t length) noexcept nogil:
        return self.map.skipped + max(<Py_ssize_t>0, self._gone(self._evicted_at(length)))

    cdef int release_evicted(self) except -1:
        cdef Py_ssize_t i, gone
        cdef int32_t block
        self.evicted = self._evicted_at(self.length)
        gone = self._gone(self.evicted)
        if gone <= 0:
            return 0
        for i in range(gone):
            block = self.map.blocks[self.map.sink_blocks + i]
            if self.pool.floats is not None and self.map.sink_blocks + self.map.skipped + i and self.pool.owners[block] == 1:
                self.pool.floats.release(block, 0)  # a known block keeps only the float rows of a sequence's start
        self.map.skip(gone)
        if self.pool.has_surplus():  # of a prompt, at whose end the newest tokens are
            for i in range(self.map.count):
                self.map.blocks[i] = self.pool.move_down(self.map.blocks[i])
        self.pool.trim()
        return 0

    cdef int start(self, digests) except -1:
        """Begin with the longest known prefix: all blocks that a sequence of its length holds must be known."""
        cdef Py_ssize_t size = self.pool.block_size, count, skipped, known = 0, found = 0
        cdef list blocks = self.pool.index.look_up(digests)
        for count in range(1, len(blocks) + 1):
            known = 0 if blocks[count - 1] is None else known + 1
            if known == 0 and count <= self.map.sink_blocks:
                break
            skipped = self._skipped_at(count * size)
            if known >= count - (self.map.sink_blocks + skipped if skipped else 0):
                found = count
        skipped = self._skipped_at(found * size)
        if skipped:
            blocks = blocks[:self.map.sink_blocks] + blocks[self.map.sink_blocks + skipped:found]
        self.begin_with(blocks[:found - skipped], skipped)
        self.evicted = self._evicted_at(self.length)
        return 0

    cdef Py_ssize_t skipped_of(self, BlockTable other) noexcept:
        """Number of blocks to skip for the tokens that `other`, perhaps with another block size, has evicted."""
        cdef Py_ssize_t evicted = (<RingTable>other).evicted
        if self.pool.block_size == other.pool.block_size:
            return other.map.skipped
        return max(<Py_ssize_t>0, evicted // self.pool.block_size - self.map.sink_blocks)

    cdef BlockTable empty(self, BlockPool pool):
        return RingTable(pool, self.window, self.num_sink_tokens, self.rollback)

    cdef int copy_resume_state(self, BlockTable other) except -1:
        BlockTable.copy_resume_state(self, other)
        self.evicted = (<RingTable>other).evicted
        return 0

    cdef dict resume_state(self):
        return BlockTable.resume_state(self) | {"evicted_tokens": self.evicted}

    cdef int set_resume_state(self, Py_ssize_t length, dict state) except -1:
        self.evicted = state["evicted_tokens"]
        return BlockTable.set_resume_state(self, length, state)

    cdef Py_ssize_t check_resume_state(self, Py_ssize_t length, dict state) except -1:
        """Skipped blocks must follow the sink tokens and hold only evicted tokens."""
        cdef Py_ssize_t skipped, evicted, most, size = self.pool.block_size
        if set(self.life.check_saved(length, state)) != {"skipped_blocks", "evicted_tokens"}:
            raise ValueError(f"the state of a ring must have other entries, got {shown(state)}")
        skipped = check_count(state["skipped_blocks"], "skipped_blocks", 0, KV_MAX_TOKENS)
        evicted = check_count(state["evicted_tokens"], "evicted_tokens", 0, KV_MAX_TOKENS)
        # Without a window, only the state says what was evicted.
        most = length if self.window == NO_WINDOW else max(self.oldest(length), self.num_sink_tokens)
        if evicted > most or skipped and (self.map.sink_blocks + skipped) * size > evicted:
            raise ValueError(f"the state of a ring must fit its window of {self.window}, {self.num_sink_tokens} sink tokens and "
                             f"{length} tokens, got {shown(state)}")
        for one in self.life.saved_layers(state) if skipped else ():
            if one is None or one["floats_begin"] >= (self.map.sink_blocks + skipped) * size and not any([
                    self.map.sink_blocks <= index < self.map.sink_blocks + skipped for index, _ in one.get("patches", [])]):
                continue
            raise ValueError(f"the state of a ring must fit the {skipped} blocks that it has dropped, got {shown(state)}")
        return (length + size - 1) // size - skipped

    cdef Py_ssize_t held_from(self) noexcept nogil:
        return self.evicted if self.evicted > self.num_sink_tokens else 0

    cdef int check_truncate(self, Py_ssize_t n) except -1:
        """Going back is exact as long as the window of n tokens is still held."""
        if n > 0 and self.oldest(n) < self.held_from():
            raise ValueError(f"cannot go back to {n} tokens: of {self.length}, a window of {self.window} with a "
                             f"rollback of {self.rollback} can be restored down to {self.evicted + self.window}")
        return 0

    cdef int truncate(self, Py_ssize_t n) except -1:
        if n == 0:
            self.evicted = 0
        BlockTable.truncate(self, n)
        return 0
