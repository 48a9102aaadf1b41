# cython: language_level=3, boundscheck=False, cdivision=True
"""The tokens that were chosen for each query: checked, and those that it sees in ascending order."""
import numpy as np

from libc.stdint cimport int64_t
from libc.string cimport memset

from kvfast.attention.cuts cimport choose_tile, panels_of_chosen
from kvfast.attention.tasks cimport KV_CODES, KV_DECODED_KEYS, KV_NUM_KINDS, KV_OWN_FLOATS, kv_call, kv_gathered, kv_given, kv_query
from kvfast.codec.blocks cimport init_side, kv_layout
from kvfast.core.checks cimport check_integers
from kvfast.core.kernels cimport KV_FLOAT32, kv_side
from kvfast.core.limits cimport KV_LANES, KV_MATRIX_TILE

from kvfast.core.interchange import as_array
from kvfast.errors import DimensionMismatchError

cdef int _LANE_SHIFT = <int>((<object>KV_LANES).bit_length() - 1)


cdef class Chosen:
    cdef Py_ssize_t most_of(self, Py_ssize_t query) noexcept nogil:
        """The number of tokens of a query, in the KV head that has most."""
        cdef Py_ssize_t most = 0, head
        for head in range(self.c.heads):
            most = max(most, self.counts[query, head])
        return most

    cdef bint split(self, Py_ssize_t query, Py_ssize_t row, Py_ssize_t end, Py_ssize_t base) noexcept nogil:
        """Give `row` those tokens before position `end` that a query still has, with positions from `base` on; False if there are none.
        """
        cdef Py_ssize_t head, count, first
        cdef bint some = False
        for head in range(self.c.heads):
            first, count = self.firsts[query, head], 0
            while count < self.counts[query, head] and self.positions[first + count] < end:
                self.positions[first + count] -= base
                count += 1
            self.firsts[query, head] += count
            self.counts[query, head] -= count
            self.firsts[row, head], self.counts[row, head] = first, count
            some = some or count > 0
        return some


cdef Chosen open_chosen(object given, Py_ssize_t run, const kv_call *call, Py_ssize_t num_queries):
    """Check what was chosen for queries that know what they see. `run`: each position stands for `run` tokens from it on."""
    cdef Chosen self = Chosen.__new__(Chosen)
    cdef const kv_layout *layout = (<const kv_given *>call.given).layout
    cdef const int64_t[:, :, ::1] view
    cdef Py_ssize_t i, head
    array = as_array(given, "chosen")
    shape = array.shape
    if array.ndim == 2:
        array = array[:, None]
    if array.ndim != 3 or array.shape[0] != num_queries or array.shape[1] not in (1, layout.num_kv_heads) or array.shape[2] == 0:
        raise DimensionMismatchError(f"chosen must have shape ({num_queries}, k), or ({num_queries}, {layout.num_kv_heads}, k) with a "
                                     f"choice for each KV head, got {shape}")
    array = check_integers(array, "chosen", np.int64, 3)
    array.sort(axis=2)
    view = array
    self.c.heads = array.shape[1]
    self.positions = np.empty(array.size * run, np.int64)
    self.firsts, self.counts = np.zeros((2, call.num_queries, self.c.heads), np.int64)
    self.c.positions, self.c.firsts, self.c.counts = &self.positions[0], &self.firsts[0, 0], &self.counts[0, 0]
    for i in range(num_queries):
        for head in range(self.c.heads):
            self.firsts[i, head] = (i * self.c.heads + head) * array.shape[2] * run
            _take(self, call.queries + i, head, view[i, head], run)
    _gather_as(&self.c.kinds[KV_CODES], call, layout, layout.k.dtype, False)
    if layout.k.means:
        _gather_as(&self.c.kinds[KV_DECODED_KEYS], call, layout, KV_FLOAT32, False)
    if layout.floats != NULL:
        _gather_as(&self.c.kinds[KV_OWN_FLOATS], call, layout.floats, layout.floats.k.dtype, True)
    for i in range(KV_NUM_KINDS):
        self.c.room_bytes = max(self.c.room_bytes, self.c.kinds[i].tile // KV_LANES
                                * (self.c.kinds[i].layout.k.bytes + self.c.kinds[i].layout.v.bytes))
    return self


cdef int _take(Chosen self, const kv_query *query, Py_ssize_t head, const int64_t[::1] chosen, Py_ssize_t run) except -1:
    """Take what a query sees of its choice, which is sorted, in a KV head."""
    cdef int64_t *positions = &self.positions[self.firsts[query.token, head]]
    cdef Py_ssize_t count = 0, before, i
    cdef int64_t position, first
    for i in range(chosen.shape[0]):
        first, before = chosen[i], count
        if first == -1:
            continue
        if first < -1 or first % run:
            multiples = f"multiples of {run}" if run > 1 else "positions"
            raise ValueError(f"chosen must hold -1 or {multiples}, got {first} for {_name(self, query, head)}")
        if i and chosen[i - 1] == first:
            raise ValueError(f"chosen must not hold a position twice, got {first} for {_name(self, query, head)}")
        for position in range(first, first + min(run, query.stop - first)):
            if position >= query.start or position < query.sink_stop:
                positions[count] = position
                count += 1
        if count == before:
            sinks = f", and those before {query.sink_stop}" if query.sink_stop else ""
            raise ValueError(f"chosen holds {first} for {_name(self, query, head)}, which sees the positions {query.start} to "
                             f"{query.stop - 1}{sinks}")
    if count == 0:
        raise ValueError(f"chosen must hold a position for each query, got none for {_name(self, query, head)}")
    self.counts[query.token, head] = count
    return 0


cdef object _name(Chosen self, const kv_query *query, Py_ssize_t head):
    return f"query {query.token}" + (f" in KV head {head}" if self.c.heads > 1 else "")


cdef int _gather_as(kv_gathered *gathered, const kv_call *call, const kv_layout *layout, int k_dtype, bint few_rows) except -1:
    """Blocks of KV_LANES tokens of a layout, with keys of a dtype."""
    gathered.layout = layout[0]
    _resize(&gathered.layout.k, &layout.k, k_dtype)
    _resize(&gathered.layout.v, &layout.v, layout.v.dtype)
    gathered.tile = KV_MATRIX_TILE if panels_of_chosen(call) else choose_tile(&gathered.layout, call.kernels, few_rows)
    memset(&gathered.slab, 0, sizeof(gathered.slab))
    gathered.slab.k_block_stride, gathered.slab.v_block_stride = gathered.layout.k.bytes, gathered.layout.v.bytes
    gathered.slab.v = gathered.tile // KV_LANES * gathered.layout.k.bytes
    gathered.layout.slabs, gathered.layout.slab_of, gathered.layout.block_shift = &gathered.slab, NULL, _LANE_SHIFT
    return 0


cdef int _resize(kv_side *side, const kv_side *given, int dtype) except -1:
    """A side like another, of KV_LANES tokens."""
    init_side(side, dtype, given.head_dim, KV_LANES, given.means and dtype == given.dtype, given.channels and dtype == given.dtype)
    side.rotated, side.in_basis, side.gaussian, side.as_keys = given.rotated, given.in_basis, given.gaussian, given.as_keys
    side.clip_search = given.clip_search
    return 0
