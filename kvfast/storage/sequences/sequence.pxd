"""All layers of one sequence."""
from kvfast.attention.sight cimport kv_member
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.sequences.segments cimport Segment
from kvfast.storage.tables.block_table cimport BlockTable


cdef class SequenceStorage:
    cdef readonly list tables          # of BlockTable: one for each group of layers with the same window and shape
    cdef list layer_tables             # (table, layer in it) for each layer
    cdef BlockPool pool                # of the first table, which guards those of all
    cdef readonly object rope_dim      # as of the pool
    cdef readonly bint secure
    cdef readonly int block_size
    cdef readonly Py_ssize_t num_layers
    cdef Py_ssize_t most               # most tokens, or -1: any number
    cdef int reads_as                  # a kv_precision, of calls that name none
    cdef list segments                 # of a spliced sequence, without the tokens since; else None
    cdef Py_ssize_t base               # position of a token, less its position in `tables`; 0 unless the sequence is spliced
    cdef object ropes                  # of a spliced sequence, as in `splicing.splice`
    cdef public object checkpoints     # a `Checkpoints`, of a model with recurrent states; else None

    cdef BlockTable _table(self, object index, Py_ssize_t *layer)
    cdef int _check_open(self) except -1
    cdef int _enter(self) except -1
    cdef int enter_reading(self) except -1
    cdef int _check_room(self, object index, Py_ssize_t held, Py_ssize_t n) except -1
    cdef int _check_advance(self, Py_ssize_t n, str name) except -1
    cdef int fill(self, BlockTable table, Py_ssize_t layer, Py_ssize_t index, kv_member *member) except -1
    cdef Py_ssize_t checked_length(self, n) except -1
    cdef int _share_blocks(self, SequenceStorage other, begin) except -1
    cdef int _copy_blocks(self, SequenceStorage other, begin) except -1
    cdef int _reserve(self, SequenceStorage other, list plans) except -1
    cdef int _trim_surplus(self) except -1
    cdef object blocks_of(self, Py_ssize_t which)

    cdef list all_segments(self, Py_ssize_t end)
    cdef int set_segments(self, list segments, Py_ssize_t base, object ropes) except -1
    cdef list known_segments(self)
    cdef SequenceStorage give_segments(self, SequenceStorage storage, bint copies)
    cdef int keep(self, Py_ssize_t n) except -1
    cdef int _keep_plain(self, Segment segment) except -1
