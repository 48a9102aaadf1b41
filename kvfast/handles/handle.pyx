# cython: language_level=3, boundscheck=False, cdivision=True
"""What a `kvfast_cache` and a `kvfast_pool` share: working memory, who may enter, rows of keys and of latents, the last error."""
from libc.stdint cimport int64_t
from libc.string cimport memcpy, memset

from kvfast.attention.plan cimport Plan
from kvfast.attention.run cimport run_tasks
from kvfast.attention.workspace cimport Workspace
from kvfast.codec.blocks cimport kv_layout
from kvfast.core.arrays cimport Rows, kv_rows, rows_overlap
from kvfast.core.flags cimport kv_drop, kv_take
from kvfast.core.threads cimport gather_unwatched, kv_team
from kvfast.handles.arguments cimport code_of, convert, itemsize_of, options_of, unfit
from kvfast.handles.header cimport kvfast_options, kvfast_rows
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.tables.block_table cimport BlockTable

from kvfast.errors import DimensionMismatchError

cdef extern from "Python.h" nogil:
    Py_ssize_t PyList_GET_SIZE(void *list)


cdef class Handle:
    cdef int over(self, BlockPool pool) except -1:
        self.pool, self.latent = pool, pool.layouts.latent
        self.plan = Plan.__new__(Plan)
        self.plan.workspace = Workspace()
        self.plan.workspace.secure = pool.secure
        return 0

    cdef bint is_quiet(self) noexcept nogil:
        """Whether no released blocks wait to be returned, which only Python can do."""
        return PyList_GET_SIZE(<void *>self.pool.to_release) == 0

    cdef bint try_enter(self) noexcept nogil:
        """Enter alone, if no other thread is in the pool, and if it is quiet; else False. `leave` is the inverse."""
        if not self.pool.try_enter():
            return False
        if self.is_quiet():
            return True
        self.leave()
        return False

    cdef void leave(self) noexcept nogil:
        self.pool.leave()

    cdef bint try_enter_reading(self) noexcept nogil:
        """Enter a call that only reads, if no other thread works in this handle's memory; else False."""
        if kv_take(&self.busy, 1):
            return False
        if self.pool.try_enter_reading():
            if self.is_quiet():
                return True
            self.pool.leave_reading()
        kv_drop(&self.busy)
        return False

    cdef void leave_reading(self) noexcept nogil:
        self.pool.leave_reading()
        kv_drop(&self.busy)

    cdef bint split(self, const kvfast_rows *given, kv_rows *rows, kv_rows *rope) noexcept nogil:
        """Convert the rows, and split latent rows from their rotary part; False if the arguments are invalid."""
        if not convert(given, rows):
            return False
        memset(rope, 0, sizeof(kv_rows))
        if self.latent:
            if given.dim != self.pool.head_dim + self.pool.layouts.v.head_dim:
                return False
            rope[0] = rows[0]
            rows.dim = self.pool.head_dim
            rope.dim = given.dim - rows.dim
            rope.data += rows.dim * itemsize_of(rows.dtype)
        return True

    cdef bint split_pair(self, const kvfast_rows *k, const kvfast_rows *v, kv_rows *keys, kv_rows *values) noexcept nogil:
        """Convert keys and values, or the two parts of latent rows; False if they are invalid, or of different numbers."""
        return ((v == NULL) == self.latent and self.split(k, keys, values) and (v == NULL or convert(v, values))
                and values.tokens == keys.tokens)

    cdef bint run(self, int num_threads) noexcept nogil:
        """Run the plan, if it needs no memory that the workspace does not keep, and if its output is finite; else False."""
        cdef kv_team team
        if self.plan.wide and not self.latent:
            return False
        gather_unwatched(&team, num_threads, <double>self.plan.work)
        if not self.plan.prepare(self.plan.workspace, team.threads):
            return False
        return run_tasks(&self.plan.call, &team) and not self.plan.bad

    cdef tuple open_rows(self, const kvfast_rows *given, str name):
        """`split` for the path of Python: two Rows, or an error."""
        cdef Rows rows = Rows.__new__(Rows), rope = Rows.__new__(Rows)
        if not self.split(given, &rows.rows, &rope.rows):
            raise unfit(given, name)
        return rows, rope

    cdef tuple open_pair(self, const kvfast_rows *k, const kvfast_rows *v):
        """`split_pair` for the path of Python."""
        cdef tuple pair
        if (v == NULL) != self.latent:
            raise ValueError("v must be NULL for latent rows" if self.latent else "v must not be NULL")
        pair = self.open_rows(k, "latent" if self.latent else "k")
        return pair if self.latent else (pair[0], self.open_rows(v, "v")[0])

    cdef tuple open_call(self, const kvfast_rows *q, const kvfast_options *options, const kvfast_rows *out, list spans, list parents):
        """The arguments of `attend` for the path of Python: queries, their rotary part or None, and options."""
        cdef Rows queries, rope
        cdef Rows target = Rows.__new__(Rows)
        queries, rope = self.open_rows(q, "q")
        if not convert(out, &target.rows):
            raise unfit(out, "out")
        if rows_overlap(&target.rows):
            raise ValueError(f"the rows of out must not overlap each other, got shape {(out.num_tokens, out.num_heads, out.dim)} with "
                             f"strides of {target.rows.token_stride} and {target.rows.head_stride} bytes")
        if options.chosen != NULL and options.chosen_heads not in (0, 1, self.pool.layouts.num_kv_heads):
            raise DimensionMismatchError(f"chosen_heads must be 0, 1 or the {self.pool.layouts.num_kv_heads} KV heads of the cache, "
                                         f"got {options.chosen_heads}")
        settings = options_of(options, target, queries, rope, spans, parents)
        if self.latent and (options.attention_chunk_size or options.num_spans or options.num_parents):
            raise ValueError("attention_chunk_size, spans and parents must be 0 and NULL for latent rows")
        return queries, rope if rope.rows.dim else None, settings

    cdef int failed(self, object error) noexcept:
        """Keep the text of an error, and return its code."""
        return code_of(error, self.text, MOST_TEXT)


cdef int copy_lse(object result, float *lse) except -1:
    """Copy the log-sum-exp that `attend` returned to where the caller wants it."""
    cdef float[:, ::1] given
    if lse != NULL:
        given = result[1]
        memcpy(lse, &given[0, 0], given.shape[0] * given.shape[1] * sizeof(float))
    return 0


cdef bint have_shape_of(const kv_layout *layout, const kv_rows *k, const kv_rows *v) noexcept nogil:
    return k.heads == v.heads == layout.num_kv_heads and k.dim == layout.k.head_dim and v.dim == layout.v.head_dim


cdef bint next_slots(BlockTable table, Py_ssize_t layer, Py_ssize_t n, int64_t *slots) noexcept nogil:
    """The slots of a sequence's next tokens; False if Python must make some of them writable first."""
    cdef Py_ssize_t first = table.lengths[layer], i
    if n and not table.is_writable(layer, first, first + n):
        return False
    for i in range(n):
        slots[i] = table.map.slot(first + i)
    return True


cdef void add_tokens(BlockTable table, Py_ssize_t layer, Py_ssize_t n) noexcept nogil:
    table.lengths[layer] += n
