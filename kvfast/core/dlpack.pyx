# cython: language_level=3, boundscheck=False, cdivision=True
"""Tensors of other libraries by the C functions that their types offer (``__dlpack_c_exchange_api__`` of DLPack 1.2).

It is much faster than ``tensor.numpy()`` or a capsule, and NumPy has no bfloat16.
"""
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid

from libc.stdint cimport uint32_t, uint64_t

cdef enum:
    MAJOR = 1
    READ_ONLY = 1              # in `flags`
    CPU = 1
    CPU_OF_GPU = 3             # kDLCUDAHost: memory of the CPU that a GPU reads too

ctypedef struct Managed:
    uint32_t major
    uint32_t minor
    void *context
    void (*deleter)(Managed *) noexcept
    uint64_t flags
    DLTensor tensor

ctypedef struct Exchange:
    uint32_t major
    uint32_t minor
    void *older
    void *allocate
    int (*managed_of)(void *, Managed **) except -1
    void *to_object
    int (*tensor_of)(void *, DLTensor *) except -1  # or NULL
    void *stream

# The functions of each type that was seen, as a capsule, or None.
cdef dict _known = {}


cdef object _exchange_of(type kind):
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if not PyCapsule_IsValid(capsule, b"dlpack_exchange_api"):
        return None
    api = <Exchange *>PyCapsule_GetPointer(capsule, b"dlpack_exchange_api")
    return capsule if api.major == MAJOR and api.tensor_of != NULL else None


cdef bint read_tensor(object array, DLTensor *tensor, bint writable) except -1:
    """Describe the memory of a tensor, which stays for as long as `array` does. False for what has no such functions, is not in the
    memory of the CPU, records gradients, or is negated in PyTorch's way, which DLPack does not tell; with `writable` also for what
    must not be written to."""
    cdef Exchange *api
    cdef Managed *managed = NULL
    cdef bint is_fixed
    kind = type(array)
    try:
        capsule = _known[kind]
    except KeyError:
        capsule = _known[kind] = _exchange_of(kind)
    if capsule is None or getattr(array, "requires_grad", False) or getattr(array, "is_neg", bool)():
        return False
    api = <Exchange *>PyCapsule_GetPointer(capsule, b"dlpack_exchange_api")
    try:
        if writable:
            api.managed_of(<void *>array, &managed)
            is_fixed = managed.flags & READ_ONLY
            if managed.deleter != NULL:
                managed.deleter(managed)
            if is_fixed:
                return False
        api.tensor_of(<void *>array, tensor)
    except Exception:  # noqa: BLE001  (any library's own way to say that this cannot be described)
        return False
    return tensor.data != NULL and (tensor.device_type == CPU or tensor.device_type == CPU_OF_GPU)
