# cython: language_level=3, boundscheck=False, cdivision=True
"""The blocks of a pool with float rows that another scheduler gives out.

A scheduler's tables say which blocks a sequence has, and not which tokens of them have codes or float rows. That is known of each
block: a block begins anew when its first token is written, it is sealed once all of its tokens belong to a sequence that goes on
behind them, and it loses its float rows when no query of that sequence reads them any more. So blocks may be freed, given to other
sequences, shared by prefix, and written again from any token on while they are open.

Nobody says that a sequence has ended. So when many blocks have float rows that the newest steps did not read, the oldest of them are
closed: their tokens keep codes alone. A sequence that goes on in such a block gets float rows of these codes.
"""
import numpy as np

from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t
from libc.stdlib cimport abs, calloc, free
from libc.string cimport memset

from kvfast.codec.seal cimport seal_blocks
from kvfast.storage.pool cimport BlockPool
from kvfast.storage.prepared_batch cimport PreparedBatch

cdef enum:
    CODES                      # its tokens have codes alone, but for the first tokens of a sequence and those of a patch
    OPEN                       # they have float rows
    SEALED                     # they have both
    SPARE = 16                 # most blocks with float rows that the newest step did not read, besides as many as it did


cdef inline Py_ssize_t _tokens_before(PreparedBatch batch, Py_ssize_t i) noexcept:
    """Tokens of a sequence that were written before the step."""
    return batch.lens[i] - (batch.starts[i + 1] - batch.starts[i])


cdef class SchedulerBlocks:
    """The life of the tokens of blocks that another scheduler gives out; see `TokenStates` for sequences of the pool's own."""

    def __cinit__(self, BlockPool pool):
        self.pool = pool
        self.written = <int16_t *>calloc(pool.num_blocks, sizeof(int16_t))
        self.state = <uint8_t *>calloc(pool.num_blocks, sizeof(uint8_t))
        self.begins = <uint8_t *>calloc(pool.num_blocks, sizeof(uint8_t))
        self.used = <Py_ssize_t *>calloc(pool.num_blocks, sizeof(Py_ssize_t))
        if self.written == NULL or self.state == NULL or self.begins == NULL or self.used == NULL:
            raise MemoryError("cannot allocate the state of a scheduler's blocks")

    def __dealloc__(self):
        free(self.written)
        free(self.state)
        free(self.begins)
        free(self.used)

    cdef int prepare(self, PreparedBatch batch) except -1:
        """Make ready for the tokens of a step, which the layers are about to write: seal the blocks that have become full, give float
        rows to the new tokens, and release those that no query reads any more. Nothing changes if the batch is refused."""
        cdef Py_ssize_t index, first, end, needed = 0
        cdef int32_t block
        cdef list writes = self._writes_of(batch)
        cdef dict ends = {block: (end, first == 0, index) for block, index, first, end in writes}
        self._check_read(batch, ends)
        for block, index, first, end in writes:
            needed += self.pool.floats.needed(-1 if first == 0 else block, -1, index, 0 if self.state[block] == CODES else first, end)
        if needed:  # those that stay lie in a chunk apart from those of prompts, which are soon released
            self.pool.floats.pieces.ensure(min(needed, batch.num_sequences * (2 * self.pool.floats.per_block + 2)))
            self.pool.floats.pieces.ensure(needed)
        self._seal(batch, ends)
        for block, index, first, end in writes:
            if first == 0:
                self.pool.floats.release(block, 0)
                self.pool.floats.set_kept_codes(block, 0)
            elif self.state[block] == CODES and self.pool.seals:
                self.pool.floats.restore(block, index, first)
            self.pool.floats.open(block, index, first, end)
            self.written[block], self.begins[block] = <int16_t>end, index == 0
            self._set_state(block, OPEN)
        self._release_float_rows(batch)
        self._close_others(batch)
        self._set_states(batch)
        self.step += 1
        batch.step = self.step
        return 0

    cdef int check(self, PreparedBatch batch) except -1:
        """Refuse a batch that is not the newest: float rows that it reads may be gone."""
        if batch.step != self.step:
            raise ValueError("the batch is of an earlier step: this pool keeps float rows, and prepares one batch after another")
        return 0

    cdef int forget(self) except -1:
        """Release all float rows, and take no block for written."""
        cdef Py_ssize_t block
        for block in range(self.pool.num_blocks):
            self.pool.floats.release(<int32_t>block, 0)
            self.pool.floats.set_kept_codes(<int32_t>block, 0)
        self.pool.floats.pieces.trim()
        memset(self.written, 0, self.pool.num_blocks * sizeof(int16_t))
        memset(self.state, CODES, self.pool.num_blocks * sizeof(uint8_t))
        self.num_open = 0
        self.step += 1
        return 0

    cdef void _set_state(self, int32_t block, int state) noexcept:
        self.num_open += (state != CODES) - (self.state[block] != CODES)
        self.state[block] = state

    cdef list _writes_of(self, PreparedBatch batch):
        """What the step writes: (block, its index in its sequence, first offset, end), after checks."""
        cdef const int64_t[::1] slots
        cdef Py_ssize_t size = self.pool.block_size, i, at = 0, position, end, offset
        cdef int32_t block
        if batch.slots is None:
            raise ValueError("this pool keeps float rows of tokens: prepare_batch needs slot_mapping")
        slots = batch.slots
        if slots.shape[0] < batch.num_tokens or (batch.slots[batch.num_tokens:] != -1).any():
            raise ValueError(f"slot_mapping must have the slots of the {batch.num_tokens} queries, and -1 behind them, got "
                             f"{slots.shape[0]} slots")
        writes = []
        for i in range(batch.num_sequences):
            position = _tokens_before(batch, i)
            while position < batch.lens[i]:
                block, offset = batch.table[i, position // size], position % size
                end = min(size, offset + batch.lens[i] - position)
                for j in range(offset, end):
                    if slots[at] != <int64_t>block * size + j:
                        raise ValueError(f"slot_mapping[{at}] must be slot {<int64_t>block * size + j}, where block_table has position "
                                         f"{position + j - offset} of sequence {i}, got {slots[at]}")
                    at += 1
                if offset > self.written[block]:
                    raise ValueError(f"sequence {i} of the batch writes token {offset} of block {block}, and only "
                                     f"{self.written[block]} were written before it")
                if offset and (self.state[block] == SEALED or self.state[block] == CODES and self.written[block] == size):
                    raise ValueError(f"sequence {i} of the batch writes token {offset} of block {block} again, and the block has been "
                                     f"sealed: go back to its first token")
                writes.append((block, position // size, offset, end))
                position += end - offset
        return writes

    cdef int _check_read(self, PreparedBatch batch, dict ends) except -1:
        """Refuse tables of tokens that nobody has written."""
        cdef Py_ssize_t size = self.pool.block_size, i, index, needed, done
        cdef int32_t block
        for i in range(batch.num_sequences):
            done = _tokens_before(batch, i)
            for index in range((done + size - 1) // size):
                block, needed = batch.table[i, index], min(size, done - index * size)
                end, is_new, at = ends.get(block, (0, False, 0))
                if max(end, 0 if is_new else self.written[block]) < needed:
                    raise ValueError(f"block_table has block {block} for {needed} tokens of sequence {i}, and {self.written[block]} of "
                                     f"them were written")
                if index or not self.pool.has_sinks:
                    continue
                if not (self.pool.seals or at == 0 if is_new else self.pool.floats.num_pieces(block)):
                    raise ValueError(f"block_table begins sequence {i} with block {block}, which was not written as the first of a "
                                     f"sequence")
        return 0

    cdef int _seal(self, PreparedBatch batch, dict ends) except -1:
        """Seal the blocks that sequences go on behind."""
        cdef Py_ssize_t size = self.pool.block_size, i, index
        cdef int32_t block
        full = {}
        if not self.pool.seals:
            return 0
        for i in range(batch.num_sequences):
            for index in range((_tokens_before(batch, i)) // size):
                block = batch.table[i, index]
                if self.state[block] == OPEN and block not in ends:
                    full[block] = index
        for at_start in (True, False):
            self._encode([block for block, index in full.items() if (index == 0) == at_start], at_start)
        for block in full:
            self._set_state(block, SEALED)
        return 0

    cdef int _encode(self, list chosen, bint at_start) except -1:
        """Encode the tokens of some blocks that have been written, from their float rows."""
        cdef int32_t[::1] blocks
        cdef uint8_t[::1] unfit
        cdef Py_ssize_t i
        # Only the first of the blocks of one call can begin a sequence.
        for part in ([[block] for block in chosen] if at_start else [chosen] if chosen else []):
            blocks, unfit = np.array(part, np.int32), np.zeros(len(part), np.uint8)
            seal_blocks(self.pool.stores, self.pool.num_layers, &blocks[0], blocks.shape[0], at_start, self.pool.floats.kept_codes,
                        &unfit[0], self.written)
            for i in range(blocks.shape[0]):
                if unfit[i]:
                    self.pool.floats.set_kept_codes(blocks[i], -abs(self.pool.floats.kept_codes[blocks[i]]))
        return 0

    cdef int _close_others(self, PreparedBatch batch) except -1:
        """Take the float rows from the blocks that were not read for longest, if there are many."""
        cdef Py_ssize_t size = self.pool.block_size, i, index, current = 0
        cdef int32_t block
        if not self.pool.seals:
            return 0
        for i in range(batch.num_sequences):
            for index in range((batch.lens[i] + size - 1) // size):
                block = batch.table[i, index]
                if self.state[block] != CODES:
                    current += self.used[block] != self.step + 1
                    self.used[block] = self.step + 1
        if self.num_open <= 2 * current + SPARE:
            return 0
        others = [block for block in range(self.pool.num_blocks) if self.state[block] != CODES and self.used[block] != self.step + 1]
        others.sort(key=lambda block: self.used[block])
        del others[self.num_open - (2 * current + SPARE):]
        for at_start in (True, False):
            self._encode([block for block in others if self.state[block] == OPEN and self.begins[block] == at_start], at_start)
        for block in others:
            self.pool.floats.release_sealed(block, 1 if self.begins[block] and self.pool.has_sinks else 0)
            self._set_state(block, CODES)
        self.pool.floats.pieces.trim()
        return 0

    cdef int _release_float_rows(self, PreparedBatch batch) except -1:
        """Release the float rows that no query of a sequence of the batch reads any more."""
        cdef Py_ssize_t size = self.pool.block_size, i, index
        cdef int32_t block
        cdef bint some = False
        if not self.pool.seals:
            return 0
        for i in range(batch.num_sequences):
            for index in range((_tokens_before(batch, i) - self.pool.open_tokens) // size):
                block = batch.table[i, index]
                if self.state[block] == SEALED:
                    self.pool.floats.release_sealed(block, 1 if index == 0 and self.pool.has_sinks else 0)
                    self._set_state(block, CODES)
                    some = True
        if some:  # what is left may lie behind all that was released
            for i in range(batch.num_sequences):
                for index in range((batch.lens[i] + size - 1) // size):
                    if index == 0 or self.state[batch.table[i, index]] != CODES:
                        self.pool.floats.move_down(batch.table[i, index])
            self.pool.floats.pieces.trim()
        return 0

    cdef void _set_states(self, PreparedBatch batch) noexcept:
        """Which positions of each sequence have codes, and from which on all have float rows."""
        cdef Py_ssize_t size = self.pool.block_size, i, index
        if not self.pool.seals:
            return
        for i in range(batch.num_sequences):
            batch.floats_begin[i], batch.codes_end[i] = 0, batch.lens[i] // size * size
            for index in range((batch.lens[i] + size - 1) // size - 1, -1, -1):
                if self.state[batch.table[i, index]] == CODES:
                    batch.floats_begin[i] = <int32_t>((index + 1) * size)
                    break
                if self.state[batch.table[i, index]] == OPEN:
                    batch.codes_end[i] = <int32_t>(index * size)
