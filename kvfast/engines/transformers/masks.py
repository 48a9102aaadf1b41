"""Masks as transformers describes them: its arguments, and the matrix only if somebody needs it.

Models make one mask per kind of layer and step and hand it to every attention. kvfast needs no matrix: it needs to know
that a mask is causal, with which window, which tokens are padding, and which see each other. Where another attention takes
over, the matrix is made from the same arguments.
"""

import numpy as np
import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvfast.engines.transformers.spans import UnknownMaskError, recognise

# Elements of a matrix that are made at a time where it is only looked at.
_FEW_ELEMENTS = 1 << 22
# Models whose indexers take the mask apart.
MATRICES = ("qwen4_exp_text",)
_EVERYTHING = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}  # a matrix, whatever it holds


class LazyMask(torch.Tensor):
    """A mask that is not computed until it is needed as a matrix.

    It is a tensor of its shape, (batch, 1, q_length, tokens), because models whose text part has a model of its own hand on what
    is one. Only the shape can be read. `q_offset` are the tokens before the queries; padding counts.

    It `is_causal` if it is causal with `sliding_window` or `chunk` and padding, and nothing else. `width` is the number of tokens
    in the 2D mask of padding, None without one; `padding` is False for these, bool of shape (batch, q_offset + q_length), or None
    where all are tokens. `parts` are what `RowCaches.parts` made of it, and whose.
    """

    @classmethod
    def of(cls, arguments):
        """The mask of some arguments of `lazy_mask`."""
        shape = arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"]
        self = torch.Tensor._make_subclass(cls, torch.empty((), dtype=torch.bool).expand(*map(int, shape)))
        self._arguments, self._matrix, self._recognised = arguments, self, {}  # the mask itself: not made yet
        self._seen = None
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
        return self

    def matrix(self):
        """The mask of scaled_dot_product_attention: bool of shape (batch, 1, q_length, kv_length), or None for causal."""
        if self._matrix is self:
            self._matrix = sdpa_mask(**self._arguments)
        return self._matrix

    def options(self, rows, layer):
        """The options of `attend` for each row of the batch. A matrix is looked at once for all layers of a kind."""
        kind = rows.pattern(layer)
        if self.is_causal and kind == (self.sliding_window, self.chunk):
            return [{}] * len(rows.rows)
        if self.is_causal:
            raise UnknownMaskError(
                f"it is for a window of {self.sliding_window} and chunks of {self.chunk}, and the layer has {kind[0]} and {kind[1]}"
            )
        if kind not in self._recognised:
            first = rows.first_seen(layer, self.q_offset + 1)  # transformers' own caches have no more
            self._recognised[kind] = recognise(self._blocks(), rows.kept(layer), *kind, first)
        return self._recognised[kind]

    def __repr__(self):
        return f"LazyMask({self.q_length} queries after {self.q_offset} tokens)"

    def _blocks(self):
        """The matrix without padding, some queries at a time."""
        arguments = self._arguments | {"attention_mask": None} | _EVERYTHING
        step = max(1, _FEW_ELEMENTS // (arguments["batch_size"] * arguments["kv_length"]))
        for first in range(0, self.q_length, step):
            size = {"q_offset": self.q_offset + first, "q_length": min(step, self.q_length - first)}
            yield sdpa_mask(**arguments | size)[:, 0].numpy()

    def __getitem__(self, index):
        """The mask of the last queries: models whose last layers keep nothing ask for it, as ``mask[:, :, -n:, :]``. As
        ``mask[:, 0, :, :]`` or ``mask[:, 0]``, for the scores of an indexer, it is a matrix."""
        whole = slice(None)
        rows, heads, queries, keys = (*index, whole, whole, whole)[:4] if isinstance(index, tuple) else (None,) * 4
        if (rows, keys) == (whole, whole) and isinstance(queries, slice):
            if heads == 0 and queries == whole:
                if self._seen is None:
                    self._seen = sdpa_mask(**self._arguments | _EVERYTHING)[:, 0]
                return self._seen
            if heads == whole and (queries.stop, queries.step) == (None, None) and (queries.start or 0) <= 0:
                dropped = queries.indices(self.q_length)[0]
                return LazyMask.of(self._arguments | {"q_length": self.q_length - dropped, "q_offset": self.q_offset + dropped})
        raise _not_a_tensor("takes a part of it")

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), others=None):
        if function == torch.Tensor.shape.__get__:
            return super().__torch_function__(function, types, arguments, others or {})
        name = function.__self__.__name__ if function.__name__ == "__get__" else function.__name__
        raise _not_a_tensor(f"calls {name} of it")


class MatrixMask:
    """A mask that came as a matrix, and has to be looked at; attributes as those of `LazyMask`.

    `tensor`, of shape (batch, heads, q_length, tokens), is True or 0 for what a query sees. One row and one head may stand for all.
    `known`, of shape (batch, q_offset), is False for padding among the tokens before. UnknownMaskError if it adds to scores, or if
    heads differ.
    """

    def __init__(self, tensor, known):
        self.tensor, self.parts, self.width, self._recognised = tensor, (None, None), None, {}
        if tensor.ndim != 4 or tensor.shape[0] not in (1, len(known)):
            raise UnknownMaskError(f"it has the shape {tuple(tensor.shape)}")
        seen = tensor
        if tensor.dtype is not torch.bool:
            seen = tensor == 0
            if not tensor.is_floating_point() or not (seen | (tensor <= torch.finfo(tensor.dtype).min)).all():
                raise UnknownMaskError("it adds numbers to scores")
        if not (seen == seen[:, :1]).all():
            raise UnknownMaskError("its heads differ")
        self._seen = seen[:, 0].expand(len(known), -1, -1).numpy()
        self.q_length, tokens = self._seen.shape[1:]
        self.q_offset = tokens - self.q_length
        self.padding = self._padding(known)

    def _padding(self, known):
        """`padding` of all tokens, or None; `known`: of those before."""
        new = self._seen[:, :, -self.q_length :].any(1)  # what no query sees, itself included, is padding
        later = np.logical_or.accumulate(new[:, ::-1], axis=1)[:, ::-1]
        if (wrong := ~new & later & self._seen.any(2)).any():
            row, query = np.argwhere(wrong)[0]
            raise UnknownMaskError(f"no token sees token {self.q_offset + query} of row {row}, which sees others")
        return _or_none(np.concatenate((known[:, : self.q_offset], new), 1))

    def options(self, rows, layer):
        """As `LazyMask.options`."""
        kind = rows.pattern(layer)
        if kind not in self._recognised:
            self._recognised[kind] = recognise([self._seen], rows.kept(layer), *kind)
        return self._recognised[kind]


class ChosenMask(MatrixMask):
    """The mask of an indexer, which shows a query the tokens that it has chosen, and padding none."""

    def _padding(self, known):
        return _or_none(np.concatenate((known[:, : self.q_offset], self._seen.any(2)), 1))

    def options(self, rows, layer):
        return [self._chosen(*row) for row in zip(self._seen, rows.kept(layer))]

    def _chosen(self, seen, kept):
        """The positions that each query of a row sees, those of padding left out, with -1 up to the largest number of them."""
        seen = seen[:, kept]
        count = seen.sum(1)
        first = np.argsort(~seen, axis=1, kind="stable")[:, : max(1, count.max())]
        chosen = np.where(np.arange(first.shape[1]) < count[:, None], first, -1)
        return {"indices": chosen[kept[self.q_offset :]]}


def _or_none(padding):
    return None if padding.all() else padding


def _not_a_tensor(what):
    return ValueError(
        f'this model works on its attention mask itself (it {what}), and under attn_implementation="kvfast" there is '
        f'no matrix of it: use attn_implementation="sdpa" or "eager", which the same cache serves. torch.compile does so, too: for that, '
        f"make a KVFastStaticCache"
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
    arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
    } | others
    if getattr(others.get("config"), "model_type", None) in MATRICES:
        return sdpa_mask(**arguments | _EVERYTHING)
    return LazyMask.of(arguments)
