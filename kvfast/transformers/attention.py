"""The attention function: stores the new keys and values, and attends on what is stored."""

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .masks import LazyMask, lazy_mask
from .rows import EVERYTHING

NAME = "kvfast"

# What changes an attention in ways that kvfast does not know.
_UNKNOWN = ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "head_mask", "block_indices", "indices", "cache")


def register():
    """Make ``attn_implementation="kvfast"`` known to transformers."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lazy_mask)


def as_numpy(tensor):
    """A view of a tensor; bfloat16 as its bits, as kvfast takes it."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, s_aux=None, is_causal=None,
              **others):
    """Attention of a model's layer, as transformers calls it.

    Parameters
    ----------
    query : tensor of shape (batch, num_q_heads, tokens, head_dim)
    key, value : tensors of shape (batch, num_kv_heads, tokens, head_dim)
        The new ones, as `KVFastCache.update` returned them; or those of all tokens, where there is no such cache.
    attention_mask : LazyMask, tensor or None

    Returns
    -------
    tuple
        Tensor of shape (batch, tokens, num_q_heads, head_dim), and None for the weights.

    Raises
    ------
    ValueError
        For what kvfast cannot compute: masks that are more than causal, a window and padding; biases; dropout.
    """
    place = getattr(key, "kvfast_place", None)
    if place is None:
        return _without_cache(module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, is_causal, others)
    rows, layer = place
    window = rows.windows[layer]
    _check(module, query, attention_mask, window, dropout, is_causal, others)
    parts = rows.parts(layer, query.shape[2], attention_mask)
    rows.store(layer, parts, as_numpy(key), as_numpy(value))

    batch, num_q_heads, n, head_dim = query.shape
    output = torch.empty((batch, n, num_q_heads, head_dim), dtype=query.dtype)
    sinks = None if s_aux is None else s_aux.detach().float().numpy()
    num_threads = torch.get_num_threads()
    for row, part, q, out in zip(rows.rows, parts, as_numpy(query), as_numpy(output)):
        if part is not EVERYTHING:
            out[...] = 0  # of padding, which nobody reads, but which must be finite
        if part is None:
            continue
        target = out[part]
        row.attend(layer, q.transpose(1, 0, 2)[part], out=target, scale=scaling, softcap=softcap, sliding_window=window,
                   sinks=sinks, num_threads=num_threads)
        if not isinstance(part, slice):
            out[part] = target
    return output, None


def _check(module, query, mask, window, dropout, is_causal, others):
    """Refuse what kvfast would not compute as the model means it."""
    if query.requires_grad:
        raise RuntimeError("KVFastCache has no gradients: call the model under torch.no_grad(), as generate does")
    if mask is not None and not isinstance(mask, LazyMask):
        raise ValueError(f"kvfast cannot apply a mask of its own making, got one of shape {tuple(mask.shape)}: give generate the 2D "
                         f'attention_mask of padding, or use attn_implementation="sdpa"')
    if mask is not None and (not mask.is_causal or mask.window != window):
        raise ValueError("kvfast knows causal masks with a sliding window and padding, and this model asks for more in "
                         f'{type(module).__name__}: use attn_implementation="sdpa"')
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    unknown = [name for name in _UNKNOWN if others.get(name) is not None]
    if not causal or dropout or unknown:
        what = "bidirectional attention" if not causal else f"dropout of {dropout}" if dropout else ", ".join(unknown)
        raise ValueError(f'{type(module).__name__} asks for {what}, which kvfast does not compute: use attn_implementation="sdpa"')


def _without_cache(module, query, key, value, mask, scaling, dropout, softcap, s_aux, is_causal, others):
    """Keys and values that are tensors, of another cache or of none: that is PyTorch's attention."""
    for name, given in (("softcap", softcap), ("attention sinks", s_aux)):
        if given is not None:
            raise ValueError(f"without a KVFastCache, attn_implementation=\"{NAME}\" is PyTorch's attention, which has no {name}: "
                             f"pass past_key_values=KVFastCache(model.config), or use attn_implementation=\"eager\"")
    if isinstance(mask, LazyMask):
        mask = mask.matrix()
    return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others)
