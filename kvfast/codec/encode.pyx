# cython: language_level=3, boundscheck=False, cdivision=True
"""Writes tokens into slots, for every kind of cache. A slot is block * block_size + offset in the block."""
import numpy as np

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from kvfast.codec.blocks cimport KV_TO_STORED, block_at, change_key_basis, changes_basis, kv_layout, piece_of, side_of
from kvfast.codec.dtypes cimport dtype_limit, dtype_name
from kvfast.core.arrays cimport Rows, check_finite, kv_rows, open_rows, zero_unstorable
from kvfast.core.interrupt cimport check_stopped, is_stopped, kv_watch
from kvfast.core.kernels cimport KV_FLOAT32, active, kv_kernels, kv_transform
from kvfast.core.limits cimport KV_MAX_HEAD_DIM, KV_MAX_ROPE_DIM, KV_MAX_ROTATED, KV_PIECE
from kvfast.core.scratch cimport give_scratch, take_scratch
from kvfast.core.threads cimport DYNAMIC, gather, kv_team, run_each
from kvfast.core.wipe cimport kv_wipe

from kvfast.core.interchange import as_array
from kvfast.errors import DimensionMismatchError, NonFiniteInputError

cdef enum:
    RUN = 16             # tokens encoded at once: whole lines of the integer layouts
    NO_MEMORY = 1
    TOKENS_PER_TASK = 64


ctypedef struct kv_write:
    const kv_kernels *kernels
    const kv_layout *layout
    kv_rows k
    kv_rows v
    kv_rotary rotary     # of the keys
    const int64_t *slots       # (tokens,), or NULL to check all tokens
    bint checks                # only check the rows, and write nothing
    bint in_order              # the tokens of a block follow each other, so tasks may be ranges of tokens
    Py_ssize_t first_range     # tokens of the first range, which ends at a border of blocks
    Py_ssize_t range_tokens    # a multiple of block_size
    int *bad                   # set when a value cannot be stored
    kv_watch *watch            # or NULL


cdef bint split_latent(const kv_layout *layout, kv_rows *rows, kv_rows *rope) noexcept nogil:
    """Split latent rows from their rotary part, which may be empty; False for rows of another width."""
    if rows.dim != layout.k.head_dim + layout.v.head_dim:
        return False
    rope[0] = rows[0]
    rows.dim, rope.dim = layout.k.head_dim, layout.v.head_dim
    if rope.data != NULL:
        rope.data += rows.dim * (4 if rows.dtype == KV_FLOAT32 else 2)
    return True


cdef tuple open_tokens(const kv_layout *layout, object k, object v):
    """The Rows of keys and values. Latent rows come whole in `k`, of shape (tokens, latent_dim + rope_dim), and give those of their two
    parts, of which the second may be empty."""
    cdef Rows keys, values
    if not layout.latent:
        if v is None:
            raise TypeError("v must be an array of float32, float16 or bfloat16, got None")
        return open_rows(k, "k"), open_rows(v, "v")
    if v is not None:
        return k, v  # Rows that are split already
    rows = as_array(k, "latent")
    if rows.ndim != 2 or rows.shape[1] != layout.k.head_dim + layout.v.head_dim or len(rows) == 0:
        raise DimensionMismatchError(f"latent must have shape (num_tokens, {layout.k.head_dim} + {layout.v.head_dim}) and at least one "
                                     f"token, got {rows.shape}")
    keys, values = open_rows(rows[:, None], "latent", False, KV_MAX_HEAD_DIM + KV_MAX_ROPE_DIM), Rows.__new__(Rows)
    values.owner = keys  # whose memory it is
    split_latent(layout, &keys.rows, &values.rows)
    return keys, values


cdef bint _is_identity(const kv_rotary *rotary) noexcept nogil:
    return rotary.row.norm == NULL and rotary.row.cos == NULL


cdef void load_rows(const kv_kernels *kernels, const kv_rows *rows, Py_ssize_t token, Py_ssize_t head,
                    Py_ssize_t num_heads, const kv_rotary *rotary, float *out, Py_ssize_t stride) noexcept nogil:
    """Heads of one token as float32, normalised and rotated, `stride` floats apart."""
    cdef const char *source = rows.data + token * rows.token_stride + head * rows.head_stride
    cdef kv_transform transform = rotary.row
    cdef bint identity = _is_identity(rotary)
    cdef Py_ssize_t i, source_stride = rows.head_stride // <Py_ssize_t>sizeof(float)
    if identity or rows.dtype != KV_FLOAT32:
        for i in range(num_heads):
            kernels.to_float[rows.dtype](source + i * rows.head_stride, rows.dim, out + i * stride)
        if identity:
            return
        source, source_stride = <const char *>out, stride
    if transform.cos != NULL:
        i = transform.pairs * (rotary.positions[token] if rotary.positions != NULL else rotary.first + token)
        transform.cos += i
        transform.sin += i
    kernels.transform(<const float *>source, source_stride, num_heads, rows.dim, &transform, out, stride)


cdef void _to_stored(const kv_kernels *kernels, const kv_layout *layout, bint values, Py_ssize_t head, const float *rows,
                     Py_ssize_t stride, Py_ssize_t count, float *out) noexcept nogil:
    """Bring rows of a KV head into the basis in which they are stored, one after the other. `out` may be the rows themselves."""
    cdef Py_ssize_t dim = side_of(layout, values).head_dim
    if values:
        kernels.rotate(rows, stride, count, dim, out, dim)
    else:
        change_key_basis(kernels, layout, head, KV_TO_STORED, rows, stride, count, out, dim)


cdef void _encode(const kv_write *call, const kv_layout *layout, bint values, int32_t block, Py_ssize_t head, Py_ssize_t slot,
                  const float *rows, Py_ssize_t stride, int count) noexcept nogil:
    cdef char *target = block_at(layout, block, head, values)
    if values:
        call.kernels.encode_v(&layout.v, target, <int>slot, rows, stride, count)
    else:
        call.kernels.encode_k(&layout.k, target, <int>slot, rows, stride, count)


cdef void _encode_run(const kv_write *call, const kv_rows *rows, const kv_rotary *rotary, bint values,
                      Py_ssize_t token, int count, Py_ssize_t head, float *buffer) noexcept nogil:
    """Encode `count` tokens with consecutive slots in one block. `buffer` has room for RUN rows."""
    cdef const float *source = buffer
    cdef Py_ssize_t stride = rows.dim
    cdef int32_t block, piece
    cdef Py_ssize_t slot
    cdef int i, size = call.layout.k.block_size
    cdef float limit = _limit(call.layout, values)
    if rows.dtype == KV_FLOAT32 and _is_identity(rotary):
        source = <const float *>(rows.data + token * rows.token_stride + head * rows.head_stride)
        stride = rows.token_stride // <Py_ssize_t>sizeof(float)
    else:
        for i in range(count):
            load_rows(call.kernels, rows, token + i, head, 1, rotary, buffer + i * stride, stride)
    if changes_basis(call.layout, values):
        _to_stored(call.kernels, call.layout, values, head, source, stride, count, buffer)
        source, stride = buffer, rows.dim
    for i in range(count):
        if call.kernels.find_unstorable(source + i * stride, rows.dim, limit) >= 0:
            call.bad[0] = 1
            return
    if call.checks:
        return
    block, slot = <int32_t>(call.slots[token] // size), call.slots[token] % size
    piece = piece_of(call.layout, block, slot) if call.layout.floats != NULL else -1
    if piece >= 0:
        _encode(call, call.layout.floats, values, piece, head, slot % KV_PIECE, source, stride, count)
    if not call.layout.seals:
        _encode(call, call.layout, values, block, head, slot, source, stride, count)


cdef float _limit(const kv_layout *layout, bint values) noexcept nogil:
    """Largest magnitude of an element that can be stored, before and after the rotation."""
    if layout.floats == NULL and changes_basis(layout, values):
        return KV_MAX_ROTATED
    return dtype_limit(side_of(layout if layout.floats == NULL else layout.floats, values).dtype)


cdef void _write_tokens(const kv_write *call, Py_ssize_t first, Py_ssize_t last, Py_ssize_t first_head,
                        Py_ssize_t last_head, float *buffer) noexcept nogil:
    """`buffer` has room for RUN rows."""
    cdef kv_rotary nothing
    cdef Py_ssize_t token = first, head
    cdef int64_t slot
    cdef int count, block_size = call.layout.k.block_size
    memset(&nothing, 0, sizeof(nothing))
    while token < last:
        if is_stopped(call.watch):
            return
        slot, count = 0 if call.slots == NULL else call.slots[token], 1
        if slot < 0:
            token += 1
            continue
        while (count < RUN and token + count < last and (call.slots == NULL or call.slots[token + count] == slot + count)
               and (slot + count) % (block_size if call.layout.floats == NULL else KV_PIECE)):
            count += 1
        for head in range(first_head, last_head):
            _encode_run(call, &call.k, &call.rotary, False, token, count, head, buffer)
            _encode_run(call, &call.v, &nothing, True, token, count, head, buffer)
        token += count
    if call.layout.secure:
        kv_wipe(buffer, RUN * max(call.k.dim, call.v.dim) * sizeof(float))


cdef int _write_task(void *shared, Py_ssize_t index, int thread, kv_watch *watch) noexcept nogil:
    """Write a range of tokens that shares no block with another range; or, if slots are not in order, one head."""
    cdef const kv_write *call = <const kv_write *>shared
    cdef Py_ssize_t border = call.first_range + index * call.range_tokens
    cdef void *buffer
    if not take_scratch(&buffer, 1):
        return NO_MEMORY
    if call.in_order:
        _write_tokens(call, max(<Py_ssize_t>0, border - call.range_tokens), min(border, call.k.tokens), 0, call.k.heads,
                      <float *>buffer)
    else:
        _write_tokens(call, 0, call.k.tokens, index, index + 1, <float *>buffer)
    give_scratch(&buffer, 1)
    return 0


cdef int check_rows(const kv_layout *layout, Rows k, Rows v) except -1:
    """Check that keys and values have the shape of a cache's tokens."""
    _check_shape(layout, k, "k", layout.k.head_dim)
    _check_shape(layout, v, "v", layout.v.head_dim)
    if k.rows.tokens != v.rows.tokens:
        raise DimensionMismatchError(f"k and v must hold the same number of tokens, got {k.rows.tokens} and "
                                     f"{v.rows.tokens}")
    return 0


cdef int check_storable(const kv_layout *layout, Rows k, Rows v, const kv_rotary *rotary, const int64_t *slots) except -1:
    """Refuse rows that `write_rows` would refuse, before anything is written. Without slots, all tokens are checked."""
    return _encode_or_raise(layout, k, v, rotary, slots, True, True, True)


cdef int _refuse(kv_written done, const kv_layout *layout, Rows k, Rows v, const kv_rotary *rotary, const int64_t *slots) except -1:
    """Raise for lack of memory, or for the first value that cannot be stored."""
    cdef const kv_layout *stored
    if done == OUT_OF_MEMORY:
        raise MemoryError("cannot allocate the working memory of appending tokens")
    names = ("the latent part", "the rotary part") if layout.latent else ("k", "v")
    stored = layout if layout.floats == NULL else layout.floats
    check_finite(k, names[0], _limit(layout, False), dtype_name(stored.k.dtype), slots)
    check_finite(v, names[1], _limit(layout, True), dtype_name(stored.v.dtype), slots)
    _refuse_basis(layout, k, names[0], rotary, False, slots)
    _refuse_basis(layout, v, names[1], NULL, True, slots)
    raise NonFiniteInputError(f"{names[0]} or {names[1]} is beyond the range of what is stored")


cdef int _refuse_basis(const kv_layout *layout, Rows given, str name, const kv_rotary *rotary, bint values,
                       const int64_t *slots) except -1:
    """Raise for the first row that is beyond the range in the basis in which it is stored."""
    cdef const kv_kernels *kernels = active()
    cdef const kv_rows *rows = &given.rows
    cdef kv_rotary change
    cdef float[::1] row = np.empty(rows.dim, np.float32)
    cdef Py_ssize_t token, head, index
    memset(&change, 0, sizeof(change))
    if rotary != NULL:
        change = rotary[0]
    for token in range(rows.tokens):
        for head in range(rows.heads if slots == NULL or slots[token] >= 0 else 0):
            load_rows(kernels, rows, token, head, 1, &change, &row[0], rows.dim)
            if changes_basis(layout, values):
                _to_stored(kernels, layout, values, head, &row[0], rows.dim, 1, &row[0])
            index = kernels.find_unstorable(&row[0], rows.dim, _limit(layout, values))
            if index >= 0:
                raise NonFiniteInputError(
                    f"{name} is beyond the range of what is stored (+-{_limit(layout, values):g}): the row at [{token}, {head}] has "
                    f"{row[index]:g} once it is {'normalised and rotated' if rotary != NULL else 'multiplied by a Hadamard matrix'}")
    return 0


cdef tuple storable(const kv_layout *layout, Rows k, Rows v):
    """Keys and values with zeros for rows that cannot be stored."""
    return zero_unstorable(k, _limit(layout, False)), zero_unstorable(v, _limit(layout, True))


cdef int _check_shape(const kv_layout *layout, Rows array, str name, Py_ssize_t dim) except -1:
    if array.rows.heads != layout.num_kv_heads or array.rows.dim != dim:
        swapped = array.rows.tokens == layout.num_kv_heads and array.rows.dim == dim
        raise DimensionMismatchError(f"{name} must have shape (num_tokens, {layout.num_kv_heads}, {dim}), "
                                     f"got ({array.rows.tokens}, {array.rows.heads}, {array.rows.dim})"
                                     + (f": pass {name}.transpose(1, 0, 2)" if swapped else ""))
    return 0


cdef int write_rows(const kv_layout *layout, Rows k, Rows v, const kv_rotary *rotary, const int64_t *slots,
                    bint in_order, bint may_stop) except -1:
    """Encode tokens into their slots, after `check_rows`. A token with slot -1 is left out. With rotary NULL, rows stay as
    they are.

    Raises for a value that cannot be stored, and with `may_stop` for a signal handler that raises. Some slots may then be
    written already: no reader must see them, or the arrays must have been checked before.
    """
    return _encode_or_raise(layout, k, v, rotary, slots, in_order, False, may_stop)


cdef int _encode_or_raise(const kv_layout *layout, Rows k, Rows v, const kv_rotary *rotary, const int64_t *slots, bint in_order,
                          bint checks, bint may_stop) except -1:
    cdef kv_team team
    cdef kv_written done
    gather(&team, None, work_of(&k.rows))
    if not may_stop:
        team.watch = NULL
    with nogil:
        done = encode_rows(layout, &k.rows, &v.rows, rotary, slots, in_order, checks, &team)
    check_stopped(team.watch)
    if done != WRITTEN:
        _refuse(done, layout, k, v, rotary, slots)
    return 0


cdef double work_of(const kv_rows *k) noexcept nogil:
    """Bytes to write, as a measure of work for the number of threads."""
    return <double>k.tokens * k.heads * k.dim * 8


cdef kv_written encode_rows(const kv_layout *layout, const kv_rows *k, const kv_rows *v, const kv_rotary *rotary, const int64_t *slots,
                            bint in_order, bint checks, kv_team *team) noexcept nogil:
    """`write_rows` without the GIL, or with `checks` only what it would find."""
    cdef kv_write call
    cdef int bad = 0
    cdef Py_ssize_t tasks = 1, n = k.tokens
    call.kernels, call.layout = active(), layout
    call.k, call.v = k[0], v[0]
    memset(&call.rotary, 0, sizeof(call.rotary))
    if rotary != NULL:
        call.rotary = rotary[0]
    call.slots, call.checks, call.in_order, call.bad, call.watch = slots, checks, in_order, &bad, team.watch
    if team.threads == 1:
        call.in_order, call.first_range, call.range_tokens = True, n, n
    elif in_order:
        call.range_tokens = max(<Py_ssize_t>TOKENS_PER_TASK, <Py_ssize_t>layout.k.block_size)
        call.first_range = call.range_tokens - (0 if checks else slots[0] % layout.k.block_size)
        tasks = (n - call.first_range + 2 * call.range_tokens - 1) // call.range_tokens if n > call.first_range else 1
    else:
        tasks = k.heads
    if run_each(team, _write_task, &call, tasks, DYNAMIC) & NO_MEMORY:
        return OUT_OF_MEMORY
    return UNSTORABLE if bad else WRITTEN
