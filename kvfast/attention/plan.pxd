from libc.stdint cimport int32_t

from kvfast.attention.refusals cimport kv_refusal
from kvfast.attention.request cimport kv_request
from kvfast.attention.sight cimport kv_member
from kvfast.attention.tasks cimport kv_call, kv_chosen, kv_given, kv_keys
from kvfast.attention.workspace cimport kv_workspace
from kvfast.codec.blocks cimport kv_layout
from kvfast.core.threads cimport kv_team


# Positions that members of a batch share, from `begin`, where a shorter prefix that they share ends, to `end`.
ctypedef struct kv_prefix:
    Py_ssize_t begin, end
    const int32_t *members
    Py_ssize_t num_members
    const int32_t *queries     # of these members
    Py_ssize_t num_queries


# A finished plan, which `run` only runs. It points into itself, and must not move.
ctypedef struct kv_plan:
    kv_call call
    kv_given given
    kv_chosen chosen
    kv_keys *keys              # of the items
    kv_workspace *workspace    # that of the cache, or `own` while another call has it
    kv_workspace own
    kv_team team
    kv_refusal refusal
    Py_ssize_t work            # see `work_of`; more for many rows
    Py_ssize_t context         # tokens of all members
    Py_ssize_t uncounted       # of these, tokens that `advance` has not counted
    Py_ssize_t extra           # the next query of a segment, after those of the tokens
    bint wide                  # whether some tasks have panels
    bint packed                # whether packed codes keep the matrix unit from being used
    int bad                    # whether the output is not finite


cdef void open_plan(kv_plan *plan, kv_workspace *workspace) noexcept nogil
cdef bint plan_of(kv_plan *plan, const kv_request *request, const kv_layout *layout, kv_member *members, Py_ssize_t count,
                  const kv_prefix *prefixes, Py_ssize_t num_prefixes) noexcept nogil
cdef void close_plan(kv_plan *plan) noexcept nogil
