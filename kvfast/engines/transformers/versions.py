"""Supported versions of transformers, the names used, and the differences between versions. No other file asks for a version."""

import functools
import logging
from inspect import signature

from kvfast.engine import installed_version, minor_of, missing, versions_text

# The first version whose caches have what this adapter needs, the last that was tested, and the first that may work in another way.
FIRST, LAST_TESTED, BEYOND = (5, 20), (5, 24), (6, 0)
USED = {
    "transformers": {"AttentionInterface": ("register",), "AttentionMaskInterface": ("register",)},
    "transformers.cache_utils": {
        "Cache": (
            "layers",
            "update",
            "update_conv_state",
            "update_recurrent_state",
            "get_mask_sizes",
            "crop",
            "reorder_cache",
            "batch_select_indices",
            "batch_repeat_interleave",
            "activate_past_recording",
            "is_croppable",
        ),
        "CacheLayerMixin": ("update", "get_mask_sizes", "get_seq_length", "get_max_length", "lazy_initialization"),
        "LinearAttentionLayer": ("number_of_states", "crop", "reset"),
        "get_layer_types_and_kwargs": ("config",),
    },
    "transformers.masking_utils": {
        "causal_mask_function": (),
        "sliding_window_causal_mask_function": ("sliding_window",),
        "create_causal_mask": ("config", "inputs_embeds", "attention_mask"),
        "sdpa_mask": ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask"),
    },
    "transformers.integrations.sdpa_attention": {
        "sdpa_attention_forward": ("module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal")
    },
}


def check_versions():
    """Refuse to be imported with a transformers that works in another way: ImportError says what is missing, and how to get it."""
    for name in ("torch", "transformers"):
        if installed_version(name) is None:
            raise ModuleNotFoundError(f'kvfast.transformers needs {name}: pip install "kvfast[transformers]"', name=name)
    check_transformers(installed_version("transformers"))


def check_transformers(version):
    """Raise ImportError for a version of transformers that is not known, or not tested and without what is used."""
    known = f"transformers>={FIRST[0]}.{FIRST[1]},<{BEYOND[0]}"
    if not FIRST <= minor_of(version) < BEYOND:
        raise ImportError(
            f"kvfast.transformers knows transformers from {FIRST[0]}.{FIRST[1]} on and before {BEYOND[0]}, and {version} is "
            f'installed: pip install "{known}"'
        )
    lacking = missing(USED) if needs_trial(version) else None
    if lacking is not None:
        raise ImportError(_refusal(lacking, version))


def needs_trial(version):
    """Whether nobody has tested a version."""
    return minor_of(version) > LAST_TESTED


def tell(version, why):
    """Say what an attention call on a version that was not tested has shown: ImportError if there is a reason against it."""
    if why is not None:
        raise ImportError(_refusal(why, version))
    logging.getLogger("kvfast").warning(
        "kvfast was tested with transformers %s, and %s is installed: one attention call gave transformers' own result, it is used",
        versions_text([LAST_TESTED]),
        version,
    )


def _refusal(why, version):
    tested = f"{LAST_TESTED[0]}.{LAST_TESTED[1]}"
    return (
        f"kvfast.transformers was tested with transformers up to {tested}, and {version} is installed: {why}; "
        f'pip install "transformers>={FIRST[0]}.{FIRST[1]},<{LAST_TESTED[0]}.{LAST_TESTED[1] + 1}"'
    )


# What differs between versions.


@functools.cache
def cache_argument():
    """The name by which models and masks take a cache: ``cache`` from 5.24 on, and before that ``past_key_values``."""
    from transformers.masking_utils import create_causal_mask

    # The older name may be there for callers of older versions.
    return "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"


def asks_for_states():
    """Whether layers ask the cache for their states, as from 5.21 on. Before, they take them from its layers, unseen by it."""
    from transformers.cache_utils import Cache

    return hasattr(Cache, "get_conv_state")


def dummy_layer():
    """A layer that keeps nothing. There is none before 5.23, where the layers of other kinds come last, or have states."""
    from transformers import cache_utils

    return cache_utils.DummyLayer()
