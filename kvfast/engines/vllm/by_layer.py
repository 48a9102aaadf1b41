"""What the user asks for single layers of a model: formats of their own, and bases for keys."""

import os
import re
from dataclasses import replace
from functools import cache

from kvfast import Calibration
from kvfast.engine import VLLM_FORMATS, VLLM_NAMES
from kvfast.engines.vllm import versions

FORMATS, CALIBRATION = "KVFAST_LAYER_FORMATS", "KVFAST_CALIBRATION"
_loaded = cache(Calibration.load)


def asked_formats():
    """The numbers of layers in FORMATS, negative ones from the last layer on, and their kv_cache_dtype; ValueError if it is not understood."""
    names, found = VLLM_FORMATS if versions.takes_names() else VLLM_NAMES, {}
    for part in filter(None, os.environ.get(FORMATS, "").replace(" ", "").split(";")):
        match = re.fullmatch(r"(-?\d+(?:,-?\d+)*)=(\w+)", part)
        if match is None or match[2] not in names:
            raise ValueError(
                f'{FORMATS} must be like "0,1,-1=int8_per_token_head;5=auto", layers and one of {", ".join(names)}, got {part!r}'
            )
        found |= dict.fromkeys(map(int, match[1].split(",")), match[2])
    return found


def asked_calibration():
    """The Calibration whose file CALIBRATION names, or None."""
    path = os.environ.get(CALIBRATION)
    return _loaded(path) if path else None


def asked():
    """What decides about the bytes of a layer's blocks, besides its spec."""
    calibration = asked_calibration()
    return [*sorted(asked_formats().items()), *([] if calibration is None else [calibration.digest])]


def let_layers_differ():
    """Give layers the formats that are asked for them when vLLM asks them for their specs, which do not have the numbers of layers."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    original = Attention.get_kv_cache_spec
    if original.__module__ == __name__:
        return

    def get_kv_cache_spec(self, vllm_config):
        name = _name_of(self.layer_name, vllm_config)
        if name is not None:
            self.kv_cache_dtype, self.kv_cache_torch_dtype = name, kv_cache_dtype_str_to_dtype(name, vllm_config.model_config)
        return original(self, vllm_config)

    Attention.get_kv_cache_spec = get_kv_cache_spec


def _name_of(layer_name, vllm_config):
    """The kv_cache_dtype that is asked for a layer, or None."""
    names = asked_formats()
    if not names:
        return None
    number, count = _place_of(layer_name, vllm_config)
    outside = [one for one in names if not -count <= one < count]
    if outside:
        raise ValueError(f"{FORMATS} must have layers from {-count} to {count - 1} of this model, got {outside[0]}")
    return {one % count: name for one, name in names.items()}.get(number)


def calibrated(fmt, layer_name, spec, vllm_config):
    """The format of a layer with its bases, if they are asked for and its keys are codes; ValueError for those of another model."""
    calibration = asked_calibration()
    if calibration is None or not (fmt.per_channel or "k" in fmt.rotation):
        return fmt
    number, count = _place_of(layer_name, vllm_config)
    if len(calibration) != count:
        raise ValueError(f"{CALIBRATION} must be of a model with {count} layers, got one with {len(calibration)}")
    if number >= count:
        return fmt
    bases = calibration[number]
    bases.matrices(fmt.per_channel, spec.num_kv_heads, spec.head_size)  # which checks their shape
    return replace(fmt, calibration=bases)


def _place_of(layer_name, vllm_config):
    """The number of a layer, and the number of the model's layers; a layer that drafts has a number that no other has."""
    from vllm.model_executor.models.utils import extract_layer_index

    count = vllm_config.model_config.get_total_num_hidden_layers()
    return count if layer_name.startswith("draft_model.") else extract_layer_index(layer_name), count
