"""Prefixes that sequences of a batch share."""
from kvfast.attention.plan cimport kv_prefix
from kvfast.attention.request cimport kv_request
from kvfast.attention.sight cimport kv_member
from kvfast.codec.blocks cimport kv_layout


# Prefixes, the shorter before the longer, in one piece of memory; NULL if there are none.
ctypedef struct kv_prefixes:
    kv_prefix *first
    Py_ssize_t count


cdef void set_shareable(kv_member *member, const kv_layout *layout) noexcept nogil
cdef bint share_nothing(const kv_member *members, Py_ssize_t count, const kv_layout *layout) noexcept nogil
cdef bint gains_nothing(const kv_request *request, const kv_layout *layout, Py_ssize_t count) noexcept nogil
cdef int find_prefixes(const kv_member *members, Py_ssize_t count, const kv_layout *layout, kv_prefixes *found) except -1
cdef void free_prefixes(kv_prefixes *prefixes) noexcept nogil

cdef enum:
    MAX_SHARED_QUERIES = 8     # with more queries, arithmetic limits a sequence, not reading
