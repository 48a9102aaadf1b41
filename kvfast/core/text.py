"""Texts of errors and tables: values for reading, and packages that are missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Number
from typing import Any

_MOST = 8  # numbers that are few
_LONGEST = 40  # characters of a name, or digits of a number


def size_text(nbytes: float) -> str:
    """Bytes with a unit, for reading."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number and what it counts: ``1 token``, ``2 tokens``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


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


@contextmanager
def needed_for(what: str, extra: str) -> Iterator[None]:
    """Say, where an import inside finds no package, what needs it and which extra of kvfast has it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f'{what} the package {error.name}: pip install "kvfast[{extra}]"', name=error.name) from None


def shown(value: Any) -> str:
    """A value for the text of an error: a number, a name, a few of them, or what it is; never data."""
    if value is None or isinstance(value, (str, Number)):
        if isinstance(value, int) and value.bit_length() > 3 * _LONGEST:
            return f"an integer of {value.bit_length()} bits"
        text = repr(value)
        return text if len(text) <= _LONGEST else f"a {type(value).__name__} of {len(text)} characters"
    if isinstance(value, dict) and len(value) <= _MOST:
        return f"{{{', '.join(f'{shown(name)}: {shown(one)}' for name, one in value.items())}}}"
    if isinstance(value, (list, tuple)) and len(value) <= _MOST and all(one is None or isinstance(one, (str, Number)) for one in value):
        text = ", ".join(map(shown, value))
        return f"[{text}]" if isinstance(value, list) else f"({text}{',' * (len(value) == 1)})"
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type):
        if not value.shape and len(repr(value)) <= _LONGEST:
            return repr(value)
        return f"a {type(value).__name__} of {value.dtype} and shape {tuple(value.shape)}"
    if isinstance(value, type):
        return f"the type {value.__name__}"
    if isinstance(value, (bytes, list, tuple, dict)):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__}"
