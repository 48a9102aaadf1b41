# cython: language_level=3, boundscheck=False, cdivision=True
"""Cascade attention (FlashInfer, arXiv 2501.01005): keys that several sequences of a batch share are read once for all."""
from libc.stdint cimport int32_t
from libc.stdlib cimport free, malloc

from kvfast.attention.cuts cimport split_tokens_of
from kvfast.attention.options cimport kvfast_options
from kvfast.attention.request cimport kv_request
from kvfast.attention.source cimport floats_from
from kvfast.codec.blocks cimport kv_layout
from kvfast.core.limits cimport KV_ROWS


cdef void set_shareable(kv_member *member, const kv_layout *layout) noexcept nogil:
    """Set how many first blocks all queries of a sequence see in full, and as codes."""
    cdef Py_ssize_t first = member.length - member.num_queries
    member.shareable = 0
    if member.num_queries <= MAX_SHARED_QUERIES and member.num_segments == 0:
        member.shareable = min(first, floats_from(layout, &member.context, first)) >> layout.block_shift


cdef bint gains_nothing(const kv_request *request, const kv_layout *layout, Py_ssize_t count) noexcept nogil:
    """Whether no prefix is read for several sequences at once: tables with a window hold the blocks of the last tokens alone, chosen
    tokens are each query's own, latent rows of many heads have whole passes for each query, so that reading together would save
    few bytes only, and a number of splits does not end one where a prefix ends."""
    cdef const kvfast_options *options = &request.options
    return (count < 2 or options.sliding_window != 0 or options.attention_chunk_size != 0 or options.indices != NULL
            or options.num_splits != 0 or (layout.latent and request.q.heads % KV_ROWS == 0))


cdef bint share_nothing(const kv_member *members, Py_ssize_t count, const kv_layout *layout) noexcept nogil:
    """Whether a look at one block of each member shows that there are no shared prefixes."""
    cdef Py_ssize_t i, j, last = (split_tokens_of(layout) >> layout.block_shift) - 1  # of the shortest prefix
    for i in range(count):
        for j in range(i if members[i].num_queries and members[i].shareable > last else 0):
            if (members[j].num_queries and members[j].shareable > last
                    and members[j].context.table[last] == members[i].context.table[last]):
                return False
    return True


cdef int find_prefixes(const kv_member *members, Py_ssize_t count, const kv_layout *layout, kv_prefixes *found) except -1:
    """Find the prefixes that members of the batch share. They end with a split, so that a query reads the splits that it reads alone.
    `free_prefixes` frees them."""
    cdef list prefixes = [], queries
    cdef Py_ssize_t numbers = 0, i
    cdef kv_prefix *one
    cdef int32_t *at
    found.first, found.count = NULL, 0
    _find(members, [i for i in range(count) if members[i].num_queries], 0, 0, layout, prefixes)
    if not prefixes:
        return 0
    for _, _, group in prefixes:
        numbers += sum([1 + members[<Py_ssize_t>i].num_queries for i in group])
    one = <kv_prefix *>malloc(len(prefixes) * sizeof(kv_prefix) + numbers * sizeof(int32_t))
    if one == NULL:
        raise MemoryError("cannot allocate the shared prefixes of a batch")
    found.first, found.count, at = one, len(prefixes), <int32_t *>(one + len(prefixes))
    for begin, end, group in prefixes:
        queries = [query for i in group for query in range(members[<Py_ssize_t>i].first_query, members[<Py_ssize_t>i].first_query
                                                           + members[<Py_ssize_t>i].num_queries)]
        one.begin, one.end, one.num_members, one.num_queries = begin, end, len(group), len(queries)
        one.members, one.queries = at, at + len(group)
        for i in [*group, *queries]:
            at[0] = <int32_t>i
            at += 1
        one += 1
    return 0


cdef void free_prefixes(kv_prefixes *prefixes) noexcept nogil:
    free(prefixes.first)


cdef int _find(const kv_member *members, list numbers, Py_ssize_t depth, Py_ssize_t begin, const kv_layout *layout,
               list found) except -1:
    """Prefixes of some members from block `depth` on; they share the positions before `begin`."""
    cdef const kv_member *first
    cdef Py_ssize_t common, limit, end, i, split = split_tokens_of(layout)
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
        end = (common << layout.block_shift) // split * split
        if end > begin:
            found.append((begin, end, group))
        _find(members, group, common, end, layout, found)
    return 0
