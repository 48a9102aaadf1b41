"""The tables of a sequence, and its segments."""
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.sequences.segments cimport Segment
from kvfast.storage.tables.block_table cimport BlockTable


cdef object rows_at(BlockTable table, Py_ssize_t layer, object positions, bint values)


cdef class SequenceTables:
    cdef readonly list tables          # of BlockTable: one for each group of layers with the same window and shape
    cdef list layer_tables             # (table, layer in it) for each layer
    cdef readonly Py_ssize_t num_layers
    cdef int reads_as                  # a kv_precision, of calls that name none
    cdef list segments                 # of a spliced sequence, without the tokens since; else None
    cdef Py_ssize_t base               # position of a token, less its position in `tables`; 0 unless the sequence is spliced
    cdef object ropes                  # of a spliced sequence, as in `splicing.splice`
    cdef public object checkpoints     # a `Checkpoints`, of a model with recurrent states; else None

    cdef BlockTable _table(self, object index, Py_ssize_t *layer)
    cdef int _check_advance(self, Py_ssize_t n, str name) except -1
    cdef BlockPool _pool(self)
    cdef int _check_open(self) except -1
    cdef int _enter(self) except -1
    cdef int _leave(self) except -1
    cdef int enter_reading(self) except -1
    cdef int leave_reading(self) except -1

    cdef list all_segments(self, Py_ssize_t end)
    cdef int set_segments(self, list segments, Py_ssize_t base, object ropes) except -1
    cdef list known_segments(self)
    cdef SequenceTables give_segments(self, SequenceTables storage, bint copies)
    cdef object spliced_rows(self, Py_ssize_t index, BlockTable table, Py_ssize_t layer, bint values)
    cdef object blocks_of(self, Py_ssize_t which)
    cdef int keep(self, Py_ssize_t n) except -1
    cdef int _keep_plain(self, Segment segment) except -1
