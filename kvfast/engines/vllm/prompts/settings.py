"""What the user asks for, and all that must be equal for stored bytes to be usable."""

import json
import os
from dataclasses import dataclass
from math import lcm

import torch
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from kvfast.engine import FILE_VERSION, ChunkStore, check_size, files_digest, minor_of
from kvfast.engines.vllm import by_layer
from kvfast.engines.vllm.formats import format_of
from kvfast.engines.vllm.versions import installed_version, is_tested

logger = init_logger("vllm.kvfast")

# Seconds to wait for a store while no request computes: the steps of an idle engine keep the interpreter from the threads that fetch.
IDLE_WAIT = 0.005
SECRET = "KVFAST_PROMPT_SECRET"


@dataclass
class Options:
    """The ``kv_connector_extra_config`` of `KVFastConnector`; the guide of vLLM describes it."""

    url: str
    chunk_tokens: int = 128
    max_bytes: int | None = None
    near: str | None = None
    time_limit: float = 5.0
    model: str | None = None

    @classmethod
    def of(cls, vllm_config):
        given = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        unknown = sorted(set(given) - set(cls.__dataclass_fields__))
        if unknown or not isinstance(given.get("url"), str):
            raise ValueError(
                f"kv_connector_extra_config of KVFastConnector must have a url, and may have "
                f"{', '.join(name for name in cls.__dataclass_fields__ if name != 'url')}, got {sorted(given) or 'nothing'}"
            )
        options = cls(**given)
        for name in ("near", "model"):
            if not isinstance(given.get(name, ""), str):
                raise TypeError(f"{name} of kv_connector_extra_config must be a text, got {given[name]!r}")
        check_size(options.chunk_tokens, "chunk_tokens", 16, 1 << 20)
        if options.max_bytes is not None:
            check_size(options.max_bytes, "max_bytes", 0)
        return options

    def open(self, figures=None):
        """The store, which counts in `figures`; ModuleNotFoundError without the packages that its kind needs."""
        return ChunkStore(self.url, self.max_bytes, self.near, secret=secret(), time_limit=self.time_limit, stats=figures, tell=_tell)


def _tell(text, kind):
    (logger.info if kind == "over" else logger.warning)("%s", text)


def secret():
    """What separates tenants of a store, at most 64 bytes; not in the configuration, which other users see in the list of processes."""
    value = os.environ.get(SECRET, "").encode()
    if len(value) > 64:
        raise ValueError(f"{SECRET} must have at most 64 bytes, got {len(value)}")
    return value


@dataclass
class Group:
    """A KV cache group of vLLM."""

    block_size: int
    window: int | None  # tokens that a query sees, or None for all
    nbytes: int  # of a block, over all layers
    has_states: bool = False  # of the end of a block, in place of keys and values

    def blocks(self, chunk_tokens):
        """Blocks of a chunk."""
        return 1 if self.has_states else chunk_tokens // self.block_size


def groups_of(kv_cache_config):
    """The groups of a model whose layers all are attention, or have states that vLLM keeps at ends of blocks; ValueError for another
    model."""
    return [_group(one.kv_cache_spec, len(one.layer_names)) for one in kv_cache_config.kv_cache_groups]


def _kinds_of(spec):
    """The specs of the layers of a group."""
    return [*spec.kv_cache_specs.values()] if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def _group(spec, num_layers):
    kinds = _kinds_of(spec)
    if all(isinstance(one, MambaSpec) and one.mamba_cache_mode == "align" for one in kinds):
        return Group(spec.block_size, 1, sum(one.page_size_bytes for one in kinds), True)
    windows = {one.sliding_window if isinstance(one, SlidingWindowSpec) else None for one in kinds}
    if len(windows) != 1 or not all(isinstance(one, (FullAttentionSpec, SlidingWindowSpec)) for one in kinds):
        raise ValueError(
            f"KVFastConnector stores keys and values of attention, and states where vLLM caches prefixes, and the model has layers of "
            f"{', '.join(sorted({type(one).__name__ for one in kinds}))}: leave --kv-transfer-config out"
        )
    nbytes = spec.page_size_bytes * (1 if isinstance(spec, UniformTypeKVCacheSpecs) else num_layers)
    return Group(spec.block_size, windows.pop(), nbytes)


def chunk_tokens_of(options, groups):
    """Tokens of a chunk: those that were asked for, or more if the blocks of a group need it."""
    size = lcm(*(group.block_size for group in groups))
    return -(-options.chunk_tokens // size) * size


def parts_of(vllm_config, groups):
    """The names of the parts of a chunk: [rank][group]."""
    parallel = vllm_config.parallel_config
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if parallel.world_size != tensor * pipeline or parallel.decode_context_parallel_size > 1:
        raise ValueError("KVFastConnector knows tensor and pipeline parallelism alone: leave --kv-transfer-config out")
    ranks = [f"{i} of {tensor}, {j} of {pipeline}" for j in range(pipeline) for i in range(tensor)]
    return [[f"{rank}, group {i}" for i in range(len(groups))] for rank in ranks]


def settings_text(vllm_config, kv_cache_config, options, folder):
    """The model, the form of its blocks, and what wrote them. Relative paths are in `folder`."""
    formats = [format_of(kind) for one in kv_cache_config.kv_cache_groups for kind in _kinds_of(one.kv_cache_spec)]
    # vLLM's own layouts depend on the processor, those of kvfast do not. A name may stand for several formats.
    stored = [torch.backends.cpu.get_cpu_capability() if fmt is None else str(fmt) for fmt in formats]
    groups = [[repr(one.kv_cache_spec), len(one.layer_names)] for one in kv_cache_config.kv_cache_groups]  # with the layers of drafts
    model = model_name(vllm_config, folder) if options.model is None else options.model
    version, dtype = minor_of(installed_version()), vllm_config.cache_config.cache_dtype
    return json.dumps(["vllm", version, is_tested(installed_version()), FILE_VERSION, model, dtype, groups, stored, *by_layer.asked()])


def model_name(vllm_config, folder):
    """What tells the weights of a model from others, and those of the model that drafts for it."""
    models = [vllm_config.model_config]
    drafts = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if drafts is not None and drafts.model != models[0].model:
        models.append(drafts)
    named = [str(vllm_config.load_config.load_format), *(_model_name(one, folder) for one in models)]
    return json.dumps(named, sort_keys=True, default=str)


def _model_name(model, folder):
    """A model's configuration, and a digest of its files, or their revision."""
    config = {name: value for name, value in model.hf_config.to_dict().items() if name[0] != "_" and name != "transformers_version"}
    revision = [model.model, model.revision, getattr(model.hf_config, "_commit_hash", None)]
    return [config, str(model.dtype), str(model.quantization), files_digest(os.path.join(folder, model.model)) or revision]
