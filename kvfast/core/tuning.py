"""How attention asks for memory on this processor: from a table by vendor, family and model, from the file that ``python -m
kvfast tune`` keeps, or from ``KVFAST_TUNING``. No bit of a result depends on it.

The sizes of tiles are not among the choices: softmax corrects its sums once a tile, so another size rounds differently.
"""

from __future__ import annotations

import json
import os
import platform
import warnings
from dataclasses import asdict, dataclass, fields, replace

from kvfast.core.kernels import available_isas, cpu_identity, get_prefetch_level, set_prefetching
from kvfast.core.text import shown

VARIABLE = "KVFAST_TUNING"
ORDERS = ("memory", "side")
LEVELS = (1, 2)
VERSION = 1
KERNELS_LEVEL = get_prefetch_level()  # that the kernels are compiled with


def _check(name, value, good, expected):
    if not good:
        raise ValueError(f"{name} must be {expected}, got {shown(value)}")


@dataclass(frozen=True)
class Prefetching:
    """How attention asks for memory.

    Attributes
    ----------
    prefetch_level : int
        The level of the processor's caches that prefetches fill, 1 or 2. The matrix unit's kernels fill level 2 whatever this is.
    int8_order : str
        Of formats whose keys and values are INT8. ``"memory"``: the pass over keys fetches the values of its tile, and the pass over
        values the next keys, as they lie in memory. ``"side"``: each fetches its own side of the next tile.
    """

    prefetch_level: int = KERNELS_LEVEL
    int8_order: str = "memory"

    def __post_init__(self):
        level = self.prefetch_level
        _check("prefetch_level", level, type(level) is int and level in LEVELS, "1 or 2")
        _check("int8_order", self.int8_order, self.int8_order in ORDERS, " or ".join(ORDERS))

    def __str__(self):
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())


NAMES = tuple(field.name for field in fields(Prefetching))

# For processors that are not in the table. On x86 prefetches fill level 2; `python -m kvfast tune` tells whether level 1 is better.
DEFAULT = Prefetching()


@dataclass(frozen=True)
class Row:
    """Processors of one design.

    Attributes
    ----------
    name, vendor : str
    family : int
    models : frozenset of int
    tier : str
        The best of the machine, as a hypervisor may hide some; empty for any.
    prefetching : Prefetching
        By ``python -m kvfast tune`` on such a processor.
    """

    name: str
    vendor: str
    family: int
    models: frozenset[int]
    tier: str
    prefetching: Prefetching


# Processors that read faster with other settings than the default, by `python -m kvfast tune`.
TABLE = (
    Row(
        "Xeon Sapphire Rapids and Emerald Rapids, AMX hidden",
        "GenuineIntel",
        6,
        frozenset([0x8F, 0xCF]),
        "avx512_vbmi",
        Prefetching(2, int8_order="side"),
    ),
    Row("EPYC Zen 5", "AuthenticAMD", 26, frozenset(range(0x20)), "", Prefetching(1)),
)


def processor():
    """The name of this kind of processor in files of `keep`, with its best tier."""
    vendor, family, model = cpu_identity()
    return f"{vendor}-{family}-{model}-{available_isas()[0]}" if vendor else f"{platform.machine()}-{available_isas()[0]}"


def from_table(identity=None, tier=None):
    """The prefetching of a processor, and the name of its row.

    Parameters
    ----------
    identity : tuple, optional
        Vendor, family and model; those of this processor when omitted.
    tier : str, optional
        The best that it can run; that of this processor when omitted.

    Returns
    -------
    tuple of Prefetching and str
    """
    vendor, family, model = cpu_identity() if identity is None else identity
    tier = tier or available_isas()[0]
    for row in TABLE:
        if (row.vendor, row.family) == (vendor, family) and model in row.models and row.tier in ("", tier):
            return row.prefetching, f"the table, {row.name}"
    return DEFAULT, "the default for processors that are not in the table"


def file():
    """The path of the file that ``python -m kvfast tune`` keeps, whether it is there or not.

    Returns
    -------
    str
    """
    if os.name == "nt":
        folder = os.environ.get("LOCALAPPDATA") or os.path.join(_home(), "AppData", "Local")
    else:
        folder = os.environ.get("XDG_CONFIG_HOME") or os.path.join(_home(), ".config")
    return os.path.join(folder, "kvfast", "tuning.json")


def _home():
    home = os.path.expanduser("~")  # `import kvfast` does not load pathlib
    if home == "~":
        raise RuntimeError("the home directory is not known")
    return home


def keep(prefetching):
    """Write a prefetching for this kind of processor to `file`, next to those of other kinds.

    Returns
    -------
    str
        The path.
    """
    path = file()
    try:
        processors = _read(path)
    except (OSError, ValueError):  # there is none yet, or none that is any good
        processors = {}
    os.makedirs(os.path.dirname(path), exist_ok=True)
    _write(path, {**processors, processor(): asdict(prefetching)})
    return path


def forget():
    """Remove what `keep` wrote for this kind of processor.

    Returns
    -------
    bool
        Whether there was anything.
    """
    path = file()
    try:
        processors = _read(path)
    except FileNotFoundError:
        return False
    if processors.pop(processor(), None) is None:
        return False
    if processors:
        _write(path, processors)
    else:
        os.remove(path)
    return True


def _write(path, processors):
    whole = f"{path}.{os.getpid()}"  # a process that starts meanwhile reads the old file or the new one
    with open(whole, "w", encoding="utf-8") as written:
        written.write(json.dumps({"version": VERSION, "processors": processors}, indent=2) + "\n")
    os.replace(whole, path)


def _read(path):
    """The processors of a file, unchecked."""
    try:
        with open(path, encoding="utf-8") as kept:
            content = json.load(kept)
    except ValueError as error:
        raise ValueError(f"{path} is not a file of python -m kvfast tune: {error}") from None
    if not (isinstance(content, dict) and content.get("version") == VERSION and isinstance(content.get("processors"), dict)):
        raise ValueError(f'{path} is not a file of python -m kvfast tune: it must have "version": {VERSION} and "processors"')
    return content["processors"]


def _merged(base, settings, where):
    """`base` with other settings, checked."""
    if type(settings) is not dict:
        raise ValueError(f"{where} must have the names {', '.join(NAMES)}, got {shown(settings)}")
    unknown = [name for name in settings if name not in NAMES]
    if unknown:
        raise ValueError(f"{where} has the unknown name {shown(unknown[0])}; the names are {', '.join(NAMES)}")
    try:
        return replace(base, **settings)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


def _parsed(text):
    """Settings of a list of ``name=value``."""
    settings = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise ValueError(f"{VARIABLE} must be a file or a list of name=value, got {shown(part.strip())} in {shown(text)}")
        settings[name] = int(value) if value.isascii() and value.isdecimal() else value
    return settings


def choose():
    """The prefetching for this processor, and where it is from: `VARIABLE`, else the kept file, else the table.

    Returns
    -------
    tuple of Prefetching and str

    Raises
    ------
    ValueError
        If the variable is not good.

    Warns
    -----
    RuntimeWarning
        If the kept file is not good; the table is taken instead.
    """
    base, where = from_table()
    text = os.environ.get(VARIABLE, "").strip()
    if "=" in text and not os.path.exists(text):
        return _merged(base, _parsed(text), VARIABLE), VARIABLE
    if text:
        try:
            processors = _read(text)
        except OSError as error:
            raise ValueError(f"{VARIABLE} must be a file or a list of name=value, got {shown(text)}: {error.strerror}") from None
        if processor() not in processors:
            raise ValueError(f"{VARIABLE}: {text} has nothing for {processor()}; it has {', '.join(processors) or 'nothing at all'}")
        return _merged(base, processors[processor()], f"{VARIABLE}: {text}"), f"{VARIABLE}, {text}"
    try:
        path = file()
        processors = _read(path)
        if processor() in processors:
            return _merged(base, processors[processor()], path), path
    except (OSError, RuntimeError):  # there is no file, or no home
        pass
    except ValueError as error:
        warnings.warn(f"{error}; kvfast goes by {where}", RuntimeWarning, stacklevel=2)
    return base, where


_in_use = DEFAULT, ""


def use(prefetching, source):
    """Set how attention asks for memory from now on, in this process."""
    global _in_use
    set_prefetching(prefetching.prefetch_level, prefetching.int8_order == "side")
    _in_use = prefetching, source


def in_use():
    """The prefetching in force, and where it is from.

    Returns
    -------
    tuple of Prefetching and str
    """
    return _in_use


use(*choose())
