# cython: language_level=3
"""The storage dtypes by name: the table of ``simd/dtypes.h``, for Python."""
from collections import namedtuple

from kvfast.core.kernels cimport KV_NUM_DTYPES, kv_dtype

from kvfast.core.text import shown

# A row of the table. `also`, `codebooks` and `options` are tuples of names.
Dtype = namedtuple("Dtype", "number name family bits scale_bytes levels limit also codebooks options")
CODEBOOKS = ("uniform", "gaussian")
_FAMILIES = ("float", "tiled", "packed")


cdef object _row(int number):
    cdef const kv_dtype *row = kv_dtypes + number
    words = [text.decode().split() for text in (row.also, row.codebooks, row.options)]
    return Dtype(row.number.decode(), row.name.decode(), _FAMILIES[row.family], row.bits, row.scale_bytes, row.levels, row.limit,
                 *map(tuple, words))


DTYPE_TABLE = tuple([_row(number) for number in range(KV_NUM_DTYPES)])
NAMES = tuple(dict.fromkeys(row.name for row in DTYPE_TABLE))
FLOATS = tuple([row.name for row in DTYPE_TABLE if row.family == "float"])
_NUMBERS = {name: number for number, row in reversed(list(enumerate(DTYPE_TABLE))) for name in (row.name, *row.also)}
_BY_CODEBOOK = {(row.name, codebook): number for number, row in enumerate(DTYPE_TABLE) for codebook in row.codebooks}


cdef int parse_dtype(object dtype, str codebook=None) except -1:
    """Number of a name, of another name, or of a NumPy (ml_dtypes) dtype; with a codebook, of that row where there is one."""
    name = dtype
    if not isinstance(name, str):
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    number = _NUMBERS.get(name.strip().lower())
    if number is None:
        raise ValueError(f"unknown storage dtype {shown(dtype)}; choose one of {', '.join(NAMES)}")
    return _BY_CODEBOOK.get((DTYPE_TABLE[number].name, codebook), number)


def canonical_dtype(dtype):
    """The name of a storage dtype, of any of its names."""
    return DTYPE_TABLE[parse_dtype(dtype)].name


def dtype_row(dtype, codebook="uniform"):
    """The `Dtype` of a name, with the codebook if it has that."""
    return DTYPE_TABLE[parse_dtype(dtype, codebook)]


def names_with(option):
    """Names of the dtypes that have an option of KVFormat, for reading."""
    return " and ".join(dict.fromkeys(row.name for row in DTYPE_TABLE if option in row.options))


cdef str dtype_name(int dtype):
    return DTYPE_TABLE[dtype].name


cdef str codes_name(int dtype):
    """The same with the codebook of INT4."""
    return DTYPE_TABLE[dtype].number.lower()
