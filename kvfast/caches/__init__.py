"""The classes that users see: names, checks, documentation. No arithmetic on tokens.

- sequence_cache: what every cache of one sequence has; attend documents its options here
- contiguous, ring, mla, multi_head: `KVCache`, `RingKVCache`, `MLAKVCache`, `MultiHeadKVCache`
- pool, paged, paged_mla: what every pool has, `PagedKVCache`, `PagedMLAKVCache`
- paged_sequence: the `Sequence` of a pool
- snapshot, loading: `Snapshot`, and the class of each kind for `load`
- token_ids, ring_rope, head_vectors: parts of a pool's sequence, of a ring with a rope, of a cache by heads
- storage_properties: sizes and dtypes
- buffer_layout, foreign_memory: pools in memory of others, for Python and for C
"""
