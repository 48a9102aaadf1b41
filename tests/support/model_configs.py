"""The parts of the config.json of some models that tell of their caches; tests/data/model_configs.json has them."""

import json
from pathlib import Path

_DATA = json.loads((Path(__file__).parents[1] / "data" / "model_configs.json").read_text("utf-8"))
CONFIGS = _DATA["models"]
# Models of which some layers keep no keys and values of their own: how many do, and the fields that say so.
HYBRIDS = _DATA["hybrids"]
# The configuration of a model, and the numbers that llama.cpp writes for it.
GGUF_HYBRIDS = _DATA["gguf_hybrids"]
