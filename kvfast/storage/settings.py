"""Settings: a dict that says what kind of cache it is. A file has it, too. The bytes of one cache are valid in another with the same settings.

Each function here makes the settings of one kind, from the arguments of its class or from the fields of a file, and checks them.
Everything about the storage of a cache follows from its settings, but for the number of its blocks and tokens; see `kinds`.
"""

from dataclasses import asdict

from kvfast.codec.formats import formats_of, latent_format
from kvfast.codec.multi_head import MultiHeadConfig
from kvfast.codec.rope import Rope, frequencies_of
from kvfast.core.checks import check_size, per_layer
from kvfast.core.limits import MAX_HEAD_DIM, MAX_KV_HEADS, MAX_LAYERS, MAX_ROPE_DIM, MAX_TOKENS
from kvfast.core.text import same_or_tuple, shown
from kvfast.errors import DimensionMismatchError

SIZED = ("full", "latent")  # kinds with a max_seq_len
# For messages: the class that users know a kind by.
NAMES = {"full": "KVCache", "ring": "RingKVCache", "latent": "MLAKVCache", "heads": "MultiHeadKVCache"}


def full(num_layers, num_kv_heads, head_dim, dtype, k_dtype=None, v_dtype=None, v_head_dim=None):
    """Settings of layers that keep all tokens. A v_head_dim of None, for all layers or for one, means head_dim."""
    num_layers = check_size(num_layers, "num_layers", 1, MAX_LAYERS)
    formats = formats_of(dtype, k_dtype, v_dtype, num_layers)
    heads, dims, v_dims = (
        per_layer(value, name, num_layers)
        for name, value in (("num_kv_heads", num_kv_heads), ("head_dim", head_dim), ("v_head_dim", v_head_dim))
    )
    heads = same_or_tuple([check_size(one, "num_kv_heads", 1, MAX_KV_HEADS) for one in heads])
    dims = [check_size(one, "head_dim", 1, MAX_HEAD_DIM) for one in dims]
    v_dims = [k if v is None else check_size(v, "v_head_dim", 1, MAX_HEAD_DIM) for k, v in zip(dims, v_dims)]
    settings = {"kind": "full", "num_layers": num_layers, "num_kv_heads": heads, "head_dim": same_or_tuple(dims), "dtype": formats}
    # With one head_dim, files stay as they were before v_head_dim existed.
    return settings if v_dims == dims else settings | {"v_head_dim": same_or_tuple(v_dims)}


def ring(layers, windows, num_sink_tokens, rollback, rope=None):
    """The settings of a ring. `layers` are made by `full`, and each window is None for a layer that keeps all tokens; by `rope`, a `Rope`,
    a ring rotates keys itself."""
    windows = per_layer(windows, "sliding_window", layers["num_layers"])
    windows = [one if one is None else check_size(one, "sliding_window", 1, MAX_TOKENS) for one in windows]
    local = [one for one in windows if one is not None]
    if not local:
        raise ValueError("sliding_window must be a number for at least one layer, got None for all; a KVCache keeps everything")
    num_sink_tokens = check_size(num_sink_tokens, "num_sink_tokens", 0, MAX_TOKENS)
    if num_sink_tokens > min(local):
        raise ValueError(f"num_sink_tokens must be at most the sliding_window of {min(local)}, got {num_sink_tokens}")
    rollback = check_size(rollback, "rollback", 0, MAX_TOKENS)
    rope = None if rope is None else _rotation(layers["head_dim"], rope)
    own = {"kind": "ring", "windows": windows, "num_sink_tokens": num_sink_tokens, "rollback": rollback, "rope": rope}
    return layers | own


def _rotation(head_dim, rope):
    """The rotation of a ring that rotates keys itself: radians per position of each pair, and which elements make a pair."""
    if not isinstance(rope, Rope):
        raise TypeError(f"rope must be a Rope or None, got {shown(rope)}")
    differs = isinstance(head_dim, tuple)
    if differs:
        raise ValueError(f"a rope rotates all layers alike and needs the same head_dim in all of them, got {shown(list(head_dim))}")
    return {"frequencies": list(frequencies_of(rope, head_dim)), "interleaved": bool(rope.interleaved)}


def latent(num_layers, latent_dim, rope_dim, dtype):
    """Settings of latent rows: one row per token, shared by all heads, and its rotary part."""
    num_layers = check_size(num_layers, "num_layers", 1, MAX_LAYERS)
    latent_dim = check_size(latent_dim, "latent_dim", 1, MAX_HEAD_DIM)
    rope_dim = check_size(rope_dim, "rope_dim", 0, MAX_ROPE_DIM)
    formats = [latent_format(one) for one in formats_of(dtype, None, None, num_layers)]
    return {"kind": "latent", "num_layers": num_layers, "latent_dim": latent_dim, "rope_dim": rope_dim, "dtype": formats}


def heads(num_heads, config, num_layers=1):
    """Settings of one layer that is read head by head. `config`: the fields of a `MultiHeadConfig`."""
    num_heads, config = check_size(num_heads, "num_heads", 1, MAX_KV_HEADS), MultiHeadConfig(**config)
    if config.num_q_heads is not None and config.num_q_heads % num_heads:
        raise DimensionMismatchError(f"num_q_heads must be a multiple of the {num_heads} heads, got {config.num_q_heads}")
    return {"kind": "heads", "num_layers": num_layers, "num_heads": num_heads, "config": asdict(config)}


def with_states(settings, max_state_bytes):
    """The settings of a cache of a model with recurrent states; of one without for a `max_state_bytes` of None."""
    if max_state_bytes is None:
        return settings
    check_size(max_state_bytes, "max_state_bytes", 1)
    return settings | {"has_states": True}


def checked_settings(fields):
    """The settings that a file tells; KeyError for an unknown kind."""
    others = dict(fields)
    if others.pop("has_states", False):
        return checked_settings(others) | {"has_states": True}
    kind = others.pop("kind")
    if kind == "ring":
        windows, num_sink_tokens, rollback, rope = [others.pop(name) for name in ("windows", "num_sink_tokens", "rollback", "rope")]
        return ring(full(**others), windows, num_sink_tokens, rollback, rope and Rope(**rope))
    return {"full": full, "latent": latent, "heads": heads}[kind](**others)


def check_sized(settings, max_seq_len):
    """ValueError for the `max_seq_len` of a kind without one."""
    if max_seq_len is not None and settings["kind"] not in SIZED:
        raise ValueError(f"a {NAMES[settings['kind']]} has no max_seq_len, got {max_seq_len}")
