"""The memory that the cache of a model will take on this machine, in every format, before it is created."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import asdict, dataclass, replace

from kvfast.codec.dtypes import FLOATS, NAMES, dtype_row
from kvfast.codec.formats import PRESETS, KVFormat, block_size_of, formats_of, latent_format
from kvfast.core.checks import check_choice, check_positive, check_size
from kvfast.core.hardware import read_bandwidth
from kvfast.core.limits import MAX_TOKENS, PIECE, SLAB_BLOCKS
from kvfast.core.text import one_of, shown
from kvfast.planning.key_bias import key_bias_note
from kvfast.planning.memory import available_memory
from kvfast.planning.model_shape import ModelShape, read_shape
from kvfast.planning.plan_text import plain_text
from kvfast.planning.vllm_blocks import ENGINES, KEEPS_FIRST_AND_LAST, VLLM_BLOCK_SIZE, VLLM_FORMATS, VLLM_NAMES, BlocksOfVLLM
from kvfast.storage.kinds import BLOCK_SIZE, ROLLBACK, ring_blocks
from kvfast.storage.memory.pool import BlockPool

# Formats that are planned by default: all presets, then the other storage dtypes, from many bits to few.
_OTHERS = sorted([name for name in NAMES if name not in (*FLOATS, *PRESETS)], key=lambda name: -dtype_row(name).bits)
DTYPES = (*FLOATS, *PRESETS, *_OTHERS)
BANDWIDTH_PASSES = 5
NOTE_OF_VLLM = (
    f"blocks of {VLLM_BLOCK_SIZE} tokens; auto is the model's dtype, taken as bfloat16; turboquant modes leave the first and last "
    f"{KEEPS_FIRST_AND_LAST} layers in it"
)


@dataclass(frozen=True)
class DtypePlan:
    """One format in a `MemoryPlan`.

    Parameters
    ----------
    dtype : str
        Name of the format, or ``"mixed"`` where layers differ.
    cache : str
        The class that holds a sequence; two classes, joined by a plus, if only some layers have latent rows. For vLLM, the format
        of kvfast that vLLM's name stands for.
    bytes_per_token : int
        Over all layers, like the `bytes_per_token` of the cache.
    bytes_per_sequence : int
        Largest size of a sequence while it grows to `MemoryPlan.context` tokens: whole blocks, the float rows of its newest tokens, and
        `MemoryPlan.checkpoints` of recurrent states.
    bytes_of_prompt : int
        Largest size if all of these tokens come in one append. Until `advance`, all tokens have float rows in formats that seal
        blocks, and no token has left a window. If a prompt comes in chunks, this is true of one chunk only.
    nbytes : int
        Bytes of all sequences of the batch.
    bytes_read : int
        Bytes of keys and values that one token of one sequence reads at the end of the context.
    fits : bool or None
        Whether the batch fits into the memory. None if the memory is unknown; so are the next two fields.
    longest_context : int or None
        Tokens that every sequence of the batch can reach. Also None if there is no limit, because all layers have windows.
    largest_batch : int or None
        Largest number of sequences with this context.
    most_checkpoints : int or None
        Checkpoints of recurrent states that each sequence of the batch has room for, at the end of the context. None for a model
        without recurrent layers, and if the memory is unknown.
    tokens_per_second : float
        Upper bound for the batch at the end of the context: the speed if reading keys and values took all the time.
    tokens_per_second_with_weights : float or None
        The same including the model's weights, read once per step of the batch; None if their size is unknown.
    """

    dtype: str
    cache: str
    bytes_per_token: int
    bytes_per_sequence: int
    bytes_of_prompt: int
    nbytes: int
    bytes_read: int
    fits: bool | None
    longest_context: int | None
    largest_batch: int | None
    most_checkpoints: int | None
    tokens_per_second: float
    tokens_per_second_with_weights: float | None

    @property
    def tokens_per_gib(self) -> int:
        """Tokens in a gibibyte, if all layers keep all of them."""
        return (1 << 30) // self.bytes_per_token


@dataclass(frozen=True, repr=False)
class MemoryPlan:
    """The memory of a model's cache in several formats; see `kvfast.plan`.

    ``plan["int8"]`` is the `DtypePlan` of one format. ``print(plan)`` prints all of them as a table, which ``python -m kvfast
    plan`` prints too.

    Parameters
    ----------
    model : ModelShape
        With the weights that the plan was made with.
    context, batch : int
    memory : int or None
        Bytes for keys and values: what the weights leave of the memory. None if the memory is unknown.
    bandwidth : float
        Bytes per second that the machine can read.
    dtypes : tuple of DtypePlan
    notes : tuple of str
        Notes on what the figures leave out.
    engine : str
        ``"kvfast"`` or ``"vllm"``: whose blocks hold the tokens.
    checkpoints : int
        Of recurrent states, in each sequence; 0 for a model without recurrent layers, and in vLLM, which keeps states otherwise.
    """

    model: ModelShape
    context: int
    batch: int
    memory: int | None
    bandwidth: float
    dtypes: tuple[DtypePlan, ...]
    notes: tuple[str, ...] = ()
    engine: str = "kvfast"
    checkpoints: int = 0

    def __str__(self):
        return plain_text(self)

    def __repr__(self):
        numbers = f"context={self.context}, batch={self.batch}, memory={self.memory}"
        return f"MemoryPlan({self.model.name}, {numbers}, {len(self.dtypes)} formats)"

    def __getitem__(self, dtype):
        for one in self.dtypes:
            if one.dtype == dtype:
                return one
        raise KeyError(dtype)

    def to_dict(self):
        """Plain values, for JSON."""
        return asdict(self)


def plan(
    model,
    *,
    context=None,
    batch=1,
    dtype=None,
    memory=None,
    bandwidth=None,
    weight_bytes=None,
    weight_bytes_read=None,
    engine="kvfast",
    checkpoints=1,
    drafts=None,
):
    """Memory that the cache of a model will take, and its largest possible speed, for each storage format: a `MemoryPlan`.

    Parameters
    ----------
    model : path-like, mapping, object with ``to_dict``, or ModelShape
        A ``config.json`` of Hugging Face, its folder, a GGUF file (with the packages of ``kvfast[llama]``), or the
        contents of such a configuration, for example ``model.config`` of transformers. Multi-head, grouped, multi-query
        and latent attention are supported, layers with windows, and layers that keep no keys and values (hybrids).
    context : int, optional
        Tokens of each sequence; by default the longest context that the model was made for, or 4,096 if that is unknown.
    batch : int
        Number of sequences, each with its own cache. A `PagedKVCache` with the same number of blocks takes the same memory.
    dtype : str, dtype or KVFormat, or a list of them, optional
        Formats to compare; by default all presets and all storage dtypes. For a plan with a format for each layer, pass ``[[...]]``.
    memory : int, optional
        Bytes of memory for the weights and for keys and values; by default what the machine has available now, within the limits
        of its cgroup. The weights are subtracted from it if their size is known.
    bandwidth : float, optional
        Bytes per second that the machine can read. Measured by default, which takes less than a second.
    weight_bytes : int, optional
        Bytes of the model's weights. Known from the file if `model` is a GGUF file.
    weight_bytes_read : int, optional
        Bytes of the weights that one token reads: less than all in a mixture of experts. By default all, or the same share as
        in the GGUF file.
    engine : str
        ``"kvfast"``, or ``"vllm"`` for kvfast's formats in the blocks of vLLM. Then `dtype` takes vLLM's names of
        ``kv_cache_dtype``, by default all of them. `memory` is then `VLLM_CPU_KVCACHE_SPACE` in bytes, for keys and values alone:
        no weights are subtracted from it. vLLM need not be installed.
    checkpoints : int
        For a model with recurrent layers: the checkpoints of their states in each sequence, see `KVCache.add_checkpoint`. The states
        with which the runtime computes come on top.
    drafts : as `model`, or int, optional
        For vLLM: what drafts tokens, whose layers take room in the same blocks. The configuration of a draft model, of EAGLE or of
        DFlash; or how many layers like its last one the model has for that (MTP).

    Raises
    ------
    ValueError
        For a missing or wrong key, which the message names, or a size out of range.
    ModuleNotFoundError
        For a GGUF file, without the packages of ``kvfast[llama]``.

    Notes
    -----
    The sizes are those of the caches themselves: `KVCache` with `max_seq_len`, `RingKVCache` if layers have windows, or
    `MLAKVCache`. Scales, padding and whole blocks are included. Formats that latent rows cannot have are left out, unless
    `dtype` names them.

    Examples
    --------
    >>> import kvfast
    >>> llama = dict(model_type="llama", num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64)
    >>> ours = kvfast.plan(llama, context=32768, batch=8, memory=16 << 30, bandwidth=20e9)
    >>> ours["int8"].bytes_per_token, ours["int8"].nbytes, ours["int8"].longest_context
    (17408, 4597219328, 123072)
    >>> print(kvfast.plan(llama, context=32768, dtype=["int8", "int4"], memory=4 << 30, bandwidth=20e9, weight_bytes=3 << 30))
    llama: 16 layers x 8 KV heads of 64
    1 sequence of 32,768 tokens
    ---------------------------------------------------------------------
            bytes a                   longest  largest  tokens/s     with
    dtype     token        all  fits  context    batch   at most  weights
    ---------------------------------------------------------------------
    int8     17,408  548.0 MiB   yes   61,376        1      35.0      5.3
    int4 *    8,960  284.0 MiB   yes  119,360        3      67.6      5.7
    ---------------------------------------------------------------------
    1.0 GiB of memory for keys and values, next to 3.0 GiB of weights; 20.0 GB/s read.
    Tokens per second, of all sequences, are at most these: they come from the read bandwidth alone. Computing takes time, too.
    * the default format.
    A sequence whose 32,768 tokens come in one append takes more until `advance`: int8 1.5 GiB (does not fit), int4 1.3 GiB (does not fit).
    """
    shape = read_shape(model)
    context = shape.context_length or 4096 if context is None else context
    context, batch = check_size(context, "context", 1, MAX_TOKENS), check_size(batch, "batch", 1, MAX_TOKENS)
    shape = _with_weights(shape, weight_bytes, weight_bytes_read)
    check_choice(engine, "engine", ENGINES, one_of(ENGINES))
    drafting = ()
    if drafts is not None:
        if engine != "vllm":
            raise ValueError("drafts share the blocks of the model with engine='vllm' alone: else plan the draft model for itself")
        is_number = hasattr(drafts, "__index__")
        drafting = shape.layers[-1:] * check_size(drafts, "drafts", 1, 1024) if is_number else read_shape(drafts).layers
        shape = replace(shape, layers=shape.layers + drafting)
    notes = shape.notes
    if engine == "vllm":
        caches = [(name, [BlocksOfVLLM(shape, name, num_drafts=len(drafting))]) for name in _names_of_vllm(dtype)]
        notes += (NOTE_OF_VLLM,)
        bias = key_bias_note(shape.name, {name: VLLM_FORMATS[name] for name, _ in caches}, "int4_per_token_head")
    else:
        wanted = _chosen(dtype, shape)
        caches = [(name, _caches(shape, one)) for name, one in wanted]
        formats = [each for _, one in wanted for each in formats_of(one, None, None, len(shape.layers))]
        bias = key_bias_note(shape.name, {str(one): one for one in formats})
    notes += () if bias is None else (bias,)
    beside = shape.weight_bytes or 0
    if memory is None:
        memory = available_memory()
    else:
        memory = check_size(memory, "memory", 0)
        if engine == "vllm":
            beside = 0
    memory = None if memory is None else max(0, memory - beside)
    if bandwidth is None:
        bandwidth = max(read_bandwidth() for _ in range(BANDWIDTH_PASSES))
    check_positive(bandwidth, "bandwidth", "number of bytes per second", finite=True)
    checkpoints = check_size(checkpoints, "checkpoints", 0, MAX_TOKENS)
    state_bytes = shape.state_bytes if engine == "kvfast" else 0
    dtypes = tuple(
        _dtype_plan(name, parts, context, batch, memory, bandwidth, shape.weight_bytes_read, state_bytes, checkpoints)
        for name, parts in caches
    )
    return MemoryPlan(shape, context, batch, memory, float(bandwidth), dtypes, notes, engine, checkpoints if state_bytes else 0)


def _with_weights(shape, weight_bytes, weight_bytes_read):
    """The shape with the weights that the arguments tell; the weights of its file replace arguments that are None."""
    total, read = shape.weight_bytes, shape.weight_bytes_read
    if weight_bytes is not None:
        weight_bytes = check_size(weight_bytes, "weight_bytes", 1)
        read = weight_bytes if not total or read is None else max(1, weight_bytes * read // total)
        total = weight_bytes
    if weight_bytes_read is not None:
        if total is None:
            raise ValueError("weight_bytes_read needs weight_bytes, the size of all weights")
        read = check_size(weight_bytes_read, "weight_bytes_read", 1, total)
    return replace(shape, weight_bytes=total, weight_bytes_read=total if read is None else read)


def _names_of_vllm(dtype):
    names = list(VLLM_NAMES) if dtype is None else dtype if isinstance(dtype, (list, tuple)) else [dtype]
    for name in names:
        if name not in VLLM_FORMATS:
            raise ValueError(f"dtype must be {one_of([*VLLM_NAMES, 'kvfast_ and a preset'])} for engine='vllm', got {shown(name)}")
    return names


def _chosen(dtype, shape):
    """(name, format) pairs; a format may be a list with one per layer."""
    if dtype is None:
        latent = any(layer.rope_dim is not None for layer in shape.layers)
        return [(name, name) for name in DTYPES if not (latent and _is_refused(name))]
    wanted = []
    for one in dtype if isinstance(dtype, (list, tuple)) else [dtype]:
        formats = [str(each) for each in formats_of(one, None, None, len(shape.layers))]
        wanted.append((formats[0] if len(set(formats)) == 1 else "mixed", one))
    return wanted


def _is_refused(name):
    try:
        latent_format(KVFormat.of(name))
    except ValueError:
        return True
    return False


def _caches(shape, dtype):
    """One `_Cache` per set of layers that one cache can hold: layers with keys and values, and latent rows of each shape."""
    formats = formats_of(dtype, None, None, len(shape.layers))
    groups = {}
    for layer, form in zip(shape.layers, formats):
        key = None if layer.rope_dim is None else (layer.head_dim, layer.rope_dim)
        groups.setdefault(key, []).append(((layer.sliding_window, layer.num_kv_heads, layer.head_dim, layer.v_head_dim), form))
    return [_Cache(None if key is None else key[1], layers) for key, layers in groups.items()]


class _Cache:
    """The cache of one sequence, as pools without memory: one pool per window and shape of layers, as in the real caches."""

    def __init__(self, rope_dim, layers):
        self.rope_dim = rope_dim
        if rope_dim is not None:
            if any(window is not None for (window, *_), _ in layers):
                raise ValueError("kvfast does not support latent rows with a window")
            layers = [(kind, latent_format(form)) for kind, form in layers]
        self.block_size = block_size_of([form for _, form in layers], None, BLOCK_SIZE)
        by_kind = {}
        for kind, form in layers:
            by_kind.setdefault(kind, []).append(form)

        def pool(kind, forms):
            _, *shape, v_dim = kind
            return BlockPool(len(forms), *shape, self.block_size, forms, 1, grows=True, rope_dim=rope_dim, v_head_dim=v_dim)

        self.pools = [(kind[0], pool(kind, forms)) for kind, forms in by_kind.items()]
        # Per kind of layer (they read the same for a token): number of layers, window, format, and a pool of one layer.
        self.kinds = [(count, kind[0], form, pool(kind, [form])) for (kind, form), count in Counter(layers).items()]
        self.bytes_per_token = sum(pool.block_bytes for _, pool in self.pools) // self.block_size

    def name(self, context):
        if self.rope_dim is not None:
            return "MLAKVCache"
        return "RingKVCache" if any(window is not None and window < context for window, _ in self.pools) else "KVCache"

    def nbytes(self, context, appended=0):
        """Bytes while the last `appended` tokens have not left a window, and have float rows in formats with newest tokens as floats."""
        total = 0
        for window, pool in self.pools:
            blocks = -(-context // self.block_size)
            if window is not None and window < context:
                blocks = ring_blocks(window + ROLLBACK, 0, self.block_size)
            total += _with_more(pool, blocks, -(-appended // self.block_size))
            floats = pool.float_pool()
            if floats is not None:
                pieces = -(-appended // PIECE) if any(form.open_tokens for form in pool.formats) else 0
                total += _with_more(floats, floats.first_blocks, pieces)
        return total

    def bytes_read(self, context):
        """Bytes that one token reads: the codes of the tokens that it sees, or their float rows where those are read."""
        total = 0
        for count, window, form, pool in self.kinds:
            seen = min(context, window or context)
            border = self.block_size if form.seals else PIECE
            newest = context - max(0, context - form.open_tokens) // border * border if form.open_tokens else 0
            first = min(context, form.num_first_float_tokens) if seen == context else 0
            floats, newest = pool.float_pool(), min(newest, seen)
            bytes_of_floats = 0 if floats is None else (newest + first) * floats.block_bytes // PIECE
            total += count * (pool.block_bytes * (seen - newest) // self.block_size + bytes_of_floats)
        return total


def _with_more(memory, first, count):
    """Bytes of a memory of `first` blocks after it has grown to `count`; see `BlockMemory.ensure`."""
    if count <= first:
        return memory.bytes_for(first)
    return memory.bytes_for(first) + memory.bytes_for(-(-max(count - first, first // 2) // SLAB_BLOCKS) * SLAB_BLOCKS)


def _dtype_plan(name, caches, context, batch, memory, bandwidth, weight_bytes, state_bytes, checkpoints):
    def nbytes(tokens, **appended):
        return sum(cache.nbytes(tokens, **appended) for cache in caches) + states

    states = checkpoints * state_bytes
    one, read = nbytes(context), sum(cache.bytes_read(context) for cache in caches)
    seconds = batch * read / bandwidth
    return DtypePlan(
        dtype=name,
        cache=" + ".join(dict.fromkeys(cache.name(context) for cache in caches)),
        bytes_per_token=sum(cache.bytes_per_token for cache in caches),
        bytes_per_sequence=one,
        bytes_of_prompt=max(one, nbytes(context, appended=context)),
        nbytes=batch * one,
        bytes_read=read,
        fits=None if memory is None else batch * one <= memory,
        longest_context=None if memory is None else _longest(nbytes, memory // batch),
        largest_batch=None if memory is None else memory // one,
        most_checkpoints=None if memory is None or not state_bytes else max(0, memory // batch - one + states) // state_bytes,
        tokens_per_second=batch / seconds,
        tokens_per_second_with_weights=None if weight_bytes is None else batch / (seconds + weight_bytes / bandwidth),
    )


def _longest(nbytes, room):
    """The largest number of tokens that fit into `room` bytes; None for no limit."""
    longest = bisect_right(range(1, MAX_TOKENS + 1), room, key=nbytes)
    return None if longest == MAX_TOKENS else longest
