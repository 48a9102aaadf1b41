# cython: language_level=3, boundscheck=False, cdivision=True
"""The second step of attention: which positions each query sees, and the items that read them, which `cuts` cuts into tasks."""
cimport cython
import numpy as np

from libc.math cimport INFINITY
from libc.stdint cimport int64_t, uint16_t, uint64_t
from libc.string cimport memset

from kvfast.attention.chosen cimport open_chosen
from kvfast.attention.cuts cimport begin_of, choose_tile, cut_alike, cut_context, cut_rows, deal_splits, work_of
from kvfast.attention.families cimport NO_PACKED_PANELS
from kvfast.attention.request cimport Request, kv_request
from kvfast.attention.tasks cimport (kv_call, kv_count_bits, kv_count_slots, kv_count_tasks, kv_given, kv_item, kv_keys,
                                     kv_partial_size, kv_query)
from kvfast.attention.workspace cimport (COUNTS, DECODED, GATHERED, ITEMS, PARTIALS, QUERIES, ROPE, SCRATCH, WIDE,
                                         Workspace)
from kvfast.codec.blocks cimport kv_context, kv_layout, values_of
from kvfast.core.checks cimport check_integers
from kvfast.core.flags cimport kv_drop
from kvfast.core.kernels cimport active_for, kv_kernels, kv_rope_scratch, kv_wide_scratch
from kvfast.core.limits cimport KV_FEW_QUERIES, KV_ROWS
from kvfast.core.threads cimport work_of_attention

from kvfast.core.interchange import as_array
from kvfast.errors import DimensionMismatchError

cdef enum:
    # Segments are read by the same tasks where there are LEAST_JOINED_TASKS, with LEAST_JOINED_PANELS panels each, or more
    # (bench/studies/bench_splice.py).
    LEAST_JOINED_TASKS = 8
    LEAST_JOINED_PANELS = 4
    # Drafts of a tree: the bits of a word.
    MOST_DRAFTS = 64


cdef Plan open_plan(Request request, const kv_layout *layout, Workspace workspace, Py_ssize_t contexts):
    """A plan without tasks, for up to `contexts` contexts, which `ask` and `add` bring."""
    cdef Plan self = Plan.__new__(Plan)
    self.workspace = workspace.lend()
    if not self.begin(&request.c, layout, contexts):
        raise no_memory()
    return self


cdef object no_memory():
    return MemoryError("cannot allocate the working memory of a call of attend")


@cython.no_gc_clear  # `workspace` is there until the end
cdef class Plan:
    def __dealloc__(self):
        if self.workspace is not None:
            kv_drop(&self.workspace.lent)

    cdef bint begin(self, const kv_request *request, const kv_layout *layout, Py_ssize_t contexts) noexcept nogil:
        """Begin a plan of a request that fits the layout; False if out of memory."""
        cdef const kv_kernels *kernels
        memset(&self.call, 0, sizeof(kv_call))
        memset(&self.given, 0, sizeof(kv_given))
        self.work = self.context = self.uncounted = 0
        self.wide = self.packed = self.bad = False
        self.num_spans = self.num_drafts = 0
        kernels = active_for(request.precision)
        self.given.request, self.given.layout, self.given.bad = request[0], layout, &self.bad
        self.call.given, self.call.kernels, self.call.values, self.call.sinks = &self.given, kernels, values_of(layout), request.sinks
        self.call.num_q_heads, self.call.group = request.q.heads, <int>(request.q.heads // layout.num_kv_heads)
        self.given.tile = choose_tile(layout, self.call.kernels, False)
        if layout.floats != NULL:
            self.given.float_tile = choose_tile(layout.floats, self.call.kernels, True)
        return self.reserve_queries(request.q.tokens, contexts)

    cdef bint reserve_queries(self, Py_ssize_t queries, Py_ssize_t contexts) noexcept nogil:
        """Make room for `queries` queries of `contexts` contexts, before the first `ask`; False if out of memory."""
        # One item for each context, those for shared prefixes, and as many as `add` can make.
        cdef Py_ssize_t items = 2 * contexts + min(queries, contexts * <Py_ssize_t>KV_FEW_QUERIES)
        if self.given.request.chooses:
            items = queries
        self.call.num_queries = queries
        self.call.items = <kv_item *>self.workspace.reserve(ITEMS, items * (sizeof(kv_item) + sizeof(kv_keys)))
        self.keys = <kv_keys *>(self.call.items + items)
        self.call.queries = <kv_query *>self.workspace.reserve(QUERIES, queries * sizeof(kv_query))
        return self.call.items != NULL and self.call.queries != NULL

    cdef int use_spans(self, object spans, str name, Py_ssize_t length) except -1:
        """Let the tokens of each span see each other, in the next `ask` of a context of `length` tokens."""
        cdef Py_ssize_t i
        self.num_spans = 0
        given = as_array(() if spans is None else spans, name)
        if given.shape[:1] == (0,):
            return 0
        given = check_integers(given, name, np.int64, 2)
        if given.shape[1] != 2:
            raise DimensionMismatchError(f"{name} must have shape (num_spans, 2), a start and a stop of each, got {given.shape}")
        self.spans = given = given[np.argsort(given[:, 0], kind="stable")]
        for i in range(self.spans.shape[0]):
            start, stop = self.spans[i, 0], self.spans[i, 1]
            if not 0 <= start < stop:
                raise ValueError(f"{name} must have a start of at least 0 and a later stop each, got {start} and {stop}")
            if stop > length:
                raise ValueError(f"{name} must end within the {length} tokens that are held, got {start} to {stop}: append all "
                                 f"tokens of a span before its queries attend")
            if i and start < self.spans[i - 1, 1]:
                raise ValueError(f"{name} must not overlap, got {self.spans[i - 1, 0]} to {self.spans[i - 1, 1]} and {start} to {stop}")
        self.num_spans = self.spans.shape[0]
        return 0

    cdef int use_parents(self, object parents, str name, Py_ssize_t num_queries) except -1:
        """Let the last of `num_queries` queries be a tree of drafts, in the next `ask`. After `use_spans`, if the request has spans."""
        cdef const int64_t[::1] view
        cdef uint64_t[::1] ancestors
        cdef Py_ssize_t i
        self.num_drafts = 0
        given = as_array(() if parents is None else parents, name)
        if given.shape == (0,):
            return 0
        if self.num_spans:
            raise ValueError(f"{name} need causal=True and spans=None for their sequence: a draft sees its ancestors alone")
        view = check_integers(given, name, np.int64, 1)
        if view.shape[0] > min(num_queries, <Py_ssize_t>MOST_DRAFTS):
            raise ValueError(f"{name} must have at most {MOST_DRAFTS} drafts, and no more than the {num_queries} tokens of q, got "
                             f"{view.shape[0]}")
        ancestors = np.zeros(view.shape[0], np.uint64)
        for i in range(view.shape[0]):
            if not -1 <= view[i] < i:
                raise ValueError(f"{name} must be -1 or a draft before its child, got {view[i]} for draft {i}")
            ancestors[i] = (<uint64_t>1 << i) | (ancestors[view[i]] if view[i] >= 0 else 0)
        self.ancestors, self.num_drafts = ancestors, view.shape[0]
        return 0

    cdef int choose(self, Request request) except -1:
        """Let each query read the tokens that were chosen for it, after `ask` and before `add`, if the request has some."""
        if request.chosen is not None:
            self.chosen = open_chosen(request.chosen, request.chosen_run, &self.call, request.c.q.tokens)
            self.given.chosen = &self.chosen.c
        return 0

    cdef void ask(self, Py_ssize_t length, Py_ssize_t first_query, Py_ssize_t num_queries) noexcept nogil:
        """Set which positions each query sees. `num_queries` from `first_query` on are the last tokens of a context of `length`."""
        cdef Py_ssize_t i, tree = length - self.num_drafts, position
        for i in range(num_queries):
            position = length - num_queries + i
            if position < tree or self.num_drafts == 0:
                self.sees(self.call.queries + first_query + i, position, length)
            else:
                self.sees_tree(self.call.queries + first_query + i, tree, self.ancestors[position - tree])
            self.call.queries[first_query + i].token = first_query + i
        self.context += length

    cdef void sees(self, kv_query *query, Py_ssize_t position, Py_ssize_t length) noexcept nogil:
        """Set which of `length` positions a query at `position` sees."""
        cdef Py_ssize_t chunk = self.given.request.chunk, i
        query.position = position
        query.stop = position + 1 if self.given.request.causal else length
        query.start = max(<Py_ssize_t>0, position + 1 - self.given.request.window) if self.given.request.window else 0
        if chunk:
            query.start = max(query.start, position // chunk * chunk)
        for i in range(self.num_spans):
            if self.spans[i, 0] <= position < self.spans[i, 1]:
                query.stop = max(query.stop, <Py_ssize_t>self.spans[i, 1])
                if not self.given.request.clamp_spans:
                    query.start = min(query.start, <Py_ssize_t>self.spans[i, 0])
        query.sink_stop = min(max(self.given.request.num_sink_tokens, 0), query.start)
        query.parts = 0
        query.ancestors = query.tree = 0

    cdef void sees_tree(self, kv_query *query, Py_ssize_t tree, uint64_t ancestors) noexcept nogil:
        """Set what a draft sees: positions before `tree`, where the drafts begin, and its ancestors. Its depth is its position."""
        cdef Py_ssize_t depth = kv_count_bits(ancestors) - 1, place
        cdef uint64_t sinks = 0
        self.sees(query, tree + depth, tree + depth + 1)
        query.tree, query.stop = tree, tree
        for place in range(tree, query.start):  # ancestors before a window or a chunk, of which sink tokens stay
            if place < query.sink_stop:
                sinks |= ancestors & (~ancestors + 1)
            ancestors &= ancestors - 1
        ancestors |= sinks
        query.sink_stop = min(query.sink_stop, tree)
        if query.start > tree:
            query.start = tree
        else:
            while ancestors >> (query.stop - tree) & 1:  # those that follow each other from the first on are as causal tokens
                ancestors ^= <uint64_t>1 << (query.stop - tree)
                query.stop += 1
                if query.stop - tree == MOST_DRAFTS:
                    break
        query.ancestors = ancestors

    cdef void add(self, const kv_context *context, Py_ssize_t first_query, Py_ssize_t num_queries, Py_ssize_t begin,
                 int part) noexcept nogil:
        """Add items for the queries of `ask`, which read their context from position `begin` on.

        A few queries that would read their sink tokens in different splits get items of their own; see `cut_context`. Each query with
        chosen tokens has one, too, whose positions count these tokens.
        """
        cdef kv_item *item
        cdef kv_query *first
        cdef Py_ssize_t n, i, end
        while num_queries and self.given.chosen != NULL:
            item = self.open_item(context)
            item.first_query, item.num_queries, item.part = first_query, 1, part
            self.close(item, self.chosen.most_of(first_query))
            first_query += 1
            num_queries -= 1
        while num_queries:
            first, n = self.call.queries + first_query, num_queries
            item = self.open_item(context)
            item.first_query, item.num_queries, item.part = first_query, n, part
            item.begin = begin_of(first, begin)
            if num_queries <= KV_FEW_QUERIES:
                cut_context(&self.call, item, item.begin + 1)
                n = 1
                while n < num_queries and cut_alike(item, first, first + n):
                    n += 1
                item.num_queries = n
            end = item.begin + 1
            for i in range(n):
                end = max(end, first[i].stop, first[i].tree + 1 if first[i].ancestors else 0)
            self.close(item, end)
            first_query += n
            num_queries -= n

    cdef kv_item *open_item(self, const kv_context *context) noexcept nogil:
        """The next item, which reads a context; `close` adds it."""
        cdef kv_item *item = self.call.items + self.call.num_items
        memset(item, 0, sizeof(kv_item))
        item.keys = memset(self.keys + self.call.num_items, 0, sizeof(kv_keys))
        self.keys[self.call.num_items].context = context[0]
        return item

    cdef void close(self, kv_item *item, Py_ssize_t end) noexcept nogil:
        """Split the item's positions up to `end`."""
        cdef Py_ssize_t span = end - item.begin
        cdef int panels
        cut_context(&self.call, item, end)
        panels = cut_rows(&self.call, item)
        if panels >= 0:
            self.wide, self.given.wide_kind = True, panels
        self.packed = self.packed or panels == NO_PACKED_PANELS
        self.call.num_items += 1
        self.work += <Py_ssize_t>(work_of_attention(work_of(self.given.layout, span))
                                  * max(1.0, item.num_queries * self.call.group / 8.0))

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
                or rows * self.given.layout.num_kv_heads <= (LEAST_JOINED_TASKS - 1) * LEAST_JOINED_PANELS * KV_ROWS):
            return
        item.continues, item.part = True, before.part

    cdef Py_ssize_t deal(self, int threads) noexcept nogil:
        """Deal the splits of all items out to tasks, and number the partial results of each query, per query head; returns how many
        slots there are for them."""
        cdef Py_ssize_t i, j
        cdef kv_item *item
        cdef kv_query *query
        deal_splits(&self.call, threads)
        for i in range(self.call.num_items):
            item = self.call.items + i
            for j in range(item.num_queries):
                query = self.call.queries + (item.members[j] if item.members != NULL else item.first_query + j)
                query = self.call.queries + query.token
                query.parts = max(query.parts, item.part + <int>item.splits)
        return kv_count_slots(&self.call, self.given.request.q.tokens)

    cdef bint prepare(self, Workspace scratch, int threads) noexcept nogil:
        """Deal the tasks, and reserve memory for partial results and threads, as the last step before `run`; False if out of memory."""
        cdef Py_ssize_t width = kv_partial_size(self.call.values), slots = self.deal(threads) * self.call.num_q_heads, i
        if slots:
            self.call.partials = <double *>self.workspace.reserve(PARTIALS, slots * width * sizeof(double))
            self.call.unfinished = <int *>self.workspace.reserve(
                COUNTS, self.given.request.q.tokens * self.given.layout.num_kv_heads * sizeof(int))
            if self.call.unfinished != NULL:
                kv_count_tasks(&self.call, self.given.request.q.tokens)
        if self.call.partials != NULL and self.call.num_queries > self.given.request.q.tokens:
            for i in range(slots):  # a query may see no key of a split of a segment that others see
                self.call.partials[i * width], self.call.partials[i * width + 1] = -INFINITY, 0.0
        if self.wide:
            self.given.wide = <kv_wide_scratch *>scratch.reserve(WIDE, threads * sizeof(kv_wide_scratch))
        if self.given.request.rope_q.data != NULL:
            self.given.rope = <kv_rope_scratch *>self.workspace.reserve(ROPE, threads * sizeof(kv_rope_scratch))
        if self.given.layout.decode != NULL:
            self.given.decoded_size = self.given.tile * max(self.given.layout.k.padded_dim, self.given.layout.v.padded_dim)
            self.given.decoded = <uint16_t *>self.workspace.reserve(DECODED, threads * self.given.decoded_size * sizeof(uint16_t))
        if self.given.chosen != NULL:
            self.chosen.c.room = <char *>self.workspace.reserve(GATHERED, threads * self.chosen.c.room_bytes)
        self.given.scratch = <void **>self.workspace.reserve(SCRATCH, threads * sizeof(void *))
        return (self.given.scratch != NULL and (slots == 0 or (self.call.partials != NULL and self.call.unfinished != NULL))
                and (not self.wide or self.given.wide != NULL)
                and (self.given.request.rope_q.data == NULL or self.given.rope != NULL)
                and (self.given.layout.decode == NULL or self.given.decoded != NULL)
                and (self.given.chosen == NULL or self.chosen.c.room != NULL))
