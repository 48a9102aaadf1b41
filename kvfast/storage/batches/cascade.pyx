# cython: language_level=3, boundscheck=False, cdivision=True
"""Cascade attention (FlashInfer, arXiv 2501.01005): keys that several sequences of a batch share are read once for all."""
import numpy as np

from kvfast.attention.plan cimport Plan
from kvfast.attention.tasks cimport kv_item
from kvfast.core.limits cimport KV_TILE

cdef enum:
    MIN_SHARED_TOKENS = 256    # each sequence reads shorter shared prefixes by itself


cdef class SharedPrefix:
    """Positions of a prefix that members of a batch share, from `begin`, where a shorter prefix that they share ends, to `end`."""


cdef bint share_nothing(const kv_member *members, Py_ssize_t count, Py_ssize_t size) noexcept nogil:
    """Whether a look at one block of each member shows that there are no shared prefixes."""
    cdef Py_ssize_t i, j, last = MIN_SHARED_TOKENS // size - 1  # of the shortest prefix
    for i in range(count):
        for j in range(i if members[i].num_queries and members[i].shareable > last else 0):
            if (members[j].num_queries and members[j].shareable > last
                    and members[j].context.table[last] == members[i].context.table[last]):
                return False
    return True


cdef list shared_prefixes(const kv_member *members, Py_ssize_t count, Py_ssize_t size):
    """The prefixes that members of the batch share, the shorter before the longer; blocks have `size` tokens."""
    cdef list found = []
    _find(members, [i for i in range(count) if members[i].num_queries], 0, 0, size, found)
    return found


cdef int _find(const kv_member *members, list numbers, Py_ssize_t depth, Py_ssize_t begin, Py_ssize_t size, list found) except -1:
    """Those of some members from block `depth` on; they share the positions before `begin`."""
    cdef SharedPrefix prefix
    cdef const kv_member *first
    cdef Py_ssize_t common, limit, end, i
    groups = {}
    for i in numbers:
        if members[i].shareable > depth:
            groups.setdefault(members[i].context.table[depth], []).append(i)
    for group in groups.values():
        if len(group) < 2:
            continue
        first = members + <Py_ssize_t>group[0]
        limit = min([members[<Py_ssize_t>i].shareable for i in group])
        common = depth + 1
        while common < limit:
            for i in group:
                if members[i].context.table[common] != first.context.table[common]:
                    break
            else:
                common += 1
                continue
            break
        end = common * size // KV_TILE * KV_TILE
        if end - begin >= MIN_SHARED_TOKENS:
            prefix = SharedPrefix.__new__(SharedPrefix)
            prefix.begin, prefix.end, prefix.members = begin, end, np.array(group, np.int32)
            prefix.queries = np.concatenate([np.arange(members[<Py_ssize_t>i].first_query, members[<Py_ssize_t>i].first_query
                                                       + members[<Py_ssize_t>i].num_queries, dtype=np.int32) for i in group])
            found.append(prefix)
        else:
            end = begin
        _find(members, group, common, end, size, found)
    return 0


cdef void read_together(Plan plan, list prefixes, kv_member *members):
    """Add items for prefixes that members of the batch share. Sets for each member where its own item begins, and the number of
    partial results before it."""
    cdef SharedPrefix prefix
    cdef kv_member *first
    cdef kv_item *item
    cdef Py_ssize_t i
    for prefix in prefixes:
        first = members + prefix.members[0]
        item = plan.open_item(&first.context)
        item.members, item.num_queries = &prefix.queries[0], prefix.queries.shape[0]
        item.begin, item.part = prefix.begin, first.parts
        plan.close(item, prefix.end)
        for i in range(prefix.members.shape[0]):
            members[prefix.members[i]].begin = prefix.end
            members[prefix.members[i]].parts = item.part + <int>item.splits
