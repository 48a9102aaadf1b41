"""What a model gets back for the keys and values that it gives a cache: tensors that only kvfast's attention can read."""

import torch

_T = torch.Tensor
# What a model may ask of them on the way to its attention,
_HARMLESS = frozenset([_T.size, _T.dim, *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "ndim"))])
# and what makes keys and values of latents, each token's of its own: the up-projection of all heads, and the rotary part to each.
_OF_EACH_TOKEN = frozenset(
    [
        "linear",
        "view",
        "reshape",
        "contiguous",
        "transpose",
        "split",
        "chunk",
        "expand",
        "unsqueeze",
        "cat",
        "new_empty",
        "copy_",
        "__getitem__",
        "__setitem__",
    ]
)


class Received(torch.Tensor):
    """New keys or values of a layer, whose older ones are in the cache alone.

    An attention of another kind would take them for all there are, and a layer that changes them means something else
    than what is stored. So whatever is done to them is refused, but to hand them to `attention`.

    `end` is what the layer, the one of this place in `rows`, had seen when it got them. With `expands` these are latents, of which
    the layer still makes keys and values.
    """

    @classmethod
    def of(cls, tensor, rows, layer, end, expands=False):
        """The tensor as one of a layer."""
        self = torch.Tensor._make_subclass(cls, tensor)
        self.rows, self.layer, self.end, self.expands, self.tensor = rows, layer, end, expands, tensor
        return self

    def _like(self, tensor):
        return Received.of(tensor, self.rows, self.layer, self.end, self.expands)

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), others=None):
        if function in _HARMLESS:
            return super().__torch_function__(function, types, arguments, others or {})
        one = next(one for one in _flat(arguments, others) if isinstance(one, Received))
        name = function.__self__.__name__ if function.__name__ == "__get__" else function.__name__
        if one.expands and name in _OF_EACH_TOKEN:
            with torch._C.DisableTorchFunctionSubclass():
                made = function(*_plain(arguments), **_plain(others or {}))
            return one._like(made) if isinstance(made, torch.Tensor) else None if made is None else tuple(map(one._like, made))
        raise RuntimeError(
            f"layer {one.rows.numbers[one.layer]} does more with its keys and values than to hand them to its attention (it calls "
            f'{name}), and under attn_implementation="kvfast" they are in the cache alone: use '
            f'attn_implementation="sdpa" or "eager", with a new KVFastCache'
        )


def _plain(arguments):
    """The same with the tensors that were received."""
    if isinstance(arguments, dict):
        return {name: _plain(one) for name, one in arguments.items()}
    if isinstance(arguments, (list, tuple)):
        return type(arguments)(map(_plain, arguments))
    return arguments.tensor if isinstance(arguments, Received) else arguments


def _flat(arguments, others):
    for one in (*arguments, *(others or {}).values()):
        yield from one if isinstance(one, (list, tuple)) else (one,)
