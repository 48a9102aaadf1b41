"""Many sequences of one pool in one call.

- batch: appends to sequences and attends to them
- prepared_batch: the tables of another scheduler, checked once for a step
- scheduler_blocks: the float rows of blocks that another scheduler gives out
"""
