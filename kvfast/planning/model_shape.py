"""The keys and values that each layer of a model stores per token, read from its ``config.json`` or its GGUF file."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvfast.core.limits import MAX_LAYERS
from kvfast.core.text import needed_for
from kvfast.planning.layer_kinds import NAMES_OF_ALL, count_state_layers, layer_windows
from kvfast.planning.states import layer_state_nbytes

MOST_JSON_BYTES = 16 << 20

# Keys that the published files of Gemma leave out, because transformers has defaults for them.
_DEFAULTS = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma4_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512},
}

# Names of a key, those of decoders that have an encoder first; error texts use the key itself.
_NAMES = {
    "num_hidden_layers": ("decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers", "layers"),
    "num_attention_heads": (
        "decoder_attention_heads",
        "num_decoder_attention_heads",
        "num_attention_heads",
        "n_head",
        "num_heads",
        "n_heads",
        "attention_heads",
    ),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "num_attention_groups"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels", "d_kv"),
    "hidden_size": ("attention_hidden_size", "hidden_size", "n_embd", "d_model", "emb_dim", "embed_dim"),
    "sliding_window": ("sliding_window", "attention_window_size", "sliding_window_size"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}
# Keys that may tell the KV heads, where none that kvfast knows does.
_MAY_TELL_KV_HEADS = re.compile("kv.*head|head.*kv|multi_?query|(query|attention|head).*group|group.*(query|head)")
# Where the configuration of a model of several parts has that of its text.
_PARTS = ("text_config", "decoder", "thinker_config")
_GGUF_NAMES = {
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "v_head_dim": "attention.value_length",
    "hidden_size": "embedding_length",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "kv_lora_rank": "attention.kv_lora_rank",
    "full_attention_interval": "full_attention_interval",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "conv_L_cache": "shortconv.l_cache",
    "ssm_conv_kernel": "ssm.conv_kernel",
    "ssm_group_count": "ssm.group_count",
    "ssm_inner_size": "ssm.inner_size",
    "ssm_state_size": "ssm.state_size",
}


@dataclass(frozen=True)
class LayerShape:
    """Shape of what one layer stores for a token.

    Parameters
    ----------
    num_kv_heads : int
        1 for latent rows.
    head_dim : int
        For latent rows, that of the latent.
    sliding_window : int or None
        Tokens that a query sees, itself included; None for all.
    rope_dim : int or None
        For latent rows, see `MLAKVCache`; None for keys and values.
    v_head_dim : int or None
        head_dim of the values if it differs from that of the keys; otherwise None.
    """

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    rope_dim: int | None = None
    v_head_dim: int | None = None


@dataclass(frozen=True)
class ModelShape:
    """What a model stores for a token, and the weights that it reads for one.

    Parameters
    ----------
    name : str
        The architecture.
    layers : tuple of LayerShape
        The layers that store keys and values.
    context_length : int or None
        The longest context that the model was made for.
    weight_bytes : int or None
        Bytes of all weights, if the file holds them.
    weight_bytes_read : int or None
        Bytes of the weights that one token reads, without embeddings that are only looked up, and without unused experts.
    notes : tuple of str
        Notes on what the shape leaves out.
    state_bytes : int
        Bytes of the recurrent states of all layers, as a checkpoint has them: of convolutions in 16 bits, of others in float32.
    """

    name: str
    layers: tuple[LayerShape, ...]
    context_length: int | None = None
    weight_bytes: int | None = None
    weight_bytes_read: int | None = None
    notes: tuple[str, ...] = ()
    state_bytes: int = 0


def read_shape(source):
    """The shape of a model; `plan` says of what.

    A missing or wrong key is a ValueError that names it, a damaged GGUF file a `kvfast.llama.ModelFileError`.
    """
    if isinstance(source, ModelShape):
        return source
    if isinstance(source, Mapping):
        return _shape(_Config(source, "the configuration"))
    if hasattr(source, "to_dict"):
        return _shape(_Config(source.to_dict(), f"the {type(source).__name__}"))
    try:
        path = os.fsdecode(source)
    except TypeError:
        raise TypeError(f"model must be a path to a config.json or GGUF file, or a mapping, got {type(source).__name__}") from None
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    if not os.path.exists(path):
        text = "no such file. Pass a config.json, its folder or a GGUF file: `hf download MODEL config.json` fetches and names one"
        raise FileNotFoundError(errno.ENOENT, text, path)
    with open(path, "rb") as file:
        if file.read(4) == b"GGUF":
            return _of_gguf(path)
        if os.fstat(file.fileno()).st_size > MOST_JSON_BYTES:
            raise ValueError(f"{path} is neither a GGUF file nor a config.json, which has less than {MOST_JSON_BYTES >> 20} MiB")
        file.seek(0)
        try:
            values = json.load(file)
        except (ValueError, RecursionError) as error:  # text that is not UTF-8 is a ValueError too
            raise ValueError(f"{path} is neither a GGUF file nor JSON: {error}") from None
    return _shape(_Config(values, path))


class _Config:
    """The keys of a configuration, checked when they are read."""

    def __init__(self, values, source, gguf_prefix=None):
        if not isinstance(values, Mapping):
            raise ValueError(f"{source} must hold a JSON object with the keys of a model, got {type(values).__name__}")  # noqa: TRY004
        while inner := next((values[part] for part in _PARTS if isinstance(values.get(part), Mapping)), None):
            values = inner
        # DBRX and MPT have the keys of attention apart.
        own = values.get("attn_config")
        self.values, self.source, self.gguf_prefix = (dict(own) if isinstance(own, Mapping) else {}) | dict(values), source, gguf_prefix
        self.name = str(self.values.get("model_type") or "unknown architecture")
        for key, value in _DEFAULTS.get(self.name, {}).items():
            self.values.setdefault(key, value)

    def spelled(self, key):
        """The key as the file spells it."""
        return key if self.gguf_prefix is None else f"{self.gguf_prefix}.{_GGUF_NAMES.get(key, key)}"

    def get(self, key):
        for name in _NAMES.get(key, (key,)):
            if self.values.get(name) is not None:
                return self.values[name]
        return None

    def count(self, key, default=None, least=1):
        """A whole number. `default`, if given, is returned for a missing key."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise ValueError(f"{self.source} lacks {self.spelled(key)}, without which the size of a {self.name} cache is unknown")
            return default
        return self._checked(key, value, least)

    def counts(self, key, number, default):
        """A whole number for each layer."""
        value = self.get(key)
        if not isinstance(value, (list, tuple)):
            return [self.count(key, default)] * number
        if len(value) != number:
            raise ValueError(f"{self.source}: {self.spelled(key)} must be one number or {number}, one per layer, got {len(value)}")
        return [self._checked(key, one, 0) for one in value]

    def _checked(self, key, value, least):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
            raise ValueError(f"{self.source}: {self.spelled(key)} must be a whole number of at least {least}, got {value!r:.80}")
        return value


def _shape(config, **weights):
    notes = []
    number = _number_of_layers(config)
    if number > MAX_LAYERS:
        raise ValueError(f"{config.source}: {config.spelled('num_hidden_layers')} must be at most {MAX_LAYERS}, got {number}")
    windows = layer_windows(config, number, notes)
    shapes = []
    if any(window != 0 for window in windows):
        shapes = (_latents if config.get("kv_lora_rank") is not None else _heads)(config, windows, notes)
    layers = tuple(shape for shape, window in zip(shapes, windows) if shape.num_kv_heads and window != 0)
    without = number - len(layers)
    if not layers:
        raise ValueError(f"{config.source}: no layer of this {config.name} keeps keys and values of its own")
    stateful = count_state_layers(config, number)
    states = stateful and layer_state_nbytes(config)
    if without:
        notes.append(f"{without} of {number} layers keep no keys and values of their own")
    if states is None:
        notes.append(f"the recurrent states of {stateful} layers are not counted, as their sizes are not known")
    if config.get("is_encoder_decoder") is True:
        notes.append("the keys and values that a decoder keeps of its encoder's tokens are not counted")
    if config.get("index_head_dim") is not None:
        notes.append("the keys by which an index chooses tokens are not counted")
    context = config.get("max_position_embeddings")
    context = None if context is None else config.count("max_position_embeddings")
    return ModelShape(config.name, layers, context, notes=tuple(notes), state_bytes=stateful * (states or 0), **weights)


def _number_of_layers(config):
    if config.name == "longcat_flash":  # its layers have two attentions each
        return 2 * config.count("num_layers")
    listed = next((config.get(name) for name in NAMES_OF_ALL if config.get(name) is not None), None)
    return config.count("num_hidden_layers", len(listed) if isinstance(listed, (list, tuple, str)) and listed else None)


def _latents(config, windows, notes):
    latent, rope = config.count("kv_lora_rank"), config.count("qk_rope_head_dim", least=0)
    if config.get("qk_nope_head_dim") is not None and config.get("v_head_dim") is not None:
        dims = config.count("qk_nope_head_dim") + rope, config.count("v_head_dim")
        notes.append(
            f"the figures are of latent rows, as an MLAKVCache has them: who stores the keys and values that are made of "
            f"them, as KVFastCache does, has {config.count('num_attention_heads')} heads of {dims[0]} and {dims[1]} in a layer"
        )
    return [
        LayerShape(1, one.count("kv_lora_rank", latent), window, one.count("qk_rope_head_dim", rope, least=0))
        for one, window in zip(_of_layers(config, len(windows)), windows)
    ]


def _heads(config, windows, notes):
    heads = config.count("num_attention_heads")
    one_for_all = config.get("multi_query") is True and config.get("new_decoder_architecture") is not True
    groups = config.count("multi_query_group_num", heads) if config.get("multi_query_attention") is True else heads  # ChatGLM
    kv_heads = [1] * len(windows)
    if not one_for_all and config.get("attn_type") != "multiquery_attention":  # MPT
        kv_heads = config.counts("num_key_value_heads", len(windows), groups)
        unknown = [key for key in config.values if _MAY_TELL_KV_HEADS.search(str(key))]
        if config.get("num_key_value_heads") is None and groups == heads and unknown:
            notes.append(
                f"no key that kvfast knows tells the KV heads: all {heads} query heads are taken to have their own; {unknown[0]} may tell"
            )
    if config.get("qk_nope_head_dim") is not None:  # here head_dim, if present, is the rotary part
        dim = config.count("qk_nope_head_dim") + config.count("qk_rope_head_dim", least=0)
    else:
        dim = config.count("head_dim", 0) or config.count("hidden_size") // heads
    if dim < 1:
        raise ValueError(f"{config.source}: {config.spelled('hidden_size')} of {config.get('hidden_size')} does not make {heads} heads")
    shapes = _shapes(config, kv_heads, dim, windows)
    return [LayerShape(n, k, window, v_head_dim=None if v == k else v) for (n, k, v), window in zip(shapes, windows)]


def _shapes(config, kv_heads, dim, windows):
    """KV heads, head_dim and v_head_dim of each layer. They may depend on the window, or on the layer."""
    values = config.count("v_head_dim", dim)
    values = 0 if values == dim else values  # 0: the values of a layer are as wide as its keys
    shapes = []
    for heads, window, one in zip(kv_heads, windows, _of_layers(config, len(windows))):
        v_dim = values
        if window:
            # MiMo V2 has twice the heads in layers with a window; only its name says so.
            heads = config.count("swa_num_key_value_heads", 2 * heads if config.name == "mimo_v2_flash" else heads)
            shape, v_dim = (heads, config.count("swa_head_dim", dim)), config.count("swa_v_head_dim", 0) or values
        elif config.get("global_head_dim") is not None and config.get("per_layer_config") is None:  # Gemma 4
            own = config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None
            shape = config.count("num_global_key_value_heads") if own else heads, config.count("global_head_dim")
        else:
            shape = heads, dim
        k_dim = one.count("head_dim", shape[1])
        shapes.append(
            (one.count("num_key_value_heads", shape[0], least=0) if shape[0] else 0, k_dim, one.count("v_head_dim", v_dim or k_dim))
        )
    return shapes


def _of_layers(config, number):
    """The fields of a configuration that each layer has for itself."""
    ours = _of_blocks(config, number) if config.get("block_configs") is not None else config.get("per_layer_config")
    ours = {} if ours is None else ours
    if not isinstance(ours, Mapping) or not all(isinstance(one, Mapping) for one in ours.values()):
        raise ValueError(f"{config.source}: per_layer_config must map layers to their keys, got {ours!r:.80}")
    return [
        _Config(ours.get(str(layer), ours.get(layer, {})), f"{config.source}: per_layer_config of layer {layer}")
        for layer in range(number)
    ]


def _of_blocks(config, number):
    """`block_configs` of Nemotron-NAS as `per_layer_config`: query heads of a KV head, or no attention."""
    blocks, heads = config.get("block_configs"), config.count("num_attention_heads")
    if not isinstance(blocks, (list, tuple)) or len(blocks) != number or not all(isinstance(one, Mapping) for one in blocks):
        raise ValueError(f"{config.source}: block_configs must be a list of {number} objects, one per layer, got {blocks!r:.80}")
    found = {}
    for layer, block in enumerate(blocks):
        attention = block.get("attention")
        one = _Config(attention if isinstance(attention, Mapping) else {}, f"{config.source}: block_configs of layer {layer}")
        without = one.get("no_op") or one.get("replace_with_linear")
        found[layer] = {"num_key_value_heads": 0 if without else heads // one.count("n_heads_in_group", 1)}
    return found


def _of_gguf(path):
    with needed_for("reading GGUF files needs", "llama"):
        from kvfast.planning.gguf_file import GGUFFile
    file = GGUFFile(path)
    arch = file.architecture
    names = _GGUF_NAMES | {
        "qk_rope_head_dim": "rope.dimension_count",
        "sliding_window_pattern": "attention.sliding_window_pattern",
        "feed_forward_length": "feed_forward_length",
    }
    values = {key: value for key, name in names.items() if (value := file.get(f"{arch}.{name}")) is not None}
    values |= {"model_type": arch, **_mixers(values)}
    total, read = _weight_bytes(file, arch)
    return _shape(_Config(values, path, arch), weight_bytes=total, weight_bytes_read=read)


def _mixers(values):
    """The kind of each layer of a hybrid. A GGUF file tells it by numbers: of KV heads, and of feed-forward rows for Nemotron-H."""
    heads, rows = values.get("num_key_value_heads"), values.pop("feed_forward_length", None)
    if not isinstance(heads, list) or values.keys().isdisjoint(("conv_L_cache", "ssm_conv_kernel")):
        return {}
    alone = rows if isinstance(rows, list) and 0 in rows and len(rows) == len(heads) else [0] * len(heads)
    return {"layers_block_type": ["attention" if n else "mlp" if own else "mamba" for n, own in zip(heads, alone)]}


def _weight_bytes(file, arch):
    """Bytes of all tensors, and of those that one token is multiplied by."""
    used, experts = file.get(f"{arch}.expert_used_count"), file.get(f"{arch}.expert_count")
    share = used / experts if isinstance(used, int) and isinstance(experts, int) and 0 < used <= experts else 1
    looked_up = {"token_embd.weight"} if "output.weight" in file.tensor_names else set()
    sizes = file.tensor_bytes()
    read = sum(size * (share if "_exps." in name else 1) for name, size in sizes.items() if name not in looked_up)
    return sum(sizes.values()), int(read)
