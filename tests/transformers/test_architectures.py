"""Every causal architecture that transformers has: what kvfast.transformers makes of those that can be built small, and what
kvfast.plan reads from the configurations of all."""

import copy
import json

import pytest
from model_configs import HYBRIDS
from tiny_architectures import KEPT, NAMES, kept_layers, small_model, try_architecture
from tiny_transformers import QUIET, transformers
from transformers.cache_utils import get_layer_types_and_kwargs

from kvfast.planning.model_shape import read_shape

pytestmark = QUIET
AUTO = transformers.models.auto
FAMILIES = sorted({*NAMES, *AUTO.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})

FOUND = json.loads(KEPT.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    """Parameters of the module, so that all tests of one architecture follow each other and share its model."""
    return request.param


def test_architecture(name):
    """What comes of it is what the guide tells: the tokens of transformers, or a refusal, and never other tokens."""
    found, kept = try_architecture(name), FOUND["architectures"].get(name)
    assert not any(text.startswith(("differs", "fails")) for text in found.values()), found
    if transformers.__version__ == FOUND["transformers"]:
        assert found == kept, "python tests/support/tiny_architectures.py --write"
    elif kept is not None:  # of another version, what went must go on
        assert {way for way, text in kept.items() if text.startswith("same")} <= {
            way for way, text in found.items() if text.startswith("same")
        }


def test_all_are_kept():
    if transformers.__version__ == FOUND["transformers"]:
        assert list(FOUND["architectures"]) == sorted(NAMES)


# --- plan ---

NO_CACHE = ("openai-gpt", "xlnet")
# With layers of summaries, which kvfast refuses to plan.
REFUSED = ("deepseek_v4", "unlimited_ocr")
# transformers makes more layers for them than their models fill: those of an encoder or of images, and of states.
FEWER = ("bart", "mllama", "pp_formulanet", "rwkv", "xlstm")


def planned(config):
    """What `plan` says that each layer keeps, as `kept_layers`. transformers keeps the rotary part of latents as the values."""
    layers = read_shape(config).layers
    return [
        (one.num_kv_heads, one.head_dim, one.v_head_dim or one.head_dim if one.rope_dim is None else one.rope_dim, one.sliding_window)
        for one in layers
    ]


def test_plan_counts_what_the_cache_keeps(name):
    try:
        model = small_model(name)
        kept = kept_layers(model)
    except Exception as error:  # noqa: BLE001  (of transformers alone)
        pytest.skip(f"{type(error).__name__} of transformers")
    if name in NO_CACHE:
        assert not kept
    elif name in REFUSED or not kept:
        with pytest.raises(ValueError, match="does not know" if kept else "no layer of this"):
            read_shape(model.config)
    else:
        assert planned(model.config) == kept


def windows_of(config):
    """The window of each layer with keys and values, as transformers makes the layers of its caches by the configuration."""
    kinds = zip(*get_layer_types_and_kwargs(config.get_text_config(decoder=True)))
    return [options.get("sliding_window") for kind, options in kinds if kind not in ("linear_attention", "conv", "dummy")]


@pytest.mark.parametrize("family", FAMILIES)
def test_plan_reads_every_configuration(family):
    """With the sizes that transformers has for a family, its fields of today, and without those that older files lack."""
    of_family = AUTO.configuration_auto.CONFIG_MAPPING[family]
    try:
        config = of_family()
        windows_of(config)
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"transformers makes no cache by it: {error}")
    fields = config.to_dict()
    if family in REFUSED:
        with pytest.raises(ValueError, match="does not know"):
            read_shape(fields)
        return
    check_windows(family, fields)
    for part in (fields, *(fields.get(name) for name in config.sub_configs)):
        if isinstance(part, dict):
            part.pop("layer_types", None)
    if family != "dory":  # which doubles its layers when it is read
        check_windows(family, fields)


def check_windows(family, fields):
    """`plan` reads of a file what transformers reads of it."""
    expected = windows_of(AUTO.configuration_auto.CONFIG_MAPPING[family].from_dict(copy.deepcopy(fields)))
    if not expected or family in ("rwkv", "xlstm"):
        with pytest.raises(ValueError, match="no layer of this"):
            read_shape(fields)
    elif family in FEWER:
        assert len(read_shape(fields).layers) <= len(expected)
    else:
        assert [one.sliding_window for one in read_shape(fields).layers] == expected


@pytest.mark.parametrize("model", HYBRIDS)
def test_plan_reads_published_configurations(model):
    check_windows(HYBRIDS[model][1]["model_type"], HYBRIDS[model][1])
