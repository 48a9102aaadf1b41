"""Who owns which block, and which block holds which position of a sequence.

`memory` has the blocks, the float rows of their tokens, and those that are known by their tokens: a pool. A block table of `tables`
belongs to a sequence, and all tables of a sequence make one of `sequences`. `batches` works on many sequences of one pool.
`kinds` builds them from the `settings` of a cache.
"""
