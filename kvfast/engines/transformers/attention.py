"""The attention function: stores the new keys and values, and attends on what is stored."""

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvfast.engine import as_numpy
from kvfast.engines.transformers.masks import ChosenMask, LazyMask, MatrixMask, lazy_mask
from kvfast.engines.transformers.received import Received
from kvfast.engines.transformers.rows import EVERYTHING
from kvfast.engines.transformers.spans import UnknownMaskError

NAME = "kvfast"

# What comes with a call and does not change it; whatever else there is, does.
_HARMLESS = {
    "position_ids",
    "cache_position",
    "use_cache",
    "num_items_in_batch",
    "return_dict",
    "output_router_logits",
    "output_hidden_states",
}


def register():
    """Make ``attn_implementation="kvfast"`` known to transformers."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lazy_mask)


def attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    softcap=None,
    s_aux=None,
    is_causal=None,
    indices=None,
    **others,
):
    """Attention of a model's layer, as transformers calls it: a tensor of shape (batch, tokens, num_q_heads, v_head_dim), and None.

    `query` is of shape (batch, num_q_heads, tokens, head_dim). `key` and `value` are the new ones, as `KVFastCache.update` returned
    them or a layer made them of latents; or those of all tokens, where there is no such cache. `indices`, of shape (batch, tokens,
    k), are the tokens that an indexer has chosen for each query, padding counted; of those, a query reads what the mask shows.

    ValueError for what kvfast cannot compute: masks that are more than causal, a window or chunks, spans of tokens that see each
    other, and padding; biases; dropout.
    """
    if not isinstance(key, Received) and not isinstance(value, Received):
        if indices is not None:
            raise _not_computed(module, "the tokens of an indexer without a KVFastCache")
        if hasattr(key, "is_decoded"):
            raise ValueError(
                f'the KVFastCache was made with another configuration than that of the model, one without attn_implementation="{NAME}", so '
                f"it decodes all of its tokens at each step: make it by KVFastCache(model.config)"
            )
        return _without_cache(module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, is_causal, others)
    rows, layer = _place(module, key, value)
    window, chunk = rows.windows[layer], rows.chunks[layer]
    if attention_mask is None and not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise _not_computed(module, "bidirectional attention")
    check_call(module, query, window or chunk, dropout, others)
    if rows.awaits(layer):
        rows.fit(layer, key, value, True)
    kind = ChosenMask if rows.indexed[layer] and indices is None else MatrixMask
    parts, of_rows = _looked_at(module, rows, layer, query.shape[2], attention_mask, kind)
    if indices is not None and any(_pads_behind(row, layer, part, query.shape[2]) for row, part in zip(rows.rows, parts)):
        raise _not_computed(module, "padding after the tokens of a row, which has an indexer: pad on the left")
    if rows.awaits(layer):  # not where another layer reads what this one stored, or the same one a second time
        if query.shape[2] != key.tensor.shape[2]:
            raise ValueError(f"{type(module).__name__} brings {key.tensor.shape[2]} keys and {query.shape[2]} queries")
        if layer == 0:
            _check_positions(others.get("position_ids"), rows.rows[0].layer_length(0), parts[0])
        rows.store(layer, parts, as_numpy(key.tensor), as_numpy(value.tensor))
    elif key.expands:
        raise _not_computed(module, "keys of its own of the latents that another layer has stored as its keys")

    batch, num_q_heads, n, head_dim = query.shape
    output = torch.empty((batch, n, num_q_heads, value.shape[3]), dtype=query.dtype)
    sinks = None if s_aux is None else s_aux.detach().float().numpy()
    options = {
        "scale": head_dim**-0.5 if scaling is None else scaling,
        "softcap": softcap,
        "sliding_window": window,
        "sinks": sinks,
        "num_threads": torch.get_num_threads(),
        "attention_chunk_size": chunk,
    }
    chosen = [None] * batch if indices is None else _chosen(rows, layer, indices.numpy())
    for row, part, own, some, q, out in zip(rows.rows, parts, of_rows, chosen, as_numpy(query), as_numpy(output)):
        q = q.transpose(1, 0, 2)
        if some is not None and part is not None:
            own = own | {"indices": some[part]}
        if isinstance(part, slice):
            if part is not EVERYTHING:
                out[...] = 0  # rows of padding are never read, but must be finite
            row.attend(layer, q[part], out=out[part], **options, **own)
            continue
        out[...] = 0
        last = -1 if part is None else part[-1]
        if part is not None:
            out[part] = row.attend(layer, q[part], out=np.empty((len(part), *out.shape[1:]), out.dtype), **options, **own)
        _attend_behind(row, layer, q[last + 1 :], out[last + 1 :], options)
    return output, None


def _chosen(rows, layer, indices):
    """The chosen tokens of each query, as positions of the rows' own tokens: (batch, tokens, k), -1 for tokens that the query does not see."""
    kept = rows.kept(layer)
    positions = np.where(kept, np.cumsum(kept, 1) - 1, -1)
    chosen = np.take_along_axis(positions[:, None], indices.astype(np.int64), 2)
    return np.where(chosen <= positions[:, -indices.shape[1] :, None], chosen, -1)


def _pads_behind(row, layer, part, n):
    """Whether the last of `n` new tokens is padding after tokens of a row, of which `part` are new."""
    if part is None:
        return row.layer_length(layer) > 0
    return not isinstance(part, slice) and part[-1] < n - 1


def _attend_behind(row, layer, q, out, options):
    """Padding after the tokens of a row, whose last output generate takes for the row's next token: it sees all of them. Windows and
    chunks that see less have refused the mask. A call takes as many queries as there are tokens."""
    options = options | {"causal": False, "sliding_window": None, "attention_chunk_size": None}
    if length := row.layer_length(layer):
        for first in range(0, len(q), length):
            row.attend(layer, q[first : first + length], out=out[first : first + length], **options)


def _place(module, key, value):
    """Rows and layer that keys and values were received for, and are still the newest of."""
    if not (
        isinstance(key, Received)
        and isinstance(value, Received)
        and (key.rows, key.layer, key.end) == (value.rows, value.layer, value.end)
    ):
        raise ValueError(f"{type(module).__name__} attends to keys and values that no KVFastCache returned together")
    if key.rows.seen[key.layer] != key.end:
        raise RuntimeError(f"{type(module).__name__} attends to keys of layer {key.rows.numbers[key.layer]} from a step before")
    return key.rows, key.layer


def _check_positions(positions, before, part):
    """Refuse tokens of the first row that begin at the first position again, after others."""
    own = None if part is None or positions is None or positions.ndim != 2 else positions[0, part]
    if before and own is not None and own[0] == 0 and own[-1] >= before:
        raise ValueError(
            f"tokens begin at position 0 again, and the cache holds {before}: generate gives every token again with use_cache=False, and "
            f"in assisted generation with a cache that is not empty. Leave these out, or reset() the cache"
        )


def _looked_at(module, rows, layer, n, mask, kind):
    """Which of the `n` new tokens each row has, and what `attend` needs to see what the mask shows them: options of each row. `kind`: what
    a tensor is."""
    try:
        mask = rows.matrix = mask if mask is None or isinstance(mask, LazyMask) else _matrix_of(rows, layer, n, mask, kind)
        parts = rows.parts(layer, n, mask)
        return parts, [{}] * len(parts) if mask is None else mask.options(rows, layer)
    except UnknownMaskError as error:
        raise ValueError(
            f"kvfast knows causal masks with a sliding window or chunks, spans of tokens that see each other, and padding, and the mask "
            f'of {type(module).__name__} is another one: {error}. Use attn_implementation="sdpa"'
        ) from None


def _matrix_of(rows, layer, n, tensor, kind):
    """The mask of a tensor, which layers share."""
    if type(rows.matrix) is kind and rows.matrix.tensor is tensor:
        return rows.matrix
    if tensor.ndim == 4:
        rows.check_place(layer, n, tensor.shape[3] - tensor.shape[2], tensor.shape[2])
    return kind(tensor, rows.kept(layer)[:, : rows.seen[layer] - n])


def check_call(module, query, size, dropout, others):
    """Refuse what kvfast would not compute as the model means it; `size` is that of the layer's window or chunks."""
    if query.requires_grad:
        raise RuntimeError("KVFastCache has no gradients: call the model under torch.no_grad(), as generate does")
    unknown = [name for name, given in others.items() if name not in _HARMLESS and given is not None and given is not False]
    if others.get("sliding_window") == size:
        unknown = [name for name in unknown if name != "sliding_window"]
    if dropout or unknown:
        other = "eager" if "output_attentions" in unknown else "sdpa"
        raise _not_computed(module, f"dropout of {dropout}" if dropout else ", ".join(unknown), other)


def _not_computed(module, what, other="sdpa"):
    return ValueError(f'{type(module).__name__} asks for {what}, which kvfast does not compute: use attn_implementation="{other}"')


def _without_cache(module, query, key, value, mask, scaling, dropout, softcap, s_aux, is_causal, others):
    """Keys and values that are tensors, of another cache or of none: that is PyTorch's attention."""
    for name, given in (("softcap", softcap), ("attention sinks", s_aux)):
        if given is not None:
            raise ValueError(
                f'without a KVFastCache, attn_implementation="{NAME}" is PyTorch\'s attention, which has no {name}: '
                f'pass cache=KVFastCache(model.config), or use attn_implementation="eager"'
            )
    if isinstance(mask, LazyMask):
        mask = mask.matrix()
    return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others)
