# cython: language_level=3, boundscheck=False, cdivision=True
"""The second step of attention: which positions each query sees, and how these are cut into tasks.

Splits depend only on the lengths of their item. So a sequence gives the same bits by itself and in a batch,
for every number of threads.
"""
cimport cython

from libc.math cimport INFINITY
from libc.stdint cimport uint16_t
from libc.string cimport memset

from kvfast.attention.families cimport NO_PACKED_PANELS, NO_PANELS, panels_of
from kvfast.attention.request cimport Request, kv_request
from kvfast.attention.tile_size cimport bytes_of, choose_tile
from kvfast.attention.tiles cimport kv_call, kv_item, kv_query
from kvfast.attention.workspace cimport DECODED, ITEMS, PARTIALS, QUERIES, ROPE, SCRATCH, WIDE, Workspace
from kvfast.codec.blocks cimport kv_context, kv_store, values_of
from kvfast.core.flags cimport kv_drop
from kvfast.core.kernels cimport KV_HALVES, active, kv_rope_scratch, kv_wide_scratch
from kvfast.core.limits cimport KV_FEW_QUERIES, KV_MATRIX_PANELS, KV_PANELS, KV_ROWS, KV_TILE

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


cdef Plan open_plan(Request request, const kv_store *store, Workspace workspace, Py_ssize_t contexts):
    """A plan without tasks, for up to `contexts` contexts, which `ask` and `add` bring."""
    cdef Plan self = Plan.__new__(Plan)
    self.workspace = workspace.lend()
    if not self.begin(&request.c, store, contexts):
        raise no_memory()
    return self


cdef object no_memory():
    return MemoryError("cannot allocate the working memory of a call of attend")


@cython.no_gc_clear  # `workspace` is there until the end
cdef class Plan:
    def __dealloc__(self):
        if self.workspace is not None:
            kv_drop(&self.workspace.lent)

    cdef bint begin(self, const kv_request *request, const kv_store *store, Py_ssize_t contexts) noexcept nogil:
        """Begin a plan of a request that fits the store; False if out of memory."""
        memset(&self.call, 0, sizeof(kv_call))
        self.work = self.context = self.uncounted = 0
        self.wide = self.packed = self.bad = False
        self.call.request, self.call.store, self.call.kernels, self.call.bad = request[0], store, active(), &self.bad
        self.call.group = <int>(request.q.heads // store.num_kv_heads)
        self.call.tile = choose_tile(store, self.call.kernels, False)
        if store.floats != NULL:
            self.call.float_tile = choose_tile(store.floats, self.call.kernels, True)
        return self.reserve_queries(request.q.tokens, contexts)

    cdef bint reserve_queries(self, Py_ssize_t queries, Py_ssize_t contexts) noexcept nogil:
        """Make room for `queries` queries of `contexts` contexts, before the first `ask`; False if out of memory."""
        # One item for each context, those for shared prefixes, and as many as `add` can make.
        cdef Py_ssize_t items = 2 * contexts + min(queries, contexts * <Py_ssize_t>KV_FEW_QUERIES)
        self.call.num_queries = queries
        self.call.items = <kv_item *>self.workspace.reserve(ITEMS, items * sizeof(kv_item))
        self.call.queries = <kv_query *>self.workspace.reserve(QUERIES, queries * sizeof(kv_query))
        return self.call.items != NULL and self.call.queries != NULL

    cdef void ask(self, const kv_context *context, Py_ssize_t first_query, Py_ssize_t num_queries) noexcept nogil:
        """Set which positions each query sees. `num_queries` from `first_query` on are the last tokens of the context."""
        cdef Py_ssize_t i
        for i in range(num_queries):
            self.sees(self.call.queries + first_query + i, context.length - num_queries + i, context.length)
            self.call.queries[first_query + i].token = first_query + i
        self.context += context.length

    cdef void sees(self, kv_query *query, Py_ssize_t position, Py_ssize_t length) noexcept nogil:
        """Set which of `length` positions a query at `position` sees."""
        cdef Py_ssize_t chunk = self.call.request.chunk
        query.position = position
        query.stop = position + 1 if self.call.request.causal else length
        query.start = max(<Py_ssize_t>0, position + 1 - self.call.request.window) if self.call.request.window else 0
        if chunk:
            query.start = max(query.start, position // chunk * chunk)
        query.sink_stop = min(max(self.call.request.num_sink_tokens, 0), query.start)
        query.parts = 0

    cdef Py_ssize_t _split_tokens(self, Py_ssize_t num_queries, Py_ssize_t span) noexcept nogil:
        """Tokens of each split of a span of `span` tokens that `num_queries` queries read."""
        cdef Py_ssize_t splits = self.call.request.num_splits, units, least
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
            if self.call.request.causal and num_queries <= KV_FEW_QUERIES:
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
        cdef int kind = panels_of(self.call.kernels, store)
        cdef Py_ssize_t least = LEAST_WORD_ROWS if kind == KV_HALVES else (panels + OPERANDS) * HALF_ROWS_OF_PANEL // 2
        item.block_rows, item.row_blocks = KV_ROWS, panels
        if kind == NO_PANELS or panels == 1:
            return
        # A single token of latent rows has enough query heads, and every single token then goes this way.
        if not (store.latent and self.call.group > KV_ROWS) and (
                item.context.length < LEAST_WIDE_CONTEXT or (item.num_queries <= KV_FEW_QUERIES and item.members == NULL)
                or (not self.call.kernels.has_matrix and item.num_queries * self.call.group < least)):
            return
        if kind == NO_PACKED_PANELS:
            self.packed = True
            return
        item.row_blocks = self._choose_row_blocks(panels, item.splits)
        item.block_rows = KV_ROWS * ((panels + item.row_blocks - 1) // item.row_blocks)
        self.wide = True
        self.call.wide_kind = kind

    cdef Py_ssize_t _choose_row_blocks(self, Py_ssize_t panels, Py_ssize_t splits) noexcept nogil:
        """The number of row blocks, with at least two of the `panels` in each, that takes the least time.

        The panels of a block share the operands of its tiles, and the blocks of all heads and splits are spread over the threads. No
        bit of a row depends on the other rows of its block.
        """
        cdef Py_ssize_t most = KV_PANELS if not self.call.kernels.has_matrix else KV_MATRIX_PANELS
        cdef Py_ssize_t operands = LATENT_OPERANDS if self.call.store.latent else OPERANDS
        cdef Py_ssize_t tasks = self.call.store.num_kv_heads * splits, threads = max(1, self.call.request.threads)
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

    cdef Py_ssize_t count_parts(self) noexcept nogil:
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
        for i in range(self.call.request.q.tokens):
            query = self.call.queries + i
            query.partial = parts
            parts += query.parts if query.parts > 1 else 0
        for i in range(self.call.request.q.tokens, self.call.num_queries):
            query = self.call.queries + self.call.queries[i].token
            self.call.queries[i].partial, self.call.queries[i].parts = query.partial, query.parts
        return parts

    cdef bint prepare(self, Workspace scratch, int threads) noexcept nogil:
        """Reserve memory for partial results and threads, as the last step before `run`; False if out of memory."""
        cdef Py_ssize_t parts = self.count_parts(), width = values_of(self.call.store).padded_dim + 2, i
        if parts:
            self.call.partials = <float *>self.workspace.reserve(PARTIALS, parts * self.call.request.q.heads * width * sizeof(float))
        if self.call.partials != NULL and self.call.num_queries > self.call.request.q.tokens:
            for i in range(parts * self.call.request.q.heads):  # a query may see no key of a split of a segment that others see
                self.call.partials[i * width], self.call.partials[i * width + 1] = -INFINITY, 0.0
        if self.wide:
            self.call.wide = <kv_wide_scratch *>scratch.reserve(WIDE, threads * sizeof(kv_wide_scratch))
        if self.call.request.rope_q.data != NULL:
            self.call.rope = <kv_rope_scratch *>self.workspace.reserve(ROPE, threads * sizeof(kv_rope_scratch))
        if self.call.store.decode != NULL:
            self.call.decoded_size = self.call.tile * max(self.call.store.k.padded_dim, self.call.store.v.padded_dim)
            self.call.decoded = <uint16_t *>self.workspace.reserve(DECODED, threads * self.call.decoded_size * sizeof(uint16_t))
        self.call.scratch = <void **>self.workspace.reserve(SCRATCH, threads * sizeof(void *))
        return (self.call.scratch != NULL and (parts == 0 or self.call.partials != NULL) and (not self.wide or self.call.wide != NULL)
                and (self.call.request.rope_q.data == NULL or self.call.rope != NULL)
                and (self.call.store.decode == NULL or self.call.decoded != NULL))
