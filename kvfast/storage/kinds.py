"""The storage of each kind of cache, built from settings alone. Layers with the same shape and window share a pool and a table."""

import numpy as np

from kvfast.codec.formats import block_size_of
from kvfast.codec.multi_head import MultiHeadConfig, signs_of
from kvfast.codec.projection import rotated
from kvfast.codec.rope import RotaryTables
from kvfast.core.checks import check_block_size, check_flag, check_size
from kvfast.core.limits import MAX_TOKENS
from kvfast.storage.batches.batch import PagedBatches
from kvfast.storage.memory.pool import BlockPool
from kvfast.storage.sequences.checkpoints import Checkpoints
from kvfast.storage.sequences.sequence import SequenceStorage
from kvfast.storage.settings import check_sized
from kvfast.storage.tables.block_table import BlockTable
from kvfast.storage.tables.ring_table import RingTable

BLOCK_SIZE = 64  # tokens of a block of any cache or pool, unless the caller or the format asks for another number
GROW_BLOCKS = 8  # that a growing cache starts with
ROLLBACK = 64  # tokens before its window that a ring keeps


def storage_of(settings, block_size=None, max_seq_len=None, secure=False, max_state_bytes=None):
    """The SequenceStorage of an empty cache of one sequence. With a `max_seq_len` its blocks are reserved at once."""
    check_sized(settings, max_seq_len)
    secure = check_flag(secure, "secure")
    if settings["kind"] == "heads":
        config = MultiHeadConfig(**settings["config"])
        pool = BlockPool(1, settings["num_heads"], config.head_dim, BLOCK_SIZE, [config.format], GROW_BLOCKS, grows=True)
        table = RingTable(pool, 0, 0, 0)
        return SequenceStorage([table], [(table, 0)])
    formats = settings["dtype"]
    block_size = check_block_size(block_size_of(formats, block_size, BLOCK_SIZE))
    if max_seq_len is not None:
        max_seq_len = check_size(max_seq_len, "max_seq_len", 1, MAX_TOKENS)
    groups = {}
    for layer, one in enumerate(zip(_windows(settings), *_shapes(settings))):
        groups.setdefault(one, []).append(layer)
    tables, places = [], [None] * settings["num_layers"]
    for (window, *shape), layers in groups.items():
        num_blocks = GROW_BLOCKS if max_seq_len is None else -(-max_seq_len // block_size)
        if window is not None:
            num_blocks = ring_blocks(window + settings["rollback"], settings["num_sink_tokens"], block_size)
        own = [formats[layer] for layer in layers]
        pool = _blocks(settings, own, shape, block_size, num_blocks, secure, grows=max_seq_len is None)
        table = _table_of(pool, settings, window)
        tables.append(table)
        for place, layer in enumerate(layers):
            places[layer] = table, place
    return SequenceStorage(tables, places, max_seq_len, Checkpoints(max_state_bytes) if settings.get("has_states") else None)


def pool_of(settings, num_blocks, block_size=None, secure=False, buffer=None):
    """The storage of many sequences with these settings, whose layers are all alike; `buffer`: a caller's memory, or None."""
    (shape,), (window,) = set(zip(*_shapes(settings))), set(_windows(settings))
    if num_blocks is None:
        raise TypeError("num_blocks must be an integer, got None")
    block_size = check_block_size(block_size_of(settings["dtype"], block_size, BLOCK_SIZE))
    secure = check_flag(secure, "secure")
    pool = _blocks(settings, settings["dtype"], shape, block_size, num_blocks, secure, is_shared=True, buffer=buffer)
    return PagedBatches(_table_of(pool, settings, window))


def _blocks(settings, formats, shape, block_size, num_blocks, secure, **more):
    """A pool for layers with these formats."""
    num_kv_heads, head_dim, v_head_dim = shape
    more |= {"secure": secure, "v_head_dim": v_head_dim, "rope_dim": settings.get("rope_dim")}
    return BlockPool(len(formats), num_kv_heads, head_dim, block_size, formats, num_blocks, **more)


def _table_of(pool, settings, window):
    """An empty table of a pool, of layers with this window, or with None of layers that keep everything."""
    return BlockTable(pool) if window is None else RingTable(pool, window, settings["num_sink_tokens"], settings["rollback"])


def _shapes(settings):
    """KV heads, head_dim and v_head_dim: each a tuple with one per layer."""
    if settings["kind"] == "latent":
        shape = 1, settings["latent_dim"], settings["latent_dim"]
    else:
        shape = settings["num_kv_heads"], settings["head_dim"], settings.get("v_head_dim", settings["head_dim"])
    return [one if isinstance(one, tuple) else (one,) * settings["num_layers"] for one in shape]


def _windows(settings):
    return settings.get("windows", [None] * settings["num_layers"])


def ring_blocks(held, num_sink_tokens, block_size):
    """Blocks of a ring in steady state, with room for chunks of a prompt: a multiple of 8."""
    blocks = -(-held // block_size) - (-num_sink_tokens // block_size) + 2
    return -(-(blocks + min(blocks // 4, 8)) // 8) * 8


def keys_of(settings, storage, layer):
    """Keys of a layer as they were given, float32 of shape (tokens, heads, dim); a view where they are stored so."""
    keys, positions = storage.rows(layer, False)
    return _turned(settings, keys, positions, -1)


def _turned(settings, keys, positions, sign):
    """Keys rotated for their positions as a ring with a rope stores them, or with -1 rotated back; others as they are."""
    rope = settings.get("rope")
    if rope is None or not len(keys):
        return keys
    frequencies = rope["frequencies"]
    cos, sin = RotaryTables(frequencies).at(positions)
    return rotated(keys, cos, sign * sin, rope["interleaved"])


def decoded(settings, storage, layer):
    """Both sides of a layer's tokens as they were given; see `keys_of`."""
    sides = keys_of(settings, storage, layer), storage.rows(layer, True)[0]
    if settings["kind"] == "heads" and settings["config"]["rotation"]:
        signs = signs_of(settings["config"]["seed"], settings["num_heads"], settings["config"]["head_dim"])
        sides = tuple(side * signs for side in sides)
    return sides


def append_decoded(settings, storage, layer, k, v):
    """Append what `decoded` returned for other settings, from the first token on."""
    if settings["kind"] == "latent":
        storage.append(layer, np.concatenate((k, v), axis=2)[:, 0], None)
    else:
        storage.append(layer, _turned(settings, k, np.arange(len(k)), 1), v)
