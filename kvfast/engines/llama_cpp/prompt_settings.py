"""What a store must know of a ``Llama`` of llama-cpp-python: all that changes its keys and values."""

import inspect
import os
import re
import sys
from pathlib import Path

from kvfast.engine import files_digest

# The parameters of a context that change keys, values, or their layout.
PARAMETERS = [
    "type_k",
    "type_v",
    "flash_attn_type",
    "attention_type",
    "swa_full",
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
]
# Variables of the environment: another llama.cpp, and keys and values that are not multiplied by a Hadamard matrix.
VARIABLES = "LLAMA_CPP_LIB_PATH", "LLAMA_ATTN_ROT_DISABLE"
# Models with this have rotations for short and for long contexts.
ORIGINAL_CONTEXT = ".rope.scaling.original_context_length"
MANY_TOKENS = 64  # whose time tells how fast prompts are computed


def settings_of(llm):
    """All that changes the keys and values of a prompt but the weights, which `weights_of` tells apart."""
    parameters = llm.context_params
    # Adapters are small, and read at once: a file may change after it was loaded.
    adapter = [files_digest(llm.lora_path), llm.lora_scale] if llm.lora_path else None
    context = llm.n_ctx() if not llm.metadata or any(name.endswith(ORIGINAL_CONTEXT) for name in llm.metadata) else None
    return [
        "llama.cpp",
        getattr(_package(llm), "__version__", ""),
        llm.kv_overrides,
        adapter,
        [getattr(parameters, name) for name in PARAMETERS],
        context,
        [os.environ.get(name) for name in VARIABLES],
    ]


def weights_of(path):
    """Digests of the files of a model, of which `path` is the first: of all of their bytes."""
    path = Path(path)
    found = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", path.name)
    if found is None:
        return [files_digest(path)]
    one = re.compile(re.escape(found[1]) + r"\d{5}" + re.escape(found[2]))
    return [files_digest(file) for file in sorted(path.parent.iterdir()) if one.fullmatch(file.name)]


def refusal(llm):
    """Why no prompt of this model can be kept, or None."""
    package = _package(llm)
    if (package.llama_model_is_recurrent(llm.model) or package.llama_model_is_hybrid(llm.model)) and not hasattr(llm, "checkpoints"):
        return "the model is recurrent: llama-cpp-python computes all of a prompt again, but `python -m kvfast serve` does not"
    if package.llama_model_has_encoder(llm.model) or not _is_causal(llm, package):
        return "the model is not causal: keys depend on the tokens that follow"
    if llm.__getstate__()["logits_all"] and getattr(llm, "draft_model", None) is None:
        return "logits_all=True keeps the logits of all tokens, which a store does not have"
    if llm.chat_handler is not None and not inspect.isfunction(llm.chat_handler):
        return "the chat_handler may have images, which token ids do not tell apart"
    return None


def _is_causal(llm, package):
    if hasattr(package, "llama_get_causal_attn"):  # older bindings lack it
        return package.llama_get_causal_attn(llm.ctx)
    said = [text.lower() for name, text in llm.metadata.items() if name.endswith(".attention.causal")]
    return llm.context_params.attention_type != package.LLAMA_ATTENTION_TYPE_NON_CAUSAL and "false" not in said


def seed_of(llm):
    """The seed that the next sampling begins with, which a state that is loaded replaces."""
    return llm.__getstate__()["seed"]


def prompt_rate(llm):
    """Tokens of a prompt that the model computes in a second, or 0.0 if that is not known."""
    done = _package(llm).llama_perf_context(llm.ctx)
    return 1000 * done.n_p_eval / done.t_p_eval_ms if done.n_p_eval >= MANY_TOKENS and done.t_p_eval_ms > 0 else 0.0


def _package(llm):
    """llama_cpp, which is imported, also where a program has derived its own class from ``Llama``."""
    modules = (sys.modules[kind.__module__.partition(".")[0]] for kind in type(llm).__mro__)
    return next(one for one in modules if hasattr(one, "llama_model_is_recurrent"))
