# cython: language_level=3, boundscheck=False, cdivision=True
"""The blocks of a pool with float rows that another scheduler gives out.

A scheduler's tables say which blocks a sequence has, and not which tokens of them have codes or float rows. The pool keeps it by
block: a block begins anew when its first token is written, each layer that seals does so when it has written the last one, and the
block loses its float rows when no sequence reads them any more. So blocks may be freed, given to other sequences, shared by prefix,
and written again from any token on while they have float rows.

Nobody says which sequence a row of a table is, nor that one has ended. A sequence is known by the last block that a step has shown of
it: the row that has this block at the same place goes on with it. Until then it holds the float rows that its next queries read,
however long it rests and whoever shares its blocks and runs ahead. One that has ended holds them until its blocks begin anew. Whoever
cannot spare that memory bounds the number of sequences: those that were not seen for longest are closed, so that their tokens keep
codes alone, and are lost where a block is not full and so not sealed. Other groups of layers may have got its memory since.

Schedulers find known beginnings of texts at ends of blocks. So a sequence also holds what queries after its last full block read, and
the ends of prompts and of closed texts are held apart, as far as memory is there. Whoever is given the same text reads there what
computing would.

Layers may differ in the number of tokens that they keep as floats, and in where these begin. So who holds which blocks, and what
state a block is in, is kept for each such rule by itself. A block loses its float rows once it has codes alone for all of them.
"""
import numpy as np

from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from kvfast.codec.blocks cimport coded_at
from kvfast.core.limits cimport KV_PIECE
from kvfast.storage.batches.prepared_batch cimport PreparedBatch
from kvfast.storage.memory.pool cimport BlockPool

cdef enum:
    CODES                      # its tokens have codes alone, but for the first tokens of a sequence and those of a patch
    OPEN                       # it is not full, and its tokens have float rows
    SEALED                     # they have both, once the layers have written the last one

    MOST_DRAFTS = 16           # a sequence that writes more tokens in a step computes its prompt
    BLOCKS_OF_END = 64         # of the pool, for each end of a prompt that is held
    LEAST_ENDS = 16


cdef inline Py_ssize_t _tokens_before(PreparedBatch batch, Py_ssize_t i) noexcept:
    """Tokens of a sequence that were written before the step."""
    return batch.lens[i] - (batch.starts[i + 1] - batch.starts[i])


cdef list _row(PreparedBatch batch, Py_ssize_t i, Py_ssize_t begin, Py_ssize_t end):
    """Blocks of a sequence."""
    cdef Py_ssize_t index
    return [batch.table[i, index] for index in range(begin, end)]


cdef class SchedulerBlocks:
    """Which blocks that another scheduler gives out are open or sealed, and who reads their float rows; see `FloatRows`."""

    def __cinit__(self, BlockPool pool):
        self.pool = pool
        self.written = <int16_t *>calloc(pool.num_blocks, sizeof(int16_t))
        self.begins = <uint8_t *>calloc(pool.num_blocks, sizeof(uint8_t))
        self.num_blocks, self.num_rules = pool.num_blocks, max(len(pool.rules), 1)
        self.state = <uint8_t *>calloc(self.num_rules * pool.num_blocks, sizeof(uint8_t))
        self.floats_from = <int16_t *>calloc(self.num_rules * pool.num_blocks, sizeof(int16_t))
        self.holders = <int32_t *>calloc(self.num_rules * pool.num_blocks, sizeof(int32_t))
        self.held, self.ends = [{} for _ in range(self.num_rules)], [{} for _ in range(self.num_rules)]
        if self.written == NULL or self.begins == NULL or self.state == NULL or self.floats_from == NULL or self.holders == NULL:
            raise MemoryError("cannot allocate the state of a scheduler's blocks")

    def __dealloc__(self):
        free(self.written)
        free(self.state)
        free(self.begins)
        free(self.floats_from)
        free(self.holders)

    cdef int prepare(self, PreparedBatch batch, Py_ssize_t max_num_seqs) except -1:
        """Make ready for the tokens of a step, which the layers are about to write: give them float rows, and release those that no
        query reads any more. Nothing changes if the batch is refused."""
        cdef Py_ssize_t index, begin, first, end, layer, needed = 0
        cdef int32_t block
        cdef int rule
        cdef list writes = self._writes_of(batch), going_on
        cdef dict ends = {block: (end, first == 0, index) for block, index, first, end in writes}
        self._check_read(batch, ends)
        for block, index, first, end in writes:
            begin = 0 if self.pool.seals and self._is_coded(block) else first  # such a block is opened again
            needed += self.pool.floats.needed(-1 if first == 0 else block, -1, index, begin, end)
        if needed:  # those that stay lie in a slab apart from those of prompts, which are soon released
            self.pool.floats.pieces.ensure(min(needed, batch.num_sequences * (2 * self.pool.floats.per_block + 2)))
            self.pool.floats.pieces.ensure(needed)
        going_on = [self._going_on(rule, batch) for rule in range(self.num_rules)]
        self._begin_anew([block for block, _, first, _ in writes if first == 0])
        for block, index, first, end in writes:
            for layer in range(self.pool.num_layers if first else 0):
                if self.pool.layouts[layer].seals and self._state_of(self.pool.layouts[layer].rule)[block] == CODES:
                    self.pool.floats.restore(layer, block, index, first)
            self.pool.floats.open(-1, block, index, first, end)
            self.written[block], self.begins[block] = <int16_t>end, index == 0
            for rule in range(self.num_rules):
                if first == 0 or self._state_of(rule)[block] == CODES:
                    self.floats_from[rule * self.num_blocks + block] = 0 if self._seals(rule) else <int16_t>first
                self._state_of(rule)[block] = SEALED if end == self.pool.block_size else OPEN
        batch.filled, batch.num_starts = self._starts_first([block for block, _, _, end in writes if end == self.pool.block_size])
        for rule in range(len(self.pool.rules)):
            self._set_begins(rule, batch, going_on[rule])
            self._hold(rule, batch, going_on[rule], max_num_seqs)
        self.step += 1
        batch.step = self.step
        return 0

    cdef int seal(self, PreparedBatch batch, Py_ssize_t layer) except -1:
        """Seal the blocks that the step has filled, in a layer that has written its tokens."""
        if batch.filled and self.pool.layouts[layer].seals:
            self.pool.floats.seal(layer, batch.filled, batch.num_starts)
        return 0

    cdef int check(self, PreparedBatch batch) except -1:
        """Refuse a batch that is not the newest: float rows that it reads may be gone."""
        if batch.step != self.step:
            raise ValueError("the batch is of an earlier step: this pool keeps float rows, and prepares one batch after another")
        return 0

    cdef int forget(self) except -1:
        """Release all float rows, and take no block for written."""
        cdef Py_ssize_t block
        for block in range(self.num_blocks):
            self.pool.floats.forget(<int32_t>block)
        self.pool.floats.pieces.trim()
        memset(self.written, 0, self.num_blocks * sizeof(int16_t))
        memset(self.state, CODES, self.num_rules * self.num_blocks * sizeof(uint8_t))
        memset(self.holders, 0, self.num_rules * self.num_blocks * sizeof(int32_t))
        self.held, self.ends = [{} for _ in range(self.num_rules)], [{} for _ in range(self.num_rules)]
        self.step += 1
        return 0

    cdef object are_coded(self, list blocks):
        """Whether blocks are full and all of their tokens have codes: bool of shape (num_blocks,)."""
        cdef int32_t block
        self.pool.enter()
        try:
            return np.array([self.written[block] == self.pool.block_size and not self.pool.is_patched(block) for block in blocks], bool)
        finally:
            self.pool.leave()

    cdef object first_rows(self, int32_t first):
        """The float rows of the first tokens of a sequence that begins with a block, layer after layer: uint8, 1-D."""
        self.pool.enter()
        try:
            if not self.begins[first] or not self.pool.floats.float_of[first * self.pool.floats.per_block] >= 0:
                raise ValueError(f"block {first} must be the first of a sequence")
            return np.concatenate(self._first_rows(first, True))
        finally:
            self.pool.leave()

    cdef int take(self, list blocks, first_rows) except -1:
        """Take full blocks for written, whose codes came from elsewhere. `first_rows` of a sequence that begins with the first of
        them, or None."""
        cdef int32_t block
        cdef int rule
        cdef bint begins = first_rows is not None and self.pool.has_sinks and len(blocks)
        self.pool.enter()
        try:
            if begins:
                self.pool.floats.pieces.ensure(1)
            self._begin_anew(blocks)
            for block in blocks:
                self.written[block], self.begins[block] = <int16_t>self.pool.block_size, False
                for rule in range(self.num_rules):
                    self._state_of(rule)[block] = CODES
            if begins:
                block = blocks[0]
                self.pool.floats.add(block, 0, KV_PIECE)
                self.begins[block], at = True, 0
                for row in self._first_rows(block, False):
                    row[:] = first_rows[at : at + len(row)]
                    at += len(row)
        finally:
            self.pool.leave()
        return 0

    cdef Py_ssize_t first_rows_nbytes(self) except -1:
        """Bytes of `first_rows`; 0 in a pool whose sequences keep none."""
        return self.pool.floats.first_nbytes()

    cdef list _first_rows(self, int32_t block, bint copies):
        return sum([self.pool.floats.first_rows(block, layer, copies) for layer in range(self.pool.num_layers)], [])

    cdef list _writes_of(self, PreparedBatch batch):
        """What the step writes: (block, its index in its sequence, first offset, end), after checks."""
        cdef const int64_t[::1] slots
        cdef Py_ssize_t size = self.pool.block_size, i, at = 0, position, end, offset
        cdef int32_t block
        if batch.slots is None:
            raise ValueError("this pool keeps float rows of tokens: prepare_batch needs slot_mapping")
        slots = batch.slots
        if slots.shape[0] < batch.num_tokens or (batch.slots[batch.num_tokens:] != -1).any():
            raise ValueError(f"slot_mapping must have the slots of the {batch.num_tokens} queries, and -1 after them, got "
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
                if offset and self.pool.seals and self.written[block] == size and self._is_coded(block):
                    raise ValueError(f"sequence {i} of the batch writes token {offset} of block {block} again, and its tokens have "
                                     f"codes alone: go back to its first token")
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
                if not (self.pool.keeps_newest or at == 0 if is_new else self.begins[block]):
                    raise ValueError(f"block_table begins sequence {i} with block {block}, which was not written as the first of a "
                                     f"sequence")
        return 0

    cdef uint8_t *_state_of(self, int rule) noexcept:
        """The row of `state`."""
        return self.state + rule * self.num_blocks

    cdef bint _seals(self, int rule) noexcept:
        """Whether layers with this rule seal blocks, which have more tokens than a piece."""
        return rule < len(self.pool.rules) and self.pool.rules[rule][1] > KV_PIECE

    cdef bint _is_coded(self, int32_t block) noexcept:
        """Whether a block has codes alone for all layers."""
        cdef int rule
        for rule in range(self.num_rules):
            if self._state_of(rule)[block] != CODES:
                return False
        return True

    cdef int _begin_anew(self, list blocks) except -1:
        """Forget all about blocks whose first token is about to be written."""
        cdef int32_t block
        cdef int rule
        for rule in range(self.num_rules):
            self._forget_behind(rule, {block for block in blocks if self.holders[rule * self.num_blocks + block]})
        for block in blocks:
            self.pool.floats.forget(block)
        return 0

    cdef tuple _starts_first(self, list blocks):
        """Some blocks, first those that begin a sequence, and the number of these."""
        starts = [block for block in blocks if self.begins[<int32_t>block]]
        return starts + [block for block in blocks if not self.begins[<int32_t>block]], len(starts)

    cdef list _going_on(self, int rule, PreparedBatch batch):
        """For each row: the position from which on it may read float rows, and the blocks that its sequence held after the last step.
        Found sequences leave `held`. A row without one reads the float rows of those that hold its newest known block, or codes. If two
        rows could go on with one sequence, the first does."""
        cdef Py_ssize_t size = self.pool.block_size, i, index, done
        cdef list blocks, first = []
        cdef dict places = {}, held = self.held[rule]
        for i in range(batch.num_sequences):
            done = _tokens_before(batch, i)
            # Drafts may have been taken back since, so its last block may lie after its present tokens. But a sequence that holds
            # none of these has ended, and its block was given to this row.
            for index in range((batch.lens[i] + size - 1) // size - 1, max(0, done - 1) // size - 1, -1):
                place = batch.table[i, index], index
                begin, blocks = held.get(place, (0, []))
                if (blocks and place not in places and (index + 1 - len(blocks)) * size < done
                        and blocks == _row(batch, i, index + 1 - len(blocks), index + 1)):
                    places[place] = i
                    first.append(min(begin, done))
                    break
            else:
                known = batch.table[i, done // size - 1] if done >= size else None
                begin = done // size * size
                for known_rows in (held, self.ends[rule]):
                    for place in [place for place, (_, blocks) in known_rows.items() if known in blocks]:
                        begin = min(begin, known_rows[place][0])
                        known_rows[place] = known_rows.pop(place)  # seen
                first.append(begin)
        going_on = [[begin, []] for begin in first]
        for place, i in places.items():
            going_on[i][1] = held.pop(place)[1]
        return going_on

    cdef int _forget_behind(self, int rule, set anew) except -1:
        """Let no sequence hold blocks that begin anew, and the blocks after them, whose tokens it has lost. What is left is an end."""
        cdef list blocks
        cdef dict held
        for held in (self.held[rule], self.ends[rule]) if anew else ():
            for place in [place for place, (_, blocks) in held.items() if not anew.isdisjoint(blocks)]:
                begin, blocks = held.pop(place)
                for count in range(len(blocks)):
                    if blocks[count] in anew:
                        break
                self._let_go(rule, blocks[count:], anew)
                if count:
                    self._let_go(rule, self._end(rule, place[1] - len(blocks) + count, begin, blocks[:count]), anew)
        return 0

    cdef int _hold(self, int rule, PreparedBatch batch, list going_on, Py_ssize_t max_num_seqs) except -1:
        """Let the sequences of the batch hold the float rows that queries at their ends read, and release those that nobody holds."""
        cdef Py_ssize_t size = self.pool.block_size, i, index, done, begin, kept_tokens, border
        cdef list blocks, before = [blocks for _, blocks in going_on]
        cdef dict held, ends = self.ends[rule]
        cdef int some = False
        kept_tokens, border = self.pool.rules[rule]
        for i in range(batch.num_sequences):
            done, begin = _tokens_before(batch, i), batch.floats_begin[rule, i]
            before.append(self._hold_row(rule, self.held[rule], batch, i, begin, (batch.lens[i] + size - 1) // size))
            if not before[i] or batch.lens[i] - done > MOST_DRAFTS:
                index = done // size - 1
                if before[i] and index >= 0:  # the prompt did not end there
                    before.append(ends.pop((batch.table[i, index], index), (0, []))[1])
                begin = max(begin, coded_at((batch.lens[i] - 1) // size * size, kept_tokens, border))
                before.append(self._hold_row(rule, ends, batch, i, begin, batch.lens[i] // size))
        held = self.held[rule]
        while len(held) > max(max_num_seqs, batch.num_sequences):
            place, (begin, blocks) = next(iter(held.items()))
            del held[place]
            index = len(blocks) - (self.written[<int32_t>blocks[-1]] < size)
            before.append(blocks[index:])
            if index:
                before.append(self._end(rule, place[1] - len(blocks) + index, begin, blocks[:index]))
        while len(ends) > max(LEAST_ENDS, self.num_blocks // BLOCKS_OF_END):
            before.append(ends.pop(next(iter(ends)))[1])
        for blocks in before:
            some |= self._let_go(rule, blocks, ())
        if some:  # the rest may lie after all that was released
            for i in range(batch.num_sequences):
                for index in range((batch.lens[i] + size - 1) // size):
                    if index == 0 or not self._is_coded(batch.table[i, index]):
                        self.pool.floats.move_down(batch.table[i, index])
            self.pool.floats.pieces.trim()
        return 0

    cdef list _hold_row(self, int rule, dict held, PreparedBatch batch, Py_ssize_t i, Py_ssize_t begin, Py_ssize_t end):
        """Hold the blocks of a row from position `begin` to the block `end`. Returns those of a row with the same tokens."""
        cdef list blocks = _row(batch, i, begin // self.pool.block_size, end)
        cdef int32_t block
        if not blocks:
            return blocks
        for block in blocks:
            self.holders[rule * self.num_blocks + block] += 1
        same = held.pop((blocks[-1], end - 1), (0, []))[1]
        held[blocks[-1], end - 1] = begin, blocks
        return same

    cdef list _end(self, int rule, Py_ssize_t index, begin, list blocks):
        """Let full blocks, the last of which is at `index` of a table, be an end. Returns those that are held no longer."""
        cdef dict ends = self.ends[rule]
        place = blocks[-1], index
        if place in ends and ends[place][0] <= begin:
            return blocks
        same = ends.pop(place, (0, []))[1]
        ends[place] = begin, blocks
        return same

    cdef int _let_go(self, int rule, list blocks, anew) except -1:
        """Hold some blocks for one sequence less. Those that none holds keep codes alone, but for those that begin anew. Returns
        whether float rows were released."""
        cdef int32_t block
        cdef list idle = []
        cdef int some = False
        cdef uint8_t *state = self._state_of(rule)
        cdef int32_t *holders = self.holders + rule * self.num_blocks
        for block in blocks:
            holders[block] -= 1
            if holders[block] == 0 and state[block] != CODES and block not in anew:
                idle.append(block)
        for block in idle:
            if state[block] == OPEN and self._seals(rule):
                self.written[block] = 0  # its tokens are lost: others may have the memory of a block that no step shows
            state[block] = CODES
            if self._is_coded(block):
                self.pool.floats.release_coded(block, self.begins[block], self.pool.block_size)
                some = True
        return some

    cdef int _set_begins(self, int rule, PreparedBatch batch, list going_on) except -1:
        """From which position on all tokens of each sequence have float rows."""
        cdef Py_ssize_t size = self.pool.block_size, i, index, first, begin, kept_tokens, border
        cdef int32_t block
        cdef uint8_t *state = self._state_of(rule)
        kept_tokens, border = self.pool.rules[rule]
        for i in range(batch.num_sequences):
            begin = max(coded_at(_tokens_before(batch, i) // size * size, kept_tokens, border), <Py_ssize_t>going_on[i][0])
            for index in range((batch.lens[i] + size - 1) // size - 1, begin // size - 1, -1):
                block = batch.table[i, index]
                first = size if state[block] == CODES else self.floats_from[rule * self.num_blocks + block]
                if first:
                    begin = max(begin, index * size + first)
                    break
            batch.floats_begin[rule, i] = <int32_t>begin
        return 0
