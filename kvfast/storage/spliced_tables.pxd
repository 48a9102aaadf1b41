"""The tables of a sequence, and its segments."""
from kvfast.storage.block_table cimport BlockTable
from kvfast.storage.segments cimport Segment, SplicedReader


cdef class SplicedTables:
    cdef readonly list tables          # of BlockTable: one for each group of layers with the same window and shape
    cdef list segments                 # of a spliced sequence, without the tokens since; else None
    cdef Py_ssize_t base               # position of a token, less its position in `tables`; 0 unless the sequence is spliced
    cdef object ropes                  # of a spliced sequence, as in `splicing.splice`

    cdef list all_segments(self, Py_ssize_t end)
    cdef SplicedReader reader(self, Py_ssize_t index, BlockTable table, Py_ssize_t layer, Py_ssize_t first_query,
                              Py_ssize_t num_queries)
    cdef int set_segments(self, list segments, Py_ssize_t base, object ropes) except -1
    cdef list known_segments(self)
    cdef SplicedTables give_segments(self, SplicedTables buffer, bint copies)
    cdef object spliced_rows(self, Py_ssize_t index, BlockTable table, Py_ssize_t layer, bint values)
    cdef object blocks_of(self, Py_ssize_t which)
    cdef int keep(self, Py_ssize_t n) except -1
    cdef int _keep_plain(self, Segment segment) except -1
