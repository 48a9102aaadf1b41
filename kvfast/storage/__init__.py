"""Who owns which block, and which block holds which position of a sequence.

Memory of blocks (`block_memory`) with float rows beside it (`float_rows`) and blocks that are known by their tokens
(`prefix_index`) make a `pool`. A block table (`block_map`, `block_table`, `ring_table`) belongs to a sequence, and all
tables of a sequence (`sequence_tables`) make a `sequence`. `batch` works on many sequences of one pool, `heads` on single heads.
`kinds` builds them from the `settings` of a cache.
"""
