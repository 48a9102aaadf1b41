"""Who owns which block, and which block holds which position of a sequence.

- memory: a pool with its blocks, the float rows of their tokens, and the known prefixes
- tables: from position to block, and what a token is stored as
- sequences: all block tables of a text
- batches: many sequences of one pool, blocks of another scheduler
- settings, kinds: the settings of a cache, and the storage that is built from them
"""
