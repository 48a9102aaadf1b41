"""The operators of PyTorch against the methods of the pool, for the token of one sequence: what a call takes besides its work."""

from statistics import median
from time import perf_counter

import pytest

import kvfast
from kvfast.tools.cli.bench.cases import SMOLLM2_135M

torch = pytest.importorskip("torch")
operators = pytest.importorskip("kvfast.torch")


@pytest.mark.parametrize("name", ["append", "attend"])
@pytest.mark.parametrize("tokens", [200, 4096])
def bench_operators(benchmark, tokens, name, threads):

    model, draw = SMOLLM2_135M, torch.Generator().manual_seed(0)
    heads, dim = model.num_kv_heads, model.head_dim
    k, q = torch.randn(tokens, heads, dim, generator=draw), torch.randn(1, model.num_q_heads, dim, generator=draw)
    slots, table = torch.arange(tokens), torch.arange(-(-tokens // 64), dtype=torch.int32)[None]
    lens, new, out = torch.tensor([tokens], dtype=torch.int32), k[-1:].contiguous(), torch.empty_like(q)
    blocks = operators.new_blocks(table.numel(), heads, dim, "int8")
    pool = kvfast.PagedKVCache(1, heads, dim, table.numel(), 64, "int8-rotated")  # int8 without floats, as in the blocks
    torch.ops.kvfast.append(blocks, k, k, slots, "int8")
    pool.append_batch(0, k, k, slots.numpy())
    calls = {
        "append": (
            lambda: torch.ops.kvfast.append(blocks, new, new, slots[-1:], "int8"),
            lambda: pool.append_batch(0, new, new, slots[-1:].numpy()),
        ),
        "attend": (
            lambda: torch.ops.kvfast.attend(blocks, q, table, lens, "int8"),
            lambda: pool.attend_batch(0, q, block_table=table.numpy(), seq_lens=lens.numpy(), out=out),
        ),
    }[name]
    pool.attend_batch(0, q, block_table=table.numpy(), seq_lens=lens.numpy(), out=out)
    assert torch.equal(torch.ops.kvfast.attend(blocks, q, table, lens, "int8"), out)
    times = [], []
    for _ in range(200):
        for call, taken in zip(calls, times, strict=True):
            for _ in range(10):
                call()
            start = perf_counter()
            for _ in range(20):
                call()
            taken.append((perf_counter() - start) / 20 * 1e6)
    benchmark.extra_info["microseconds_of_the_operator"], benchmark.extra_info["of_the_method"] = map(median, times)
    benchmark(calls[0])
