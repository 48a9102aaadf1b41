"""Headers from outside the process: every field is of its exact type and in its range, or the file is refused.

A reader has one table of its fields. Classes then check what several fields say together.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from kvfast.codec.dtypes import CODEBOOKS
from kvfast.core.limits import (
    BLOCK_SIZES,
    MAX_FLOAT_TOKENS,
    MAX_HEAD_DIM,
    MAX_KV_HEADS,
    MAX_LAYERS,
    MAX_Q_HEADS,
    MAX_RECENT_TOKENS,
    MAX_TOKENS,
    UNLIMITED,
)
from kvfast.errors import CorruptFileError
from kvfast.storage.sequences.checkpoints import DTYPES, MAX_STATE_BYTES, MAX_STATES, MOST_DIMS, MOST_NAME

MOST_TEXT = 1 << 16  # characters of a name


class Kind:
    """A type and a range of values of JSON: in `words` for messages, and a function `fits`, apart from its parts.

    `parts` yields (name, value, kind) of the parts of a value that fits.
    """

    def __init__(self, words: str, fits: Callable[[Any], bool], parts: Callable[[Any], Any] | None = None) -> None:
        self.words, self.fits, self.parts = words, fits, parts

    def __or__(self, other: Kind) -> Kind:
        def parts(value: Any) -> Any:
            kind = self if self.fits(value) else other
            return kind.parts(value) if kind.parts else ()

        return Kind(f"{self.words} or {other.words}", lambda value: self.fits(value) or other.fits(value), parts)


def parsed(header: str | bytes) -> Any:
    """The JSON of a header; ValueError if it is not JSON, or names a field twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a field is there twice")
        return found

    return json.loads(header, object_pairs_hook=unique)


def check_fields(value: Any, kind: Kind, name: str) -> None:
    """Raise CorruptFileError for the first field that is not of its kind. The message shows no text of the file."""
    waiting = [(name, value, kind)]
    while waiting:
        name, value, kind = waiting.pop()
        if not kind.fits(value):
            raise CorruptFileError(f"{name} must be {kind.words}, got {_shown(value)}")
        if kind.parts:
            waiting += [(f"{name}.{part}", *rest) for part, *rest in kind.parts(value)]


def _shown(value):
    if type(value) in (int, float, bool) and abs(value) < 1 << 64:
        return f"{type(value).__name__} {value}"
    if type(value) is dict:
        return f"an object with {len(value)} fields"
    return type(value).__name__ + (f" of {len(value)}" if type(value) in (str, list) else "")


def integer(least: int, most: int) -> Kind:
    """A number without a point; not true or false."""
    return Kind(f"an integer from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def exactly(one: Any, words: str = "") -> Kind:
    return Kind(words or repr(one), lambda value: type(value) is type(one) and value == one)


def text(pattern: str, words: str) -> Kind:
    return Kind(words, lambda value: type(value) is str and len(value) <= MOST_TEXT and re.fullmatch(pattern, value) is not None)


def list_of(kind: Kind, least: int = 0, most: int = MAX_LAYERS) -> Kind:
    return Kind(
        f"a list of {least} to {most}, each {kind.words}",
        lambda value: type(value) is list and least <= len(value) <= most,
        lambda value: ((i, one, kind) for i, one in enumerate(value)),
    )


def fields(**kinds: Kind) -> Kind:
    """An object with these fields and no others; one whose name ends with an underscore may be absent."""
    table = {name.rstrip("_"): kind for name, kind in kinds.items()}
    needed = {name for name in kinds if not name.endswith("_")}
    return Kind(
        f"an object with {', '.join(table)}",
        lambda value: type(value) is dict and needed <= value.keys() <= table.keys(),
        lambda value: ((name, one, table[name]) for name, one in value.items()),
    )


def either(field: str, tables: dict[str, Kind]) -> Kind:
    """An object whose `field` says which table it follows."""
    return Kind(
        f"an object whose {field} is one of {', '.join(tables)}",
        lambda value: type(value) is dict and type(value.get(field)) is str and value[field] in tables,
        lambda value: ((value[field], value, tables[value[field]]),),
    )


NULL, TRUE, FLAG = exactly(None, "null"), exactly(True, "true"), Kind("true or false", lambda value: type(value) is bool)
NUMBER = Kind("a finite number with a point", lambda value: type(value) is float and math.isfinite(value))
STRING = Kind("a string", lambda value: type(value) is str)
TOKENS, HEADS, HEAD_DIM, LAYERS = integer(0, MAX_TOKENS), integer(1, MAX_KV_HEADS), integer(1, MAX_HEAD_DIM), integer(1, MAX_LAYERS)
_STRINGS = Kind(
    "an object of strings",
    lambda value: type(value) is dict,
    lambda value: ((f"[{i}]", one, STRING) for i, one in enumerate(value.values())),
)
_PER_LAYER = {
    name: kind | list_of(kind, 1) for name, kind in (("num_kv_heads", HEADS), ("head_dim", HEAD_DIM), ("v_head_dim_", HEAD_DIM))
}

FORMAT = fields(
    dtype=text(r"[a-z0-9]+(/[a-z0-9]+)?", "one dtype, or two with a slash"),
    rotation_=text("k|v|kv", "k, v or kv"),
    codebook_=text("|".join(CODEBOOKS), " or ".join(CODEBOOKS)),
    centring_=TRUE,
    per_channel_=TRUE,
    clip_search_=TRUE,
    block_size_=Kind("a block size", lambda value: type(value) is int and value in BLOCK_SIZES),
    num_first_float_tokens_=integer(0, MAX_FLOAT_TOKENS),
    num_recent_float_tokens_=integer(0, MAX_RECENT_TOKENS),
    recent_by_query_=TRUE,
    calibration_=text("[0-9a-f]{32}", "32 hexadecimal digits"),
)
_DTYPE = {"num_layers": LAYERS, "dtype": list_of(FORMAT, 1), "has_states_": TRUE}
_BITS = integer(2, 8)
SETTINGS = either(
    "kind",
    {
        "full": fields(kind=exactly("full"), **_DTYPE, **_PER_LAYER),
        "ring": fields(
            kind=exactly("ring"),
            **_DTYPE,
            **_PER_LAYER,
            windows=list_of(integer(1, MAX_TOKENS) | NULL, 1),
            num_sink_tokens=TOKENS,
            rollback=TOKENS,
            rope=NULL | fields(frequencies=list_of(NUMBER, 1, MAX_HEAD_DIM), interleaved=FLAG),
        ),
        "latent": fields(kind=exactly("latent"), **_DTYPE, latent_dim=HEAD_DIM, rope_dim=integer(0, MAX_HEAD_DIM)),
        "heads": fields(
            kind=exactly("heads"),
            num_layers=exactly(1),
            num_heads=HEADS,
            config=fields(
                head_dim=HEAD_DIM,
                bits=_BITS | list_of(_BITS, 2, 2),
                rotation=FLAG,
                codebook=text("|".join(CODEBOOKS), " or ".join(CODEBOOKS)),
                num_q_heads=integer(1, MAX_Q_HEADS) | NULL,
                seed=integer(0, (1 << 64) - 1),
            ),
        ),
    },
)

# What is left of the tokens of a block table; see `BlockTable.resume_state` and `TokenLife.saved`.
_LAYER = {"floats_begin": TOKENS, "kept_codes": TOKENS, "patches_": list_of(list_of(TOKENS, 2, 2), 0, MAX_TOKENS)}
TABLES = list_of(
    fields(
        skipped_blocks=TOKENS,
        evicted_tokens_=TOKENS,
        floats_begin_=TOKENS,
        kept_codes_=TOKENS,
        patches_=_LAYER["patches_"],
        layers_=list_of(fields(**_LAYER), 2),
    ),
    1,
)

STATES = Kind(
    f"an object of 1 to {MAX_STATES} states",
    lambda value: type(value) is dict and 0 < len(value) <= MAX_STATES and max(map(len, value)) <= MOST_NAME,
    lambda value: ((f"[{i}]", one, STATE) for i, one in enumerate(value.values())),
)
STATE = fields(shape=list_of(integer(0, MAX_STATE_BYTES), 0, MOST_DIMS), dtype=text("|".join(DTYPES), "the name of a dtype"))

HEADER = fields(
    version=TOKENS,
    settings=SETTINGS,
    block_size=Kind("a block size", lambda value: type(value) is int and value in BLOCK_SIZES),
    max_seq_len=integer(1, MAX_TOKENS) | NULL,
    seq_len=TOKENS,
    tables=TABLES,
    metadata=_STRINGS,
    salted_=TRUE,
    max_state_bytes_=integer(1, UNLIMITED),
    states_=STATES,
    checkpoints_=list_of(integer(1, MAX_TOKENS), 1, MAX_TOKENS),
)
