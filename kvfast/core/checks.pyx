# cython: language_level=3, boundscheck=False, cdivision=True
"""Checks of arguments that are numbers or truth values."""
import math
import operator
import os
from numbers import Real

import numpy as np

from libc.stdint cimport int32_t

from kvfast.core.limits cimport KV_MAX_BLOCK_SIZE, KV_MIN_BLOCK_SIZE, KV_UNLIMITED

from kvfast.core.interchange import as_array, as_numbers
from kvfast.core.limits import BLOCK_SIZES
from kvfast.core.text import one_of, shown
from kvfast.errors import DimensionMismatchError, NonFiniteInputError


# What float() reads or takes for a number, although it is not one.
cdef tuple _NO_NUMBERS = (bool, np.bool_, str, bytes, bytearray, np.ma.MaskedArray)


cpdef object as_integer(object value, str name):
    """A Python int. TypeError for a truth value, too, which Python takes for 0 or 1."""
    if type(value) is int:
        return value
    try:
        if isinstance(value, _NO_NUMBERS):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {shown(value)}") from None


cpdef float check_number(object value, str name, bint positive) except? -1:
    cdef float number
    try:
        if isinstance(value, _NO_NUMBERS):
            raise TypeError
        number = float(value)
    except OverflowError:  # an integer
        number = math.inf
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {shown(value)}") from None
    if not math.isfinite(number) or (positive and number <= 0):
        raise ValueError(f"{name} must be a {'positive ' if positive else ''}finite number of float32, got {shown(value)}")
    return number


cdef Py_ssize_t check_count(object value, str name, Py_ssize_t least, Py_ssize_t most=KV_UNLIMITED) except -1:
    """An integer between least and most. `least` must be at least 0, as -1 reports an error."""
    number = as_integer(value, name)
    if not least <= number <= most:
        limits = f"at least {least}" if most == KV_UNLIMITED and number < least else f"between {least} and {most}"
        raise ValueError(f"{name} must be {limits}, got {shown(number)}")
    return number


cpdef bint check_flag(object value, str name) except? -1:
    """A truth value, of Python or NumPy: "False" is a true text."""
    if value is True or value is False or isinstance(value, np.bool_):
        return value
    raise TypeError(f"{name} must be True or False, got {shown(value)}")


cpdef Py_ssize_t check_index(object value, Py_ssize_t count, str name) except -1:
    number = as_integer(value, name)
    if not 0 <= number < count:
        raise IndexError(f"{name} must be between 0 and {count - 1}, got {shown(number)}")
    return number


cdef Py_ssize_t check_layer(object index, Py_ssize_t num_layers) except -1:
    return check_index(index, num_layers, "layer")


def check_choice(value, name, choices, text):
    """One of some texts, which `text` lists for the message."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be {text}, got {shown(value)}")


def per_layer(value, name, num_layers, one="one number"):
    """One value for each layer, from one for all or from a list."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * num_layers
    if len(values) != num_layers:
        raise DimensionMismatchError(f"{name} must be {one} or a list of {num_layers}, one per layer, got {len(values)}")
    return values


def checked_list(values, name, of):
    """A list of the elements of an iterable. `of` names them in the error."""
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{name} must be a list of {of}, got {shown(values)}") from None


def checked_path(path, name):
    """A path as a str. Not an integer: `open` takes it for a file that is open already, and closes it."""
    try:
        return os.fsdecode(path)
    except TypeError:
        raise TypeError(f"{name} must be a str or path-like, got {shown(path)}") from None


def check_positive(value, name, kind="number", finite=False):
    """Raise ValueError unless this is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not value > 0 or finite and math.isinf(value):
        raise ValueError(f"{name} must be a positive {kind}, got {shown(value)}")


def check_size(value, name, least, most=KV_UNLIMITED):
    """An integer between least and most; by default there is no limit."""
    return check_count(value, name, least, most)


def checked_lengths(lengths, name):
    """Numbers of tokens as int32, as other engines take them. ValueError if one does not fit."""
    most = max(lengths, default=0)
    if most > np.iinfo(np.int32).max:
        raise ValueError(f"{name} are int32, for at most {np.iinfo(np.int32).max} tokens, got {most}: ask len() or layer_length()")
    return np.array(lengths, np.int32)


def check_block_size(value):
    """Tokens of a block, a power of two."""
    size = check_count(value, "block_size", KV_MIN_BLOCK_SIZE, KV_MAX_BLOCK_SIZE)
    if size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be {one_of(BLOCK_SIZES)}, got {size}")
    return size


cdef object check_vector(object values, str name, Py_ssize_t count, str what=""):
    """`count` finite numbers; `what` tells what each is for."""
    array = as_numbers(values, name)
    if array.shape != (count,):
        raise DimensionMismatchError(f"{name} must have shape ({count},){what}, got {array.shape}")
    if not np.isfinite(array).all():
        raise NonFiniteInputError(f"{name} must be finite, got {array[~np.isfinite(array)][0]}")
    return array


cdef object check_integers(object values, str name, object dtype, int ndim):
    """Integers as a new array, so that the caller cannot change them after the check. None is cut to fit the dtype."""
    array = as_array(values, name)
    if array.size == 0 and isinstance(values, (list, tuple)):  # whose dtype NumPy has made up
        array = array.astype(dtype)
    if array.ndim != ndim or array.dtype.kind not in "iu":
        got = f"{array.dtype} of shape {array.shape}" if array.ndim else shown(values)
        raise DimensionMismatchError(f"{name} must be integers with {ndim} dimension{'s' * (ndim > 1)}, got {got}")
    if array.dtype != dtype and array.size and not np.can_cast(array.dtype, dtype):
        least, most, limits = int(array.min()), int(array.max()), np.iinfo(dtype)
        if least < limits.min or most > limits.max:
            wrong = least if least < limits.min else most
            raise ValueError(f"{name} must hold integers from {limits.min} to {limits.max}, got {wrong}")
    return np.array(array, dtype, order="C")


cdef bint rises(const int32_t[::1] values) noexcept:
    cdef Py_ssize_t i
    for i in range(1, values.shape[0]):
        if values[i] < values[i - 1]:
            return False
    return True


def checked_token_ids(token_ids, count=None):
    """Token ids as a new int64 array. ValueError if they are not integers, or not `count` of them if that is given."""
    wanted = "integers of shape (num_tokens,)" if count is None else f"{count} integers"
    try:
        array = as_array(token_ids, "token_ids")
    except ValueError:
        raise ValueError(f"token_ids must be {wanted}, got {shown(token_ids)}") from None
    if array.ndim != 1 or count is not None and len(array) != count or array.size and array.dtype.kind not in "iu":
        raise ValueError(f"token_ids must be {wanted}, got {array.dtype} of shape {array.shape}")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"token_ids must be below 2**63, got {array.max()}")  # as int64 it would equal a negative id
    return array.astype(np.int64)


def checked_salt(salt):
    """The salt of a tenant; no message shows it."""
    if not isinstance(salt, bytes):
        raise TypeError(f"salt must be bytes, got {type(salt).__name__}")
    if len(salt) > 64:
        raise ValueError(f"salt must be at most 64 bytes, got {len(salt)}")
    return salt
