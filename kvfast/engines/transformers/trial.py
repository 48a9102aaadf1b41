"""One attention call on a version of transformers that was not tested: kvfast's result against that of transformers' own cache."""

from types import SimpleNamespace

import torch
from transformers import DynamicCache, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask

from kvfast.engine import difference
from kvfast.engines.transformers.attention import NAME, attention
from kvfast.engines.transformers.cache import KVFastCache
from kvfast.engines.transformers.versions import cache_argument

_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 16
_STEPS = 5, 1  # tokens of each
_MOST = 1e-4  # of a difference between two ways to compute attention in float32


def trial():
    """Why this version cannot be used, or None."""
    draw = torch.Generator().manual_seed(0)
    steps = [[torch.randn(1, heads, n, _HEAD_DIM, generator=draw) for heads in (_HEADS, _KV_HEADS, _KV_HEADS)] for n in _STEPS]
    ways = (
        ("sdpa", sdpa_attention_forward, lambda config: DynamicCache(config=config)),
        (NAME, attention, lambda config: KVFastCache(config, "float32")),
    )
    return difference(lambda: [_attended(*way, steps) for way in ways], "transformers'", _MOST)


def _attended(name, attend, new_cache, steps):
    """What a layer of transformers with an attention and a cache returns for some steps."""
    config = LlamaConfig(
        hidden_size=_HEADS * _HEAD_DIM,
        num_hidden_layers=1,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        attn_implementation=name,
    )
    layer = SimpleNamespace(config=config, layer_idx=0, is_causal=True, training=False, num_key_value_groups=_HEADS // _KV_HEADS)
    cache, results = new_cache(config), []
    for query, key, value in steps:
        rows = torch.zeros(1, query.shape[2], config.hidden_size)
        mask = create_causal_mask(config=config, inputs_embeds=rows, attention_mask=None, **{cache_argument(): cache})
        key, value = cache.update(key, value, 0)
        results.append(attend(layer, query, key, value, mask, scaling=_HEAD_DIM**-0.5, dropout=0.0)[0])
    return torch.cat(results, 1)
