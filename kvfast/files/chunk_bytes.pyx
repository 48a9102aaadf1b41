# cython: language_level=3, boundscheck=False, cdivision=True
"""The bytes of shared prefixes, outside of a sequence's own file.

A chunk is a run of full blocks of the layers that keep all tokens: the same bytes in every sequence that has the same tokens up
to its end. The rest of a sequence is in `block_bytes.rest_layout` and `block_bytes.rest`.
"""

from libc.stdint cimport int32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from kvfast.codec.blocks cimport block_at, kv_layout, side_of
from kvfast.codec.stored_floats cimport are_storable
from kvfast.core.limits cimport KV_PIECE
from kvfast.files.block_bytes cimport keeps_all, num_full_blocks
from kvfast.storage.sequences.sequence cimport SequenceStorage
from kvfast.storage.tables.block_table cimport BlockTable

from kvfast.errors import CorruptFileError


ctypedef struct kv_layer:
    const kv_layout *layout
    const int32_t *blocks
    Py_ssize_t num_kv_heads


cdef list _tables(SequenceStorage storage):
    return [table for table in storage.tables if keeps_all(table)]


def keeps_everything(SequenceStorage storage):
    """Whether no layer evicts tokens."""
    return len(_tables(storage)) == len(storage.tables)


def count_chunk_blocks(SequenceStorage storage):
    """Number of first blocks that may be in chunks: full, and with codes that follow from the tokens alone."""
    cdef BlockTable table
    cdef Py_ssize_t count = storage.length // storage.block_size, i
    storage.check_plain()
    storage.enter_reading()
    try:
        for table in _tables(storage):
            count = min(count, num_full_blocks(table))
            for i in range(count if table.pool.seals else 0):
                if table.knowable_block(i) < 0:
                    count = i
                    break
    finally:
        storage.pool.leave_reading()
    return count


def chunk_nbytes(SequenceStorage storage, Py_ssize_t num_blocks):
    """Bytes of `num_blocks` blocks in a chunk, without float rows; 0 if no layer keeps all tokens."""
    return sum([(<BlockTable>table).pool.block_bytes for table in _tables(storage)]) * num_blocks


def copy_blocks(SequenceStorage storage, Py_ssize_t first, Py_ssize_t last, data, bint write, Py_ssize_t start=0):
    """Read the blocks first to last of a chunk into `data`, or write those of them from `start` on.

    `data` are chunk_nbytes(last - first) bytes: layer after layer; in it keys and values, in them head after head, in them block
    after block. Other threads may copy other blocks of the storage at the same time. Nothing else may change it.
    """
    cdef const unsigned char[::1] source
    cdef unsigned char[::1] target
    cdef Py_ssize_t expected = chunk_nbytes(storage, last - first), num_layers = 0, i
    cdef BlockTable table
    cdef kv_layer *layers
    cdef char *at = NULL
    if write:
        source = data
        at = <char *>&source[0] if source.shape[0] else NULL
    else:
        target = data
        at = <char *>&target[0] if target.shape[0] else NULL
    found = source.shape[0] if write else target.shape[0]
    if found != expected:
        raise ValueError(f"the blocks of a chunk must have {expected} bytes, got {found}")
    layers = <kv_layer *>malloc(max(storage.num_layers, <Py_ssize_t>1) * sizeof(kv_layer))
    if layers == NULL:
        raise MemoryError("cannot allocate the list of the layers of a chunk")
    try:
        for table, layer in storage.layer_tables:
            if not keeps_all(table):
                continue
            if not 0 <= first <= last <= table.map.count:
                raise ValueError(f"the blocks of a chunk must be among the {table.map.count} of the sequence, got {first} to {last}")
            layers[num_layers].layout, layers[num_layers].blocks = table.pool.layouts + <Py_ssize_t>layer, table.map.blocks
            layers[num_layers].num_kv_heads = table.pool.num_kv_heads
            num_layers += 1
        with nogil:  # once for all layers: threads that take the GIL in turns wait for each other
            for i in range(num_layers):
                at = _copy_layer(layers + i, first, last, at, write, start)
    finally:
        free(layers)


cdef char *_copy_layer(const kv_layer *layer, Py_ssize_t first, Py_ssize_t last, char *at, bint write, Py_ssize_t start) noexcept nogil:
    cdef Py_ssize_t head, i, nbytes
    cdef char *block
    cdef int values
    for values in range(2):
        nbytes = side_of(layer.layout, values).bytes
        for head in range(layer.num_kv_heads):
            for i in range(first, last):
                block = block_at(layer.layout, layer.blocks[i], head, values)
                if not write:
                    memcpy(at, block, nbytes)
                elif i >= start:
                    memcpy(block, at, nbytes)
                at += nbytes
    return at


def check_floats(SequenceStorage storage, Py_ssize_t num_blocks, data):
    """Check the floats in the payload of a chunk: its blocks, and the float rows of the first tokens, if it has them."""
    cdef const unsigned char[::1] source = data
    cdef const char *at = <const char *>&source[0]
    cdef const char *end = at + source.shape[0]
    cdef BlockTable table
    cdef Py_ssize_t layer
    cdef kv_layout *layout
    cdef bint good = True
    for table, layer in storage.layer_tables:
        layout = table.pool.layouts + layer
        if keeps_all(table) and good:
            good = _check_layer(layout, num_blocks * layout.num_kv_heads, &at)
    for table, layer in storage.layer_tables if at < end else ():
        layout = table.pool.layouts + layer
        if keeps_all(table) and table.pool.has_sinks and layout.floats != NULL and good:
            good = _check_layer(layout.floats, layout.num_kv_heads, &at)
    if not good:
        raise CorruptFileError("it holds NaN or infinity")


cdef bint _check_layer(const kv_layout *layout, Py_ssize_t count, const char **at) noexcept:
    """Check `count` blocks of keys, and as many of values after them. Sets `at` to their end."""
    cdef bint good
    with nogil:
        good = are_storable(&layout.k, at[0], count) and are_storable(&layout.v, at[0] + count * layout.k.bytes, count)
    at[0] += count * (layout.k.bytes + layout.v.bytes)
    return good


def first_float_rows(SequenceStorage storage, bint copies):
    """The float rows that a sequence keeps of its first tokens; see `FloatRows.first_rows`. Only of layers that keep all tokens."""
    cdef BlockTable table
    result = []
    for table, layer in storage.layer_tables:
        if keeps_all(table) and table.pool.has_sinks:
            result += table.pool.floats.first_rows(table.map.blocks[0], layer, copies)
    return result


def first_floats_nbytes(SequenceStorage storage):
    """Bytes of `first_float_rows`."""
    cdef BlockTable table
    total = 0
    for table in storage.tables:
        if keeps_all(table) and table.pool.has_sinks:
            total += table.pool.floats.first_nbytes()
    return total


def extend(SequenceStorage storage, Py_ssize_t length):
    """Let a sequence go on to `length` tokens, in full blocks whose bytes are written later.

    All of its layers keep all tokens, and all of its tokens are in full blocks with codes. After CacheFullError or MemoryError, the
    sequence is as it was.
    """
    storage.check_plain()
    storage.alone(lambda: _extend(storage, length))


cdef int _extend(SequenceStorage storage, Py_ssize_t length) except -1:
    cdef BlockTable table
    cdef Py_ssize_t size = storage.block_size, count = length // size
    for table in storage.tables:
        if (table.length % size or length % size or length < table.length
                or table.pool.keeps_newest and table.life.floats_begin < table.length):
            raise ValueError(f"a sequence of {table.length} tokens cannot go on in full blocks up to {length}")
    for table in storage.tables:
        table.map.reserve_blocks(length)
        table.ensure(count - table.map.count)
        if table.pool.has_sinks and table.map.count == 0 and count:
            table.pool.floats.pieces.ensure(1)
    for table in storage.tables:
        if table.pool.keeps_newest:
            table.life.raise_to(length)
        begins = table.map.count == 0 and count > 0
        table.map.extend(count)
        if begins and table.pool.has_sinks:
            table.pool.floats.add(table.map.blocks[0], 0, KV_PIECE)
        table.set_length(length)
    return 0
