# cython: language_level=3, boundscheck=False, cdivision=True
"""Which family of kernels attends.

Every tier has *vectors* (``simd/vectors``), which take up to 16 query rows of a KV head at a time. Some have families of panels
(``simd/panels``), which take many: ``words16``, ``tiles8`` and ``tiles_bf16``. The table of a tier names one for each kind of panels
that it has; docs/design/kernel-names.md lists them. `cuts` tells from which number of rows and tokens panels pay.
"""
from libc.string cimport memset

from kvfast.codec.blocks cimport init_side, kv_layout
from kvfast.core.kernels cimport (KV_FLOAT32, KV_FLOAT_ROWS, KV_PACKED_CODES, KV_PANELS_OF_CODES, KV_PANELS_OF_PACKED,
                                  KV_PANELS_OF_ROWS, compiled, kv_kernels, parse_precision)
from kvfast.core.limits cimport KV_LANES

from kvfast.codec.dtypes import DTYPE_TABLE


cdef int panels_of(const kv_kernels *kernels, const kv_layout *layout) noexcept nogil:
    """The kind of panels that read a layout: KV_PANELS_OF_..., NO_PANELS or NO_PACKED_PANELS."""
    cdef int kind = KV_PANELS_OF_CODES
    if layout.k.family == KV_PACKED_CODES or layout.v.family == KV_PACKED_CODES:
        kind = KV_PANELS_OF_PACKED
    elif layout.k.family == KV_FLOAT_ROWS and layout.v.family == KV_FLOAT_ROWS:
        kind = KV_PANELS_OF_ROWS
    # Panels multiply numbers of at most 16 bits, which lose bits of float32; and they read rows where they lie.
    # The fast precision has vectors alone for packed codes: the panels of the exact one would take longer.
    if (layout.decode != NULL or layout.k.dtype == KV_FLOAT32 or layout.v.dtype == KV_FLOAT32
            or (kind == KV_PANELS_OF_PACKED and kernels != kernels.exact)):
        return NO_PANELS
    if kernels.panels[kind].family == NULL:
        return NO_PACKED_PANELS if kind == KV_PANELS_OF_PACKED and kernels.panels[KV_PANELS_OF_CODES].family != NULL else NO_PANELS
    return kind


def families(precision="exact"):
    """The family that takes many query rows, by the tiers of this build, best first, and the storage dtypes.

    Parameters
    ----------
    precision : str
        ``"exact"`` or ``"fast"``.

    Returns
    -------
    dict of str to dict of str to str
        ``families()["amx"]["int8"]`` is ``"tiles8"``; others are ``"tiles_bf16"``, ``"words16"`` and ``"vectors"``.
    """
    cdef const kv_kernels *kernels
    cdef kv_layout layout
    cdef int number, kind, of = parse_precision(precision)
    found, tier = {}, 0
    while True:
        kernels = compiled(tier, of)
        if kernels == NULL:
            return found
        tier += 1
        names = found[kernels.isa.decode()] = {}
        for number, row in enumerate(DTYPE_TABLE):
            memset(&layout, 0, sizeof(layout))
            init_side(&layout.k, number, KV_LANES, KV_LANES)
            layout.v = layout.k
            kind = panels_of(kernels, &layout)
            names[row.number.lower()] = kernels.panels[kind].family.decode() if kind >= 0 else "vectors"
