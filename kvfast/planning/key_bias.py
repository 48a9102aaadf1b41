"""Which formats lose much on the keys of a model, because these have a large part in common."""

from kvfast.codec.dtypes import FLOATS

# Qwen2, 2.5 and their relatives add a bias to their keys that is far larger than what differs from token to token. Their
# configurations do not name it.
FAMILIES = ("qwen2",)


def key_bias_note(model_type, formats, instead="int4 or int8-centred"):
    """A sentence about those of the formats, by name, that should not hold the keys of this kind of model, and what to take; None
    if all of them suit."""
    if not str(model_type).startswith(FAMILIES):
        return None
    unfit = [name for name, one in formats.items() if one.k_dtype not in FLOATS and not one.centring and not one.per_channel]
    if not unfit:
        return None
    return f"the keys of {model_type} have a large bias, with which int4 loses less than {', '.join(unfit)}: take {instead}"
