"""Storage formats of a cache, and their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from kvfast.codec.calibration import Calibration, LayerCalibration
from kvfast.codec.dtypes import CODEBOOKS, FLOATS, canonical_dtype, dtype_row, names_with
from kvfast.core.checks import check_choice, check_flag, check_size, per_layer
from kvfast.core.limits import BLOCK_SIZES, MAX_FLOAT_TOKENS, MAX_RECENT_TOKENS, OPEN_TOKENS, PIECE
from kvfast.core.text import one_of, shown
from kvfast.errors import DimensionMismatchError

_SEALED_SIZES = BLOCK_SIZES[1:]  # fewer tokens do not share statistics


@dataclass(frozen=True)
class KVFormat:
    """How keys and values are stored.

    Parameters
    ----------
    dtype : str
        ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"int8"`` or ``"int4"``, or two of them for keys and values,
        ``"int8/int4"``. Integers have one scale per token per KV head, unless `per_channel`. ``"int2"``, ``"int3"``,
        ``"int5"``, ``"int6"`` and ``"int7"`` are packed without unused bits. INT2 and INT3 are unpacked in registers as they
        are multiplied (with AVX2 and above); the others become INT8 when they are read. All save memory, and save time only
        where memory bandwidth is the limit.
    rotation : {"", "k", "v", "kv"}
        The sides (keys, values) that are rotated by a Hadamard transform with fixed signs before encoding, so
        that there are no outliers (QuaRot, arXiv 2404.00456). Queries are rotated like keys, and outputs are rotated
        back, so the result of attention stays the same.
    codebook : {"uniform", "gaussian"}
        Levels of INT4, INT2, INT3 and INT5: evenly spaced, or those with the least squared error for a Gaussian
        (Lloyd-Max). Rotated rows are close to Gaussian. Keys with `per_channel` always have evenly spaced levels, and so
        have INT6 and above, where a row's own range is as good.
    centring : bool
        Subtract the mean of every channel from the keys of each full block before encoding.
    per_channel : bool
        INT4 or INT3 keys have a scale and an offset per channel and full block, and none per token (KIVI, arXiv 2402.02750).
        Channels are ordered by their variation in the block, times the size of keys in both channels of a rotary pair. The first
        quarter has one bit more, and the last quarter one bit less (INT4: two more and two less if their variations differ a
        lot). Four adjacent channels have the same number of bits.
    block_size : int or None
        Tokens that are encoded together: 32, 64, 128 or 256, the `block_size` of the cache. Only with `centring` or `per_channel`,
        where the tokens of a block stay float16 until it is full.
    num_first_float_tokens : int
        Number of first tokens of a sequence, up to 16, whose integer sides always stay float16. These tokens receive much
        attention, whatever their content (StreamingLLM, arXiv 2309.17453).
    num_recent_float_tokens : int
        Number of newest tokens, a multiple of 16 up to 1024, whose integer sides are read as float16, next to their codes: a query
        reads 16 tokens as codes once this number of tokens follow them. With `centring` or `per_channel` the number is at least 16,
        and a block is read as codes once it is full and this number of tokens follow it. So at most 15, or `block_size` - 1, further
        tokens are float16. After a rollback of at most this many counted tokens, later blocks get the same codes. Sink tokens are
        read as codes once blocks between them and the window are gone.
    recent_by_query : bool
        Each query counts the newest tokens back from its own position, so that no bit depends on where a prompt is cut into steps.
        Without it, queries also read all tokens of their own step as float16: prompts in long steps lose less.
    clip_search : bool
        Choose each token's INT4 scale for the least squared error, even if that clips the largest elements. Writing takes
        longer; reading does not.
    calibration : Calibration, one of its layers, or None
        The bases in which keys are stored, from `calibrate` for the model. They replace the `rotation` of keys. Keys must be
        rotated, or `per_channel`. A `Calibration` is for a cache with the same number of layers; ``calibration[3]`` is for a
        single layer.

    Raises
    ------
    ValueError
        For an unknown name, or for options that exclude each other.

    Notes
    -----
    ``str(format)`` is the name of the preset, if the format is one. Every ``dtype=`` argument of kvfast takes a format,
    the name of a preset, one or two names of storage dtypes, or a list with one of these per layer.

    Examples
    --------
    >>> import kvfast
    >>> kvfast.KVFormat("int8/int4", rotation="kv", codebook="gaussian")
    KVFormat(dtype='int8/int4', rotation='kv', codebook='gaussian', centring=False, per_channel=False, block_size=None, num_first_float_tokens=0, num_recent_float_tokens=0, recent_by_query=False, clip_search=False, calibration=None)
    >>> str(kvfast.KVFormat("int8/int4"))
    'int8/int4'
    """

    dtype: str = "int4"
    rotation: str = ""
    codebook: str = "uniform"
    centring: bool = False
    per_channel: bool = False
    block_size: int | None = None
    num_first_float_tokens: int = 0
    num_recent_float_tokens: int = 0
    recent_by_query: bool = False
    clip_search: bool = False
    calibration: Calibration | LayerCalibration | None = None

    def __post_init__(self) -> None:
        names = self.dtype.split("/") if isinstance(self.dtype, str) else [self.dtype]
        if len(names) > 2:
            raise ValueError(f"dtype must be one storage dtype, or two for keys and values, got {shown(self.dtype)}")
        k, v = canonical_dtype(names[0]), canonical_dtype(names[-1])
        object.__setattr__(self, "dtype", k if k == v else f"{k}/{v}")
        check_choice(self.rotation, "rotation", ("", "k", "v", "kv"), '"", "k", "v" or "kv"')
        check_choice(self.codebook, "codebook", CODEBOOKS, '"uniform" or "gaussian"')
        for name in ("centring", "per_channel", "recent_by_query", "clip_search"):
            object.__setattr__(self, name, check_flag(getattr(self, name), name))
        check_size(self.num_first_float_tokens, "num_first_float_tokens", 0, MAX_FLOAT_TOKENS)
        if check_size(self.num_recent_float_tokens, "num_recent_float_tokens", 0, MAX_RECENT_TOKENS) % PIECE:
            raise ValueError(f"num_recent_float_tokens must be a multiple of {PIECE}, got {self.num_recent_float_tokens}")
        self._check_rotation()
        self._check_blocks()
        self._check_calibration()
        by_token = [dtype_row(name, self.codebook) for name in [k] * (not self.per_channel) + [v]]
        if self.codebook != "uniform" and not any(self.codebook in row.codebooks for row in by_token):
            raise ValueError(
                "a Gaussian codebook is for int4 with a scale per token and for packed integers, which neither side of this format has"
            )
        if self.clip_search and not any("clip_search" in row.options for row in by_token):
            raise ValueError(
                f"clip_search is for {names_with('clip_search')} with a scale per token, which neither side of this format has"
            )
        for name in ("num_first_float_tokens", "num_recent_float_tokens"):
            if getattr(self, name) and k in FLOATS and v in FLOATS:
                raise ValueError(f"{name} is for integer formats; all tokens of {self.dtype} are floats")

    def _check_rotation(self):
        for side, dtype in zip("kv", (self.k_dtype, self.v_dtype)):
            if side in self.rotation and dtype in FLOATS:
                raise ValueError(f'rotation="{self.rotation}" needs integer storage; it does not help {dtype}')
        if self.per_channel and "k" in self.rotation:
            raise ValueError("per_channel keys cannot be rotated: channel scales need channels that differ, and a rotation mixes them")

    def _check_calibration(self):
        if self.calibration is None:
            return
        if not isinstance(self.calibration, (Calibration, LayerCalibration)):
            raise TypeError(f"calibration must be a Calibration or one of its layers, got {shown(self.calibration)}")
        if "k" not in self.rotation and not self.per_channel:
            raise ValueError(
                f'calibration is for keys that are rotated or per_channel, got rotation="{self.rotation}" and no per_channel'
            )

    def _check_blocks(self):
        k = dtype_row(self.k_dtype)
        if self.per_channel and "per_channel" not in k.options:
            raise ValueError(f"per_channel is for {names_with('per_channel')} keys, got {self.k_dtype}")
        if self.per_channel and self.centring:
            raise ValueError("per_channel keys have an offset per channel already; leave out centring")
        if self.centring and "centring" not in k.options:
            raise ValueError(f"centring is for {names_with('centring')} keys, got {self.k_dtype}")
        if self.seals:
            if self.block_size is None:
                object.__setattr__(self, "block_size", 64)
            if self.block_size not in _SEALED_SIZES:
                raise ValueError(f"block_size must be {one_of(_SEALED_SIZES)} tokens, got {shown(self.block_size)}")
        elif self.recent_by_query and not self.num_recent_float_tokens:
            raise ValueError("recent_by_query is for formats with num_recent_float_tokens, centring or per_channel")
        elif self.block_size is not None:
            raise ValueError(
                "block_size is for centring and per_channel, which this format does not have; every cache takes one of its own"
            )

    @property
    def k_dtype(self) -> str:
        """Storage dtype of the keys."""
        return self.dtype.partition("/")[0]

    @property
    def v_dtype(self) -> str:
        """Storage dtype of the values."""
        return self.dtype.rpartition("/")[2]

    @property
    def seals(self) -> bool:
        """Whether blocks are sealed, that is, encoded when they are full."""
        return self.centring or self.per_channel

    @property
    def open_tokens(self) -> int:
        """Tokens that follow others before these are read as codes; 0 if no newest tokens are floats."""
        return max(self.num_recent_float_tokens, OPEN_TOKENS) if self.seals else self.num_recent_float_tokens

    @property
    def kept_tokens(self) -> int:
        """Tokens that follow others before their float rows are released. Where each query reads its own newest tokens, a rollback of
        16 counted tokens changes no bit."""
        return self.open_tokens + (PIECE if self.open_tokens and self.recent_by_query else 0)

    @property
    def floats_of_steps(self) -> bool:
        """Whether queries read all tokens of their step as floats."""
        return self.open_tokens > 0 and not self.recent_by_query

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from ``KVFormat()``, and `dtype`, for JSON; of a calibration its digest."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        changed = {name: value for name, (value, default) in values.items() if value != default or name == "dtype"}
        return changed | ({"calibration": self.calibration.digest} if self.calibration is not None else {})

    @classmethod
    def of(cls, value: Any) -> KVFormat:
        """The format for a name, a dict of its fields, a NumPy dtype, or a format.

        Raises
        ------
        ValueError
        TypeError
            For the result of `to_dict` of a format with a calibration, which has only the digest of the calibration.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            unknown = [name for name in value if name not in cls.__dataclass_fields__]
            if unknown:
                raise TypeError(f"a format has the fields {', '.join(cls.__dataclass_fields__)}, got {shown(unknown[0])}")
            return cls(**value)
        if isinstance(value, str):
            name = value.strip().lower()
            if name in PRESETS:
                return PRESETS[name]
            if name in _FORMER_NAMES:
                raise ValueError(f"{name} is now {_FORMER_NAMES[name]}")
            if "/" in name:
                return cls(name)
        try:
            name = canonical_dtype(value)
        except ValueError:
            raise ValueError(
                f"unknown storage dtype {shown(value)}; choose one of {', '.join([*PRESETS, *FLOATS])}, two dtypes for keys "
                f'and values, as "int8/int4", or a KVFormat'
            ) from None
        return PRESETS.get(name) or cls(name)

    def __str__(self) -> str:
        if self.calibration is not None:
            return f"{replace(self, calibration=None)} calibrated"
        for name, preset in PRESETS.items():
            if self == preset:
                return name
        options = [f"{name}={value}" for name, value in self.to_dict().items() if name != "dtype"]
        return self.dtype + (f"({', '.join(options)})" if options else "")


# A piece of float rows has 16 tokens, so fewer first tokens would take as many bytes.
_BY_TOKEN = {"rotation": "kv", "num_first_float_tokens": 16}
_BY_CHANNEL = {"rotation": "v", "codebook": "gaussian", "per_channel": True, "num_first_float_tokens": 16}
_RECENT_8 = {"num_recent_float_tokens": 16, "recent_by_query": True}

PRESETS = {
    "int8": KVFormat("int8", **_BY_TOKEN, **_RECENT_8),
    "k8v4": KVFormat("int8/int4", **_BY_TOKEN, codebook="gaussian", clip_search=True, num_recent_float_tokens=48, recent_by_query=True),
    "int4": KVFormat("int4", **_BY_CHANNEL, num_recent_float_tokens=48),
    "k4v3": KVFormat("int4/int3", **_BY_CHANNEL, num_recent_float_tokens=48),
    "int8-centred": KVFormat("int8", **_BY_TOKEN, **_RECENT_8, centring=True),
    "int4-recent": KVFormat("int4", **_BY_CHANNEL, num_recent_float_tokens=96, recent_by_query=True),
    "int3": KVFormat("int3", **_BY_CHANNEL, num_recent_float_tokens=96),
    "int2": KVFormat("int2", **_BY_TOKEN, codebook="gaussian", num_recent_float_tokens=96),
    "int8-rotated": KVFormat("int8", rotation="kv"),
    "k8v4-rotated": KVFormat("int8/int4", rotation="kv", codebook="gaussian", clip_search=True),
    "int8-plain": KVFormat("int8"),
    "int4-plain": KVFormat("int4"),
    "int3-plain": KVFormat("int3"),
    "int2-plain": KVFormat("int2"),
}


def formats_of(dtype, k_dtype, v_dtype, num_layers):
    """A KVFormat for each layer, from the arguments of a cache."""
    formats = [_of_layer(KVFormat.of(one), i, num_layers) for i, one in enumerate(per_layer(dtype, "dtype", num_layers, "one"))]
    if k_dtype is None and v_dtype is None:
        return formats
    if any(one.calibration is not None for one in formats):
        raise ValueError("k_dtype and v_dtype name plain dtypes, which have no calibration; leave them out")
    keys = [f.k_dtype for f in formats] if k_dtype is None else per_layer(k_dtype, "k_dtype", num_layers, "one")
    values = [f.v_dtype for f in formats] if v_dtype is None else per_layer(v_dtype, "v_dtype", num_layers, "one")
    return [KVFormat(f"{canonical_dtype(k)}/{canonical_dtype(v)}") for k, v in zip(keys, values)]


_FORMER_NAMES = {"int8-recent": "int8-centred, and int8 keeps newest tokens as floats, too", "k8v4-recent": "k8v4"}
_CODES_ALONE = {PRESETS[name]: PRESETS[f"{name}-rotated"] for name in ("int8", "k8v4")}

# A row that is also read as values can have neither channel scales nor float rows next to its codes.
_LATENT_PRESETS = _CODES_ALONE | {PRESETS["int4"]: KVFormat("int4", rotation="kv", codebook="gaussian", clip_search=True)}


def codes_alone(fmt):
    """The format of a place that has no room for float rows: int8 and k8v4 without them, others as they are."""
    return _CODES_ALONE.get(fmt, fmt)


def latent_format(fmt):
    """The format of latent rows for a format of keys and values; ValueError if there is none."""
    fmt = _LATENT_PRESETS.get(fmt, fmt)
    if fmt.calibration is not None:
        raise ValueError("a calibration is for keys, and latent rows are keys and values at once")
    if fmt.open_tokens or fmt.num_first_float_tokens:
        raise ValueError(
            f"latent rows are keys and values at once and need a format with a scale per token and without tokens "
            f"that stay floats, got {fmt}"
        )
    return fmt


def _of_layer(fmt, layer, num_layers):
    """The format of a layer, with the layer's part of a calibration."""
    if not isinstance(fmt.calibration, Calibration):
        return fmt
    if len(fmt.calibration) != num_layers:
        raise DimensionMismatchError(f"the calibration is for {len(fmt.calibration)} layers, and the cache has {num_layers}")
    return replace(fmt, calibration=fmt.calibration[layer])


def floats_of(fmt):
    """The format of the float rows of a layer; None if no token has one. A side that is stored as floats keeps its dtype."""
    if not fmt.open_tokens and not fmt.num_first_float_tokens:
        return None
    return KVFormat("/".join(one if one in FLOATS else "float16" for one in (fmt.k_dtype, fmt.v_dtype)))


def block_size_of(formats, block_size, default):
    """Tokens of a block: what the formats require, otherwise `block_size` or the default. A given `block_size` must agree."""
    blocks = {one.block_size for one in formats if one.block_size is not None}
    if len(blocks) > 1:
        raise ValueError(f"the formats of the layers must have the same block_size, got {', '.join(map(str, sorted(blocks)))} tokens")
    if not blocks:
        return default if block_size is None else block_size
    (block,) = blocks
    if block_size is not None and check_size(block_size, "block_size", 1) != block:
        raise ValueError(
            f"block_size must be {block}, the tokens that share the statistics of their keys in this format, got {block_size}"
        )
    return block
