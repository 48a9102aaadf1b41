# cython: language_level=3, boundscheck=False, cdivision=True
"""The third step of attention: the tasks of a plan are run, or counted."""
from kvfast.attention.plan cimport Plan, no_memory
from kvfast.attention.request cimport Request
from kvfast.attention.tasks cimport measure_tasks, run_tasks
from kvfast.attention.tiles cimport kv_item, kv_traffic
from kvfast.attention.workspace cimport Workspace
from kvfast.codec.blocks cimport kv_store, values_of
from kvfast.codec.dtypes cimport codes_name, dtype_limit, dtype_name
from kvfast.core.interrupt cimport check_stopped
from kvfast.core.threads cimport gather, kv_team, threads_for

from kvfast.attention.explained import AttendItem, AttendPlan
from kvfast.core import slow_paths
from kvfast.errors import NonFiniteInputError

LOGS = slow_paths.LOGS


cdef object run_plan(Request request, Plan plan):
    """The output of a call, or a tuple of it and the log-sum-exp."""
    cdef kv_team team
    cdef bint done
    # A megabyte or two per thread: only caches of latent rows keep it, as every token of theirs needs it.
    cdef Workspace scratch = Workspace() if plan.wide and not plan.call.store.latent else plan.workspace
    scratch.secure = plan.workspace.secure
    gather(&team, request.num_threads, <double>plan.work)
    if not plan.prepare(scratch, team.threads):
        raise no_memory()
    if LOGS:
        slow_paths.log(_notes(request, plan, team.threads))
    with nogil:
        done = run_tasks(&plan.call, &team)
    check_stopped(team.watch)
    if not done:
        raise no_memory()
    if plan.bad:
        raise NonFiniteInputError(f"q, keys and values are too large together: a score is beyond float32, or an output beyond "
                                  f"{dtype_name(request.c.out.dtype)} (+-{dtype_limit(request.c.out.dtype):g})")
    return request.out if request.lse is None else (request.out, request.lse)


cdef object explain_plan(Request request, Plan plan, str storage):
    """The AttendPlan of a call, which is not run."""
    cdef const kv_store *store = plan.call.store
    cdef kv_traffic traffic
    cdef kv_item *item
    cdef Py_ssize_t i, rows = 1
    cdef int threads = threads_for(request.num_threads, <double>plan.work)
    plan.count_parts()
    cdef bint measured
    with nogil:
        measured = measure_tasks(&plan.call, &traffic)
    if not measured:
        raise no_memory()
    panels = ("attend_panels",) if plan.wide else ()
    items = []
    for i in range(plan.call.num_items):
        item = plan.call.items + i
        items.append(AttendItem(item.num_queries, item.begin, item.end, item.splits, item.split_tokens, item.row_blocks))
        rows = max(rows, min(item.num_queries * plan.call.group, <Py_ssize_t>item.block_rows))
    return AttendPlan(
        isa=plan.call.kernels.isa.decode(), storage=storage,
        kernels=_kernels_of(store) + panels,
        float_kernels=() if store.floats == NULL else _kernels_of(store.floats),
        q_shape=(request.c.q.tokens, request.c.q.heads, request.c.q.dim), q_dtype=dtype_name(request.c.q.dtype),
        num_kv_heads=store.num_kv_heads, v_head_dim=values_of(store).head_dim, context=plan.context, uncounted=plan.uncounted,
        tile=plan.call.tile, float_tile=plan.call.float_tile, rows=rows, num_threads=threads, num_tasks=plan.call.num_tasks,
        items=tuple(items), code_bytes=traffic.codes, scale_bytes=traffic.scales, float_bytes=traffic.floats,
        operations=int(traffic.operations), notes=tuple([text for _, text in _notes(request, plan, threads)]))


cdef list _notes(Request request, Plan plan, int threads):
    cdef const kv_store *store = plan.call.store
    # In a store of latent rows v is the rotary part. Notes describe the width of the latents alone.
    sides = {store.k.head_dim: store.k.rotated}
    if not store.latent:
        sides[store.v.head_dim] = sides.get(store.v.head_dim, False) or store.v.rotated
    return slow_paths.notes(sides, plan.work, threads, plan.call.num_tasks, request.num_threads, plan.packed,
                            plan.uncounted if store.seals and plan.uncounted > request.c.q.tokens else 0)


cdef tuple _kernels_of(const kv_store *store):
    """Names of the kernels that read a store's keys and values, as in the kernel table."""
    if store.latent:
        return f"scores_{codes_name(store.k.dtype)}", "accumulate_latent"
    return f"scores_{codes_name(store.k.dtype)}", f"accumulate_{codes_name(store.v.dtype)}"
