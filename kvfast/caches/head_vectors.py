"""Vectors of heads, as the arguments of a `MultiHeadKVCache`."""

from typing import Any

import numpy as np

from kvfast.core.interchange import as_array, as_float32
from kvfast.core.limits import MAX_ROTATED
from kvfast.core.text import shown
from kvfast.errors import DimensionMismatchError, NonFiniteInputError


def vectors(given: Any, name: Any, count: Any, dim: Any) -> Any:
    """A new float32 array of shape (count, dim) from an array or a sequence of vectors."""
    try:
        num = len(given)
    except TypeError:
        raise TypeError(f"{name} must be {count} vectors, one per head, got {shown(given)}") from None
    if num != count:
        raise DimensionMismatchError(f"{name} must be {count} vectors, one per head, got {num}")
    if isinstance(given, (list, tuple)):
        rows = [_floats(row, f"{name}[{i}]", dim) for i, row in enumerate(given)]
    else:
        rows = _floats(given, name, count, dim)
    with np.errstate(over="ignore"):  # overflow is reported below
        array = np.array(rows, np.float32)
    largest = np.abs(array).max()
    if not largest <= MAX_ROTATED:
        head, element = map(int, np.argwhere(~(np.abs(array) <= MAX_ROTATED))[0])
        value = array[head, element]
        most = f", and at most {MAX_ROTATED:g} in magnitude" if np.isfinite(value) else ""
        raise NonFiniteInputError(f"{name} must be finite{most}, got {value} in element {element} of head {head}")
    return array


def tokens(given: Any, name: Any, count: Any, dim: Any) -> Any:
    """A new float32 array of shape (num_tokens, count, dim) from an array."""
    array = as_float32(given, name)
    if array.ndim != 3 or array.shape[1:] != (count, dim) or not len(array):
        raise DimensionMismatchError(f"{name} must have shape (num_tokens, {count}, {dim}) and at least one token, got {array.shape}")
    good = np.abs(array) <= MAX_ROTATED
    if not good.all():
        where = np.argwhere(~good)[0].tolist()
        raise NonFiniteInputError(
            f"{name} must be finite, and at most {MAX_ROTATED:g} in magnitude, got {array[tuple(where)]} at {where}"
        )
    return np.array(array, order="C")


def _floats(given, name, *shape):
    try:
        array = as_array(given, name) if isinstance(given, (list, tuple)) else as_float32(given, name)
    except DimensionMismatchError:
        raise DimensionMismatchError(f"{name} must have shape {shape}, got lists of different lengths") from None
    if array.shape != shape:
        raise DimensionMismatchError(f"{name} must have shape {shape}, got {array.shape}")
    if array.dtype.kind not in "fi":
        raise TypeError(f"{name} must be float32, float16, bfloat16 or numbers, got {array.dtype}")
    return array
