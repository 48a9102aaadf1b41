"""kvfast: the KV cache for language models on CPUs.

Keys and values are stored as INT8 or INT4, rotated, centred or with scales per channel where that keeps
them more faithful (or as float32, float16, bfloat16), and attention is computed straight on the stored
bytes.

How the package is built, from the bottom up; each room imports only from those before it::

    simd/                   C: arithmetic on one row or one tile, once per instruction set
    _kernels, _openmp, _spin, _flags, slow_paths
                            the table of kernels and the CPU dispatch; the thread policy; whose turn it is; what is told of
                            slow calls
    interchange             arrays of other libraries, by DLPack and the like
    _arrays, blocks, quant  array arguments; the block format and its memory; the public codecs
    span, attention, options, attend_plan, attend_call
                            what a task of attention reads; fused attention over blocks; its arguments; what is told of
                            a call; a call, cut into tasks
    plain, codebook, books  attention on arrays without a cache; how codebooks are learned; attention on indices into them
    encode, fused           rows into blocks; split, norm and rotation on the way
    formats, finish         what is stored of a token; blocks that are encoded as a whole
    block_memory, float_rows, prefix, pool
                            memory of blocks, and how many owners each has; float rows of tokens beside it; blocks known by
                            their tokens; the pool that has all three
    block_map, table, ring, transfer
                            which block holds which position of a sequence; its tokens; one that forgets; copies from pool to
                            pool
    sequence, streams       all layers of one sequence; their bytes as files know them
    heads, paged            some heads of one layer; batches of many in one pool
    rope                    tables of angles
    state, cache_file       a cache as plain arrays; as a file (extra ``files``)
    snapshot                a cache at one point in time
    layer_groups, storage_properties, latent_rows, stored_sequence, sequence_cache, cache, mla_cache, ring_cache, paged_sequence,
    paged_storage, paged_cache, paged_mla_cache, prompt_cache, multi_head, multi_head_config
                            the classes that users see
    capi                    the same for C and Cython, without Python in between (``kvfast.h``)
    ggml, llama_cpp_state   ggml's rows; the state of a sequence of llama.cpp (both extra ``llama``)
    compression/            finished keys and values in fewer bits
    fidelity, machine       what a storage format costs on tensors of one's own; what the machine can do at most
    model_shape, memory, planning
                            what a model keeps of a token; what the machine has; what a cache will take, told before it is made
    bench/, plotting        how fast it is here (extra ``bench``); files with plots (extra ``plot``)
    llama/, cli             an example runtime (extra ``llama``) and ``python -m kvfast``
    transformers/           a cache and an attention for Hugging Face models (extra ``transformers``)

A sequence is a table of blocks of a pool. The caches differ in the pool and the table only: `KVCache` has a pool
of its own, `RingKVCache` also drops blocks that left the window, the sequences of a `PagedKVCache` share one. A
`Snapshot` is one more table: a block with several owners is copied before one of them writes to it.
"""

from __future__ import annotations

import os
from typing import Any

import kvfast.core.spin as _spin  # noqa: F401  (before what loads OpenMP)
from kvfast.attention.dense import attention, merge_states
from kvfast.attention.plan import AttendItem, AttendPlan
from kvfast.caches.contiguous import KVCache
from kvfast.caches.loading import load
from kvfast.caches.mla import MLAKVCache
from kvfast.caches.multi_head import MultiHeadKVCache
from kvfast.caches.multi_head_config import MultiHeadConfig
from kvfast.caches.paged import PagedKVCache
from kvfast.caches.paged_mla import MLASequence, PagedMLAKVCache
from kvfast.caches.paged_sequence import Sequence
from kvfast.caches.prompt_cache import PromptCache
from kvfast.caches.ring import RingKVCache
from kvfast.caches.snapshot import Snapshot
from kvfast.codec.formats import PRESETS, KVFormat
from kvfast.codec.projection import split_qkv_norm_rope
from kvfast.codec.quantize import dequantize, quantize
from kvfast.compression import (
    CompressedKV,
    CompressedShape,
    Hybrid,
    KVCacheCompressor,
    LowRank,
    PrefixKVCache,
    Quantize,
    ReconstructionError,
    VectorQuantization,
)
from kvfast.core.hardware import peak_rate, read_bandwidth
from kvfast.core.kernels import active_isa, available_isas, cpu_features, use_isa
from kvfast.core.threads import get_num_threads, has_openmp, set_num_threads
from kvfast.errors import (
    CacheFullError,
    CorruptFileError,
    DimensionMismatchError,
    IncompatibleSnapshotError,
    NonFiniteInputError,
)
from kvfast.interop import ggml, llama_cpp_state  # noqa: F401  (kvfast.ggml, kvfast.llama_cpp_state)
from kvfast.planning.fidelity import Fidelity, choose_format, fidelity
from kvfast.planning.model_shape import LayerShape, ModelShape
from kvfast.planning.plan import DtypePlan, MemoryPlan, plan

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "AttendItem",
    "AttendPlan",
    "CacheFullError",
    "CompressedKV",
    "CompressedShape",
    "CorruptFileError",
    "DimensionMismatchError",
    "DtypePlan",
    "Fidelity",
    "Hybrid",
    "IncompatibleSnapshotError",
    "KVCache",
    "KVCacheCompressor",
    "KVFormat",
    "LayerShape",
    "LowRank",
    "MLAKVCache",
    "MLASequence",
    "MemoryPlan",
    "ModelShape",
    "MultiHeadConfig",
    "MultiHeadKVCache",
    "NonFiniteInputError",
    "PagedKVCache",
    "PagedMLAKVCache",
    "PrefixKVCache",
    "PromptCache",
    "Quantize",
    "ReconstructionError",
    "RingKVCache",
    "Sequence",
    "Snapshot",
    "VectorQuantization",
    "active_isa",
    "attention",
    "available_isas",
    "choose_format",
    "config",
    "cpu_features",
    "dequantize",
    "fidelity",
    "get_include",
    "get_num_threads",
    "load",
    "merge_states",
    "peak_rate",
    "plan",
    "quantize",
    "read_bandwidth",
    "set_num_threads",
    "show_config",
    "split_qkv_norm_rope",
    "use_isa",
]


def config() -> dict[str, Any]:
    """Version, ISA tiers, threads and CPU features of this installation.

    Returns
    -------
    dict
    """
    return {
        "version": __version__,
        "active_isa": active_isa(),
        "available_isas": available_isas(),
        "openmp": has_openmp(),
        "num_threads": get_num_threads(),
        "cpu_features": cpu_features(),
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
    print(f"CPU features: {', '.join(features) or 'none known'}")
    print(f"OpenMP:       {'yes' if settings['openmp'] else 'no'}, {settings['num_threads']} threads")
