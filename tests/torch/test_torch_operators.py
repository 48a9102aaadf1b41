"""The operators of PyTorch: what they compute, what they declare, and what compilers make of it."""

import subprocess
import sys
import warnings

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs the extra packages of kvfast[torch]")

from torch_llama import HEAD_DIM, KV_HEADS, Layer, Llama, generate, step

import kvfast
import kvfast.torch
from kvfast import DimensionMismatchError, NonFiniteInputError
from kvfast.engines.torch import pools

# PyTorch uses parts of itself and of Python that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch")

FORMATS = "int8", "k8v4", "int4-plain", "bfloat16", "float32"
CODES_ALONE = {"int8": "int8-rotated", "k8v4": "k8v4-rotated"}  # what blocks without float rows hold
TABLE = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
LENGTHS = torch.tensor([70, 9], dtype=torch.int32)
STARTS = torch.tensor([0, 3, 4], dtype=torch.int32)
SLOTS = torch.cat([3 * 64 + torch.arange(64), torch.arange(6), 64 + torch.arange(9)])
PROMPT = torch.tensor([5, 17, 80, 3, 44] * 13)  # more than a block


def rows(heads, tokens=79, width=64, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed + heads)
    return torch.randn(tokens, heads, width, generator=draw).to(dtype)


def filled(dtype, **options):
    blocks = kvfast.torch.new_blocks(4, 2, 64, dtype)
    torch.ops.kvfast.append(blocks, rows(2), rows(2, seed=1), SLOTS, dtype)
    return blocks


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("of_queries", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bits_of_a_pool(dtype, of_queries):
    """A pool with memory of its own has them, too: for prompts and single tokens, with all options."""
    pool = kvfast.PagedKVCache(1, 2, 64, 4, 64, CODES_ALONE.get(dtype, dtype))
    pool.append_batch(0, rows(2), rows(2, seed=1), SLOTS.numpy())
    blocks, q, sinks = filled(dtype), rows(8, 4, dtype=of_queries), torch.linspace(-1, 1, 8)
    tables = {"block_table": TABLE.numpy(), "seq_lens": LENGTHS.numpy(), "cu_seqlens_q": STARTS.numpy()}
    for options in ({}, {"scale": 0.2, "softcap": 5.0, "sliding_window": 20, "sinks": sinks}, {"causal": False}):
        out = torch.ops.kvfast.attend(blocks, q, TABLE, LENGTHS, dtype, STARTS, **options)
        expected = torch.empty(4, 8, 64, dtype=of_queries)
        pool.attend_batch(0, q, **tables, out=expected, **options | ({"sinks": sinks.numpy()} if "sinks" in options else {}))
        assert out.dtype == of_queries and torch.equal(out, expected)
    assert torch.equal(
        kvfast.torch.attend(blocks, q[:2], TABLE, LENGTHS, dtype), torch.ops.kvfast.attend(blocks, q[:2], TABLE, LENGTHS, dtype)
    )


@pytest.mark.parametrize("count", [2, 130])
def test_c_and_python_paths_have_the_same_bits(count):
    """Many sequences, integers of other widths, and rows and tables that are parts of larger tensors."""
    blocks, q = filled("int8"), rows(8, 2 * count)
    table, lens, starts = TABLE.repeat(count // 2, 1), LENGTHS.repeat(count // 2), torch.arange(0, 2 * count + 1, 2, dtype=torch.int32)
    pool = kvfast.PagedKVCache(1, 2, 64, 4, 64, "int8-rotated")
    pool.append_batch(0, rows(2), rows(2, seed=1), SLOTS.numpy())
    tables = {"block_table": table.numpy(), "seq_lens": lens.numpy(), "cu_seqlens_q": starts.numpy()}
    expected = torch.from_numpy(pool.attend_batch(0, q, **tables))
    wide = torch.cat([table, table], 1)[:, :2]
    for given in (
        (q, table, lens, starts),
        (q, wide, lens, starts),
        (q, table.long(), lens.long(), starts.long()),
        (torch.cat([q, q], 1)[:, :8], table, torch.stack([lens, lens], 1)[:, 0], starts),
    ):
        assert torch.equal(torch.ops.kvfast.attend(blocks, *given[:3], "int8", given[3]), expected)
    again = kvfast.torch.new_blocks(4, 2, 64, "int8")
    both = torch.cat([rows(2), rows(2, seed=1)], 1)  # keys and values of a fused projection
    for part in (slice(0, 9), slice(9, 79)):
        torch.ops.kvfast.append(again, both[part, :2], both[part, 2:], torch.stack([SLOTS, SLOTS], 1)[part, 0], "int8")
    assert torch.equal(again, blocks)


def test_blocks_that_move_keep_their_tokens():
    """They have all of them: a copy elsewhere, and memory that another tensor had before."""
    blocks, q = filled("int8"), rows(8, 2)
    expected = torch.ops.kvfast.attend(blocks, q, TABLE, LENGTHS, "int8")
    assert torch.equal(torch.ops.kvfast.attend(blocks.clone(), q, TABLE, LENGTHS, "int8"), expected)
    kept = blocks.clone()
    blocks.zero_()
    blocks.copy_(kept)
    assert torch.equal(torch.ops.kvfast.attend(blocks, q, TABLE, LENGTHS, "int8"), expected)
    apart = torch.zeros(4, 2, *blocks.shape[1:], dtype=torch.uint8)[:, 1]  # with room for another layer
    apart.copy_(kept)
    assert torch.equal(torch.ops.kvfast.attend(apart, q, TABLE, LENGTHS, "int8"), expected)


def test_few_pools_are_kept(monkeypatch):
    monkeypatch.setattr(pools, "_MOST_POOLS", 3)
    monkeypatch.setattr(pools, "_pools", {})
    expected = torch.ops.kvfast.attend(filled("int8"), rows(8, 2), TABLE, LENGTHS, "int8")
    kept = [filled("int8") for _ in range(5)]
    assert len(pools._pools) <= 3
    assert all(torch.equal(torch.ops.kvfast.attend(one, rows(8, 2), TABLE, LENGTHS, "int8"), expected) for one in kept)


def test_values_of_another_width():
    blocks = kvfast.torch.new_blocks(4, 2, 64, "int8", v_head_dim=32)
    torch.ops.kvfast.append(blocks, rows(2), rows(2, width=32), SLOTS, "int8")
    q = rows(8, 2)
    out = torch.ops.kvfast.attend(blocks, q, TABLE, LENGTHS, "int8", v_head_dim=32)
    pool = kvfast.PagedKVCache(1, 2, 64, 4, 64, "int8-rotated", v_head_dim=32)
    pool.append_batch(0, rows(2), rows(2, width=32), SLOTS.numpy())
    assert np.array_equal(out.numpy(), pool.attend_batch(0, q, block_table=TABLE.numpy(), seq_lens=LENGTHS.numpy()))


def test_what_is_refused():
    """Before anything changes."""
    with pytest.raises(ValueError, match="keeps some tokens as floats.*int8, k8v4, int4-plain"):
        kvfast.torch.new_blocks(4, 2, 64, "int4")
    with pytest.raises(ValueError, match="unknown storage dtype"):
        kvfast.torch.new_blocks(4, 2, 64, "int9")
    blocks, k = filled("int8"), rows(2)
    before = blocks.clone()
    with pytest.raises(DimensionMismatchError, match="blocks must have 136 bytes of a token and head for int8.*got 128"):
        torch.ops.kvfast.append(blocks[..., :128], k, k, SLOTS, "int8")
    with pytest.raises(DimensionMismatchError, match="uint8 on the CPU"):
        torch.ops.kvfast.append(blocks.float(), k, k, SLOTS, "int8")
    across = blocks.as_strided(blocks.shape, (blocks.stride(0), blocks.stride(1), 1, blocks.shape[2]))  # of the same address
    with pytest.raises(ValueError, match="each block must lie in one piece"):
        torch.ops.kvfast.append(across, k, k, SLOTS, "int8")
    with pytest.raises(DimensionMismatchError, match="uint8 on the CPU"):
        torch.ops.kvfast.append(blocks.view(torch.int8), k, k, SLOTS, "int8")
    with pytest.raises(NonFiniteInputError):
        torch.ops.kvfast.append(blocks, k * float("nan"), k, SLOTS, "int8")
    with pytest.raises(ValueError, match="between 0 and 255, got 256"):
        torch.ops.kvfast.append(blocks, k, k, SLOTS + 61, "int8")
    with pytest.raises(RuntimeError, match="no gradients: call the model under torch.no_grad"):
        torch.ops.kvfast.attend(blocks, rows(8, 2).requires_grad_(), TABLE, LENGTHS, "int8")
    with pytest.raises(RuntimeError, match="no gradients"):
        torch.ops.kvfast.append(blocks, k.requires_grad_(), k, SLOTS, "int8")
    assert torch.equal(blocks, before)


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_opcheck(dtype):
    """Schemas, what is changed, fake tensors, and dynamic shapes under AOTAutograd."""
    blocks, k = filled(dtype), rows(2)
    torch.library.opcheck(torch.ops.kvfast.append, (blocks, k, k.clone(), SLOTS, dtype))
    torch.library.opcheck(torch.ops.kvfast.attend, (blocks, rows(8, 4), TABLE, LENGTHS, dtype, STARTS))
    torch.library.opcheck(torch.ops.kvfast.attend, (blocks, rows(8, 2), TABLE, LENGTHS, dtype), {"softcap": 5.0, "sliding_window": 20})


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_llama_says_the_same(backend):
    """In one graph, with the blocks changed in place; a prompt, and a graph for all single tokens."""
    expected, margin = generate(Llama("int8").eval(), PROMPT, 12)
    assert margin > 1e-3 and len(set(expected)) > 3
    torch._dynamo.reset()
    model = Llama("int8").eval()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    assert generate(compiled, PROMPT, 12)[0] == expected


def test_kvfast_does_not_import_it():
    script = "import kvfast, sys; assert not {'torch', 'kvfast.torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.exhaustive
def test_an_exported_layer(tmp_path):
    """AOTInductor packs a layer into a file, which finds the operators in this process. The blocks are an argument there."""

    class Attention(torch.nn.Module):
        def forward(self, blocks, q, k, v, slots, table, lengths, starts):
            torch.ops.kvfast.append(blocks, k, v, slots, "int8")
            return 2 * torch.ops.kvfast.attend(blocks, q, table, lengths, "int8", starts)

    _, slots, table, lengths, starts = step(0, 5)
    q, k, v = (rows(heads, 5, HEAD_DIM, seed=heads) for heads in (4, KV_HEADS, KV_HEADS))
    given = q, k, v, slots, table, lengths, starts
    blocks = Layer("int8").blocks
    expected = Attention()(blocks.clone(), *given)
    exported = torch.export.export(Attention(), (blocks.clone(), *given))
    path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "layer.pt2"))
    loaded, own = torch._inductor.aoti_load_package(path), blocks.clone()
    assert torch.equal(loaded(own, *given), expected)
    assert own.any()


def test_tensors_without_data_stand_beside_no_others():
    blocks, k = kvfast.torch.new_blocks(4, 2, 64, "float32"), torch.ones(40, 2, 64)
    with pytest.raises(ValueError, match="all tensors must be on the CPU, or without data on meta, got cpu and meta"):
        torch.ops.kvfast.append(blocks, k.to("meta"), k, torch.arange(40), "float32")
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="got cpu and meta"):
        torch.ops.kvfast.attend(blocks, k[:1].to("meta"), table, lengths, "float32")
    torch.ops.kvfast.append(blocks.to("meta"), k.to("meta"), k.to("meta"), torch.arange(40, device="meta"), "float32")
