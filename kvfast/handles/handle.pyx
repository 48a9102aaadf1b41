# cython: language_level=3, boundscheck=False, cdivision=True
"""What a `kvfast_cache` and a `kvfast_pool` share: who may enter, calls of `attend`, the last error."""
from libc.stdint cimport int64_t
from libc.string cimport memset

from kvfast.attention.plan cimport close_plan, kv_plan, kv_prefix, open_plan, plan_of
from kvfast.attention.refusals cimport VALUE, refuse
from kvfast.attention.request cimport Request, default_scale, fits, has_finite_queries, kv_request, raise_refusal, split_queries
from kvfast.attention.run cimport LOGS, end_run, run
from kvfast.attention.sight cimport kv_member
from kvfast.codec.blocks cimport kv_layout
from kvfast.codec.encode cimport split_latent
from kvfast.core.arrays cimport Rows, kv_rows, rows_overlap
from kvfast.core.checks cimport check_layer
from kvfast.core.kernels cimport UNSET
from kvfast.core.threads cimport most_threads
from kvfast.handles.arguments cimport code_of, convert, unfit
from kvfast.handles.header cimport KVFAST_OK, kvfast_rows
from kvfast.storage.tables.block_table cimport BlockTable

cdef extern from "Python.h" nogil:
    Py_ssize_t PyList_GET_SIZE(void *list)
    int PyGILState_Check()


cdef class Handle:
    cdef bint try_enter(self) noexcept nogil:
        """Enter alone, if no other thread is in the pool, and if no released blocks wait to be returned, which only Python can do; else
        False."""
        if not self.pool.try_enter():
            return False
        if PyList_GET_SIZE(<void *>self.pool.to_release) == 0:
            return True
        self.pool.leave()
        return False

    cdef int enter_reading(self) noexcept nogil:
        """Enter a call that only reads; returns a code."""
        if self.pool.try_enter_reading():
            if PyList_GET_SIZE(<void *>self.pool.to_release) == 0:
                return KVFAST_OK
            self.pool.leave_reading()
        return self.tidy_and_read()

    cdef int tidy_and_read(self) noexcept with gil:
        try:
            self.pool.enter_reading()
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef bint split_pair(self, const kv_layout *layout, const kvfast_rows *k, const kvfast_rows *v, kv_rows *keys,
                         kv_rows *values) noexcept nogil:
        """Convert keys and values, or the two parts of latent rows; False if they are invalid, or of another shape."""
        if (v == NULL) != layout.latent or not convert(k, keys):
            return False
        if not (split_latent(layout, keys, values) if layout.latent else convert(v, values)):
            return False
        return (values.tokens == keys.tokens and keys.heads == values.heads == layout.num_kv_heads and keys.dim == layout.k.head_dim
                and values.dim == layout.v.head_dim)

    cdef tuple open_pair(self, const kv_layout *layout, const kvfast_rows *k, const kvfast_rows *v):
        """`split_pair` as two Rows, of any shape, or an error."""
        cdef Rows keys = Rows.__new__(Rows), values = Rows.__new__(Rows)
        if (v == NULL) != layout.latent:
            raise ValueError("v must be NULL for latent rows" if layout.latent else "v must not be NULL")
        if not convert(k, &keys.rows) or (layout.latent and not split_latent(layout, &keys.rows, &values.rows)):
            raise unfit(k, "latent" if layout.latent else "k")
        if not layout.latent and not convert(v, &values.rows):
            raise unfit(v, "v")
        return keys, values

    cdef int open_call(self, kv_c_call *call, const kv_layout *layout, int precision) noexcept nogil:
        """Describe a call, and check it; returns a code. `precision`: that of the cache."""
        cdef kv_request *request = &call.request
        memset(request, 0, sizeof(kv_request))
        if not convert(call.q, &request.q) or not convert(call.out, &request.out):
            return self.wrong_rows(call)
        split_queries(layout, request)
        request.options = call.options[0]
        if request.options.scale == 0:
            request.options.scale = default_scale(layout)
        if request.options.precision == UNSET:
            request.options.precision = precision
        request.threads = most_threads(min(max(request.options.num_threads, 0), 1024))
        if rows_overlap(&request.out):
            refuse(&call.refusal, VALUE, b"the rows of out must not overlap each other, got shape ({0}, {1}, {2}) with strides of {3} "
                   b"and {4} bytes", request.out.tokens, request.out.heads, request.out.dim, request.out.token_stride,
                   request.out.head_stride)
            return self.refused(call)
        if not fits(request, layout, &call.refusal) or not has_finite_queries(request, &call.refusal):
            return self.refused(call)
        return KVFAST_OK

    cdef int answer(self, kv_c_call *call, const kv_layout *layout, kv_member *members, Py_ssize_t count, const kv_prefix *prefixes,
                    Py_ssize_t num_prefixes) noexcept nogil:
        """Plan a call and run it; returns a code."""
        cdef kv_plan plan
        cdef int code = KVFAST_OK
        cdef bint done
        open_plan(&plan, &self.pool.workspace.c)
        done = (plan_of(&plan, &call.request, layout, members, count, prefixes, num_prefixes)
                and run(&plan, PyGILState_Check()))  # a thread that must wait for the GIL may be what its owner waits for
        if (plan.team.watch != NULL and plan.team.watch.is_stopped) or (done and LOGS):
            code = self.end(&plan)
        if not done and code == KVFAST_OK:
            call.refusal = plan.refusal
            code = self.refused(call)
        close_plan(&plan)
        return code

    cdef int end(self, kv_plan *plan) noexcept with gil:
        try:
            end_run(plan)
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int refused(self, const kv_c_call *call) noexcept with gil:
        """Keep the text of a refusal, and return its code."""
        cdef Request request
        try:
            request = Request.__new__(Request)
            request.c, request.of = call.request, f"layer {call.layer}"
            raise_refusal(&call.refusal, request)
        except BaseException as error:
            return self.failed(error)

    cdef int wrong_rows(self, const kv_c_call *call) noexcept with gil:
        try:
            raise unfit(call.q, "q") if call.request.q.data == NULL else unfit(call.out, "out")
        except BaseException as error:
            return self.failed(error)

    cdef int no_layer(self, int layer, Py_ssize_t num_layers) noexcept with gil:
        try:
            check_layer(layer, num_layers)
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int failed(self, object error) noexcept:
        """Keep the text of an error, and return its code."""
        return code_of(error, self.text, MOST_TEXT)


cdef bint next_slots(BlockTable table, Py_ssize_t layer, Py_ssize_t n, int64_t *slots) noexcept nogil:
    """The slots of a sequence's next tokens; False if Python must make some of them writable first, or seal their blocks."""
    cdef Py_ssize_t first = table.lengths[layer], i
    if n and not table.is_writable(layer, first, first + n) or table.life.fills(layer, first, first + n):
        return False
    for i in range(n):
        slots[i] = table.map.slot(first + i)
    return True
