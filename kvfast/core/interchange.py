"""Arrays of other libraries as NumPy's, without a copy and without importing them."""

import ctypes
import sys

import numpy as np

from kvfast.errors import DimensionMismatchError

_CPU = (1, 3)  # kDLCPU, and kDLCUDAHost: memory of the CPU that a GPU reads too
_FLOAT, _BFLOAT = 2, 4
_TYPES = {(_FLOAT, 64): "<f8", (_FLOAT, 32): "<f4", (_FLOAT, 16): "<f2", (_BFLOAT, 16): "<u2"}


class _DLTensor(ctypes.Structure):
    """``DLTensor`` of DLPack, with which a ``DLManagedTensor`` begins."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Held:
    """What a capsule describes, for NumPy; the capsule is not consumed, and frees its memory when it is collected."""

    def __init__(self, capsule, interface):
        self.capsule = capsule
        self.__array_interface__ = interface


def as_array(array, name="array"):
    """An array as NumPy sees it; TypeError if it is masked, is on another device, or cannot be read as an array.

    It may be an ndarray; anything with a buffer or ``__array__``; or anything with ``__dlpack__`` in the memory of the CPU. The
    result is of the same memory where that can be (a copy of what `is_lazy`). bfloat16 that comes by DLPack, which NumPy cannot
    take from there itself, is its bits in uint16. `name` is for messages.
    """
    if type(array) is np.ndarray:
        return array
    if array is None:
        raise TypeError(f"{name} must be an array, got None")
    check_unmasked(array, name, f"pass {name}.filled(...) with what masked entries stand for, or leave them out")
    if not hasattr(array, "__dlpack__") or isinstance(array, np.ndarray):
        try:
            return np.asarray(array)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  (any object's own way to say that it is not an array)
            kind = DimensionMismatchError if isinstance(error, ValueError) else TypeError
            why = "its lists have different lengths" if "inhomogeneous" in str(error) else error
            raise kind(f"{name} must be an array: {why}") from None
    _check_device(array, name)
    array = _resolved(array)
    try:
        return np.asarray(array) if hasattr(array, "__array__") else np.from_dlpack(array)
    except Exception as error:  # noqa: BLE001  (any library's own way to say that NumPy has no such type)
        return _from_capsule(array, name, error)


def as_floats(array, name, rounds=True):
    """float32 or float16 as NumPy sees them, or the bits of bfloat16 in uint16; of the same memory where that can be.

    With `rounds`, float64 is taken, too, as a copy that is rounded to float32. What is beyond its range becomes infinity, which the
    caller refuses. TypeError for anything else, such as integers, or bytes in another order.
    """
    if not rounds:
        check_unmasked(array, name, f"pass {name}.data")
    array = as_array(array, name)
    if array.dtype.name == "bfloat16" and array.dtype.isnative:
        array = array.view(np.uint16)
    if array.dtype.char == "d" and array.dtype.isnative and rounds:
        with np.errstate(over="ignore"):
            return array.astype(np.float32)
    if array.dtype.char not in "feH" or not array.dtype.isnative:
        way = f": pass {name}.astype(np.float32)" if rounds else f": make {name} with dtype=np.float32"
        way *= array.dtype.kind in "fiu"
        raise TypeError(f"{name} must be float32, float16 or bfloat16 (ml_dtypes, or its bits as uint16), got {array.dtype}{way}")
    return array


def as_float32(array, name):
    """The numbers of `as_floats` as float32: a copy, unless they are."""
    array = as_floats(array, name)
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def aligned(array, dtype=None):
    """A C-contiguous ndarray whose elements lie at their alignment, for pointers and typed views; a copy if need be."""
    array = np.asarray(array, dtype, order="C")
    return array if array.flags.aligned else array.copy()


def as_numbers(array, name):
    """Any numbers, as of a weight or a table, as float32 for pointers and typed views; uint16 are the bits of bfloat16."""
    array = as_array(array, name)
    try:
        if array.dtype.kind not in "iufV":  # those of ml_dtypes are V
            raise TypeError
        return aligned(as_float32(array, name) if array.dtype == np.uint16 else array, np.float32)
    except (TypeError, ValueError) as error:  # whose text has the value that is not a number
        raise type(error)(f"{name} must be numbers, got {array.dtype} of shape {array.shape}") from None


def as_numpy(tensor):
    """A view of a tensor of PyTorch, or a copy of one that is still to be negated or conjugated; bfloat16 and int8 as their bits."""
    tensor, torch = _resolved(tensor), sys.modules["torch"]
    bits = {torch.bfloat16: torch.uint16, torch.int8: torch.uint8}.get(tensor.dtype)
    return (tensor if bits is None else tensor.view(bits)).numpy()


def check_unmasked(array, name, way):
    """Refuse an array whose entries may be masked, and lists of them: NumPy leaves out the mask in silence."""
    try:
        masked = _is_masked(array)
    except RecursionError:
        raise ValueError(f"{name} must be an array, got lists that hold themselves") from None
    if masked:
        raise TypeError(f"{name} must not be a masked array: {way}")


def _is_masked(array):
    if isinstance(array, (list, tuple)):  # of which those of numbers may be long
        return len(array) > 0 and not isinstance(array[0], (int, float, np.generic)) and any(map(_is_masked, array))
    return isinstance(array, np.ma.MaskedArray)


def is_lazy(array):
    """Whether PyTorch is still to negate or to conjugate the numbers in the memory of a tensor, which DLPack does not tell."""
    return getattr(array, "is_neg", bool)() or getattr(array, "is_conj", bool)()


def _resolved(array):
    """The array, or a copy with the numbers that it stands for."""
    return array.resolve_conj().resolve_neg() if is_lazy(array) else array


def _check_device(array, name):
    try:
        device = getattr(array, "__dlpack_device__", lambda: (1, 0))()
    except Exception as error:  # noqa: BLE001  (any library's own way to say that DLPack has no such device)
        raise TypeError(f"{name} must be in the memory of the CPU: {error}") from None
    if int(device[0]) not in _CPU:
        raise TypeError(f"{name} must be in the memory of the CPU, got one on DLPack device {tuple(map(int, device))}")


def _from_capsule(array, name, reason):
    try:
        capsule = array.__dlpack__()
        pointer = _pointer(capsule, b"dltensor")
    except Exception as error:  # noqa: BLE001
        raise TypeError(f"{name} must be an array of float32, float16 or bfloat16, got {type(array).__name__}: {error}") from reason
    tensor = ctypes.cast(pointer, ctypes.POINTER(_DLTensor)).contents
    kind = _TYPES.get((tensor.code, tensor.bits))
    if kind is None or tensor.lanes != 1 or tensor.device_type not in _CPU or not 0 <= tensor.ndim <= 32:
        raise TypeError(
            f"{name} must be float32, float16 or bfloat16 in the memory of the CPU, got a {type(array).__name__} of "
            f"DLPack type {tensor.code} with {tensor.bits} bits: {reason}"
        )
    size = tensor.bits // 8
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(size * tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    if 0 in shape:
        return np.empty(shape, kind)
    return np.asarray(
        _Held(
            capsule,
            {"version": 3, "typestr": kind, "shape": shape, "strides": strides, "data": (tensor.data + tensor.byte_offset, False)},
        )
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
