"""Queries by blocks: one call, cut into tasks that read tiles. Knows no cache.

A `call` checks its arguments (`options`), cuts the work into `tasks` and reports what it will do (`plan`). A task reads
keys and values tile by tile (`tiles`). `dense` is the same for arrays without a cache.
"""
