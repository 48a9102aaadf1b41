"""`kvfast.h` through ctypes: the functions of the table by their names, with arguments that a compiler would let pass, wrong ones too."""

import ctypes
from types import SimpleNamespace

import numpy as np

import kvfast.capi

POINTER, SIZE, INT = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int


class Rows(ctypes.Structure):
    _fields_ = [
        ("data", POINTER),
        *((name, SIZE) for name in ("num_tokens", "num_heads", "dim", "token_stride", "head_stride")),
        ("dtype", INT),
    ]


class Options(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, SIZE) for name in ("sliding_window", "num_sink_tokens")),
        *((name, POINTER) for name in ("sinks", "alibi_slopes", "lse")),
        *((name, INT) for name in ("not_causal", "num_splits", "num_threads")),
        *(("attention_chunk_size", SIZE), ("spans", POINTER), ("num_spans", SIZE), ("clamp_spans", INT), ("tree_parents", POINTER)),
        *(("num_parents", SIZE), ("indices", POINTER), ("num_indices", SIZE)),
        *((name, INT) for name in ("index_heads", "index_block", "precision")),
    ]


class Batch(ctypes.Structure):
    _fields_ = [
        *(("sequences", POINTER), ("num_sequences", SIZE), ("starts", POINTER), ("span_counts", POINTER), ("parent_counts", POINTER)),
        *(("no_cascade", INT), ("block_table", POINTER), ("max_blocks", SIZE), ("seq_lens", POINTER), ("slots", POINTER)),
    ]


# The functions in their order: result and arguments; those with an object need the GIL.
_HANDLE = ctypes.POINTER(POINTER)
_TABLE = {
    "open": (POINTER, ctypes.py_object),
    "close": (None, POINTER),
    "append": (INT, POINTER, INT, POINTER, POINTER),
    "attend": (INT, POINTER, INT, POINTER, POINTER, POINTER),
    "advance": (INT, POINTER, SIZE),
    "truncate": (INT, POINTER, SIZE),
    "length": (SIZE, POINTER),
    "layer_length": (SIZE, POINTER, INT),
    "error": (ctypes.c_char_p, POINTER),
    "kernels": (POINTER,),
    "block_nbytes": (SIZE, POINTER),
    "open_pool": (ctypes.py_object, POINTER, POINTER, SIZE, POINTER),
    "keep_branch": (INT, POINTER, SIZE, POINTER, SIZE),
    "fork": (INT, POINTER, _HANDLE),
    "snapshot": (INT, POINTER, _HANDLE),
    "restore": (INT, POINTER, POINTER),
    "close_snapshot": (None, POINTER),
    "save": (INT, POINTER, ctypes.c_char_p),
    "load": (INT, POINTER, ctypes.c_char_p),
    "open_batches": (POINTER, ctypes.py_object),
    "close_batches": (None, POINTER),
    "new_sequence": (INT, POINTER, _HANDLE),
    "free_sequence": (INT, POINTER),
    "num_free_blocks": (SIZE, POINTER),
    "append_batch": (INT, POINTER, INT, POINTER, POINTER, POINTER),
    "attend_batch": (INT, POINTER, INT, POINTER, POINTER, POINTER, POINTER),
    "pool_error": (ctypes.c_char_p, POINTER),
    "advance_ids": (INT, POINTER, POINTER, SIZE),
    "match_prefix": (INT, POINTER, POINTER, SIZE, POINTER, SIZE, _HANDLE),
    "advance_batch": (INT, POINTER, POINTER, POINTER),
}


def _functions():
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = POINTER, [ctypes.py_object, ctypes.c_char_p]
    base = address(kvfast.capi.C_API, b"kvfast.capi.C_API") + 2 * ctypes.sizeof(INT)
    places = (POINTER * len(_TABLE)).from_address(base)
    kinds = [
        ctypes.PYFUNCTYPE if ctypes.py_object in types or types[0] is ctypes.py_object else ctypes.CFUNCTYPE
        for types in _TABLE.values()
    ]
    return {name: kind(*types)(place) for (name, types), kind, place in zip(_TABLE.items(), kinds, places, strict=True)}


C = SimpleNamespace(**_functions())


def rows(array, **wrong):
    """The address of float32 rows, and fields that differ from what the array has."""
    fields = {"data": array.ctypes.data, **dict(zip(("num_tokens", "num_heads", "dim"), array.shape, strict=True))} | wrong
    return _at(Rows, fields, array)


def options(**fields):
    return _at(Options, fields)


def batch(sequences, **fields):
    handles = (POINTER * len(sequences))(*sequences)
    return _at(Batch, {"sequences": ctypes.addressof(handles), "num_sequences": len(sequences)} | fields, handles)


def made(function, *arguments):
    """(the code, the handle that a function made)."""
    handle = POINTER(0xDEAD)
    return function(*arguments, ctypes.byref(handle)), handle.value


def _at(kind, fields, *kept):
    """A struct, which keeps the arrays of its fields."""
    arrays = {name: np.ascontiguousarray(value) for name, value in fields.items() if isinstance(value, np.ndarray)}
    struct = kind(**{name: arrays[name].ctypes.data if name in arrays else value for name, value in fields.items()})
    struct.kept = (kept, arrays)
    return ctypes.byref(struct)
