"""Checks that an installed library has the names and parameters that kvfast uses, and computes as it does. Version numbers tell little:
some libraries change every few weeks."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any

# Errors of calls of a library that has changed.
_FAILURES = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)


def missing(used: Mapping[str, Mapping[str, Collection[str]]]) -> str | None:
    """The first thing that is not there, in words; or None.

    `used` has of each module what is used of it (a name, or several with points between), and attributes, fields or parameters of
    that.

    >>> from kvfast.core.capabilities import missing
    >>> missing({"json": {"dumps": ["obj", "indent"], "JSONEncoder.encode": []}})
    >>> missing({"json": {"dumps": ["colour"]}})
    'dumps of json has no colour'
    """
    for module, names in used.items():
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            return f"{module} cannot be imported ({error})"
        for name, details in names.items():
            one: Any = found
            for step in name.split("."):
                one = getattr(one, step, None)
            if one is None:
                return f"{module} has no {name}"
            for detail in details:
                if not _has(one, detail):
                    return f"{name} of {module} has no {detail}"
    return None


def difference(calls: Callable[[], Any], library: str, most: float) -> str | None:
    """Why a version of a library that was not tested cannot be used, or None.

    `calls` makes one attention call in the library's own way and in kvfast's, and returns both results, tensors of PyTorch. Rounding
    explains a difference of `most`. `library` is a genitive, for the message.
    """
    try:
        own, other = calls()
    except _FAILURES as error:
        return f"an attention call failed with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    largest = float((own - other).abs().max())
    return None if largest <= most else f"an attention call differs from {library} own by {largest:.2g}, more than {most:.2g}"


def _has(one, detail):
    """Whether something has an attribute, a field or a parameter of a name."""
    if hasattr(one, detail) or (is_dataclass(one) and detail in {field.name for field in fields(one)}):
        return True
    return detail in signature(one).parameters


def installed_version(*packages: str) -> str | None:
    """The version of the first of some packages that is installed, or None."""
    for name in packages:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return None


def minor_of(version: str) -> tuple[int, int]:
    """The version without what changes no interface, as numbers."""
    major, minor = (int("".join(filter(str.isdigit, part)) or 0) for part in f"{version}.0".split(".")[:2])
    return major, minor


def versions_text(minors: Iterable[tuple[int, int]]) -> str:
    """Versions for reading: ``0.30, 0.31 and 0.32``."""
    *most, last = [f"{major}.{minor}" for major, minor in minors]
    return f"{', '.join(most)} and {last}" if most else last
