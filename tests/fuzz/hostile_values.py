"""Values that no caller should give, and arrays that are hard to read."""

import numpy as np
from numpy.lib.stride_tricks import as_strided

try:
    from ml_dtypes import bfloat16
except ModuleNotFoundError:  # the bits do instead
    bfloat16 = np.uint16

NUMBERS = [
    *(0, 1, -1, 2, 15, 16, 17, 255, 256, 512, 513, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32),
    *((1 << 40) + 1, 1 << 60, (1 << 63) - 1, 1 << 63, -(1 << 63), 1 << 64, 10**30, -(10**400), True, False),
    *(0.0, -0.0, 0.5, 1.0, 1e-45, 1e300, -1e300, float("nan"), float("inf"), -float("inf")),
    *(1j, np.int8(-1), np.uint64((1 << 64) - 1), np.float32("nan")),
    *(np.bool_(True), np.int64(-(1 << 63)), np.float16(2)),
]
OTHERS = [
    *(None, "", "int8", "int4"),
    *("k8v4", "float32", "full", "\0", "\ud800"),
    *("x" * 300, b"", b"salt", b"\xff" * 65),
    *((), [], {}, set(), [[]], [None], ["a"], [1, 2], [1.5], [[1], [2, 3]], {"a": 1}, object(), Ellipsis),
    *(NotImplemented, int, len, range(3), slice(2), np.float32, np.dtype("V8"), np.datetime64("2020")),
    *(np.array(None), np.ma.masked, memoryview(b"12345678"), lambda *_: 0),
]
DTYPES = [
    *(object, "U4", "S3", bool, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.int64, np.uint64),
    *(np.float16, np.float32, np.float64, np.longdouble, np.complex64, np.complex128, bfloat16),
    *(">f4", ">f2", ">u2", ">i4", "M8[s]", "m8[s]"),
    *([("a", np.float32)], [("a", np.int8), ("b", np.float64)], "V4"),
]
EXTREMES = [
    *(0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, 1e-38, 1e-20, 448.0, 65504.0, 65520.0, -70000.0, 1e10, 1e19),
    *(-1e19, 1e20, 6e35, 7e35, 3.3e38, 3.38e38, 3.4028235e38, -3.4028235e38, float("nan"), float("inf")),
    -float("inf"),
]


class Misfit:
    """An object whose every way to become an array or a number raises, or lies."""

    def __init__(self, error):
        self._error = error

    def _fail(self, *_, **__):
        raise self._error("on purpose")

    __array__ = __index__ = __float__ = __len__ = __iter__ = __getitem__ = __fspath__ = _fail


def array(rng):
    """Any array at all."""
    shape = tuple(rng.choices([0, 1, 2, 3, 4, 7, 20, 33], k=rng.choice([0, 1, 1, 2, 2, 3, 3, 3, 4])))
    return of_dtype(np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) / 7, rng.choice(DTYPES))


def of_dtype(values, dtype):
    """The values as well as a dtype can tell them, if it can."""
    dtype = np.dtype(dtype)
    with np.errstate(all="ignore"):
        if dtype.kind == "V" and dtype.name != "bfloat16" or dtype.kind in "mM":
            return np.zeros(values.shape, dtype)
        return values.astype(dtype)


def twisted(rng, values):
    """The array in another memory layout, dtype or shape, or with elements at the limits of floats."""
    values = np.asarray(values)
    way = rng.randrange(20)
    if way < 4:
        return of_dtype(values, rng.choice(DTYPES)) if values.dtype.kind in "fiub" else array(rng)
    if way == 4:
        return values[..., ::-1] if values.ndim else values
    if way == 5:
        return values[::-1] if values.ndim else values
    if way == 6:
        return np.asfortranarray(values)
    if way == 7:  # every row the same bytes
        return np.broadcast_to(values[:1], values.shape) if values.ndim and values.size else values
    if way == 8 and values.ndim and values.size > 2 and values.flags.c_contiguous:  # rows that overlap
        return as_strided(values, (values.size - 1, *values.shape[:0], 2), (values.itemsize,) * 2, writeable=False)
    if way == 9:
        copy = values.copy()
        copy.flags.writeable = False
        return copy
    if way == 10 and values.dtype != object:  # not at a multiple of the item size
        raw = np.zeros(values.nbytes + 1, np.uint8)[1:]
        other = raw.view(values.dtype).reshape(values.shape)
        other[...] = values
        return other
    if way == 11:
        return values.swapaxes(0, -1) if values.ndim else values
    if way == 12:
        return rng.choice(
            [
                values[None],
                values[..., None],
                values[:0] if values.ndim else values,
                values.reshape(-1),
                values[..., :0] if values.ndim else values,
            ]
        )
    if way == 13 and values.ndim:
        return np.concatenate([values, values], axis=rng.randrange(values.ndim))
    if way == 14:
        return np.ma.masked_array(values, mask=rng.random() < 0.5)
    if values.dtype.kind == "f" and values.size:
        other = values.copy()
        with np.errstate(over="ignore"):
            if rng.random() < 0.3:
                other[...] = rng.choice(EXTREMES)
            else:
                for _ in range(rng.choice([1, 1, 3])):
                    other.flat[rng.randrange(other.size)] = rng.choice(EXTREMES)
        return other
    if values.dtype.kind in "iu" and values.size:
        other = values.astype(np.int64)
        other.flat[rng.randrange(other.size)] = rng.choice([-2, -1, 0, 1, 31, 32, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 62, -(1 << 63)])
        return other
    return values


def hostile(rng, fitting=None):
    """Something in the place of a fitting argument."""
    choice = rng.random()
    if isinstance(fitting, np.ndarray) and choice < 0.8:
        return twisted(rng, twisted(rng, fitting) if rng.random() < 0.2 else fitting)
    if choice < 0.6:
        return rng.choice(NUMBERS)
    if choice < 0.85:
        return rng.choice(OTHERS)
    if choice < 0.87:
        return Misfit(rng.choice([TypeError, ValueError]))
    return array(rng)


def is_finite(value):
    """Whether all numbers in a value are finite, as far as it holds numbers."""
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, tuple | list):
        return all(map(is_finite, value))
    if isinstance(value, float | np.floating | complex):
        return bool(np.isfinite(value))
    if isinstance(value, np.ndarray):
        if value.dtype.name in ("bfloat16", "uint16"):  # the same bits
            return bool(((value.view(np.uint16) & 0x7F80) != 0x7F80).all())
        return value.dtype.kind not in "fc" or bool(np.isfinite(value).all())
    return True
