"""All layers of one sequence."""
from kvfast.attention.call cimport AttendCall
from kvfast.attention.options cimport Options
from kvfast.storage.block_table cimport BlockTable
from kvfast.storage.pool cimport BlockPool
from kvfast.storage.segments cimport SplicedReader


cdef int fit_window(BlockTable table, AttendCall call) except -1
cdef int check_held(BlockTable table, AttendCall call, Py_ssize_t first_query) except -1


cdef class SequenceBuffer:
    cdef readonly list tables          # of BlockTable: one for each group of layers with the same window and shape
    cdef list layer_tables             # (table, layer in it) for each layer
    cdef readonly Py_ssize_t num_layers
    cdef Py_ssize_t most               # most tokens, or -1: any number
    cdef list segments                 # of a spliced sequence, without the tokens since; else None
    cdef Py_ssize_t base               # position of a token, less its position in `tables`; 0 unless the sequence is spliced
    cdef object ropes                  # of a spliced sequence: as in `splice`

    cdef BlockTable _table(self, object index, Py_ssize_t *layer)
    cdef int _check_open(self) except -1
    cdef int _enter(self) except -1
    cdef int _leave(self) except -1
    cdef int enter_reading(self) except -1
    cdef int leave_reading(self) except -1
    cdef BlockPool _pool(self)
    cdef int _trim_surplus(self) except -1
    cdef int _share_blocks(self, SequenceBuffer other, begin) except -1
    cdef int _copy_blocks(self, SequenceBuffer other, begin) except -1
    cdef list all_segments(self, Py_ssize_t end)
    cdef SplicedReader reader(self, object index, BlockTable table, Py_ssize_t layer, Py_ssize_t first_query, Py_ssize_t num_queries)
    cdef SequenceBuffer _with_segments(self, SequenceBuffer buffer, bint copies)
    cdef int _copy_spliced(self, SequenceBuffer other, list pieces, begin) except -1
    cdef object _spliced_rows(self, Py_ssize_t index, BlockTable table, Py_ssize_t layer, bint values)
    cdef object _blocks_of(self, Py_ssize_t which)
    cdef int keep(self, Py_ssize_t n) except -1
    cdef int _check_room(self, object index, Py_ssize_t held, Py_ssize_t n) except -1
    cdef AttendCall _open_call(self, object index, BlockTable table, Py_ssize_t layer, object q, object sink_q, object rope_q,
                               Options options)
