"""Which layers of a model keep keys and values, and of how many tokens: by the fields that published configurations have for it."""

from collections.abc import Mapping

FULL, SLIDING, CHUNKED, NOTHING = "FSCN"

# What a layer keeps for its tokens, by the name of its kind; letters are those of Nemotron-H.
KINDS = {
    **dict.fromkeys(("full_attention", "attention", "hybrid", "indexed_attention", "*"), FULL),
    **dict.fromkeys(("sliding_attention", "hybrid_sliding"), SLIDING),
    "chunked_attention": CHUNKED,
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "recurrent", "conv", "mlp", "moe", "M", "E", "-"), NOTHING),
}

# Families whose files may leave out which layer is which: first layers|kinds that all layers take in turn|last layers.
_FAMILIES = {
    **dict.fromkeys(("mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2", "moshi"), "S"),
    **dict.fromkeys(("gemma2", "vaultgemma", "gpt_oss", "gpt-oss", "t5gemma_module"), "SF"),
    **dict.fromkeys(("afmoe", "cohere2", "dory", "olmo3"), "SSSF"),
    **dict.fromkeys(("gemma3n", "gemma3n_text", "kolibri1"), "SSSSF"),
    **dict.fromkeys(("gemma3", "gemma3_text", "t5gemma2_decoder", "inkling_text", "inkling2_text", "inkling2_loop_text"), "SSSSSF"),
    **dict.fromkeys(("beam", "diffusion_gemma_text", "gemma4_text", "gemma4_unified_text"), "|SSSSSF|F"),
    **dict.fromkeys(("cwm", "granite_swa", "granitemoe_swa"), "FSSS"),
    **dict.fromkeys(("llama4", "llama4_text"), "CCCF"),
    **dict.fromkeys(
        ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen3next", "qwen4_exp_text", "glm5_next_text"), "NNNF"
    ),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "granitemoehybrid"), "N"),
    "bamba": "N",
    "dots3_note_text": "F|SFSS|",
    **dict.fromkeys(("falcon_h1", "falcon-h1"), "F"),
    "flint": "F|SFSS|F",
    "kimi_linear": "N|FNNN|",
    "lara_mini": "NSNFS",
    "lfm3": "N|SNFN|",
    "lfm3_vl_text": "NN|FN|",
    "mimo_v2_flash": "F|SSSSSF|",
    "minimax": "FN",
    "modernbert-decoder": "FSS",
    "muse_glimmer_text": "SSSF",
    "muse_spark_text": "SFSS",
    "zaya": "F",
}
# Kinds of layers with a recurrent state, by the same names; some have keys and values, too.
_STATEFUL = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "M", "hybrid", "hybrid_sliding")
# Families all of whose layers have one, without such a name.
_ALL_STATEFUL = ("falcon_h1", "falcon-h1", "zamba", "zaya", "mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
# Keys of layers with a state in place of keys and values.
_OF_STATES = ("mamba", "ssm_", "linear_attn", "linear_num", "lru_")


def layer_windows(config, number, notes):
    """The tokens that each of a model's layers keeps: None for all, 0 for a layer without keys and values of its own."""
    kinds, asks = _kinds(config, number, notes)
    windows = {FULL: None, NOTHING: 0, SLIDING: _window(config), CHUNKED: config.count("attention_chunk_size", 0) or None}
    if SLIDING in kinds and windows[SLIDING] is None and asks and config.get("use_sliding_window") is not False:
        raise ValueError(f"{config.source} lacks {config.spelled('sliding_window')}, which its {asks} asks for")
    if CHUNKED in kinds and windows[CHUNKED] is None:
        notes.append("chunked attention without attention_chunk_size is taken to keep everything")
    found = [windows[kind] for kind in kinds]
    for place in _without_own(config, number):
        found[place] = 0
    return found


def count_state_layers(config, number):
    """The layers that have a recurrent state, with keys and values or in their place."""
    for field, kinds_of in _FIELDS.items():
        if kinds_of is _named and isinstance(kinds := _value(config, field), (list, tuple, str)):
            return sum(kind in _STATEFUL for kind in kinds)
    return number if config.name in _ALL_STATEFUL else _kinds(config, number, [])[0].count(NOTHING)


def _window(config):
    """The size of sliding windows; None without them."""
    if config.get("use_sliding_window") is False or config.get("sliding_window") == 0:
        return None
    if config.name == "mimo_v2_flash" and config.get("sliding_window_size") is not None:
        return config.count("sliding_window_size") + 1  # there the token itself is not counted
    if config.name == "modernbert-decoder" and config.get("local_attention") is not None:
        return config.count("local_attention") // 2
    return config.count("sliding_window", 0) or None


def _kinds(config, number, notes):
    """The kind of each layer, and the field that names all of them, if one does."""
    for field, kinds_of in _FIELDS.items():
        if _value(config, field) is not None:
            kinds = kinds_of(config, field, number)
            return _spread(kinds, number), field if kinds_of is _named else None
    if config.name in _FAMILIES:
        return _spread(_FAMILIES[config.name], number), None
    if any(str(key).startswith(_OF_STATES) for key in config.values):
        notes.append(
            f"which layers of a {config.name} keep a state in place of keys and values is not said: all are taken to keep keys and values"
        )
    if (window := _window(config)) is not None:
        notes.append(
            f"which layers of a {config.name} have its window of {window} tokens is not said: all are taken to keep everything"
        )
    return FULL * number, None


def _without_own(config, number):
    """The layers that read keys and values of an earlier layer, or of images."""
    shared = config.count("num_kv_shared_layers", 0, least=0)
    sources, images = config.get("kv_source_layers"), config.get("cross_attention_layers")
    factor = config.count("cla_share_factor", 1) if config.get("use_cla") is True else 1  # Hunyuan
    places = [
        *range(max(0, number - shared), number),
        *(i for i in range(number) if i % factor),
        *(images if isinstance(images, list) else ()),
        *(i for i, source in enumerate(sources if isinstance(sources, list) else ()) if source != i),
    ]
    return [place for place in places if place in range(number)]


def _value(config, field):
    value = config.values
    for key in field.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _spread(kinds, number):
    first, turn, last = kinds.split("|") if "|" in kinds else ("", kinds, "")
    spread = (first + (turn * (number // len(turn) + 1))[len(first) :])[:number]
    return spread[: max(0, number - len(last))] + last[-number:] if last else spread


# --- the kinds of all layers by one field of a configuration ---


def _named(config, field, number):
    kinds = config.get(field)
    if not isinstance(kinds, (list, tuple, str)) or len(kinds) != number:
        raise ValueError(f"{config.source}: {field} must be a list of {number} names, one per layer, got {kinds!r:.80}")
    return "".join(_kind(config, field, kind) for kind in kinds)


def _kind(config, field, kind):
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{config.source}: {field} has {kind!r:.80}, and kvfast does not know what such a layer keeps")
    return KINDS[kind]


def _listed(named, others, first=0):
    """Reads a field with the places of some layers, counted from `first`."""

    def kinds_of(config, field, number):
        places = _places(config, field, number, first)
        return "".join(named if i in places else others for i in range(number))

    return kinds_of


def _marked(named, others):
    """Reads a field with a mark for each layer, 0 or 1."""

    def kinds_of(config, field, number):
        marks = _value(config, field)
        if not isinstance(marks, (list, tuple)) or len(marks) != number:
            raise ValueError(f"{config.source}: {field} must be a list of {number} marks, one per layer, got {marks!r:.80}")
        return "".join(named if mark else others for mark in marks)

    return kinds_of


def _turns(length, place, named, others, number):
    """A kind of its own at one place of each turn. A file may name any length: only the layers count."""
    return "".join(named if i % length == place else others for i in range(number))


def _last_of_each(named, others):
    """Reads a field with the length of a turn, whose last layer is of another kind."""
    return lambda config, field, number: _turns(config.count(field), config.count(field) - 1, named, others, number)


def _of_a_period(config, field, number):
    period = config.count(field)
    kinds = _turns(period, config.count("attn_layer_offset", least=0) % period, FULL, NOTHING, number)
    return f"NNF{kinds}"[:number] if config.name == "zamba" else kinds


def _pattern(config, field, number):
    pattern = config.get(field)
    if isinstance(pattern, str) and pattern and not pattern.strip("LG"):  # local and global
        return pattern.replace("L", SLIDING).replace("G", FULL)
    if isinstance(pattern, (list, tuple)):
        return _marked(SLIDING, FULL)(config, field, number)
    length = config.count(field, least=0) or 1
    return _turns(length, length - 1, FULL, SLIDING, number)


def _global_layers(config, field, number):
    length = config.count(field)
    return _turns(length, 0 if config.name == "modernbert-decoder" else length - 1, FULL, SLIDING, number)


def _blocks_in_turn(config, field, number):
    turn = config.get(field)
    return _named(config, field, len(turn) if isinstance(turn, (list, tuple)) and turn else 1).replace(FULL, SLIDING)


def _without_rotation(config, field, number):
    """Kinds of Llama 4: layers without rotation attend to everything, layers with it to chunks."""
    if config.get("attention_chunk_size") is None:
        return FULL
    return _marked(CHUNKED, FULL)(config, field, number) if config.get(field) else _FAMILIES["llama4"]


def _compressed(config, field, number):
    raise ValueError(f"{config.source}: {field} is given, and kvfast does not know what layers keep that compress their tokens")


def _windows_begin(config, field, number):
    return (FULL * min(number, config.count(field, least=0))).ljust(number, SLIDING)


def _places(config, field, number, first=0):
    places = _value(config, field) or []
    if not isinstance(places, (list, tuple)) or not all(type(i) is int and first <= i < first + number for i in places):
        raise ValueError(f"{config.source}: {field} must list layers between {first} and {first + number - 1}, got {places!r:.80}")
    return {i - first for i in places}


# The first of these that a configuration has tells what its layers keep.
_FIELDS = {
    "layer_types": _named,
    "layers_block_type": _named,
    "hybrid_override_pattern": _named,
    "compress_ratios": _compressed,
    "block_types": _blocks_in_turn,
    "hybrid_layer_pattern": _marked(SLIDING, FULL),
    "attn_type_list": _marked(FULL, NOTHING),
    "full_attn_idxs": _listed(FULL, NOTHING),
    "attn_layer_indices": _listed(FULL, NOTHING),
    "hybrid_layer_ids": _listed(FULL, NOTHING),
    "local_layer_ids": _listed(SLIDING, FULL),
    "linear_attn_config.full_attn_layers": _listed(FULL, NOTHING, first=1),
    "full_attention_interval": _last_of_each(FULL, NOTHING),
    "layer_group_size": _last_of_each(FULL, NOTHING),
    "attn_layer_period": _of_a_period,
    "global_attn_every_n_layers": _global_layers,
    "sliding_window_pattern": _pattern,
    "max_window_layers": _windows_begin,
    "no_rope_layers": _without_rotation,
}
NAMES_OF_ALL = tuple(field for field, kinds_of in _FIELDS.items() if kinds_of is _named)
