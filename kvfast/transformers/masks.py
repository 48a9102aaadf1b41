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
        Whether the mask is causal with `window` and padding, and nothing else.
    window : int or None
        Tokens that a query sees, itself included.
    padding : ndarray of shape (batch, q_offset + q_length), bool, or None
        False for padding; None where there is none.
    parts : tuple
        What `Rows.parts` made of it, and whose.
    """

    __slots__ = ("_arguments", "_matrix", "is_causal", "padding", "parts", "q_length", "q_offset", "window")

    def __init__(self, arguments):
        self._arguments, self._matrix = arguments, self  # the mask itself: not made yet
        self.q_offset, self.q_length = int(arguments["q_offset"]), int(arguments["q_length"])
        self.window = arguments.get("local_size")
        # What is laid over a causal mask (images, packed sequences) forbids this shortcut of another attention.
        self.is_causal = arguments.get("allow_is_causal_skip", True) and _is_causal(arguments["mask_function"], self.window)
        self.padding, self.parts = None, (None, None)
        given = arguments["attention_mask"]
        if given is not None and not given.all():
            self.padding = given.cpu().numpy()

    def matrix(self):
        """The mask of scaled_dot_product_attention: bool of shape (batch, 1, q_length, kv_length), or None for causal."""
        if self._matrix is self:
            self._matrix = sdpa_mask(**self._arguments)
        return self._matrix


def _is_causal(mask_function, window):
    """Whether a function of transformers is the causal mask, with a sliding window if one is given."""
    if window is None:
        return mask_function is causal_mask_function
    # Two queries and the edges of what they see: a window of another size shows, and chunks of any size do.
    queries = torch.tensor([[2 * window], [2 * window + 1]])
    keys = queries + torch.tensor([1, 0, 1 - window, -window])
    zero = torch.tensor(0)
    return mask_function(zero, zero, queries, keys).tolist() == [[False, True, True, False]] * 2


def lazy_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function,
              attention_mask=None, **others):
    """What ``AttentionMaskInterface`` calls for ``attn_implementation="kvfast"``; the arguments are its own."""
    return LazyMask({"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
                     "kv_offset": kv_offset, "mask_function": mask_function, "attention_mask": attention_mask} | others)
