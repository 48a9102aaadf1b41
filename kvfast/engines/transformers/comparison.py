"""A model with a `KVFastCache` against the same model with transformers' own cache, token by token."""

from dataclasses import dataclass
from inspect import signature

import numpy as np
import torch
from transformers import DynamicCache

from kvfast.engine import as_array, check_size
from kvfast.engines.transformers.attention import NAME
from kvfast.engines.transformers.cache import KVFastCache
from kvfast.engines.transformers.versions import cache_argument


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of `compare`: arrays with a number for each compared token. `print` sums them up.

    Attributes
    ----------
    same : array of bool
        Whether both caches lead to the same most likely next token.
    gaps : array of float
        The lead of `DynamicCache`'s most likely token over that of kvfast, in logits of `DynamicCache`: 0 where they are the same. A small
        gap is a near tie, which rounding decides.
    leads : array of float
        The lead of `DynamicCache`'s most likely token over its second.
    kl : array of float
        The KL divergence from the probabilities with `DynamicCache` to those with kvfast, in nats.
    """

    same: np.ndarray
    gaps: np.ndarray
    leads: np.ndarray
    kl: np.ndarray

    @property
    def agreement(self):
        """The part of tokens that are the same, from 0 to 1."""
        return float(self.same.mean())

    def __str__(self):
        others = f", and the others are up to {self.gaps.max():.2g} logits apart" if self.agreement < 1 else ""
        return (
            f"{self.same.sum()} of {len(self.same)} most likely tokens are the same{others} (median lead of the most likely token "
            f"{np.median(self.leads):.2g}); KL divergence {self.kl.mean():.2g} on average, at most {self.kl.max():.2g}"
        )


def compare(model, input_ids, dtype="int4", *, num_tokens=64, attn_implementation="sdpa"):
    """Compare the logits of a model with a `KVFastCache` and with transformers' `DynamicCache`, on the same text.

    Both caches get the text without its last tokens as a prompt, then these tokens one by one, as in generation. Two generated texts
    cannot be compared so: after the first near tie they go on from different tokens.

    Parameters
    ----------
    model : PreTrainedModel
        Its attention implementation is set back at the end.
    input_ids : integers of shape (1, n)
        A text, without padding.
    dtype
        As in `KVFastCache`.
    num_tokens : int
        The number of last tokens whose logits are compared, below n.
    attn_implementation : str
        The implementation that attends to the `DynamicCache`: ``"eager"`` for models with a softcap or sinks.

    Returns
    -------
    Comparison

    Examples
    --------
    >>> found = kvfast.transformers.compare(model, inputs.input_ids, "int8")                 # doctest: +SKIP
    >>> found.agreement, found.gaps.max()                                                    # doctest: +SKIP
    (0.984375, 0.0031)
    """
    num_tokens, ids = check_size(num_tokens, "num_tokens", 1), as_array(input_ids, "input_ids")
    if ids.ndim != 2 or len(ids) != 1 or ids.shape[1] <= num_tokens:
        raise ValueError(f"input_ids must have shape (1, n) with more than {num_tokens} tokens, got {ids.shape}")
    ids, before = torch.as_tensor(ids), model.config._attn_implementation
    try:
        expected = _logits(model, ids, num_tokens, attn_implementation, DynamicCache(config=model.config))
        found = _logits(model, ids, num_tokens, NAME, KVFastCache(model.config, dtype))
    finally:
        model.set_attn_implementation(before)
    best, chosen = expected.topk(2).values, found.argmax(-1, keepdim=True)
    gaps = best[:, 0] - expected.gather(1, chosen)[:, 0]
    expected_logs, logs = (torch.log_softmax(one.double(), -1) for one in (expected, found))
    kl = (expected_logs.exp() * (expected_logs - logs)).sum(-1)
    same = chosen[:, 0] == expected.argmax(-1)
    return Comparison(*(one.numpy() for one in (same, gaps, best[:, 0] - best[:, 1], kl)))


@torch.no_grad()
def _logits(model, ids, num_tokens, implementation, cache):
    """The logits after each of the last tokens, as float32 of shape (num_tokens, vocabulary)."""
    model.set_attn_implementation(implementation)
    options = {cache_argument(): cache, "use_cache": True}
    if "logits_to_keep" in signature(model.forward).parameters:
        options["logits_to_keep"] = 1  # those of a prompt would be large
    first = ids.shape[1] - num_tokens
    steps = [ids[:, :first], *ids[:, first:].split(1, 1)]
    return torch.cat([model(input_ids=step, **options).logits[0, -1:].float() for step in steps][1:])
