"""Attention on blocks of keys and values. Knows no cache.

A call has three steps, which `run.answer` takes one after the other:

- `request`: what the call asks for. Python's keywords (`options`) and the struct of `kvfast.h` become one `kv_request`, which is
  checked; `refusals` says how.
- `plan`: the sequences that the queries belong to become tasks. `sight` tells what each query sees, `chosen` which tokens an indexer
  has chosen for it, `cascade` which keys several sequences share, `cuts` and `families` how the work is cut and by which kernels it is
  done. It needs no interpreter.
- `run`: the tasks walk over the tiles (``walk/``, in C). `source` tells them what to read, `tiles` reads it, and `gather` reads chosen
  tokens. `tasks` has the structs, `workspace` the memory.

`dense` is the same for arrays without a cache, `indexer` finds the tokens to choose, and `explained` shows a plan to users.
"""
