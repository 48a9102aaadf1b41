"""Values for reading."""

from typing import Any


def size_text(nbytes: float) -> str:
    """Bytes with a unit, for reading."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024


def same_or_tuple(values: list[Any]) -> Any:
    """The value that all are, or a tuple of them."""
    return values[0] if len(set(values)) == 1 else tuple(values)


def each(values: Any) -> str:
    """The values of `same_or_tuple` for reading, each once."""
    return "/".join(map(str, dict.fromkeys(values))) if isinstance(values, tuple) else str(values)


def one_of(values: Any) -> str:
    """Values as a choice: ``16, 32 or 64``."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
