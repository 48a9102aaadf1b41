# cython: language_level=3, boundscheck=False, cdivision=True
"""The third step of attention: the tasks of a plan are run, or counted."""
from libc.math cimport logf
from libc.string cimport memset

from kvfast.attention.gather cimport read_chosen
from kvfast.attention.plan cimport close_plan, kv_plan, kv_prefix, open_plan, plan_of
from kvfast.attention.refusals cimport NOT_FINITE, no_memory, refuse
from kvfast.attention.request cimport Request, raise_refusal
from kvfast.attention.sight cimport kv_member
from kvfast.attention.source cimport read
from kvfast.attention.tasks cimport (kv_attend_task, kv_call, kv_each_split, kv_given, kv_item, kv_open_task, kv_own, kv_query,
                                     kv_read_split, kv_source, kv_split_begin, kv_task, kv_traffic)
from kvfast.attention.workspace cimport Workspace
from kvfast.codec.blocks cimport kv_layout, values_of
from kvfast.codec.dtypes cimport codes_name, dtype_limit, dtype_name
from kvfast.core.arrays cimport kv_rows
from kvfast.core.interrupt cimport check_stopped, kv_watch, watch_of
from kvfast.core.kernels cimport FAST, KV_FLOAT32, active, kv_kernels, resolved
from kvfast.core.scratch cimport SCRATCH_BYTES, give_scratch, take_scratch
from kvfast.core.threads cimport DYNAMIC, kv_team, run_each
from kvfast.core.wipe cimport kv_wipe_pages, kv_wipe_stack

from kvfast.attention.explained import AttendItem, AttendPlan
from kvfast.core import slow_paths
from kvfast.core.kernels import name_of_precision

LOGS = slow_paths.LOGS

assert sizeof(kv_own) <= SCRATCH_BYTES  # of a task

cdef kv_source _SOURCE
cdef kv_source _CHOSEN
_SOURCE.read, _SOURCE.write = read, _write
_CHOSEN.read, _CHOSEN.write = read_chosen, _write


cdef inline const kv_source *_source_of(const kv_given *given) noexcept nogil:
    return &_SOURCE if given.chosen == NULL else &_CHOSEN


cdef bint run(kv_plan *plan, bint is_watched) noexcept nogil:
    """Run the tasks of a plan. False if it is refused. `end_run` follows. `is_watched`: whether the thread looks for Ctrl-C, for which
    it must be able to take the GIL."""
    cdef kv_team team = plan.team
    cdef bint done
    if is_watched:
        team.watch = plan.team.watch = watch_of(&plan.team.memory, <double>plan.work)
    team.threads = _with_tasks(&plan.call, team.threads)
    done = take_scratch(plan.given.scratch, team.threads)
    if done:
        plan.call.source, plan.given.watch = _source_of(&plan.given), team.watch
        run_each(&team, _attend, &plan.call, plan.call.num_tasks, DYNAMIC)
        give_scratch(plan.given.scratch, team.threads)
    if not done:
        return no_memory(&plan.refusal)
    return not plan.bad or refuse(&plan.refusal, NOT_FINITE, b"q, keys and values are too large together: a score is beyond float32, "
                                  b"or an output beyond {dtype}")


cdef int end_run(kv_plan *plan) except -1:
    """Raise what a signal handler has raised during a run, and log slow paths."""
    check_stopped(plan.team.watch)
    if LOGS:
        slow_paths.log(_notes(plan))
    return 0


cdef object answer(Request request, const kv_layout *layout, Workspace workspace, kv_member *members, Py_ssize_t count,
                   const kv_prefix *prefixes=NULL, Py_ssize_t num_prefixes=0, str storage=None):
    """The output of a call, or a tuple of it and the log-sum-exp. For imagined queries, its AttendPlan; `storage` is a name for it."""
    cdef kv_plan plan
    cdef bint done, runs = request.c.q.data != NULL
    open_plan(&plan, &workspace.c)
    try:
        with nogil:
            done = plan_of(&plan, &request.c, layout, members, count, prefixes, num_prefixes)
            if done and runs:
                done = run(&plan, True)
        if not done:
            check_stopped(plan.team.watch)
            raise_refusal(&plan.refusal, request)
        if not runs:
            return _explained(request, &plan, storage)
        end_run(&plan)
    finally:
        close_plan(&plan)
    return request.out if request.lse is None else (request.out, request.lse)


cdef object _explained(Request request, kv_plan *plan, str storage):
    """The AttendPlan of a call, which is not run."""
    cdef const kv_layout *layout = plan.given.layout
    cdef kv_traffic traffic
    cdef void *scratch
    cdef kv_item *item
    cdef Py_ssize_t i, rows = 1
    # The tasks run, read no queries and write no output: they count.
    memset(&traffic, 0, sizeof(traffic))
    plan.call.source, plan.given.traffic, plan.given.scratch = _source_of(&plan.given), &traffic, &scratch
    if not take_scratch(&scratch, 1):
        no_memory(&plan.refusal)
        raise_refusal(&plan.refusal, request)
    with nogil:
        for i in range(plan.call.num_tasks):
            _attend(&plan.call, i, 0, NULL)
    give_scratch(&scratch, 1)
    panels = ("attend_" + plan.call.kernels.panels[plan.given.panel_kind].family.decode(),) if plan.wide else ()
    items = []
    for i in range(plan.call.num_items):
        item = plan.call.items + i
        items.append(AttendItem(
            item.num_queries, item.begin, item.end,
            tuple([max(item.begin, kv_split_begin(item, item.first_split + split)) for split in range(item.splits)]), item.run,
            item.row_blocks))
        rows = max(rows, min(item.num_queries * plan.call.group, <Py_ssize_t>item.block_rows))
    return AttendPlan(
        isa=plan.call.kernels.isa.decode(), precision=name_of_precision(resolved(request.c.options.precision)), storage=storage,
        kernels=_kernels_of(layout) + panels,
        float_kernels=() if layout.floats == NULL else _kernels_of(layout.floats),
        q_shape=(request.c.q.tokens, request.c.q.heads, request.c.q.dim), q_dtype=dtype_name(request.c.q.dtype),
        num_kv_heads=layout.num_kv_heads, v_head_dim=values_of(layout).head_dim, context=plan.context, uncounted=plan.uncounted,
        tile=plan.given.tile, float_tile=plan.given.float_tile, rows=rows, num_threads=_with_tasks(&plan.call, plan.team.threads),
        num_tasks=plan.call.num_tasks,
        items=tuple(items), code_bytes=traffic.codes, scale_bytes=traffic.scales, float_bytes=traffic.floats,
        operations=int(traffic.operations), notes=tuple([text for _, text in _notes(plan)]))


cdef list _notes(kv_plan *plan):
    cdef const kv_layout *layout = plan.given.layout
    # In a layout of latent rows v is the rotary part. Notes describe the width of the latents alone.
    sides = {layout.k.head_dim: layout.k.rotated}
    if not layout.latent:
        sides[layout.v.head_dim] = sides.get(layout.v.head_dim, False) or layout.v.rotated
    stay_floats = plan.uncounted if layout.floats_of_steps and plan.uncounted > plan.given.request.q.tokens else 0
    return slow_paths.notes(sides, plan.work, plan.team.threads, plan.call.num_tasks, plan.given.request.options.num_threads or None,
                            plan.packed, stay_floats,
                            _stays_exact(layout, plan.call.kernels) if resolved(plan.given.request.options.precision) == FAST else None)


cdef object _stays_exact(const kv_layout *layout, const kv_kernels *kernels):
    """The format of a layout if kernels of the fast precision are those of the exact one, else None."""
    cdef const kv_kernels *exact = active()
    if kernels.scores[layout.k.dtype] == exact.scores[layout.k.dtype] and (
            layout.latent or kernels.accumulate[layout.v.dtype] == exact.accumulate[layout.v.dtype]):
        return "/".join(dict.fromkeys([codes_name(layout.k.dtype), codes_name(values_of(layout).dtype)]))


cdef tuple _kernels_of(const kv_layout *layout):
    """Names of the kernels that read a layout's keys and values, as in the kernel table."""
    if layout.latent:
        return f"scores_{codes_name(layout.k.dtype)}", "accumulate_latent"
    return f"scores_{codes_name(layout.k.dtype)}", f"accumulate_{codes_name(layout.v.dtype)}"


cdef inline int _with_tasks(const kv_call *call, int threads) noexcept nogil:
    """How many of the threads have a task."""
    return <int>max(1, min(<Py_ssize_t>threads, call.num_tasks))


cdef int _attend(void *shared, Py_ssize_t index, int thread, kv_watch *watch) noexcept nogil:
    cdef const kv_call *call = <const kv_call *>shared
    cdef const kv_given *given = <const kv_given *>call.given
    cdef kv_own *own = <kv_own *>given.scratch[thread]
    cdef kv_task task
    own.rope = given.rope + thread if given.rope != NULL else NULL
    own.decoded = given.decoded + thread * given.decoded_size if given.decoded != NULL else NULL
    own.gathered = given.chosen.room + thread * given.chosen.room_bytes if given.chosen != NULL else NULL
    task.own, task.narrow = own, &own.scratch
    task.wide = given.wide + thread if given.wide != NULL else NULL
    task.folds = given.folds + thread * given.folds_size
    task.rest = own.rest if call.values.dtype == KV_FLOAT32 else NULL
    task.options.softcap, task.options.query_at, task.options.bias = given.request.options.softcap, own.query_at, NULL
    task.options.slopes = own.slopes if given.request.options.alibi_slopes != NULL else NULL
    own.scratch.queries.room = own.scratch.softmax.room = &own.room
    if task.wide != NULL:
        task.wide.operands.room = &own.room
    if own.rope != NULL:
        own.rope.queries.room = &own.room
    kv_open_task(&task, call, index)
    if given.traffic != NULL:
        kv_each_split(&task, kv_read_split)
        return 0
    kv_attend_task(&task)
    if given.layout.secure:
        kv_wipe_pages(<char *>own, sizeof(kv_own))
        kv_wipe_stack()
    return 0


cdef void _write(const kv_call *call, const kv_query *query, Py_ssize_t q_head, float *row, float top, float l) noexcept nogil:
    """Write an output row, and its log-sum-exp; see `kv_source`."""
    cdef const kv_given *given = <const kv_given *>call.given
    cdef const kv_rows *out = &given.request.out
    cdef Py_ssize_t dim = call.values.head_dim
    if call.values.rotated:
        call.kernels.rotate(row, dim, 1, dim, row, dim)
    # Every query sees at least its own token, so l is 0 or NaN only if scores were beyond float32; see exp in simd/vectors/rows.inc.h.
    if not l > 0 or call.kernels.find_unstorable(row, dim, dtype_limit(out.dtype)) >= 0:
        given.bad[0] = 1
    call.kernels.from_float[out.dtype](row, dim, out.data + query.token * out.token_stride + q_head * out.head_stride)
    if given.request.options.lse != NULL:
        given.request.options.lse[query.token * call.num_q_heads + q_head] = top + logf(l)
