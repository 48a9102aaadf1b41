"""PyTorch: scaled_dot_product_attention, and attention out of two matrix products.

"grouped" hands the query heads of a KV head over as the rows of one head, which for one token reads every key once
and is the faster way; with more tokens `enable_gqa` is. Sequences of a batch are the first dimension.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from contenders import PREFILL


def version():
    return f"PyTorch {torch.__version__}"


class Contender:
    def __init__(self, work, name, storage):
        dtype = getattr(torch, storage)
        k, v, q = (torch.from_numpy(x).to(dtype) for x in work.tensors())
        k, v = (x.transpose(0, 1)[None].repeat(work.sequences, 1, 1, 1) for x in (k, v))
        q = q.reshape(work.sequences, -1, *q.shape[1:]).transpose(1, 2).contiguous()
        self.work = work
        self.layers = work.layers(k.nbytes + v.nbytes)
        self.nbytes = self.layers * (k.nbytes + v.nbytes)
        self.cache = [(k.clone(), v.clone()) for _ in range(self.layers)]
        self.mask = torch.from_numpy(work.mask()) if work.kind == PREFILL else None
        self.q = q
        self.rows = q.reshape(work.sequences, work.num_kv_heads, -1, work.head_dim)  # one token: heads of a group side by side
        self.attend = {"PyTorch SDPA": self._sdpa, "PyTorch SDPA, grouped": self._grouped, "PyTorch matmul": self._matmul}[name]

    def _sdpa(self, k, v):
        return scaled_dot_product_attention(self.q, k, v, attn_mask=self.mask, enable_gqa=True)

    def _grouped(self, k, v):
        return scaled_dot_product_attention(self.rows, k, v)

    def _matmul(self, k, v):
        scores = (self.rows * self.work.head_dim**-0.5) @ k.transpose(2, 3)
        return torch.softmax(scores, -1) @ v

    def run(self, num_threads):
        torch.set_num_threads(num_threads)
        with torch.inference_mode():
            self.outputs = [self.attend(k, v) for k, v in self.cache]

    def check(self):
        shape = self.work.sequences, self.work.num_q_heads, self.work.new_tokens, self.work.head_dim
        first, last = (self.outputs[i].float().reshape(shape).transpose(1, 2).flatten(0, 1).numpy() for i in (0, -1))
        return self.work.error(first, last)
