# cython: language_level=3, boundscheck=False, cdivision=True
"""CPU dispatch: chooses the tier of kernels at import; ``use_isa`` changes it."""
import os

from kvfast.core.text import shown


cdef extern from "simd/kernels.h" nogil:
    const kv_kernels *kv_all_kernels[8]
    bint kv_supported(const kv_kernels *kernels)
    void kv_begin()
    const kv_kernels *kv_fast(const kv_kernels *exact)

    ctypedef struct kv_cpu_feature:
        const char *name
        int present

    const kv_cpu_feature *kv_cpu_features()

    ctypedef struct kv_cpu_identity:
        const char *vendor
        int family
        int model

    kv_cpu_identity kv_identify_cpu()

    int kv_prefetch_level


cdef const kv_kernels *_active = NULL


cdef const kv_kernels *active() noexcept nogil:
    return _active


cdef int _precision = EXACT  # of the process


cdef int resolved(int precision) noexcept nogil:
    return _precision if precision == UNSET else precision


cdef const kv_kernels *active_for(int precision) noexcept nogil:
    return kv_fast(_active) if resolved(precision) == FAST else _active


_NAMES = None, "exact", "fast", "invariant"  # of each kv_precision


cdef int parse_precision(object name) except -1:
    """A kv_precision; None: UNSET."""
    if name is None:
        return UNSET
    if isinstance(name, str) and name in _NAMES:
        return _NAMES.index(name)
    raise ValueError(f"precision must be 'exact', 'fast', 'invariant' or None, got {shown(name)}")


def name_of_precision(int precision):
    """The name of a kv_precision; None for UNSET."""
    return _NAMES[precision]


def default_precision():
    """The precision of calls and caches that name none: that of KVFAST_PRECISION in the environment, else ``"exact"``."""
    return name_of_precision(_precision)


cdef const kv_kernels *compiled(int tier, int precision) noexcept nogil:
    return kv_fast(kv_all_kernels[tier]) if kv_all_kernels[tier] != NULL and precision == FAST else kv_all_kernels[tier]


cdef const kv_kernels *_find(object name) except NULL:
    cdef int i = 0
    while isinstance(name, str) and kv_all_kernels[i] != NULL:
        if kv_all_kernels[i].isa.decode() == name:
            if not kv_supported(kv_all_kernels[i]):
                raise ValueError(f"this CPU cannot run the ISA tier {shown(name)}; "
                                 f"it can run {', '.join(available_isas())}")
            return kv_all_kernels[i]
        i += 1
    raise ValueError(f"unknown ISA tier {shown(name)}; this CPU can run {', '.join(available_isas())}")


def available_isas():
    """Names of the ISA tiers that this CPU and its operating system can run, best first.

    Returns
    -------
    tuple of str
    """
    cdef int i = 0
    names = []
    while kv_all_kernels[i] != NULL:
        if kv_supported(kv_all_kernels[i]):
            names.append(kv_all_kernels[i].isa.decode())
        i += 1
    return tuple(names)


def active_isa():
    """Name of the ISA tier in use, such as ``"avx2"``."""
    return _active.isa.decode()


def cpu_features():
    """Instruction-set extensions of this CPU that kvfast knows.

    Returns
    -------
    dict of str to bool
    """
    cdef const kv_cpu_feature *feature = kv_cpu_features()
    features = {}
    while feature.name != NULL:
        features[feature.name.decode()] = bool(feature.present)
        feature += 1
    return features


def cpu_identity():
    """Vendor, family and model of an x86 processor; ``("", 0, 0)`` of others."""
    cdef kv_cpu_identity cpu = kv_identify_cpu()
    return cpu.vendor.decode("ascii", "replace"), cpu.family, cpu.model


def get_prefetch_level():
    """``kv_prefetch_level`` of ``simd/kernels.h``."""
    return kv_prefetch_level


def set_prefetch_level(int level):
    """Set ``kv_prefetch_level``, 1 or 2."""
    global kv_prefetch_level
    kv_prefetch_level = level


class use_isa:
    """Make a tier of kernels the active one, for the process or for a ``with`` block.

    Parameters
    ----------
    name : str
        One of `available_isas()`.

    Raises
    ------
    ValueError
        If the name is unknown or this CPU cannot run the tier.

    Notes
    -----
    Takes effect at once, also without ``with``. Leaving the block restores the previous tier. The tier applies to the whole
    process; calls that are running keep the one they started with. ``KVFAST_ISA=name`` in the environment does the same at
    import.

    Examples
    --------
    >>> import kvfast
    >>> with kvfast.use_isa("scalar"):
    ...     kvfast.active_isa()
    'scalar'
    """

    def __init__(self, name):
        global _active
        cdef const kv_kernels *kernels = _find(name)
        self._previous = active_isa()
        _active = kernels

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        global _active
        _active = _find(self._previous)


def _begin():
    """Use the tier and the precision that the environment names, or the best tier and exact attention."""
    global _active, _precision
    kv_begin()
    try:
        _precision = parse_precision(os.environ.get("KVFAST_PRECISION") or "exact")
    except ValueError as error:
        raise ValueError(f"KVFAST_PRECISION in the environment: {error}") from None
    name = os.environ.get("KVFAST_ISA") or available_isas()[0]
    try:
        _active = _find(name)
    except ValueError as error:
        raise ValueError(f"KVFAST_ISA in the environment: {error}") from None


_begin()
