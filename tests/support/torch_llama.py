"""A Llama in PyTorch whose attention is the operators of kvfast, with random weights."""

import math

import torch

import kvfast.torch

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 4, 2, 32, 128, 97
BLOCK_SIZE, NUM_BLOCKS = 64, 4


def rotated(x, positions):
    """Rotary embedding of (tokens, heads, HEAD_DIM)."""
    half = HEAD_DIM // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Layer(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype
        self.norm, self.mlp_norm = torch.nn.RMSNorm(HIDDEN), torch.nn.RMSNorm(HIDDEN)
        self.qkv = torch.nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = torch.nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.up, self.down = torch.nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.register_buffer("blocks", kvfast.torch.new_blocks(NUM_BLOCKS, KV_HEADS, HEAD_DIM, dtype, block_size=BLOCK_SIZE))

    def forward(self, x, positions, slots, block_table, seq_lens, starts):
        n = x.shape[0]
        q, k, v = self.qkv(self.norm(x)).view(n, -1, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), 1)
        torch.ops.kvfast.append(self.blocks, rotated(k, positions), v.contiguous(), slots, self.dtype)
        found = torch.ops.kvfast.attend(self.blocks, rotated(q, positions), block_table, seq_lens, self.dtype, starts)
        x = x + self.out(found.reshape(n, -1))
        gate, up = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


class Llama(torch.nn.Module):
    def __init__(self, dtype, num_layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = torch.nn.ModuleList(Layer(dtype) for _ in range(num_layers))
        self.norm, self.head = torch.nn.RMSNorm(HIDDEN), torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids, positions, slots, block_table, seq_lens, starts):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, positions, slots, block_table, seq_lens, starts)
        return self.head(self.norm(x[-1:]))


def step(first, n):
    """The arguments of a step after `ids`, of the tokens from `first` on: one sequence in blocks 2, 0, 3."""
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    positions = torch.arange(first, first + n)
    slots = table[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    lengths, starts = torch.tensor([first + n], dtype=torch.int32), torch.tensor([0, n], dtype=torch.int32)
    return positions, slots, table, lengths, starts


def generate(model, prompt, most):
    """The greedy tokens after a prompt, and the least distance of a best token from the second best."""
    ids, first, said, margin = prompt, 0, [], math.inf
    with torch.no_grad():
        for _ in range(most):
            logits = model(ids, *step(first, len(ids)))[0]
            first += len(ids)
            best = logits.topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            said.append(int(best.indices[0]))
            ids = best.indices[:1]
    return said, margin
