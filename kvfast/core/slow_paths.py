"""Slow paths: each makes a call slower by more than a tenth. `explain` lists them; ``KVFAST_LOG=1`` logs each once.

Paths that cost less in measurements are not listed: queries whose rows are not contiguous, float16 and bfloat16 instead of
float32, rotation with ``interleaved``, blocks of 16 tokens. The texts have no ratios, which depend on the machine:
``python -m kvfast bench`` with ``KVFAST_ISA`` shows them.
"""

import os
import threading

from kvfast.core.kernels import active_isa, available_isas, cpu_features
from kvfast.core.text import counted
from kvfast.core.threads import has_openmp, lost_threads

LOGS = os.environ.get("KVFAST_LOG", "") not in ("", "0")

_TIERS = {
    "avx512": "integers are decoded more slowly than with AVX-512 VNNI; float16 is not",
    "avx_vnni": "integers are decoded more slowly than with AVX-512 VNNI, and float16 a little more slowly",
    "avx2": "integers are decoded more slowly than with AVX-512 VNNI, and float16 a little more slowly",
    "sse2": "integers and float16 are decoded several times more slowly than with AVX2 or AVX-512",
    "neon_dotprod": "integers take more products than with those of 8-bit matrices",
    "neon": "without dot products integers take more multiplications",
    "scalar": "everything is computed many times more slowly than with vector instructions",
}
_NEEDS = {
    "avx512": ("avx512vnni",),
    "avx_vnni": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"),
    "avx2": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"),
    "sse2": ("avx2", "fma"),
    "neon_dotprod": ("i8mm",),
    "neon": ("dotprod",),
    "scalar": ("sse2",),
}
_GATHERED = {"k": "keys", "v": "values", "qkv": "a fused projection"}

_logged: set[str] = set()
_lock = threading.Lock()


def notes(sides, work, num_threads, num_tasks, wanted_threads, packed=False, uncounted=0, stays_exact=None):
    """The slow paths of a call of attend, each as (kind, text).

    `sides` has the head_dim of keys and that of values, and whether the format rotates them; `work` is as in ``num_threads_for``.
    `packed`: many queries are computed without the matrix unit because of the width of the codes. `uncounted` tokens before those of the
    queries stay float rows. `stays_exact` is the format of a fast call that no fast kernel reads, or None.
    """
    found = [_tier(), *(_rotation(*side) for side in sides.items()), *map(_padding, sides), _threads(work, wanted_threads)]
    found += [
        packed
        and (
            "packed",
            "codes of 2, 3, 5, 6 or 7 bits are multiplied without the matrix unit: for long prompts, int8 and int4 are faster",
        ),
        uncounted
        and (
            "uncounted",
            f"{uncounted} tokens were never counted, so their blocks stay float16 and are not encoded: call advance after each step",
        ),
        stays_exact and ("exact", f"the tier {active_isa()} has no fast kernels for {stays_exact}: attention is exact"),
        num_tasks < num_threads
        and ("tasks", f"{num_threads} threads share {counted(num_tasks, 'task')}: num_splits=0 or a larger num_splits makes more"),
    ]
    return [note for note in found if note]


def _tier():
    isa, isas = active_isa(), available_isas()
    if isa not in _TIERS:
        return None
    if isa != isas[0]:
        return "tier", f"the tier {isa} was asked for (KVFAST_ISA, use_isa), and this CPU can run {isas[0]}: {_TIERS[isa]}"
    features = cpu_features()
    missing = [name for name in _NEEDS[isa] if not features.get(name)]
    lacks = f"lacks {', '.join(missing)}" if missing else "can run no other tier of this build"
    return "tier", f"the tier is {isa}, as this CPU {lacks}: {_TIERS[isa]}"


def _rotation(head_dim, rotated):
    odd = head_dim // (head_dim & -head_dim)
    if not rotated or head_dim % 16 == 0 or odd == 1:
        return None
    return "rotation", (
        f"head_dim {head_dim} is {head_dim // odd} x {odd}, so rotating a row takes a sum of {odd} for each "
        f"element, when it is appended and when it is a query; choose a multiple of 16, or a format without rotation"
    )


def _padding(head_dim):
    padded = -(-head_dim // 16) * 16
    if padded <= 1.1 * head_dim:
        return None
    return "padding", (
        f"head_dim {head_dim} is stored as {padded}: {padded / head_dim - 1:.0%} more bytes are stored and read; "
        f"a multiple of 16 needs no padding"
    )


def _threads(work, wanted):
    lost = lost_threads(wanted, work)
    if lost <= 1:
        return None
    if has_openmp():
        return "fork", (
            f"this process was forked from one that had used OpenMP, and its threads could not be ended before: 1 thread "
            f"instead of {lost}; fork before the first call, or start processes by spawn"
        )
    return "threads", f"this build has neither OpenMP nor threads of the system: 1 thread instead of {lost}"


def log_gathered(name):
    """Log that rows had to be copied to become contiguous."""
    if name in _GATHERED:
        text = f"the rows of {_GATHERED[name]} are not contiguous in memory and are copied first: make the last axis contiguous"
        log([(f"gathered {name}", text)])


def log(found):
    """Log the notes whose kind has not been logged before."""
    for kind, text in found:
        with _lock:
            is_new = kind not in _logged
            _logged.add(kind)
            logger = _logger()
        if is_new:
            logger.warning(text)


def _logger():
    """The logger "kvfast"; it writes to stderr if logging is not configured."""
    import logging

    logger = logging.getLogger("kvfast")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("kvfast: %(message)s"))
        logger.addHandler(handler)
    return logger
