# cython: language_level=3, boundscheck=False, cdivision=True
"""Keeps one branch of a tree of drafts: its tokens follow directly on those before the tree, and all others are dropped."""
import numpy as np

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from kvfast.codec.blocks cimport block_at, kv_layout, piece_of, side_of
from kvfast.core.checks cimport check_integers
from kvfast.core.kernels cimport active, kv_kernels, kv_side
from kvfast.core.limits cimport KV_PIECE
from kvfast.storage.sequences.segments cimport Segment
from kvfast.storage.sequences.sequence cimport SequenceStorage
from kvfast.storage.tables.block_table cimport BlockTable

from kvfast.core.interchange import as_array


def keep_branch(SequenceStorage storage, n, keep, begin=None, str moved=None):
    """Keep the first `n` tokens, and the later ones that `keep` numbers from `n` on, counted or not.

    `begin` is called after the last step that can fail, with the first position whose token changes and the old positions of the
    complete tokens that come there. `moved` says why rows cannot move, if they cannot.
    """
    cdef int64_t[::1] rows = _integers(keep)
    cdef BlockTable table
    cdef Py_ssize_t first, last, stay = 0, complete
    cdef list opened = [], one, _old = storage.segments  # which are released after the end of the call
    storage._enter()
    try:
        first = storage.checked_length(n)
        _check_numbers(storage, first, rows)
        last = first + rows.shape[0]
        while stay < rows.shape[0] and rows[stay] == stay:
            stay += 1
        complete = first + int(np.searchsorted(rows, storage.length - first))
        positions = np.asarray(rows)[stay:] + first
        rows, first = positions - storage.base, first + stay
        for table in storage.tables:
            if first < last:
                _check_moves(storage, table, first, complete, moved)
            else:
                table.check_truncate(last)
        checkpoints = storage.checkpoints
        if checkpoints is not None:
            checkpoints = checkpoints.upto(min(first, complete))  # no state comes after tokens that moved
            checkpoints.check_truncate(complete, max(storage.length, complete + (first < complete)))
        try:
            for table in storage.tables if first < last else ():
                one = [table, None, table.map.count]
                opened.append(one)
                one[1] = table.open_range(-1, first - storage.base, last - storage.base)  # so that no step comes after it that can fail
            if begin is not None:
                begin(first, positions[:max(complete - first, 0)].tolist())
        except BaseException:
            for table, changes, count in opened:
                if changes is not None:
                    table.undo_changes(changes, count)
            raise
        try:
            for table, changes, _ in opened:
                _move(table, first - storage.base, rows)
                table.keep_changes(changes)
        except BaseException:
            storage.keep(min(first, complete))  # no memory to seal a block
            raise
        storage.keep(last)
        storage.checkpoints = checkpoints
        for table in storage.tables if complete < last else ():
            table.length = complete - storage.base
        storage._trim_surplus()
    finally:
        storage.pool.leave()


cdef object _integers(keep):
    given = as_array(keep, "keep")
    return np.empty(0, np.int64) if given.shape == (0,) else check_integers(given, "keep", np.int64, 1)


cdef int _check_numbers(SequenceStorage storage, Py_ssize_t n, const int64_t[::1] rows) except -1:
    """Check that numbers of tokens rise from 0 on, and that every layer has these tokens."""
    cdef Py_ssize_t i, layer, held
    for i in range(rows.shape[0]):
        if rows[i] < 0 or i and rows[i] <= rows[i - 1]:
            raise ValueError(f"keep must rise, from 0 for the token at position n={n}, got {rows[i]} at {i}")
    for layer in range(storage.num_layers if rows.shape[0] else 0):
        held = storage.layer_length(layer) - n
        if rows[rows.shape[0] - 1] >= held:
            raise ValueError(f"keep must be below the {held} tokens that layer {layer} holds from position n={n} on, "
                             f"got {rows[rows.shape[0] - 1]}")
    return 0


cdef int _check_moves(SequenceStorage storage, BlockTable table, Py_ssize_t first, Py_ssize_t complete, str moved) except -1:
    """Raise if other tokens cannot come to the positions from `first` on and be what they were. `complete` is the new length."""
    cdef Py_ssize_t layer, size = table.pool.block_size
    cdef const kv_layout *layout
    again = f"call truncate({first}), and append the tokens after it again"
    if moved is not None:
        raise ValueError(f"keep cannot move tokens: {moved}; {again}")
    if storage.segments is not None and first < (<Segment>storage.segments[-1]).end():
        raise ValueError(f"keep cannot move a token to position {first}, among the {(<Segment>storage.segments[-1]).end()} tokens that "
                         f"were spliced or shifted: {again}")
    table.check_truncate(max(first, 1))
    first, complete = first - storage.base, complete - storage.base
    # The codes of a sealed block are those of all of its tokens together, so a token without its float row cannot move, nor can one
    # come into a block that stays sealed.
    if table.pool.seals and (first < table.life.cut_end or first < complete // size * size):
        raise ValueError(f"keep cannot move a token to position {first + storage.base}, whose block of {size} tokens is sealed: call "
                         f"truncate(n, keep=...) before advance; or {again}")
    for layer in range(table.pool.num_layers):
        layout = table.pool.layouts + layer
        if layout.open_tokens and first < table.life.begins[layer]:
            raise ValueError(f"keep cannot move a token to position {first + storage.base}, which layer {layer} reads as codes: call "
                             f"truncate(n, keep=...) before advance; or {again}")
        if layout.open_tokens == 0 and first < layout.float_tokens:  # beyond its piece, a token has no float row to take along
            raise ValueError(f"keep cannot move a token to position {first + storage.base}, as layer {layer} keeps the first "
                             f"{layout.float_tokens} tokens as floats: {again}")
    return 0


cdef int _move(BlockTable table, Py_ssize_t first, const int64_t[::1] rows) except -1:
    """Move the tokens at the positions `rows` of a table, which rise, to those from `first` on, whose blocks are writable."""
    cdef const kv_kernels *kernels = active()
    cdef Py_ssize_t i, layer
    cdef int64_t source, target
    for i in range(rows.shape[0]):
        source, target = table.map.slot(rows[i]), table.map.slot(first + i)
        with nogil:
            for layer in range(table.pool.num_layers):
                _move_token(kernels, table.pool.layouts + layer, source, target)
    for layer in range(table.pool.num_layers):
        table.life.seal(layer, first, first + rows.shape[0])
    return 0


cdef void _move_token(const kv_kernels *kernels, const kv_layout *layout, int64_t source, int64_t target) noexcept nogil:
    """Copy the codes and the float rows of a token, as far as it has them, from slot to slot."""
    cdef int size = layout.k.block_size, from_offset = <int>(source % size), offset = <int>(target % size)
    cdef int32_t from_block = <int32_t>(source // size), block = <int32_t>(target // size), piece, from_piece
    if not layout.seals:
        _move_rows(kernels, layout, from_block, from_offset, block, offset)
    piece = -1 if layout.floats == NULL else piece_of(layout, block, offset)
    if piece >= 0:
        from_piece = piece_of(layout, from_block, from_offset)
        _move_rows(kernels, layout.floats, from_piece, from_offset % KV_PIECE, piece, offset % KV_PIECE)


cdef void _move_rows(const kv_kernels *kernels, const kv_layout *layout, int32_t from_block, int from_offset, int32_t block,
                     int offset) noexcept nogil:
    """Copy the rows of a token in all heads; or with block -1, zero them: nobody reads them, but what a dropped token had there must
    go."""
    cdef const kv_side *side
    cdef Py_ssize_t head
    cdef bint values
    for head in range(layout.num_kv_heads):
        for values in range(2):
            side = side_of(layout, values)
            if from_block < 0:
                memset(block_at(layout, block, head, values) + offset * side.row_stride, 0, side.row_stride)
            else:
                kernels.copy_token(side, block_at(layout, from_block, head, values), from_offset,
                                   side, block_at(layout, block, head, values), offset, values)
