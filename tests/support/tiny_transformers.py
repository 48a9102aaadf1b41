"""Models of transformers with random weights, and what generates with them."""

import functools
import os
import warnings

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():  # of the two about each other
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs the extra packages of kvfast[transformers]")
    transformers = pytest.importorskip("transformers", reason="needs the extra packages of kvfast[transformers]")
    from kvfast.engines.transformers.versions import cache_argument
    from kvfast.transformers import KVFastCache

transformers.logging.set_verbosity_error()
# Neither of the two is ours to mend.
QUIET = [
    pytest.mark.filterwarnings(f"ignore::{kind}")
    for kind in ("DeprecationWarning", "FutureWarning", "UserWarning:torch", "UserWarning:transformers")
]

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # random weights say little: larger ones keep the best token apart from the second best
    "initializer_range": 0.2,
}
WINDOW = 16
NEW_TOKENS = 16
MODELS = {
    "llama": ("Llama", {}),
    "smollm2": ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96, "tie_word_embeddings": True}),
    "multi-query": ("Llama", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": WINDOW, "head_dim": 16}),
    "gemma2": ("Gemma2", {"sliding_window": WINDOW, "head_dim": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 20}),
    "gemma3": ("Gemma3", {"sliding_window": WINDOW, "head_dim": 16, "query_pre_attn_scalar": 20}),
    "gpt-oss": (
        "GptOss",
        {"sliding_window": WINDOW, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 2, "initializer_range": 0.1},
    ),
}
SLIDING = ("mistral", "gemma2", "gemma3", "gpt-oss")


def new_model(name, **others):
    """A model of `MODELS`, the same weights each time."""
    family, sizes = MODELS[name]
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**SIZES | sizes | others)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    return model


random_model = functools.cache(new_model)  # for tests that leave it as it was


def prompt(batch, tokens, padding=()):
    """Token ids and their mask; row i has ``padding[i]`` tokens of padding on its left."""
    ids = torch.from_numpy(np.random.default_rng(batch * 1000 + tokens).integers(3, 97, (batch, tokens)))
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        ids[row, :count], mask[row, :count] = 0, 0
    return ids, mask


def padded(batch, tokens, *holes):
    """As `prompt`, with padding in any places: `holes` are a row and a slice of it."""
    ids, mask = prompt(batch, tokens)
    for row, hole in holes:
        ids[row, hole], mask[row, hole] = 0, 0
    return ids, mask


def stock(model, ids, mask, **options):
    """The tokens of transformers alone; eager attention also knows softcaps and sinks."""
    model.set_attn_implementation("eager")
    return model.generate(ids, attention_mask=mask, **{"max_new_tokens": NEW_TOKENS, "do_sample": False} | options)


def ours(model, ids, mask, cache=None, **options):
    model.set_attn_implementation("kvfast")
    cache = KVFastCache(model.config, "float32") if cache is None else cache
    return model.generate(
        ids, attention_mask=mask, **{cache_argument(): cache}, **{"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
    )


def logits(model, ids, implementation, cache, mask=None):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(ids, attention_mask=mask, **{cache_argument(): cache}).logits


def error(found, expected):
    """The relative error of a tensor, in norms."""
    return ((found - expected).norm() / expected.norm()).item()


def interrupt(layer, step):
    """Ctrl-C as soon as a step comes to a layer."""

    def stop(*_):
        raise KeyboardInterrupt

    hook = layer.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        step()
    hook.remove()
