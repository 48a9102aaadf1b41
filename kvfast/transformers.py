"""kvfast in Hugging Face transformers: a cache for ``generate``, and attention straight on its bytes.

>>> import kvfast.transformers
>>> from transformers import AutoModelForCausalLM
>>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="kvfast")     # doctest: +SKIP
>>> cache = kvfast.transformers.KVFastCache(model.config, dtype="int8")                  # doctest: +SKIP
>>> model.generate(**inputs, cache=cache)                                      # doctest: +SKIP

Importing it registers the attention function and its masks under the name ``"kvfast"``. Needs the extra packages of
``pip install "kvfast[transformers]"``; nothing else in kvfast imports it.

A batch is a list of kvfast caches, one for each of its rows: a `kvfast.KVCache`, or a `kvfast.RingKVCache` where layers
have sliding windows. A row holds its own tokens and no padding; beams share blocks until one of them writes. Layers whose state
is something else, such as Mamba's, are transformers' own, in the same cache. A `KVFastStaticCache` is for steps that PyTorch compiles, with
``attn_implementation="kvfast_static"``. `compare` measures how near a format comes to transformers' own cache.
"""

from kvfast.engines.transformers.versions import check_versions, installed_version, needs_trial, tell

check_versions()  # before what follows imports them

from kvfast.engines.transformers.attention import register
from kvfast.engines.transformers.cache import KVFastCache
from kvfast.engines.transformers.comparison import Comparison, compare
from kvfast.engines.transformers.static import KVFastStaticCache, register_static

register()
register_static()
if needs_trial(installed_version("transformers")):
    from kvfast.engines.transformers.trial import trial

    tell(installed_version("transformers"), trial())

__all__ = ["Comparison", "KVFastCache", "KVFastStaticCache", "compare"]
