# cython: language_level=3, boundscheck=False, cdivision=True
"""A scheduler's tables for one step, checked once for all layers."""
import numpy as np

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from kvfast.attention.cascade cimport MAX_SHARED_QUERIES, find_prefixes, free_prefixes, kv_prefixes
from kvfast.attention.sight cimport kv_member
from kvfast.core.checks cimport check_integers, rises
from kvfast.storage.memory.pool cimport BlockPool

from kvfast.core.checks import check_size
from kvfast.core.interchange import as_array
from kvfast.errors import DimensionMismatchError


cdef class PreparedBatch:
    """The block tables, lengths, queries and slots of one step of a scheduler, checked; from `PagedKVCache.prepare_batch`.

    It holds copies, so that later changes of the arrays do not matter. It is valid for the pool that prepared it, and for any
    number of calls: what can change in the pool meanwhile is checked by each of them. `num_tokens` are the queries of all sequences.
    """

    def __init__(self):
        raise TypeError("a PreparedBatch comes from PagedKVCache.prepare_batch")

    cdef int check(self, BlockPool pool) except -1:
        """Refuse a batch of another pool. A pool of sequences always has the blocks that it was made with."""
        if self.pool is not pool:
            raise ValueError("the batch was prepared by another pool")
        return 0

    cdef void fill(self, kv_member *members, int rule) noexcept nogil:
        """Describe the members of the batch, for layers with this `rule`."""
        cdef kv_member *member
        cdef Py_ssize_t i, shareable
        memset(members, 0, self.num_sequences * sizeof(kv_member))
        for i in range(self.num_sequences):
            member = members + i
            member.context.table, member.context.length, member.length = &self.table[i, 0], self.lens[i], self.lens[i]
            member.first_query, member.num_queries = self.starts[i], self.starts[i + 1] - self.starts[i]
            shareable = member.context.counted = member.context.length - member.num_queries
            if rule >= 0:
                member.context.floats_begin = self.floats_begin[rule, i]
                shareable = min(shareable, member.context.floats_begin)  # all queries see these as codes
            if member.num_queries <= MAX_SHARED_QUERIES:
                member.shareable = shareable // self.pool.block_size

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self.num_prefixes):
            free_prefixes(self.prefixes + i)
        free(self.prefixes)

    cdef int look_for_prefixes(self) except -1:
        """Look for prefixes that sequences share, once for all layers of a rule."""
        cdef kv_member *members = <kv_member *>malloc(self.num_sequences * sizeof(kv_member))
        cdef Py_ssize_t count = len(self.pool.rules) + 1, i
        try:
            self.prefixes = <kv_prefixes *>calloc(count, sizeof(kv_prefixes))
            if members == NULL or self.prefixes == NULL:
                raise MemoryError("cannot allocate a batch")
            self.num_prefixes = count
            for i in range(count):
                self.fill(members, <int>i if i < count - 1 else -1)
                find_prefixes(members, self.num_sequences, self.pool.layouts, self.prefixes + i)
        finally:
            free(members)
        return 0

    cdef const kv_prefixes *prefixes_of(self, int rule) noexcept:
        """The prefixes for layers with this `rule`, after `look_for_prefixes`."""
        return self.prefixes + (rule if rule >= 0 else self.num_prefixes - 1)

    cdef int set_slots(self, object slot_mapping) except -1:
        cdef const int64_t[::1] slots
        cdef int64_t total = <int64_t>self.pool.num_blocks * self.pool.block_size
        cdef Py_ssize_t i
        self.slots = check_integers(slot_mapping, "slot_mapping", np.int64, 1)
        slots = self.slots
        for i in range(slots.shape[0]):
            if not -1 <= slots[i] < total:
                raise ValueError(f"slot_mapping[{i}] must be -1 or between 0 and {total - 1}, got {slots[i]}")
        check_distinct(self.slots[self.slots >= 0])
        return 0

    def only(self, index):
        """The batch of the sequence with this index, to attend; valid as long as this one."""
        cdef PreparedBatch one = PreparedBatch.__new__(PreparedBatch)
        cdef Py_ssize_t i = check_size(index, "index", 0, self.num_sequences - 1)
        one.pool, one.step, one.num_sequences = self.pool, self.step, 1
        one.num_tokens = self.starts[i + 1] - self.starts[i]
        one.table, one.lens = self.table[i : i + 1], self.lens[i : i + 1]
        one.starts = np.array([0, one.num_tokens], np.int32)
        one.used = self.table[i, : (self.lens[i] + self.pool.block_size - 1) // self.pool.block_size]
        if self.pool.keeps_newest:
            one.floats_begin = np.ascontiguousarray(self.floats_begin[:, i : i + 1])
        return one

    def __copy__(self):
        return self  # a batch never changes

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("a PreparedBatch cannot be pickled: it is valid for the pool of this process that prepared it")

    def __repr__(self):
        return f"PreparedBatch({self.num_sequences} sequences, {self.num_tokens} tokens)"


def check_distinct(slots):
    """Refuse slots that are given twice."""
    ordered = np.sort(slots)
    if (ordered[1:] == ordered[:-1]).any():
        raise ValueError("slot_mapping must not hold a slot twice")


cdef const int32_t[::1] checked_starts(object cu_seqlens_q, Py_ssize_t count, Py_ssize_t num_tokens):
    """`cu_seqlens_q`, or one token per sequence if it is None. With `num_tokens` -1 the number of queries is not known yet."""
    cdef const int32_t[::1] starts
    if cu_seqlens_q is None:
        starts = cu_seqlens_q = np.arange(count + 1, dtype=np.int32)
    else:
        starts = cu_seqlens_q = check_integers(cu_seqlens_q, "cu_seqlens_q", np.int32, 1)
    if starts.shape[0] != count + 1 or starts[0] != 0 or num_tokens not in (-1, starts[count]) or not rises(starts):
        raise DimensionMismatchError(
            f"cu_seqlens_q must rise from 0 {'' if num_tokens < 0 else f'to the {num_tokens} tokens of q '}in {count + 1} entries, got "
            f"{np.array2string(cu_seqlens_q, threshold=8)}; without it q must hold one token per sequence")
    return starts


cdef PreparedBatch prepare(BlockPool pool, object block_table, object seq_lens, const int32_t[::1] starts, Py_ssize_t window,
                           Py_ssize_t num_sink_tokens):
    """Check the block table of another scheduler: each block that is read must hold tokens. `seq_lens` are checked.

    With a `window`, which a pool of windows has, blocks between sink tokens and the window of the first query are not read: in their
    place the table has another block of the row.
    """
    cdef PreparedBatch self = PreparedBatch.__new__(PreparedBatch)
    cdef const int32_t[::1] lens
    cdef const int32_t[:, ::1] table
    cdef int32_t[::1] used
    cdef Py_ssize_t size = pool.block_size, i, j, at = 0, count, num_queries, num_used = 0
    cdef int32_t least = 0, most = -1, block, shortest, longest
    self.pool, self.starts = pool, starts
    lens = seq_lens
    self.num_sequences, self.num_tokens = lens.shape[0], starts[starts.shape[0] - 1]
    given = as_array(block_table, "block_table")
    if given.ndim == 2 and given.shape[1] and lens.shape[0] == given.shape[0] > 0:
        shortest = longest = lens[0]
        for i in range(lens.shape[0]):
            shortest, longest = min(shortest, lens[i]), max(longest, lens[i])
            num_used += (<Py_ssize_t>lens[i] + size - 1) // size
        if shortest < 0 or longest > given.shape[1] * size:
            raise ValueError(f"seq_lens must lie between 0 and the {given.shape[1] * size} tokens of block_table's "
                             f"{given.shape[1]} blocks, got {shortest} to {longest}")
        given = given[:, :max(1, (longest + size - 1) // size)]  # engines have rows for their longest text
    wide = given
    # What is not read may be anything.
    if given.dtype != np.int32 and given.dtype.kind in "iu" and not np.can_cast(given.dtype, np.int32):
        given = given.astype(np.int32)
        given[(wide < 0) | (wide >= pool.num_blocks)] = -1
    table = given = check_integers(given, "block_table", np.int32, 2)
    if table.shape[0] != lens.shape[0] or table.shape[1] == 0:
        raise DimensionMismatchError(f"block_table must have shape ({lens.shape[0]}, max_blocks), one row per sequence, got "
                                     f"{given.shape}")
    if window:
        table = given = _without_gaps(given, seq_lens, np.diff(starts), size, window, num_sink_tokens)
    used = np.empty(num_used, np.int32)
    for i in range(lens.shape[0]):
        count = (<Py_ssize_t>lens[i] + size - 1) // size
        for j in range(count):
            block = table[i, j]
            used[at] = block
            at += 1
            least, most = min(least, block), max(most, block)
    if least < 0 or most >= pool.num_blocks:
        wide = _without_gaps(wide, seq_lens, np.diff(starts), size, window, num_sink_tokens) if window else wide
        read = [wide[i, :(lens[i] + size - 1) // size] for i in range(lens.shape[0])]
        raise ValueError(f"block_table must hold blocks between 0 and {pool.num_blocks - 1} for the tokens of seq_lens, got "
                         f"{min([row.min() for row in read if row.size])} to {max([row.max() for row in read if row.size])}")
    self.table, self.lens, self.used = table, lens, used
    if pool.keeps_newest:
        self.floats_begin = np.zeros((len(pool.rules), lens.shape[0]), np.int32)
    for i in range(lens.shape[0]):
        num_queries = starts[i + 1] - starts[i]
        if num_queries > lens[i]:
            raise ValueError(f"sequence {i} of the batch holds {lens[i]} tokens, and q {num_queries} of them")
    return self


def _without_gaps(table, seq_lens, num_queries, size, window, num_sink_tokens):
    """A table with the last block of each row in place of the blocks before its window."""
    begins = np.arange(table.shape[1], dtype=np.int64) * size
    first = seq_lens.astype(np.int64) - np.maximum(num_queries, 1) + 1 - window
    is_used = (begins + size > first[:, None]) | (begins < max(num_sink_tokens, 0))
    last = np.maximum(seq_lens - 1, 0) // size
    return np.where(is_used, table, np.take_along_axis(table, last[:, None], 1))
