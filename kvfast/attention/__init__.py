"""Attention on blocks of keys and values. Knows no cache.

A call has three steps: a request is checked, a plan cuts it into tasks, and threads run the tasks.

- options: the keyword arguments, and the struct of `kvfast.h`
- request, refusals: one checked description of the call, and the texts of its refusals
- plan: from a request and its sequences to tasks, without the interpreter
- sight, chosen: what each query sees, and the tokens that an indexer chose for it
- cuts, families, cascade: tiles, splits and tasks; the kernels for them; keys that sequences share
- run: threads run the tasks, or count them for `explain`
- walk: a task over its splits, in C
- source, gather, tiles: what a task reads, chosen tokens in one tile, the kernels tile by tile
- tasks, workspace: the structs, the memory that calls work in
- dense, indexer, explained: attention on plain arrays, `top_k`, the plan as users see it
"""
