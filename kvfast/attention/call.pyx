# cython: language_level=3, boundscheck=False, cdivision=True
"""Checks and plans a call of attention: which positions each query sees, and the splits of each item.

Splits depend only on the lengths of their item. So a sequence gives the same bits by itself and in a batch,
for every number of threads.
"""
cimport cython
import math

import numpy as np

from libc.math cimport INFINITY
from libc.stdint cimport uint16_t
from libc.string cimport memset

from kvfast.attention.options cimport Options
from kvfast.attention.tasks cimport measure, run
from kvfast.attention.tile_size cimport bytes_of, choose_tile
from kvfast.attention.tiles cimport kv_item, kv_query, kv_traffic
from kvfast.attention.workspace cimport DECODED, ITEMS, PARTIALS, QUERIES, ROPE, SCRATCH, WIDE, Workspace
from kvfast.codec.blocks cimport kv_context, kv_store, values_of
from kvfast.codec.dtypes cimport codes_name, dtype_limit, dtype_name, parse_dtype
from kvfast.core.arrays cimport Rows, check_apart, check_finite, open_output, open_rows
from kvfast.core.checks cimport check_count, check_number, check_per_head
from kvfast.core.flags cimport kv_drop
from kvfast.core.interrupt cimport check_stopped
from kvfast.core.kernels cimport (KV_BFLOAT16, KV_FLOAT32, KV_FLOAT_ROWS, KV_HALVES, KV_INTEGERS, KV_PACKED_CODES, KV_PAIRS, active,
                                  has_bfloat16, kv_rope_scratch, kv_wide_scratch)
from kvfast.core.limits cimport (KV_FEW_QUERIES, KV_MATRIX_PANELS, KV_MAX_FLOAT32, KV_MAX_Q_HEADS, KV_MAX_TOKENS, KV_PANELS, KV_ROWS,
                                 KV_TILE)
from kvfast.core.threads cimport gather, kv_team, most_threads, threads_for

from kvfast.core import slow_paths
from kvfast.attention.plan import AttendPlan, AttendItem
from kvfast.core.text import shown
from kvfast.errors import DimensionMismatchError, NonFiniteInputError

cdef enum:
    # More tasks than this in one item do not balance better.
    ENOUGH_TASKS = 64
    # Fewest tokens of a split: each task costs a cold start and a merge. MIN_ is for few heads, MAX_ for 8 and more;
    # python -m kvfast bench --work decode --contexts 1024,4096 sets all three.
    MIN_SPLIT_TOKENS = 1024
    MAX_SPLIT_TOKENS = 4096
    SPLIT_TOKENS_PER_UNIT = 512
    # Tokens of context from which a matrix unit and words pay for their operands. This and the rows below are set by
    # python -m kvfast bench --work prefill --tokens N, with N from 16 to 128.
    LEAST_WIDE_CONTEXT = 200
    # Query rows from which words are faster than floats.
    LEAST_WORD_ROWS = 28
    # A panel of words takes as long as 12.5 rows of codes in vectors, here in half rows.
    HALF_ROWS_OF_PANEL = 25
    # Panels that take as long as making the operands of a tile.
    OPERANDS = 1
    LATENT_OPERANDS = 4
    # Tasks of a thread; more do not balance better.
    ENOUGH_ROUNDS = 16
    # Latent rows have many query heads. LATENT_PANELS panels of query rows share a tile's operands. A split has at least
    # MIN_LATENT_SPLIT_TOKENS tokens, as it leaves a partial result for every head (bench/bench_mla.py).
    LATENT_PANELS = 8
    MIN_LATENT_SPLIT_TOKENS = 2048

    # Segments are read by the same tasks where there are LEAST_JOINED_TASKS, with LEAST_JOINED_PANELS panels each, or more
    # (bench/studies/bench_splice.py).
    LEAST_JOINED_TASKS = 8
    LEAST_JOINED_PANELS = 4

LOGS = slow_paths.LOGS

cdef AttendCall open_call(const kv_store *store, Workspace workspace, object q, Options options, Py_ssize_t contexts):
    """Check everything but the contexts, which `ask` and `add` bring. For `explain`, q is `imagined_rows`: they have no
    data."""
    cdef AttendCall self = AttendCall.__new__(AttendCall)
    cdef float[:, ::1] lse_view
    cdef const float[::1] view
    cdef Py_ssize_t dim = values_of(store).head_dim
    memset(&self.call, 0, sizeof(self.call))
    self.options, self.workspace = options, workspace.lend()
    given = options.num_threads  # `run` checks it
    self.threads = most_threads(given if type(given) is int and 0 < given <= 1024 else 0)
    self.q = open_rows(q, "q")
    self.call.q = self.q.rows
    if self.call.q.dim != store.k.head_dim:
        raise DimensionMismatchError(f"q must have head_dim {store.k.head_dim}, got {self.call.q.dim}")
    if self.call.q.heads % store.num_kv_heads:
        swapped = self.call.q.tokens % store.num_kv_heads == 0
        raise DimensionMismatchError(f"the heads of q, its second axis, must be a multiple of the {store.num_kv_heads} KV heads, got "
                                     f"{self.call.q.heads}" + (": if the first has them, pass q.transpose(1, 0, 2)" if swapped else ""))
    self.call.scale = (1.0 / math.sqrt(self.call.q.dim) if options.scale is None
                       else check_number(options.scale, "scale", False))
    if options.softcap is not None and options.softcap != 0:
        self.call.softcap = check_number(options.softcap, "softcap", True)
    if options.sliding_window is not None:
        self.window = check_count(options.sliding_window, "sliding_window", 1)
    if options.sinks is not None:
        self.sinks = view = check_per_head(options.sinks, "sinks", self.call.q.heads)
        self.call.sinks = &view[0]
    if options.alibi_slopes is not None:
        self.slopes = view = check_per_head(options.alibi_slopes, "alibi_slopes", self.call.q.heads)
        self.call.slopes = &view[0]
    self.num_splits = check_count(options.num_splits, "num_splits", 0, 1 << 30)
    if not self.begin(store, contexts):
        raise _no_memory()
    if self.call.q.data == NULL:
        return self
    check_finite(self.q, "q", KV_MAX_FLOAT32, "float32")

    self.out = options.out
    if self.out is None:
        self.out = np.empty((self.call.q.tokens, self.call.q.heads, dim), np.float32)
    self.result = open_output(self.out, "out")
    self.call.out = self.result.rows
    if self.call.out.tokens != self.call.q.tokens or self.call.out.heads != self.call.q.heads or self.call.out.dim != dim:
        raise DimensionMismatchError(
            f"out must have shape ({self.call.q.tokens}, {self.call.q.heads}, {dim}), "
            f"got ({self.call.out.tokens}, {self.call.out.heads}, {self.call.out.dim})")
    check_apart(&self.call.out, &self.call.q, "q")
    if type(options.out) is np.ndarray and (np.may_share_memory(self.out, self.sinks) or np.may_share_memory(self.out, self.slopes)):
        raise ValueError("out must not share memory with sinks or alibi_slopes")
    if options.return_lse:
        self.lse = lse_view = np.empty((self.call.q.tokens, self.call.q.heads), np.float32)
        self.call.lse = &lse_view[0, 0]
    return self


cdef object _no_memory():
    return MemoryError("cannot allocate the working memory of a call of attend")


cdef Rows imagined_rows(object q, object num_q_heads, object dtype, const kv_store *store):
    """Rows without data, from an array, a shape or a number of tokens."""
    cdef Rows self = Rows.__new__(Rows), given
    if getattr(q, "ndim", 0):  # an array, of NumPy or another library
        given = open_rows(q, "q")
        self.rows = given.rows
        self.rows.data = NULL
        return self
    shape = q
    if not isinstance(q, (tuple, list)):
        shape = q, store.num_kv_heads if num_q_heads is None else num_q_heads, store.k.head_dim
    if len(shape) != 3:
        raise DimensionMismatchError(f"q must have 3 dimensions (num_tokens, num_heads, head_dim), got shape {shown(q)}")
    self.rows.tokens = check_count(shape[0], "the tokens of q", 1, KV_MAX_TOKENS)
    self.rows.heads = check_count(shape[1], "the heads of q", 1, KV_MAX_Q_HEADS)
    self.rows.dim = check_count(shape[2], "the head_dim of q", 1, 1 << 20)
    self.rows.dtype = parse_dtype(dtype)
    if self.rows.dtype > KV_BFLOAT16:
        raise ValueError(f"q must be float32, float16 or bfloat16, got {shown(dtype)}")
    return self


@cython.no_gc_clear  # `workspace` is there until the end
cdef class AttendCall:
    def __dealloc__(self):
        if self.workspace is not None:
            kv_drop(&self.workspace.lent)

    cdef bint begin(self, const kv_store *store, Py_ssize_t contexts) noexcept nogil:
        """Set what follows from the store and from q, which was checked to fit it; False if out of memory."""
        self.call.kernels, self.call.store = active(), store
        self.bad, self.call.bad = 0, &self.bad
        self.call.group = <int>(self.call.q.heads // store.num_kv_heads)
        self.call.tile = choose_tile(store, self.call.kernels, False)
        if store.floats != NULL:
            self.call.float_tile = choose_tile(store.floats, self.call.kernels, True)
        return self.reserve_queries(self.call.q.tokens, contexts)

    cdef bint reserve_queries(self, Py_ssize_t queries, Py_ssize_t contexts) noexcept nogil:
        """Make room for so many queries, before the first `ask`; False if out of memory."""
        # One item for each context, those for shared prefixes, and as many as `add` can make.
        cdef Py_ssize_t items = 2 * contexts + min(queries, contexts * <Py_ssize_t>KV_FEW_QUERIES)
        self.call.num_queries = queries
        self.call.items = <kv_item *>self.workspace.reserve(ITEMS, items * sizeof(kv_item))
        self.call.queries = <kv_query *>self.workspace.reserve(QUERIES, queries * sizeof(kv_query))
        return self.call.items != NULL and self.call.queries != NULL

    cdef int set_rope(self, object rope_q) except -1:
        """Set the rotary part of queries to latent rows, (tokens, heads, rope_dim)."""
        self.rope_q = open_rows(rope_q, "q")
        check_finite(self.rope_q, "the rotary part of q", KV_MAX_FLOAT32, "float32")
        self.call.rope_q = self.rope_q.rows
        if self.call.q.data != NULL:
            check_apart(&self.call.out, &self.call.rope_q, "q")
        return 0

    cdef void ask(self, const kv_context *context, Py_ssize_t first_query, Py_ssize_t num_queries) noexcept nogil:
        """Set which positions each query sees. `num_queries` from `first_query` on are the last tokens of the context."""
        cdef Py_ssize_t i
        for i in range(num_queries):
            self.sees(self.call.queries + first_query + i, context.length - num_queries + i, context.length)
            self.call.queries[first_query + i].token = first_query + i
        self.context += context.length

    cdef void sees(self, kv_query *query, Py_ssize_t position, Py_ssize_t length) noexcept nogil:
        """Set which of `length` positions a query at `position` sees."""
        cdef Py_ssize_t chunk = self.options.attention_chunk_size
        query.position = position
        query.stop = position + 1 if self.options.causal else length
        query.start = max(<Py_ssize_t>0, position + 1 - self.window) if self.window else 0
        if chunk:
            query.start = max(query.start, position // chunk * chunk)
        query.sink_stop = min(max(self.options.num_sink_tokens, 0), query.start)
        query.parts = 0

    cdef Py_ssize_t _split_tokens(self, Py_ssize_t num_queries, Py_ssize_t span) noexcept nogil:
        """Tokens of each split of a span of `span` tokens that `num_queries` queries read."""
        cdef Py_ssize_t splits = self.num_splits, units, least
        if splits == 0:
            # A few queries are split as each of them would be alone; see `add`.
            units = num_queries if num_queries > KV_FEW_QUERIES else 1
            units = self.call.store.num_kv_heads * ((units * self.call.group + KV_ROWS - 1) // KV_ROWS)
            least = MIN_SPLIT_TOKENS
            if self.call.store.latent:
                units, least = (units + LATENT_PANELS - 1) // LATENT_PANELS, MIN_LATENT_SPLIT_TOKENS
            least = min(max(units * SPLIT_TOKENS_PER_UNIT, least), <Py_ssize_t>MAX_SPLIT_TOKENS)
            splits = min(ENOUGH_TASKS // units, span // least)
        splits = max(<Py_ssize_t>1, min(splits, (span + KV_TILE - 1) // KV_TILE))
        return ((span + splits - 1) // splits + KV_TILE - 1) // KV_TILE * KV_TILE

    cdef void add(self, const kv_context *context, Py_ssize_t first_query, Py_ssize_t num_queries, Py_ssize_t begin,
                 int part) noexcept nogil:
        """Add items for the queries of `ask`, which read their context from position `begin` on.

        Queries that would be split differently when alone get items of their own. So a query's result has the same
        bits whether it comes alone or with a few others, as when drafted tokens are verified.
        """
        cdef kv_item *item
        cdef kv_query *first
        cdef kv_query *last
        cdef Py_ssize_t n
        while num_queries:
            first, n = self.call.queries + first_query, num_queries
            if self.options.causal and num_queries <= KV_FEW_QUERIES:
                n = 1
                while n < num_queries and self._cut_alike(first, first + n, begin):
                    n += 1
            last = first + n - 1
            item = self.call.items + self.call.num_items
            memset(item, 0, sizeof(kv_item))
            item.context = context[0]
            item.first_query, item.num_queries, item.part = first_query, n, part
            item.begin = self._begin_of(first, begin)
            self.close(item, last.stop)
            first_query += n
            num_queries -= n

    cdef Py_ssize_t _begin_of(self, const kv_query *query, Py_ssize_t begin) noexcept nogil:
        return max(begin, query.start // KV_TILE * KV_TILE)

    cdef bint _cut_alike(self, const kv_query *a, const kv_query *b, Py_ssize_t begin) noexcept nogil:
        cdef Py_ssize_t start = self._begin_of(a, begin), size
        if start != self._begin_of(b, begin):
            return False
        size = self._split_tokens(1, a.stop - start)
        return size == self._split_tokens(1, b.stop - start) and (a.stop - start - 1) // size == (b.stop - start - 1) // size

    cdef void close(self, kv_item *item, Py_ssize_t end) noexcept nogil:
        """Split the item's positions up to `end`, and count its tasks."""
        cdef Py_ssize_t span = end - item.begin
        item.end = end
        item.split_tokens = self._split_tokens(item.num_queries, span)
        item.splits = (span + item.split_tokens - 1) // item.split_tokens
        self._cut_rows(item)
        item.first_task = self.call.num_tasks
        self.call.num_tasks += item.splits * item.row_blocks * self.call.store.num_kv_heads
        self.call.num_items += 1
        self.work += <Py_ssize_t>(bytes_of(self.call.store, span) * max(1.0, item.num_queries * self.call.group / 8.0))

    cdef void join(self, Py_ssize_t first_item) noexcept nogil:
        """Let the last item continue the one before it, if that is not before `first_item` and their tasks have the same rows.

        So these rows leave one partial result for many segments. A few queries stay apart, as each would be alone.
        """
        cdef kv_item *item = self.call.items + self.call.num_items - 1
        cdef kv_item *before = item - 1
        cdef Py_ssize_t rows = item.num_queries * self.call.group
        # Whether items are joined must not depend on the number of threads, as their row blocks do.
        if (self.call.num_items - 2 < first_item or item.num_queries <= KV_FEW_QUERIES or item.num_queries != before.num_queries
                or self.call.queries[item.first_query].token != self.call.queries[before.first_query].token
                or item.splits > 1 or before.splits > 1 or item.block_rows != before.block_rows
                or rows * self.call.store.num_kv_heads <= (LEAST_JOINED_TASKS - 1) * LEAST_JOINED_PANELS * KV_ROWS):
            return
        item.continues, item.part = True, before.part
        self.call.num_tasks = item.first_task

    cdef void _cut_rows(self, kv_item *item) noexcept nogil:
        """Set the number of query rows of each task of an item."""
        cdef const kv_store *store = self.call.store
        cdef Py_ssize_t panels = (item.num_queries * self.call.group + KV_ROWS - 1) // KV_ROWS
        cdef int kind = KV_HALVES if store.k.family == KV_FLOAT_ROWS and store.v.family == KV_FLOAT_ROWS else KV_INTEGERS
        cdef Py_ssize_t least = LEAST_WORD_ROWS if kind == KV_HALVES else (panels + OPERANDS) * HALF_ROWS_OF_PANEL // 2
        item.block_rows, item.row_blocks = KV_ROWS, panels
        # Panels multiply 16-bit numbers, which lose bits of float32; and they read rows where they lie.
        if (self.call.kernels.attend_panels[kind] == NULL or store.k.dtype == KV_FLOAT32
                or store.v.dtype == KV_FLOAT32 or store.decode != NULL or panels == 1):
            return
        # A single token of latent rows has enough query heads, and every single token then goes this way.
        if not (store.latent and self.call.group > KV_ROWS) and (
                item.context.length < LEAST_WIDE_CONTEXT or (item.num_queries <= KV_FEW_QUERIES and item.members == NULL)
                or (self.call.kernels.open_matrix == NULL and item.num_queries * self.call.group < least)):
            return
        if self.call.kernels.open_matrix != NULL and KV_PACKED_CODES in (store.k.family, store.v.family):
            self.packed = True
            return
        item.row_blocks = self._choose_row_blocks(panels, item.splits)
        item.block_rows = KV_ROWS * ((panels + item.row_blocks - 1) // item.row_blocks)
        self.wide = True
        self.call.wide_kind = kind

    cdef Py_ssize_t _choose_row_blocks(self, Py_ssize_t panels, Py_ssize_t splits) noexcept nogil:
        """Row blocks of so many panels, at least two in each, that take the least time.

        The panels of a block share the operands of its tiles, and the blocks of all heads and splits are spread over the threads. No
        bit of a row depends on the other rows of its block.
        """
        cdef Py_ssize_t most = KV_PANELS if self.call.kernels.open_matrix == NULL else KV_MATRIX_PANELS
        cdef Py_ssize_t operands = LATENT_OPERANDS if self.call.store.latent else OPERANDS
        cdef Py_ssize_t tasks = self.call.store.num_kv_heads * splits, threads = max(1, self.threads)
        cdef Py_ssize_t blocks = (panels + most - 1) // most, best = blocks, least_time = 0, size, rounds, time
        while True:
            size, rounds = (panels + blocks - 1) // blocks, (tasks * blocks + threads - 1) // threads
            if size < 2:
                return best
            time = rounds * (size + operands)
            if least_time == 0 or time <= least_time:
                best, least_time = blocks, time
            if rounds >= ENOUGH_ROUNDS:
                return best
            blocks += 1

    cdef Py_ssize_t _count_parts(self) noexcept nogil:
        """Number the partial results of each query, per query head; returns how many there are."""
        cdef Py_ssize_t i, j, parts = 0
        cdef kv_item *item
        cdef kv_query *query
        for i in range(self.call.num_items):
            item = self.call.items + i
            for j in range(item.num_queries):
                query = self.call.queries + (item.members[j] if item.members != NULL else item.first_query + j)
                query = self.call.queries + query.token
                query.parts = max(query.parts, item.part + <int>item.splits)
        for i in range(self.call.q.tokens):
            query = self.call.queries + i
            query.partial = parts
            parts += query.parts if query.parts > 1 else 0
        for i in range(self.call.q.tokens, self.call.num_queries):
            query = self.call.queries + self.call.queries[i].token
            self.call.queries[i].partial, self.call.queries[i].parts = query.partial, query.parts
        return parts

    cdef bint prepare(self, Workspace scratch, int threads) noexcept nogil:
        """Reserve memory for partial results and threads, as the last step before `run`; False if out of memory."""
        cdef Py_ssize_t parts = self._count_parts(), width = values_of(self.call.store).padded_dim + 2, i
        if parts:
            self.call.partials = <float *>self.workspace.reserve(PARTIALS, parts * self.call.q.heads * width * sizeof(float))
        if self.call.partials != NULL and self.call.num_queries > self.call.q.tokens:
            for i in range(parts * self.call.q.heads):  # a query may see no key of a split of a segment that others see
                self.call.partials[i * width], self.call.partials[i * width + 1] = -INFINITY, 0.0
        if self.wide:
            if self.call.wide_kind == KV_HALVES and self._has_pairs():
                self.call.wide_kind = KV_PAIRS
            self.call.wide = <kv_wide_scratch *>scratch.reserve(WIDE, threads * sizeof(kv_wide_scratch))
        if self.call.rope_q.data != NULL:
            self.call.rope = <kv_rope_scratch *>self.workspace.reserve(ROPE, threads * sizeof(kv_rope_scratch))
        if self.call.store.decode != NULL:
            self.call.decoded_size = self.call.tile * max(self.call.store.k.padded_dim, self.call.store.v.padded_dim)
            self.call.decoded = <uint16_t *>self.workspace.reserve(DECODED, threads * self.call.decoded_size * sizeof(uint16_t))
        self.call.scratch = <void **>self.workspace.reserve(SCRATCH, threads * sizeof(void *))
        return (self.call.scratch != NULL and (parts == 0 or self.call.partials != NULL) and (not self.wide or self.call.wide != NULL)
                and (self.call.rope_q.data == NULL or self.call.rope != NULL)
                and (self.call.store.decode == NULL or self.call.decoded != NULL))

    cdef bint _has_pairs(self) noexcept nogil:
        """Whether all keys and queries that panels read are bfloat16, and the processor multiplies these."""
        cdef const kv_store *store = self.call.store
        cdef Py_ssize_t i
        for i in range(self.call.num_items):
            if self.call.items[i].rotation.cos != NULL:
                return False
        return (self.call.kernels.attend_panels[KV_PAIRS] != NULL and has_bfloat16() and store.k.dtype == KV_BFLOAT16
                and not store.k.rotated and store.bases == NULL and self.call.q.dtype == KV_BFLOAT16
                and (self.call.sink_q.data == NULL or self.call.sink_q.dtype == KV_BFLOAT16)
                and (self.call.rope_q.data == NULL
                     or (store.v.dtype == KV_BFLOAT16 and self.call.rope_q.dtype == KV_BFLOAT16)))

    cdef object run(self):  # no-cython-lint: an imported function has the same name
        cdef kv_team team
        # A megabyte or two per thread: only caches of latent rows keep it, as every token of theirs needs it.
        cdef Workspace scratch = Workspace() if self.wide and not self.call.store.latent else self.workspace
        scratch.secure = self.workspace.secure
        gather(&team, self.options.num_threads, <double>self.work)
        if not self.prepare(scratch, team.threads):
            raise _no_memory()
        if LOGS:
            slow_paths.log(self._notes(team.threads))
        cdef bint done
        with nogil:
            done = run(&self.call, &team)
        check_stopped(team.watch)
        if not done:
            raise _no_memory()
        if self.bad:
            raise NonFiniteInputError(f"q, keys and values are too large together: a score is beyond float32, or an output beyond "
                                      f"{dtype_name(self.call.out.dtype)} (+-{dtype_limit(self.call.out.dtype):g})")
        return (self.out, self.lse) if self.options.return_lse else self.out

    cdef object explain(self, str storage):
        """The AttendPlan of this call. The call is not run."""
        cdef const kv_store *store = self.call.store
        cdef kv_traffic traffic
        cdef kv_item *item
        cdef Py_ssize_t i, rows = 1
        cdef int threads = threads_for(self.options.num_threads, <double>self.work)
        self._count_parts()
        cdef bint measured
        with nogil:
            measured = measure(&self.call, &traffic)
        if not measured:
            raise _no_memory()
        panels = ("attend_panels",) if self.wide else ()
        items = []
        for i in range(self.call.num_items):
            item = self.call.items + i
            items.append(AttendItem(item.num_queries, item.begin, item.end, item.splits, item.split_tokens, item.row_blocks))
            rows = max(rows, min(item.num_queries * self.call.group, <Py_ssize_t>item.block_rows))
        return AttendPlan(
            isa=self.call.kernels.isa.decode(), storage=storage,
            kernels=_kernels_of(store) + panels,
            float_kernels=() if store.floats == NULL else _kernels_of(store.floats),
            q_shape=(self.call.q.tokens, self.call.q.heads, self.call.q.dim), q_dtype=dtype_name(self.call.q.dtype),
            num_kv_heads=store.num_kv_heads, v_head_dim=values_of(store).head_dim, context=self.context, uncounted=self.uncounted,
            tile=self.call.tile, float_tile=self.call.float_tile, rows=rows, num_threads=threads, num_tasks=self.call.num_tasks,
            items=tuple(items), code_bytes=traffic.codes, scale_bytes=traffic.scales, float_bytes=traffic.floats,
            operations=int(traffic.operations), notes=tuple([text for _, text in self._notes(threads)]))

    cdef list _notes(self, int threads):
        cdef const kv_store *store = self.call.store
        # In a store of latent rows v is the rotary part. Notes describe the width of the latents alone.
        sides = {store.k.head_dim: store.k.rotated}
        if not store.latent:
            sides[store.v.head_dim] = sides.get(store.v.head_dim, False) or store.v.rotated
        return slow_paths.notes(sides, self.work, threads, self.call.num_tasks, self.options.num_threads, self.packed,
                                self.uncounted if store.seals and self.uncounted > self.call.q.tokens else 0)


cdef tuple _kernels_of(const kv_store *store):
    """Names of the kernels that read a store's keys and values, as in the kernel table."""
    if store.latent:
        return f"scores_{codes_name(store.k.dtype)}", "accumulate_latent"
    return f"scores_{codes_name(store.k.dtype)}", f"accumulate_{codes_name(store.v.dtype)}"
