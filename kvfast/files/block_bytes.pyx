# cython: language_level=3, boundscheck=False, cdivision=True
"""The bytes of a sequence in the layout of arrays and files: full blocks head by head, the blocks after them, and float rows."""
import numpy as np

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from kvfast.codec.blocks cimport kv_layout, side_of
from kvfast.codec.stored_floats cimport StoredFloats, are_storable
from kvfast.core.kernels cimport kv_side
from kvfast.core.limits cimport KV_SLAB_SHIFT, KV_PIECE
from kvfast.storage.memory.float_rows cimport FloatRows
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.sequences.sequence cimport SequenceStorage
from kvfast.storage.tables.block_table cimport BlockTable
from kvfast.storage.tables.copying cimport clone_table, copy_slots, slots_with_codes
from kvfast.storage.tables.ring_table cimport RingTable


cdef bint keeps_all(BlockTable table) noexcept:
    """Whether the table never evicts tokens."""
    return not isinstance(table, RingTable)


cdef Py_ssize_t num_full_blocks(BlockTable table) noexcept:
    """Number of blocks of the table that are full of codes in all layers."""
    cdef Py_ssize_t slots = table.num_slots()
    if table.pool.seals:
        slots = min(slots, table.length - table.map.skipped * table.pool.block_size)
    return slots // table.pool.block_size


cdef Py_ssize_t _tail_blocks(BlockTable table, Py_ssize_t layer) except -1:
    """Number of blocks after the full ones in which the layer has codes."""
    cdef Py_ssize_t slots = table.life.slots_with_codes(layer)
    return (slots + table.pool.block_size - 1) // table.pool.block_size - num_full_blocks(table)


cdef BlockTable _straight(BlockTable table):
    """The table if its full blocks lie one after the other in memory, else a copy in which they do."""
    cdef Py_ssize_t i
    cdef BlockPool pool = table.pool
    if pool.layers is not None:
        return clone_table(table, pool.exact(table.map.count))
    for i in range(1, num_full_blocks(table)):
        if (table.map.blocks[i] != table.map.blocks[0] + i
                or pool.slab_of[table.map.blocks[i] >> KV_SLAB_SHIFT] != pool.slab_of[table.map.blocks[0] >> KV_SLAB_SHIFT]):
            return clone_table(table, pool.exact(table.map.count))
    return table


cdef BlockTable _tail(BlockTable table):
    """A copy of the blocks after the full ones, with only this sequence's tokens; None if there are none."""
    cdef Py_ssize_t full = num_full_blocks(table), first = full * table.pool.block_size, rest = table.num_slots() - first
    cdef BlockTable other
    if rest == 0:
        return None
    other = BlockTable(table.pool.exact((rest + table.pool.block_size - 1) // table.pool.block_size))
    other.open(other.pool.num_blocks)
    copy_slots(table.pool.layouts, table.map.blocks + full, other.pool.layouts, other.map.blocks, table.pool.num_layers, rest,
               np.asarray(slots_with_codes(table)) - first, True)
    return other


cdef list _floats(BlockTable table, Py_ssize_t layer, bint values, bint copies):
    """The float rows of a layer, piece after piece and head after head, each uint8 of shape (bytes of a piece,).

    They are views; or with `copies`, copies in which all rows are 0 that are not this sequence's, or that it never reads.
    """
    cdef Py_ssize_t position, head, longest = table.longest()
    cdef Py_ssize_t first, last, row_bytes
    cdef FloatRows floats = table.pool.floats
    cdef kv_layout *layout = table.pool.layouts + layer
    cdef Py_ssize_t size = table.pool.block_size
    result = []
    if layout.floats == NULL:
        return result
    cdef Py_ssize_t floats_begin = table.life.begins[layer]
    begin = {index: index * size + kept_codes for index, kept_codes in table.life.patches(layer)
             if index * size < floats_begin}
    for position in table.life.pieces():
        for head in range(floats.pieces.num_kv_heads):
            piece = floats.pieces.bytes_of_head(layer, floats.float_of[table.map.slot(position) // KV_PIECE], 1, head, values)[0]
            if copies:
                piece, row_bytes = piece.copy(), side_of(layout.floats, values).row_stride
                first = max(layout.float_tokens - position, <Py_ssize_t>0)
                last = KV_PIECE
                if layout.open_tokens:
                    last = max(begin.get(position // size, floats_begin) - position, <Py_ssize_t>0)
                piece[first * row_bytes:max(first, last) * row_bytes] = 0
                piece[min(longest - position, KV_PIECE) * row_bytes:] = 0
            result.append(piece)
    return result


def floats_of(SequenceStorage storage, Py_ssize_t layer, bint values, bint in_pieces):
    """The `StoredFloats` of one side of a layer: of its blocks, or of its pieces of float rows."""
    cdef BlockTable table
    cdef Py_ssize_t i
    cdef const kv_layout *layout
    cdef StoredFloats floats = StoredFloats.__new__(StoredFloats)
    table, i = storage.layer_tables[layer]
    layout = table.pool.layouts[i].floats if in_pieces else table.pool.layouts + i
    floats.side, floats.owner = side_of(layout, values), table.pool
    return floats


cdef BlockTable _measured(BlockTable table, Py_ssize_t length, dict state):
    """A table without blocks, which knows how many blocks of each kind it will have; ValueError if `state` is invalid."""
    cdef BlockTable other = table.empty(table.pool)
    other.check_resume_state(length, state)
    other.set_resume_state(length, state)
    other.life.planned = other.life.saved_layers(state)
    return other


cdef int _take_blocks(BlockTable table, Py_ssize_t length, dict state) except -1:
    """Take the blocks of a sequence of `length` tokens, whose bytes are written later; ValueError if `state` is invalid."""
    cdef Py_ssize_t count = table.check_resume_state(length, state), position
    cdef int64_t slot
    cdef BlockPool pool = table.pool
    if pool.grows:
        # A file may claim any window: reserve only what the number of its bytes justifies.
        pool.first_blocks = min(pool.first_blocks, max(4 * count, <Py_ssize_t>8))
    table.open(count)
    table.set_resume_state(length, state)
    table.life.set_codes(table.life.saved_layers(state))
    for position in table.life.pieces():
        slot = table.map.slot(position)
        pool.floats.add(<int32_t>(slot // pool.block_size), position % pool.block_size, position % pool.block_size + KV_PIECE)
    return 0


def places(SequenceStorage storage, Py_ssize_t length, list states):
    """The shapes of `targets`, for `length` tokens; ValueError if `states` are invalid.

    A list with (K, V) of each layer, each (full blocks, blocks after them, bytes of a block, pieces of float rows, bytes of a
    piece).
    """
    cdef BlockTable table
    cdef kv_layout *layout
    cdef Py_ssize_t layer
    if len(states) != len(storage.tables):
        raise ValueError(f"states must describe {len(storage.tables)} block tables, got {len(states)}")
    measured = {table: _measured(table, length, state) for table, state in zip(storage.tables, states)}
    result = []
    for table, layer in storage.layer_tables:
        layout = table.pool.layouts + layer
        table = measured[table]
        blocks = num_full_blocks(table), _tail_blocks(table, layer)
        pieces, k_bytes, v_bytes = 0, 0, 0
        if layout.floats != NULL:
            pieces, k_bytes, v_bytes = len(table.life.pieces()), layout.floats.k.bytes, layout.floats.v.bytes
        result.append(((*blocks, layout.k.bytes, pieces, k_bytes), (*blocks, layout.v.bytes, pieces, v_bytes)))
    return result


def check_rest(SequenceStorage storage, Py_ssize_t skip, Py_ssize_t length, list states, data):
    """Check that contiguous `data` may be the bytes of `rest` for `length` tokens; ValueError if they or `states` are invalid."""
    cdef BlockTable table
    cdef const unsigned char[::1] given = data
    cdef Py_ssize_t layer, at = 0, i, total = 0, blocks, pieces, nbytes, piece_bytes
    cdef const kv_layout *layout
    parts = []
    for (table, layer), pair in zip(storage.layer_tables, places(storage, length, states)):
        skipped = skip if keeps_all(table) else 0
        for i, (full, tails, nbytes, pieces, piece_bytes) in enumerate(pair):
            if skipped > full:
                raise ValueError(f"states must be of a sequence with {skipped} full blocks, got {full}")
            blocks, pieces = table.pool.num_kv_heads * (full - skipped + tails), table.pool.num_kv_heads * pieces
            total += blocks * nbytes + pieces * piece_bytes
            parts.append((table, layer, i, blocks, pieces))
    if given.shape[0] != total:
        raise ValueError(f"they must have {total} bytes, got {given.shape[0]}")
    for table, layer, i, blocks, pieces in parts:
        layout = table.pool.layouts + layer
        for count, side in ((blocks, 0), (pieces, 1)):
            if count:
                at = _check_blocks(layout.floats if side else layout, i, &given[0], at, count)
    return 0


cdef Py_ssize_t _check_blocks(const kv_layout *layout, bint values, const unsigned char *data, Py_ssize_t at,
                              Py_ssize_t count) except -1:
    """Check the floats of `count` blocks from `at` on. Returns where they end."""
    cdef const kv_side *side = side_of(layout, values)
    cdef bint good
    with nogil:
        good = are_storable(side, <const char *>data + at, count)
    if not good:
        raise ValueError("they hold NaN or infinity")
    return at + count * side.bytes


def rest(SequenceStorage storage, Py_ssize_t skip, bint copies):
    """The bytes of a sequence after the first `skip` blocks of those layers that keep all tokens, as contiguous uint8 arrays.

    Layer after layer; in it keys and values; in them the full blocks head after head, then the blocks after them, block after block
    and head after head, then the pieces of float rows likewise. With `copies` as for `arrays`, with zeros after the last token, for
    reading. Otherwise they are where to write, after `reopen`.
    """
    cdef BlockTable table, tail
    cdef Py_ssize_t layer, full, first, i
    tails = {table: _tail(table) for table in storage.tables} if copies else {}
    result = []
    for table, layer in storage.layer_tables:
        full, tail = num_full_blocks(table), tails.get(table, table)
        first = 0 if copies else full
        heads = range(table.pool.num_kv_heads)
        for values in (False, True):
            for head in heads:
                result += [table.pool.bytes_of_head(layer, table.map.blocks[i], 1, head, values)[0]
                           for i in range(skip if keeps_all(table) else 0, full)]
            result += [tail.pool.bytes_of_head(layer, tail.map.blocks[first + i], 1, head, values)[0]
                       for i in range(_tail_blocks(table, layer)) for head in heads]
            result += _floats(table, layer, values, copies)
    return result


def copy_rows(list rows, data, bint write):
    """Copy between contiguous arrays, one after another in `data`, and `rows`: to them if `write`, else from them."""
    cdef Py_ssize_t count = len(rows), total = 0, i
    cdef Py_buffer one, whole
    cdef char **where = <char **>malloc((count + 1) * sizeof(char *))
    cdef Py_ssize_t *sizes = <Py_ssize_t *>malloc((count + 1) * sizeof(Py_ssize_t))
    cdef char *at
    try:
        if where == NULL or sizes == NULL:
            raise MemoryError(f"cannot allocate a list of {count:,} rows")
        for i in range(count):
            PyObject_GetBuffer(rows[i], &one, PyBUF_WRITABLE if write else PyBUF_SIMPLE)
            where[i], sizes[i] = <char *>one.buf, one.len
            total += one.len
            PyBuffer_Release(&one)  # the list keeps it
        PyObject_GetBuffer(data, &whole, PyBUF_SIMPLE if write else PyBUF_WRITABLE)
        try:
            if whole.len != total:
                raise ValueError(f"data must have the {total} bytes of the rows, got {whole.len}")
            at = <char *>whole.buf
            with nogil:  # new pages cost more than the copy
                for i in range(count):
                    memcpy(where[i] if write else at, at if write else where[i], sizes[i])
                    at += sizes[i]
        finally:
            PyBuffer_Release(&whole)
    finally:
        free(where)
        free(sizes)


def reopen(SequenceStorage storage, Py_ssize_t length, list states, memory=None, offsets=None, Py_ssize_t reserve=0):
    """After `places`: turn the storage into a sequence of `length` complete tokens. Their bytes are then written to `targets`.

    If the full blocks lie in `memory` already, `offsets` says where; see `BlockPool.map`. Blocks for `reserve` tokens are
    reserved at once.
    """
    cdef BlockTable table
    cdef Py_ssize_t full, size
    for table, state in zip(storage.tables, states):
        full, size = num_full_blocks(_measured(table, length, state)), table.pool.block_size
        if memory is not None and full:
            table.pool.map(memory, full, [offsets[i] for i in range(storage.num_layers) if storage.layer_tables[i][0] is table])
        _take_blocks(table, length, state)
        table.pool.ensure(max(<Py_ssize_t>0, (reserve + size - 1) // size - table.map.count))


def targets(SequenceStorage storage):
    """Where to write the bytes of a sequence after `reopen`: a list with (K, V) of each layer, each three lists.

    These are the full blocks of each head, uint8 of shape (num_blocks, bytes of a block); the blocks after them, block after block
    and head after head, uint8 of shape (bytes,); and the pieces of float rows, in the same order and form.
    """
    return _targets(storage, {table: (table, table, num_full_blocks(table)) for table in storage.tables}, False)


def arrays(SequenceStorage storage):
    """The bytes of all tokens, in the form of `targets`. Contiguous full blocks are views, valid as long as the storage lives;
    all else is copied. There are zeros after the last token."""
    storage.enter_reading()
    try:
        return _targets(storage, {table: (_straight(table), _tail(table), 0) for table in storage.tables}, True)
    finally:
        storage.pool.leave_reading()


cdef list _targets(SequenceStorage storage, dict sources, bint copies):
    """`targets` for tables given as (table of the full blocks, table of the blocks after them from its block `first` on, first)."""
    cdef BlockTable table, source, tail
    cdef Py_ssize_t layer, full, first, behind, i
    result = []
    for table, layer in storage.layer_tables:
        source, tail, first = sources[table]
        full, behind = num_full_blocks(source), _tail_blocks(table, layer)
        heads, pair = range(source.pool.num_kv_heads), []
        for values in (False, True):
            whole = [source.pool.bytes_of_head(layer, source.map.blocks[0] if full else 0, full, head, values) for head in heads]
            rests = [tail.pool.bytes_of_head(layer, tail.map.blocks[first + i], 1, head, values)[0]
                     for i in range(behind) for head in heads]
            pair.append((whole, rests, _floats(table, layer, values, copies)))
        result.append(tuple(pair))
    return result
