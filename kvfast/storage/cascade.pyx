# cython: language_level=3, boundscheck=False, cdivision=True
"""Cascade attention (FlashInfer, arXiv 2501.01005): keys that several sequences of a batch share are read once for all."""
import numpy as np

from libc.stdint cimport int32_t
from libc.string cimport memset

from kvfast.attention.call cimport AttendCall
from kvfast.attention.tiles cimport kv_item
from kvfast.core.limits cimport KV_TILE

cdef enum:
    MIN_SHARED_TOKENS = 256    # each sequence reads shorter shared prefixes by itself


cdef class Context:
    """The keys that one sequence of a batch sees, and its queries."""


cdef int read_together(AttendCall call, list contexts, list members, Py_ssize_t depth, Py_ssize_t size, list begins, list parts,
                       list keepalive) except -1:
    """Add items for prefixes that members of the batch share, from block `depth` on; blocks have `size` tokens. Sets for each
    member where its own item begins, and the number of partial results before it."""
    cdef Context context, first
    cdef Py_ssize_t common, limit, tokens, begin, i, j, n
    cdef int32_t[::1] queries
    cdef kv_item *item
    groups = {}
    for member in members:
        context = contexts[member]
        if context.shareable > depth:
            groups.setdefault(context.c.table[depth], []).append(member)
    for group in groups.values():
        if len(group) < 2:
            continue
        first = contexts[group[0]]
        limit = min([(<Context>contexts[member]).shareable for member in group])
        common = depth + 1
        while common < limit:
            for member in group:
                if (<Context>contexts[member]).c.table[common] != first.c.table[common]:
                    break
            else:
                common += 1
                continue
            break
        begin, tokens = begins[group[0]], common * size // KV_TILE * KV_TILE
        if tokens - begin >= MIN_SHARED_TOKENS:
            n = sum([(<Context>contexts[member]).num_queries for member in group])
            queries = np.empty(n, np.int32)
            keepalive.append(queries)
            j = 0
            for member in group:
                context = contexts[member]
                for i in range(context.num_queries):
                    queries[j] = <int32_t>(context.first_query + i)
                    j += 1
            item = call.call.items + call.call.num_items
            memset(item, 0, sizeof(kv_item))
            item.context, item.members, item.num_queries = first.c, &queries[0], n
            item.begin, item.part = begin, parts[group[0]]
            call.close(item, tokens)
            for member in group:
                begins[member], parts[member] = tokens, item.part + <int>item.splits
        read_together(call, contexts, group, common, size, begins, parts, keepalive)
    return 0
