"""The tokens of a sequence."""
from libc.stdint cimport int32_t

from kvfast.attention.options cimport kvfast_options
from kvfast.attention.refusals cimport kv_refusal
from kvfast.attention.sight cimport kv_member
from kvfast.codec.blocks cimport kv_context
from kvfast.codec.encode cimport kv_rotary
from kvfast.core.arrays cimport Rows
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.tables.block_map cimport BlockMap
from kvfast.storage.tables.token_life cimport TokenLife


cdef class BlockTable:
    cdef readonly BlockPool pool
    cdef readonly BlockMap map
    cdef TokenLife life
    cdef Py_ssize_t *lengths           # (num_layers,) tokens of each layer
    cdef readonly Py_ssize_t length    # tokens that every layer has
    cdef bint closed                   # `close` was called
    cdef bint is_counted               # as a sequence of its pool

    cdef Py_ssize_t longest(self) noexcept nogil
    cdef Py_ssize_t num_uncounted(self) noexcept nogil
    cdef Py_ssize_t num_slots(self) noexcept nogil
    cdef Py_ssize_t num_held(self) noexcept nogil
    cdef Py_ssize_t held_from(self) noexcept nogil
    cdef int advance(self, Py_ssize_t n) except -1
    cdef bint just_counts(self, Py_ssize_t n) noexcept nogil
    cdef void count_tokens(self, Py_ssize_t n) noexcept nogil
    cdef int release_evicted(self) except -1
    cdef int ensure(self, Py_ssize_t num_blocks) except -1
    cdef dict resume_state(self)
    cdef int set_resume_state(self, Py_ssize_t length, dict state) except -1
    cdef void set_length(self, Py_ssize_t length) noexcept nogil
    cdef Py_ssize_t check_resume_state(self, Py_ssize_t length, dict state) except -1
    cdef void context(self, Py_ssize_t layer, kv_context *context) noexcept nogil
    cdef bint is_writable(self, Py_ssize_t layer, Py_ssize_t first, Py_ssize_t last) noexcept nogil
    cdef bint _is_open(self, Py_ssize_t layer, int32_t block, Py_ssize_t index, Py_ssize_t first, Py_ssize_t last) noexcept nogil
    cdef Py_ssize_t floats_needed(self, Py_ssize_t first, Py_ssize_t last) noexcept
    cdef int make_writable(self, Py_ssize_t layer, Py_ssize_t first, Py_ssize_t last, list changes) except -1
    cdef list open_range(self, Py_ssize_t layer, Py_ssize_t first, Py_ssize_t last)
    cdef int keep_changes(self, list changes) except -1
    cdef int undo_changes(self, list changes, Py_ssize_t count) except -1
    cdef int append(self, Py_ssize_t layer, Rows k, Rows v, const kv_rotary *rotary) except -1
    cdef int truncate(self, Py_ssize_t n) except -1
    cdef int cut(self, Py_ssize_t n) except -1
    cdef int drop_front(self, Py_ssize_t first) except -1
    cdef int wipe_before(self, Py_ssize_t first) except -1
    cdef bint is_shared_at(self, Py_ssize_t position) noexcept nogil
    cdef int own(self, Py_ssize_t position) except -1
    cdef int32_t _copy_frozen(self, Py_ssize_t at) except -1
    cdef int _wipe_behind(self, Py_ssize_t index) except -1
    cdef int check_truncate(self, Py_ssize_t n) except -1
    cdef BlockTable empty(self, BlockPool pool)
    cdef int copy_resume_state(self, BlockTable other) except -1
    cdef Py_ssize_t skipped_of(self, BlockTable other) noexcept
    cdef int start(self, digests) except -1
    cdef int begin_with(self, list blocks, Py_ssize_t skipped) except -1
    cdef int reserve(self, Py_ssize_t count, Py_ssize_t pieces) except -1
    cdef int _exchange(self, Py_ssize_t count) except -1
    cdef int open(self, Py_ssize_t count) except -1
    cdef bint fit_window(self, kvfast_options *options, kv_refusal *refusal) noexcept nogil
    cdef void describe(self, Py_ssize_t layer, kv_member *member) noexcept nogil
    cdef Py_ssize_t oldest(self, Py_ssize_t length) noexcept nogil
    cdef int share(self, BlockTable other) except -1
    cdef int release(self) except -1
    cdef int close(self) except -1
    cdef int check_open(self) except -1
