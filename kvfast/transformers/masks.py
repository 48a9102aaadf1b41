"""What transformers asks of a mask, kept as it was asked.

Models make one mask per kind of layer and step and hand it to every attention. kvfast needs no matrix: it needs to know
that a mask is causal, with which window, and which tokens are padding. Where another attention takes over, the matrix is
made from the same arguments.
"""

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask


class LazyMask:
    """A mask that is not computed until it is needed as a matrix.

    Attributes
    ----------
    q_offset, q_length : int
        Tokens before the queries, and queries; padding counts.
    is_causal : bool
        Whether the mask is causal with `sliding_window` or `chunk` and padding, and nothing else.
    sliding_window : int or None
        Tokens that a query sees, itself included.
    chunk : int or None
        Tokens of a chunk, beyond whose first none is seen.
    width : int or None
        Number of tokens in the 2D mask of padding; None without one.
    padding : ndarray of shape (batch, q_offset + q_length), bool, or None
        False for padding; None where there is none.
    parts : tuple
        What `Rows.parts` made of it, and whose.
    """

    __slots__ = ("_arguments", "_matrix", "chunk", "is_causal", "padding", "parts", "q_length", "q_offset", "sliding_window", "width")

    def __init__(self, arguments):
        self._arguments, self._matrix = arguments, self  # the mask itself: not made yet
        self.q_offset, self.q_length = int(arguments["q_offset"]), int(arguments["q_length"])
        given = arguments["attention_mask"]
        self.width = None if given is None else given.shape[-1]
        self.sliding_window = self.chunk = None
        # What is laid over a causal mask (images, packed sequences) forbids this shortcut of another attention.
        self.is_causal = arguments.get("allow_is_causal_skip", True)
        if self.is_causal:
            self.sliding_window, self.chunk, self.is_causal = _pattern(arguments["mask_function"], arguments.get("local_size"), given)
        self.padding, self.parts = None, (None, None)
        if given is not None and not given.all():
            self.padding = given.cpu().numpy()

    def matrix(self):
        """The mask of scaled_dot_product_attention: bool of shape (batch, 1, q_length, kv_length), or None for causal."""
        if self._matrix is self:
            self._matrix = sdpa_mask(**self._arguments)
        return self._matrix

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise _not_a_tensor(f"reads its {name}")

    def __getitem__(self, index):
        """The mask of the last queries: models whose last layers keep nothing ask for it, as ``mask[:, :, -n:, :]``."""
        whole = slice(None)
        if isinstance(index, tuple) and len(index) == 4 and (index[0], index[1], index[3]) == (whole, whole, whole):
            queries = index[2]
            if isinstance(queries, slice) and (queries.stop, queries.step) == (None, None) and (queries.start or 0) <= 0:
                dropped = queries.indices(self.q_length)[0]
                return LazyMask(self._arguments | {"q_length": self.q_length - dropped, "q_offset": self.q_offset + dropped})
        raise _not_a_tensor("takes a part of it")

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), others=None):
        raise _not_a_tensor(f"calls {getattr(function, '__name__', function)} with it")


def _not_a_tensor(what):
    return ValueError(
        f'this model works on its attention mask itself (it {what}), and under attn_implementation="kvfast" there is '
        f'no matrix of it: use attn_implementation="sdpa" or "eager", which the same cache serves'
    )


def _pattern(mask_function, size, padding):
    """The sliding window and the chunk of a function of transformers, one of which is `size`, or neither; and whether
    that is all there is to it."""
    if size is None:
        return None, None, mask_function is causal_mask_function
    # Queries at the edges of a chunk and the edges of what they see, counted from the end of the padding of each row.
    begins = torch.zeros(1, dtype=int) if padding is None else (padding.cumsum(-1) == 0).sum(-1)
    row, begins = torch.arange(len(begins))[:, None, None], begins[:, None, None]
    queries = torch.tensor([[2 * size], [2 * size + 1], [3 * size - 1]])
    keys = torch.cat([queries + torch.tensor([1, 0, 1 - size, -size]), torch.tensor([[2 * size, 2 * size - 1]]).expand(3, 2)], 1)
    seen, causal = mask_function(row, torch.tensor(0), queries + begins, keys + begins), keys <= queries
    if (seen == (causal & (keys > queries - size))).all():
        return size, None, True
    if (seen == (causal & (keys // size == queries // size))).all():
        return None, size, True
    return None, None, False


def lazy_mask(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function, attention_mask=None, **others
):
    """What ``AttentionMaskInterface`` calls for ``attn_implementation="kvfast"``; the arguments are its own."""
    return LazyMask(
        {
            "batch_size": batch_size,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "mask_function": mask_function,
            "attention_mask": attention_mask,
        }
        | others
    )
