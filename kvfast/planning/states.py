"""The recurrent states of a model's layers, by the fields that published configurations have for them."""

from math import prod

from kvfast.storage.sequences.checkpoints import ALIGNMENT

CONVOLVED, RECURRENT = 2, 4  # bytes of an element: of a model in 16 bits, and of float32, which transformers keeps

# Names that families have for a number: the first that a configuration has counts.
_HEADS = ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads")
_HEAD_DIM = ("mamba_d_head", "mamba_headdim", "mamba_head_dim")
_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
_STATE = ("mamba_d_state", "ssm_state_size")
_KERNEL = ("mamba_d_conv", "conv_kernel")


def layer_state_nbytes(config):
    """Bytes of the states of one layer in a checkpoint, or None for a kind of layer that is not known."""
    for shapes_of in (_delta, _mamba2, _mamba, _of_gguf, _convolution):
        shapes = shapes_of(config)
        if shapes is not None:
            return sum(-(-prod(shape) * nbytes // ALIGNMENT) * ALIGNMENT for shape, nbytes in shapes)
    return None


def _delta(config):
    """Gated delta rule and its kin (Qwen3-Next, Kimi Linear, OLMo Hybrid): a matrix for each head."""
    own = config.get("linear_attn_config")
    if isinstance(own, dict):
        heads, dim, kernel = (own.get(name) for name in ("num_heads", "head_dim", "short_conv_kernel_size"))
        numbers = [heads, dim, heads, dim, kernel]
    else:
        heads, dim = _first(config, ("linear_num_heads",)), _first(config, ("linear_head_dim",))
        names = (
            "linear_num_key_heads",
            "linear_key_head_dim",
            "linear_num_value_heads",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
        )
        numbers = [_first(config, (name,)) or other for name, other in zip(names, (heads, dim, heads, dim, None))]
    if not all(map(_is_size, numbers)):
        return None
    key_heads, key_dim, value_heads, value_dim, kernel = numbers
    convolved = 2 * key_heads * key_dim + value_heads * value_dim
    return [((convolved, kernel), CONVOLVED), ((value_heads, key_dim, value_dim), RECURRENT)]


def _mamba2(config):
    numbers = [_first(config, names) for names in (_HEADS, _HEAD_DIM, _GROUPS, _STATE, _KERNEL)]
    if not all(map(_is_size, numbers)):
        return None
    heads, head_dim, groups, state, kernel = numbers
    return [((heads * head_dim + 2 * groups * state, kernel), CONVOLVED), ((heads, head_dim, state), RECURRENT)]


def _mamba(config):
    numbers = [_first(config, names) for names in (("mamba_expand", "expand"), ("hidden_size",), _STATE, _KERNEL)]
    if not all(map(_is_size, numbers)) or _first(config, _HEADS) is not None:
        return None
    expand, hidden, state, kernel = numbers
    return [((expand * hidden, kernel), CONVOLVED), ((expand * hidden, state), RECURRENT)]


def _of_gguf(config):
    """One form for Mamba, Mamba-2 and the gated delta rule, whose keys are as many as the groups of Mamba-2."""
    inner, state, kernel = (config.get(name) for name in ("ssm_inner_size", "ssm_state_size", "ssm_conv_kernel"))
    groups = config.get("ssm_group_count") or 0
    if not all(map(_is_size, (inner, state, kernel, groups or 1))):
        return None
    return [((inner + 2 * groups * state, kernel), CONVOLVED), ((inner, state), RECURRENT)]


def _convolution(config):
    kernel, hidden = _first(config, ("conv_L_cache",)), config.get("hidden_size")
    return [((hidden, kernel), CONVOLVED)] if _is_size(kernel) and _is_size(hidden) else None


def _first(config, names):
    return next((config.get(name) for name in names if config.get(name) is not None), None)


def _is_size(value):
    return type(value) is int and 0 < value < 1 << 31
