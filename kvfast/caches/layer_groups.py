"""Layers with the same shape and format share a pool and a block table; the layers of a cache may differ."""

from kvfast.errors import DimensionMismatchError
from kvfast.storage.sequences.sequence import SequenceBuffer


def per_layer(value, name, num_layers):
    """One value for each layer, from one for all or from a list."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * num_layers
    if len(values) != num_layers:
        raise DimensionMismatchError(f"{name} must be one number or a list of {num_layers}, one per layer, got {len(values)}")
    return values


def shapes_of(num_kv_heads, head_dim, v_head_dim, num_layers):
    """KV heads, head_dim and v_head_dim of each layer. A v_head_dim of None, for all layers or for one, means head_dim."""
    heads, dims = per_layer(num_kv_heads, "num_kv_heads", num_layers), per_layer(head_dim, "head_dim", num_layers)
    v_dims = per_layer(v_head_dim, "v_head_dim", num_layers)
    return [(n, k, k if v is None else v) for n, k, v in zip(heads, dims, v_dims)]


def buffer_of(kinds, new_table, max_seq_len=None):
    """A buffer whose layers of one kind share a table.

    Parameters
    ----------
    kinds : list
        One hashable value per layer. Layers with equal values share a table.
    new_table : callable
        Makes the BlockTable of a kind from the kind and the indices of its layers.
    max_seq_len : int, optional
    """
    groups = {}
    for layer, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(layer)
    tables, places = [], [None] * len(kinds)
    for kind, layers in groups.items():
        table = new_table(kind, layers)
        tables.append(table)
        for place, layer in enumerate(layers):
            places[layer] = table, place
    return SequenceBuffer(tables, places, max_seq_len)
