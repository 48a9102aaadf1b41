"""The KV cache for language models on CPUs.

Keys and values are stored in 4 or 8 bits (or as float32, float16, bfloat16), and attention reads the stored bytes.

- Caches: `KVCache` (one sequence), `RingKVCache` (a sliding window), `PagedKVCache` (many sequences over one pool),
  `MLAKVCache` and `PagedMLAKVCache` (latent rows), `MultiHeadKVCache` (head by head).
- Formats: a ``dtype`` names what is stored; `KVFormat` describes it, `PRESETS` has names, `fidelity` measures the cost, `calibrate` fits
  it to a model.
- A cache at one point in time: `Snapshot`, `load`, `PromptCache`.
- Finished prompts in fewer bits: `KVCacheCompressor`, `PrefixKVCache`.
- Attention without a cache: `attention`, `merge_states`.
- Planning and settings: `plan`, `config`, `set_num_threads`, `use_isa`.

What these take and return, and seldom is named, is in its module: ``kvfast.planning`` (shapes of models, plans of memory),
``kvfast.attention.explained`` (the plan of a call), ``kvfast.caches.multi_head`` (`MultiHeadConfig`),
``kvfast.caches.buffer_layout`` (memory for a pool), ``kvfast.core.hardware`` (how fast the machine reads and multiplies).

The rooms inside, from the bottom up; ``docs/architecture.md`` has the rules between them:

- simd, core: kernels in C; the kernel table, threads, array arguments
- codec, attention: formats, codes and scales of a token; what a query sees, and its scores over blocks
- storage, files: the pool, its blocks and float rows, tables of blocks and rings; the bytes of a sequence outside the process
- caches, errors: the classes and exceptions above
- handles, capi: ``kvfast.h``, for C and Cython
- compression, prompts, planning: prompts in fewer bits, prompts in stores, plans of memory
- engine, engines: names for engines; kvfast inside vLLM, transformers, PyTorch and llama.cpp
- vllm, transformers, torch, llama_cpp: the public names of engines
- tools: the example runtime, the evaluation of formats, the commands
- llama, evaluation: the public names of the first two
"""

from __future__ import annotations

import os
from typing import Any

import kvfast.core.spin as _spin  # noqa: F401  (before what loads OpenMP)
from kvfast.attention.dense import attention, merge_states
from kvfast.caches.contiguous import KVCache
from kvfast.caches.loading import load
from kvfast.caches.mla import MLAKVCache
from kvfast.caches.multi_head import MultiHeadKVCache
from kvfast.caches.paged import PagedKVCache
from kvfast.caches.paged_mla import PagedMLAKVCache
from kvfast.caches.paged_sequence import Sequence
from kvfast.caches.ring import RingKVCache
from kvfast.caches.snapshot import Snapshot
from kvfast.codec.calibration import Calibration, calibrate
from kvfast.codec.formats import PRESETS, KVFormat
from kvfast.codec.projection import split_qkv_norm_rope
from kvfast.codec.quantize import dequantize, quantize
from kvfast.codec.rope import Rope
from kvfast.compression import CompressedKV, Hybrid, KVCacheCompressor, LowRank, PrefixKVCache, Quantize, VectorQuantization
from kvfast.core import prefetching as _prefetching
from kvfast.core.kernels import active_isa, available_isas, use_isa
from kvfast.core.kernels import cpu_features as _cpu_features
from kvfast.core.kernels import default_precision as _default_precision
from kvfast.core.numa import numa_state as _numa_state
from kvfast.core.threads import get_num_threads, has_openmp, set_num_threads
from kvfast.core.threads import thread_source as _thread_source
from kvfast.errors import (
    CacheFullError,
    CorruptFileError,
    DimensionMismatchError,
    IncompatibleSnapshotError,
    MissingCheckpointError,
    NonFiniteInputError,
    StoreError,
)
from kvfast.planning.fidelity import choose_format, fidelity
from kvfast.planning.plan import plan
from kvfast.prompts.prompt_cache import PromptCache

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022  (by what it is for; the reference has the same groups)
    # caches
    "KVCache",
    "RingKVCache",
    "PagedKVCache",
    "Sequence",
    "MLAKVCache",
    "PagedMLAKVCache",
    "MultiHeadKVCache",
    "Rope",
    # formats
    "KVFormat",
    "PRESETS",
    "Calibration",
    "calibrate",
    "fidelity",
    "choose_format",
    # a cache at one point in time, and prompts that are kept
    "Snapshot",
    "load",
    "PromptCache",
    # finished prompts in fewer bits
    "KVCacheCompressor",
    "CompressedKV",
    "PrefixKVCache",
    "LowRank",
    "Hybrid",
    "VectorQuantization",
    "Quantize",
    # arrays, without a cache
    "attention",
    "merge_states",
    "split_qkv_norm_rope",
    "quantize",
    "dequantize",
    # the machine, and what fits it
    "plan",
    "config",
    "show_config",
    "get_num_threads",
    "set_num_threads",
    "active_isa",
    "available_isas",
    "use_isa",
    "get_include",
    # errors
    "CacheFullError",
    "CorruptFileError",
    "DimensionMismatchError",
    "IncompatibleSnapshotError",
    "MissingCheckpointError",
    "NonFiniteInputError",
    "StoreError",
]


def config() -> dict[str, Any]:
    """Version, ISA tiers, precision, threads, CPU features, prefetches and nodes of memory of this installation.

    Returns
    -------
    dict
    """
    return {
        "version": __version__,
        "active_isa": active_isa(),
        "available_isas": available_isas(),
        "precision": _default_precision(),
        "openmp": has_openmp(),
        "threads": _thread_source(),
        "num_threads": get_num_threads(),
        "cpu_features": _cpu_features(),
        "prefetch": dict(zip(("level", "source"), _prefetching.in_use(), strict=True)),
        "numa": dict(zip(("policy", "memory"), _numa_state(), strict=True)),
    }


def get_include() -> str:
    """The folder of ``kvfast.h`` and ``simd/kernels.h``, for compiling against kvfast.

    Returns
    -------
    str
    """
    return os.path.dirname(__file__)


def show_config() -> None:
    """Print `config()`."""
    settings = config()
    features = [name for name, present in settings["cpu_features"].items() if present]
    print(f"kvfast {settings['version']}")
    print(f"ISA tier:     {settings['active_isa']} (available: {', '.join(settings['available_isas'])})")
    print(f"Precision:    {settings['precision']}")
    print(f"CPU features: {', '.join(features) or 'none known'}")
    print("Prefetches:   of level {level} (from {source})".format(**settings["prefetch"]))
    print(f"Threads:      {settings['num_threads']} (of {settings['threads']})")
    print(f"Memory:       {settings['numa']['memory']} (policy {settings['numa']['policy']})")
