"""What a model gets back for the keys and values that it gives a cache: tensors that only kvfast's attention can read."""

import torch

_T = torch.Tensor
# What a model may ask of them on the way to its attention.
_HARMLESS = frozenset([_T.size, _T.dim, *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "ndim"))])


class Received(torch.Tensor):
    """New keys or values of a layer, whose older ones are in the cache alone.

    An attention of another kind would take them for all there are, and a layer that changes them means something else
    than what is stored. So whatever is done to them is refused, but to hand them to `attention`.

    Attributes
    ----------
    rows : Rows
    layer : int
        Its place in the rows.
    end : int
        What the layer had seen when it got them.
    tensor : tensor of shape (batch, num_kv_heads, tokens, head_dim)
    """

    @classmethod
    def of(cls, tensor, rows, layer, end):
        """The tensor as one of a layer."""
        self = torch.Tensor._make_subclass(cls, tensor)
        self.rows, self.layer, self.end, self.tensor = rows, layer, end, tensor
        return self

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), others=None):
        if function in _HARMLESS:
            return super().__torch_function__(function, types, arguments, others or {})
        one = next(one for one in _flat(arguments, others) if isinstance(one, Received))
        name = function.__self__.__name__ if function.__name__ == "__get__" else function.__name__
        raise RuntimeError(
            f"layer {one.rows.numbers[one.layer]} does more with its keys and values than to hand them to its attention (it calls "
            f"{name}), and under attn_implementation=\"kvfast\" they are in the cache alone: use "
            f'attn_implementation="sdpa" or "eager", with a new KVFastCache'
        )


def _flat(arguments, others):
    for one in (*arguments, *(others or {}).values()):
        yield from one if isinstance(one, (list, tuple)) else (one,)
