"""The level of the processor's caches that attention's prefetches fill, 1 or 2: by ``KVFAST_PREFETCH_LEVEL``, else by a table of
processors. No bit of a result depends on it. The matrix unit's kernels fill level 2 whatever this is.

The sizes of tiles are not a choice: softmax corrects its sums once a tile, so another size rounds differently.
"""

from __future__ import annotations

import os

from kvfast.core.kernels import cpu_identity, get_prefetch_level, set_prefetch_level
from kvfast.core.text import shown

VARIABLE = "KVFAST_PREFETCH_LEVEL"
LEVELS = (1, 2)

# Vendor, family, models and level of processors that read at least a tenth faster with another level than the kernels' own (`python -m
# kvfast bench` with each).
TABLE = {"EPYC Zen 5": ("AuthenticAMD", 26, range(0x20), 1)}

_OWN = get_prefetch_level()


def choose(identity: tuple[str, int, int] | None = None) -> tuple[int, str]:
    """The level for a processor, and where it is from; ValueError if the variable is neither 1 nor 2.

    `identity`: vendor, family and model; those of this processor when omitted.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if text and text not in map(str, LEVELS):
        raise ValueError(f"{VARIABLE} must be 1 or 2, got {shown(text)}")
    if text:
        return int(text), VARIABLE
    vendor, family, model = cpu_identity() if identity is None else identity
    for name, (its_vendor, its_family, models, level) in TABLE.items():
        if (vendor, family) == (its_vendor, its_family) and model in models:
            return level, f"the table, {name}"
    return _OWN, "the default for processors that are not in the table"


_in_use = _OWN, ""


def use(level: int, source: str) -> None:
    """Set the level from now on, in this process."""
    global _in_use
    set_prefetch_level(level)
    _in_use = level, source


def in_use() -> tuple[int, str]:
    """The level in force, and where it is from."""
    return _in_use


use(*choose())
