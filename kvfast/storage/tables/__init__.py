"""Where the tokens of a sequence lie, and what they are stored as.

- block_map: from position to block and offset
- block_table: the tokens of a sequence in its blocks: written, taken back, shared
- ring_table: a table that drops what its window has left
- token_life: which tokens have codes, float rows, or both
- copying: tokens from one table to another
"""
