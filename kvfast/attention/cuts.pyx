# cython: language_level=3, boundscheck=False, cdivision=True
"""How work is cut: the tokens of a tile, those between two softmax corrections, the tokens of a split, and the query rows of a task.

Splits depend on positions alone: a query gives the same bits alone, with others and in a batch, for every number of threads. A task
reads a run of splits, whose length depends on the threads and on the number of queries.
"""
from kvfast.attention.families cimport NO_PACKED_PANELS, NO_PANELS, panels_of
from kvfast.attention.tasks cimport kv_add_tasks, kv_cut_context, kv_given, kv_keys, kv_partial_size
from kvfast.codec.blocks cimport kv_layout, values_of
from kvfast.core.kernels cimport (INVARIANT, KV_FLOAT_ROWS, KV_INT2, KV_INT3, KV_PACKED_CODES, KV_PANELS_OF_ROWS, kv_dtypes, kv_kernels,
                                  kv_side, resolved)
from kvfast.core.limits cimport KV_FEW_QUERIES, KV_LANES, KV_MATRIX_PANELS, KV_MAX_PANELS, KV_ROWS, KV_TILE

cdef extern from "simd/platform.h" nogil:
    enum: KV_X86

cdef enum:
    # Most bytes of float rows in a tile. Larger tiles have fewer softmax corrections and fewer turns between keys and values.
    # python -m kvfast bench --work decode,cached --formats all sets this and the sizes below.
    FLOAT_TILE_BYTES = 32768
    # Most bytes of float rows in a tile next to codes, and on processors other than x86.
    FEW_ROWS_BYTES = 4096
    # Most bytes of codes in a tile. Between the passes of a tile nothing is fetched, and rows wait for their maxima.
    CODE_TILE_BYTES = 32768
    # Most tokens of a tile where a side is expanded before it is read (more was not measured), and where values are not rotated: the
    # weights of a tile are rounded to a unit that the largest of them sets, and unrotated values may show it.
    SHORT_TILE = 128
    # More tasks than this in one item of many queries do not balance better.
    ENOUGH_TASKS = 64
    # Most numbers (float32) in the partial results of an item of many queries, where a task does not take all splits.
    MOST_PARTIALS = 1 << 24
    # More tokens in one float32 sum could be off by more than a third of the contract's bound where all of them are alike, so that each
    # addition rounds the same way (tests/attention/test_precision.py).
    MOST_SPLIT_TOKENS = 32768
    # Tokens of context from which a matrix unit and words pay for their operands. This and the rows below are set by
    # python -m kvfast bench --work prefill --tokens N, with N from 16 to 128.
    LEAST_WIDE_CONTEXT = 200
    # Query rows from which a matrix unit is faster than vectors, and words than floats.
    LEAST_MATRIX_ROWS = 24
    LEAST_WORD_ROWS = 28
    # The time of a panel of words, in half rows of codes in vectors.
    HALF_ROWS_OF_PANEL = 25
    # Panels that take as long as making the operands of a tile.
    OPERANDS = 1
    LATENT_OPERANDS = 4
    # Row blocks of a thread; more do not balance better.
    ENOUGH_ROUNDS = 16
    # Tasks of a thread that reads splits for a few queries: at least ROUNDS, as threads must end together, and up to MANY_ROUNDS as
    # long as each reads LONG_RUN splits, as each begins without a fetch (python -m kvfast bench --work decode).
    ROUNDS = 4
    MANY_ROUNDS = 16
    LONG_RUN = 4
    # Panels of query rows of latents that share a tile's operands.
    LATENT_PANELS = 8


cdef Py_ssize_t work_of(const kv_layout *layout, Py_ssize_t tokens) noexcept nogil:
    """The work of reading `tokens` tokens, in bytes. A narrower code takes as long as a byte."""
    return layout.num_kv_heads * tokens * (max(token_bytes(&layout.k), <Py_ssize_t>layout.k.padded_dim)
                                           + max(token_bytes(&layout.v), <Py_ssize_t>layout.v.padded_dim))


cdef int _limit_tile(int tile, const kv_side *side, Py_ssize_t most_bytes) noexcept nogil:
    """`most_bytes` of float rows."""
    if side.family == KV_PACKED_CODES and side.dtype != KV_INT2 and side.dtype != KV_INT3:
        return min(tile, SHORT_TILE)
    if side.family != KV_FLOAT_ROWS:
        most_bytes = CODE_TILE_BYTES
    while tile > KV_LANES and tile * side.padded_dim * kv_dtypes[side.dtype].bits // 8 > most_bytes:
        tile //= 2
    return tile


cdef int choose_tile(const kv_layout *layout, const kv_kernels *kernels, bint few_rows) noexcept nogil:
    """Tokens of a tile; with `few_rows`, of float rows next to codes. It does not depend on the block size, so that every cache gives
    the same bits, nor that of codes on the processor or the number of queries."""
    cdef const kv_side *values = values_of(layout)
    cdef bint floats = layout.k.family == KV_FLOAT_ROWS or values.family == KV_FLOAT_ROWS
    cdef bint short = (floats and (not KV_X86 or kernels.has_matrix)) or (values.family != KV_FLOAT_ROWS and not values.rotated)
    cdef int tile = SHORT_TILE if short else KV_TILE
    cdef Py_ssize_t most_bytes = FLOAT_TILE_BYTES if KV_X86 and not few_rows else FEW_ROWS_BYTES
    if layout.latent and not floats:  # many query heads share a tile
        return SHORT_TILE
    return _limit_tile(_limit_tile(tile, &layout.k, most_bytes), &layout.v, most_bytes)


cdef void cut_context(const kv_call *call, kv_item *item, Py_ssize_t end) noexcept nogil:
    """Cut what an item reads, up to `end`, into splits.

    They lie at the same positions for every length of the context and any number of queries. So a query's result has the same bits
    whether it comes alone or with others, as when drafted tokens are verified, or a prompt is computed in chunks.
    """
    cdef const kv_given *given = <const kv_given *>call.given
    cdef Py_ssize_t length = end if given.chosen != NULL else max((<const kv_keys *>item.keys).context.length, end)
    item.split_tokens = split_tokens_of(given.layout)
    if given.request.options.num_splits:
        item.split_tokens = _whole_tiles(length, given.request.options.num_splits)
    item.least_run = <int>((item.split_tokens + MOST_SPLIT_TOKENS - 1) // MOST_SPLIT_TOKENS)
    item.split_tokens = min(item.split_tokens, <Py_ssize_t>MOST_SPLIT_TOKENS)
    kv_cut_context(item, end)


cdef inline Py_ssize_t _whole_tiles(Py_ssize_t tokens, Py_ssize_t splits) noexcept nogil:
    return ((tokens + splits - 1) // splits + KV_TILE - 1) // KV_TILE * KV_TILE


cdef bint takes_whole(const kv_call *call, const kv_item *item) noexcept nogil:
    """Whether each task of an item of many queries takes all of its splits, as its heads and rows are enough for the threads. A thread
    then folds the partial results of its rows as it computes them. So their memory has a bound: others have fewer than ENOUGH_TASKS x
    KV_ROWS rows, of latents LATENT_PANELS times as many, and at most MOST_PARTIALS numbers."""
    cdef const kv_given *given = <const kv_given *>call.given
    cdef Py_ssize_t units = given.layout.num_kv_heads * ((item.num_queries * call.group + KV_ROWS - 1) // KV_ROWS)
    cdef Py_ssize_t partials = units * KV_ROWS * item.splits * kv_partial_size(call.values)
    if given.layout.latent:
        units //= LATENT_PANELS
    return (item.num_queries > KV_FEW_QUERIES and given.request.options.num_splits == 0
            and (units >= min(ENOUGH_TASKS, ROUNDS * given.request.threads) or partials > MOST_PARTIALS))


cdef inline bint _has_many_heads(const kv_call *call) noexcept nogil:
    """Whether a single token has the query rows of several panels."""
    return (<const kv_given *>call.given).layout.latent and call.group > KV_ROWS


cdef inline int _kind_of_panels(const kv_call *call) noexcept nogil:
    """What panels read, as `panels_of` says; none where each row must be computed as if it were alone."""
    cdef const kv_given *given = <const kv_given *>call.given
    return NO_PANELS if resolved(given.request.options.precision) == INVARIANT else panels_of(call.kernels, given.layout)


cdef bint panels_of_chosen(const kv_call *call) noexcept nogil:
    """Whether panels read chosen tokens, which each query has of its own. They take no decoded keys, as these are float32."""
    cdef const kv_layout *layout = (<const kv_given *>call.given).layout
    return _has_many_heads(call) and layout.k.means == 0 and _kind_of_panels(call) >= 0


cdef int cut_rows(const kv_call *call, kv_item *item) noexcept nogil:
    """Set the number of query rows of each task of an item; returns what panels of them are multiplied with, as `panels_of` does."""
    cdef const kv_layout *layout = (<const kv_given *>call.given).layout
    cdef Py_ssize_t length = (<const kv_keys *>item.keys).context.length, rows = item.num_queries * call.group, size
    cdef Py_ssize_t panels = (rows + KV_ROWS - 1) // KV_ROWS, least = (panels + OPERANDS) * HALF_ROWS_OF_PANEL // 2
    cdef int kind = _kind_of_panels(call)
    # Panels round float rows in other ways, and each of a few queries gets the bits that it would get alone.
    cdef bint alone = ((layout.k.family == KV_FLOAT_ROWS or values_of(layout).family == KV_FLOAT_ROWS)
                       and item.num_queries <= KV_FEW_QUERIES and item.members == NULL)
    if call.kernels.has_matrix or kind == KV_PANELS_OF_ROWS:
        least = LEAST_MATRIX_ROWS if call.kernels.has_matrix else LEAST_WORD_ROWS
    item.block_rows, item.row_blocks = KV_ROWS, panels
    if kind == NO_PANELS or panels == 1 or ((<const kv_given *>call.given).chosen != NULL and not panels_of_chosen(call)):
        return NO_PANELS
    # A single token of latent rows has enough query heads, and every single token then goes this way.
    if not _has_many_heads(call) and (length < LEAST_WIDE_CONTEXT or alone or rows < least):
        return NO_PANELS
    if kind == NO_PACKED_PANELS:
        return kind
    size = _choose_block(call, panels, 1 if takes_whole(call, item) else item.splits)
    item.block_rows, item.row_blocks = KV_ROWS * <int>size, (panels + size - 1) // size
    return kind


cdef Py_ssize_t _choose_block(const kv_call *call, Py_ssize_t panels, Py_ssize_t runs) noexcept nogil:
    """The panels of a row block, at least two of all `panels`, with which these take the least time.

    The panels of a block share the operands of its tiles, and the blocks of all heads and runs are spread over the threads. No
    bit of a row depends on the other rows of its block.
    """
    cdef const kv_given *given = <const kv_given *>call.given
    cdef bint few = call.kernels.has_matrix and given.layout.k.family != KV_FLOAT_ROWS  # float rows take longer to lay out
    cdef Py_ssize_t most = KV_MATRIX_PANELS if few else KV_MAX_PANELS
    cdef Py_ssize_t operands = LATENT_OPERANDS if given.layout.latent else OPERANDS
    cdef Py_ssize_t tasks = given.layout.num_kv_heads * runs, threads = max(1, given.request.threads)
    cdef Py_ssize_t size = most, best = most, least_time = 0, blocks, rounds, time
    while size >= 2:
        blocks = (panels + size - 1) // size
        size = (panels + blocks - 1) // blocks
        rounds = (tasks * blocks + threads - 1) // threads
        time = rounds * (size + operands)
        if least_time == 0 or time <= least_time:
            best, least_time = size, time
        if rounds >= ENOUGH_ROUNDS:
            break
        size -= 1
    return best


cdef void deal_splits(kv_call *call, int threads) noexcept nogil:
    """Set the splits of each task, and number the tasks of all items. No bit of a row depends on it."""
    cdef const kv_given *given = <const kv_given *>call.given
    cdef Py_ssize_t heads = given.layout.num_kv_heads, all_splits = 0, most, i
    cdef kv_item *item
    for i in range(call.num_items):
        item = call.items + i
        all_splits += item.splits * item.row_blocks * heads
    most = all_splits
    if threads > 1:
        most = max(min(all_splits // (threads * ROUNDS), <Py_ssize_t>LONG_RUN), all_splits // (threads * MANY_ROUNDS), <Py_ssize_t>1)
    call.num_tasks = 0
    for i in range(call.num_items):
        item = call.items + i
        item.run = item.least_run
        if given.request.options.num_splits == 0:
            item.run = max(item.run, <int>(item.splits if takes_whole(call, item) else min(item.splits, most)))
        kv_add_tasks(call, item)
