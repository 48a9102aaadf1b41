"""All layers of one text.

- sequence: append, attend, truncate, over the block tables of a text
- segments, splicing: positions that were moved, and the calls that move them
- branches: one branch of a tree of drafts is kept
- checkpoints: recurrent states at some positions
- heads: one layer, head by head
"""
