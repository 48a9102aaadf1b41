"""The cache of vLLM with kvfast's formats: what the names of ``kv_cache_dtype`` store, and the memory of its blocks."""

from collections import Counter

from kvfast.caches.buffer_layout import buffer_layout
from kvfast.codec.formats import PRESETS, KVFormat, codes_alone, floats_of

DEFAULTS = {"kvfast": "int4", "vllm": "auto"}
"""The format of an engine, if nobody names one."""
ENGINES = tuple(DEFAULTS)


def rotated(dtype):
    return KVFormat(dtype, rotation="kv", codebook="uniform" if dtype == "int8" else "gaussian")


VLLM_NAMES = {
    "auto": KVFormat.of("bfloat16"),  # the model's dtype
    "int8_per_token_head": KVFormat.of("int8-rotated"),
    "turboquant_k8v4": KVFormat.of("k8v4"),
    "int4_per_token_head": KVFormat.of("int4-recent"),
    "turboquant_4bit_nc": rotated("int4"),
    "turboquant_k3v4_nc": rotated("int3/int4"),
    "turboquant_3bit_nc": rotated("int3"),
}
# From vLLM 0.33 on, also presets by their names.
VLLM_FORMATS = VLLM_NAMES | {f"kvfast_{name.replace('-', '_')}": form for name, form in PRESETS.items()}
# In a turboquant mode vLLM leaves this many layers at each end in the model's dtype.
KEEPS_FIRST_AND_LAST = 2
VLLM_BLOCK_SIZE = 64
# vLLM holds a window for as many tokens more as one step may compute; this is its server's default.
STEP_TOKENS = 2048


def vllm_format(name, window, has_tail=None):
    """The KVFormat of a layer. `has_tail`: whether newest tokens are floats, None for what VLLM_FORMATS says. Layers with a window
    have blocks alone, no float rows."""
    form = KVFormat.of("int8") if has_tail and name == "int8_per_token_head" else VLLM_FORMATS[name]
    if window is None and has_tail is not False:
        return form
    codes = codes_alone(form)
    return codes if floats_of(codes) is None else rotated(codes.dtype)


class BlocksOfVLLM:
    """The blocks of one sequence, with the methods of `plan`'s own caches. `num_drafts`: the last layers of the shape that draft."""

    def __init__(self, shape, name, num_drafts=0):
        block_size, number = VLLM_BLOCK_SIZE, len(shape.layers) - num_drafts
        if any(layer.rope_dim is not None for layer in shape.layers):
            raise ValueError("plan of engine='vllm' knows no latent rows, which the model has")
        kept = min(KEEPS_FIRST_AND_LAST, number // 2) if name.startswith("turboquant") else 0
        in_dtype = {*range(kept), *range(number - kept, number)}
        kinds = Counter()
        for index, layer in enumerate(shape.layers):
            # vLLM counts the layers of a draft model anew, and a single one (EAGLE, MTP) on.
            index -= number if num_drafts > 1 and index >= number else 0
            form = VLLM_FORMATS["auto" if index in in_dtype else name]  # with a window, too: vLLM needs blocks of one size
            layout = buffer_layout(1, layer.num_kv_heads, layer.head_dim, 1, block_size, form, v_head_dim=layer.v_head_dim)
            kinds[layer, layout.nbytes] += 1
        self.block_bytes, self.groups = _groups(kinds, block_size)
        self.bytes_per_token = sum(self.block_bytes // tokens for _, tokens in self.groups)
        self.kinds, self.block_size, self.form = kinds, block_size, VLLM_FORMATS[name]

    def name(self, context):
        return f"vLLM, {self.form}"

    def nbytes(self, context, appended=0):
        return self.block_bytes * sum(min(-(-context // tokens), most) for most, tokens in self.groups)

    def bytes_read(self, context):
        kinds = self.kinds.items()
        return sum(count * size * min(context, layer.sliding_window or context) // self.block_size for (layer, size), count in kinds)


def _groups(kinds, block_size):
    """Bytes of a block, and of each of vLLM's groups of layers the most blocks and the tokens of one. Layers that keep as many tokens are
    one group. Otherwise each kind has groups of equally many layers, some of which may be missing, and each layer has as much of a
    block as the largest needs: one that can fill it with more tokens has them."""
    windows = {layer.sliding_window for layer, _ in kinds}
    if len(windows) == 1:
        return sum(size * count for (_, size), count in kinds.items()), [(_most_blocks(*windows, block_size), block_size)]
    largest, fewest, most = max(size for _, size in kinds), min(kinds.values()), max(kinds.values())
    each = most if most < 1.5 * fewest else fewest
    groups = []
    for (layer, size), count in kinds.items():
        tokens = block_size if largest % size else block_size * largest // size
        groups += [(_most_blocks(layer.sliding_window, tokens), tokens)] * -(-count // each)
    return each * largest, groups


def _most_blocks(window, block_size):
    return float("inf") if window is None else -(-(window - 1 + STEP_TOKENS) // block_size) + 1
