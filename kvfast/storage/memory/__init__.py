"""The blocks of a pool and who owns them.

- pool: takes and releases blocks; says which threads may enter
- block_memory, buffer_layers: memory of blocks, free blocks and owners; memory of a caller
- float_rows: the pieces of float rows that belong to a block
- prefix_index: full blocks by the token ids of their prefix
"""
