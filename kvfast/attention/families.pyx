# cython: language_level=3, boundscheck=False, cdivision=True
"""Which family of kernels attends.

Every tier has *vectors* (``simd/vectors``), which take up to 16 query rows of a KV head at a time. Tiers with AVX-512 VNNI also
have *words* (``simd/panels_vnni``): panels of many rows, multiplied as integers of 16 bits. The tier with a matrix unit has *tiles*
of bytes (``simd/panels_tiles``), and so has the fast precision of those with AVX-512 VNNI. `cuts` tells from which number of rows and
tokens panels pay.
"""
from libc.string cimport memset

from kvfast.codec.blocks cimport init_side, kv_layout
from kvfast.core.kernels cimport KV_FLOAT32, KV_FLOAT_ROWS, KV_HALVES, KV_INTEGERS, KV_PACKED, KV_PACKED_CODES, compiled, kv_kernels
from kvfast.core.limits cimport KV_LANES

from kvfast.codec.dtypes import DTYPE_TABLE


cdef int panels_of(const kv_kernels *kernels, const kv_layout *layout) noexcept nogil:
    """What panels of a layout are multiplied with: KV_INTEGERS, KV_PACKED, KV_HALVES, NO_PANELS or NO_PACKED_PANELS."""
    cdef int kind = KV_INTEGERS
    if layout.k.family == KV_PACKED_CODES or layout.v.family == KV_PACKED_CODES:
        kind = KV_PACKED
    elif layout.k.family == KV_FLOAT_ROWS and layout.v.family == KV_FLOAT_ROWS:
        kind = KV_HALVES
    # Panels multiply numbers of at most 16 bits, which lose bits of float32; and they read rows where they lie.
    if layout.decode != NULL or layout.k.dtype == KV_FLOAT32 or layout.v.dtype == KV_FLOAT32:
        return NO_PANELS
    if kernels.attend_panels[kind] == NULL:
        return NO_PACKED_PANELS if kind == KV_PACKED and kernels.attend_panels[KV_INTEGERS] != NULL else NO_PANELS
    return kind


def families():
    """The family that takes many query rows, by the tiers of this build, best first, and the storage dtypes.

    Returns
    -------
    dict of str to dict of str to str
        ``families()["amx"]["int8"]`` is ``"matrix"``; others are ``"words"`` and ``"vectors"``.
    """
    cdef const kv_kernels *kernels
    cdef kv_layout layout
    cdef int number
    found, tier = {}, 0
    while True:
        kernels = compiled(tier)
        if kernels == NULL:
            return found
        tier += 1
        names = found[kernels.isa.decode()] = {}
        for number, row in enumerate(DTYPE_TABLE):
            memset(&layout, 0, sizeof(layout))
            init_side(&layout.k, number, KV_LANES, KV_LANES)
            layout.v = layout.k
            panels = "matrix" if kernels.has_matrix else "words"
            names[row.number.lower()] = panels if panels_of(kernels, &layout) >= 0 else "vectors"
