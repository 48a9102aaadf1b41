"""A Llama-family model as it lies in memory: its sizes, and its weights in float32.

Every projection is kept as the file has it, `(outputs, inputs)`, C-contiguous, so one output is one
contiguous row and `x @ weight.T` streams the weight once. Projections that read the same input are
stacked into one matrix: one long BLAS call in place of two or three short ones.
"""

from dataclasses import dataclass

import numpy as np

from kvfast.engine import shown
from kvfast.planning.gguf_file import GGUFFile, ModelFileError

# Architecture -> whether the GGUF converter interleaved the rotary halves of the Q and K rows.
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}

# Keys of the metadata. The last two change nothing where rotations are scaled linearly.
ROPE_SETTINGS = (
    "dimension_count",
    "freq_base",
    "scale_linear",
    "scaling.type",
    "scaling.factor",
    "scaling.original_context_length",
    "scaling.finetuned",
)


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama-family model.

    `hidden_size` is the width of the residual stream, `ffn_size` that inside the feed-forward block, and `context_length` the
    longest context that the model was trained for. `norm_eps` is added to the mean square in RMSNorm. `rope_dims` dimensions of
    a head are rotated; the rest pass through.
    """

    architecture: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_dims: int


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer, float32. `heads` below is num_q_heads + num_kv_heads."""

    attn_norm: np.ndarray  # (hidden_size,)
    qkv: np.ndarray  # ((heads + num_kv_heads) * head_dim, hidden_size): Q, K and V rows stacked
    qkv_bias: np.ndarray | None  # ((heads + num_kv_heads) * head_dim,)
    q_norm: np.ndarray | None  # (head_dim,)
    k_norm: np.ndarray | None  # (head_dim,)
    attn_output: np.ndarray  # (hidden_size, num_q_heads * head_dim)
    ffn_norm: np.ndarray  # (hidden_size,)
    gate_up: np.ndarray  # (2 * ffn_size, hidden_size): gate rows, then up rows
    ffn_down: np.ndarray  # (hidden_size, ffn_size)


@dataclass(frozen=True)
class Weights:
    """All weights of a model, float32."""

    embedding: np.ndarray  # (vocab_size, hidden_size)
    layers: tuple[Layer, ...]  # num_layers of them
    output_norm: np.ndarray  # (hidden_size,)
    output: np.ndarray  # (vocab_size, hidden_size); the embedding itself where the model ties them
    rope_frequencies: np.ndarray  # (rope_dims // 2,) float64: radians by which a position rotates each pair

    def arrays(self):
        """All of them, in a fixed order."""
        for part in (self, *self.layers):
            yield from (array for array in vars(part).values() if isinstance(array, np.ndarray))


def read_config(file: GGUFFile) -> LlamaConfig:
    """Read the sizes of the model in `file`; a model this runtime cannot run is a ModelFileError."""
    arch = file.architecture
    if arch not in ARCHITECTURES:
        raise ModelFileError(f"{file.path}: unsupported architecture {shown(arch)}; supported: {', '.join(ARCHITECTURES)}")
    hidden_size = file.count(f"{arch}.embedding_length")
    num_q_heads = file.count(f"{arch}.attention.head_count")
    num_kv_heads = file.count(f"{arch}.attention.head_count_kv", num_q_heads)
    head_dim = file.count(f"{arch}.attention.key_length", max(1, hidden_size // num_q_heads))
    rope_dims = file.count(f"{arch}.rope.dimension_count", head_dim)
    if num_q_heads % num_kv_heads:
        raise ModelFileError(f"{file.path}: {num_q_heads} query heads cannot share {num_kv_heads} KV heads")
    if file.count(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise ModelFileError(f"{file.path}: keys and values of different width are not supported")
    if rope_dims % 2 or rope_dims > head_dim:
        raise ModelFileError(f"{file.path}: cannot rotate {rope_dims} of {head_dim} dimensions")
    return LlamaConfig(
        architecture=arch,
        num_layers=file.count(f"{arch}.block_count"),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        ffn_size=file.count(f"{arch}.feed_forward_length"),
        vocab_size=file.tensor_shape("token_embd.weight")[0],
        context_length=file.count(f"{arch}.context_length"),
        norm_eps=file.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_dims=rope_dims,
    )


def read_weights(file: GGUFFile, config: LlamaConfig) -> Weights:
    """Read every weight of `file` into float32.

    A tensor that no part of the model asks for (experts, an unknown bias) is a ModelFileError: a
    model run without some of its weights would only look as if it worked.
    """
    tensors = _Tensors(file)
    vocabulary = config.vocab_size, config.hidden_size
    embedding = tensors.read("token_embd.weight", *vocabulary)
    weights = Weights(
        embedding=embedding,
        layers=tuple(_read_layer(tensors, config, f"blk.{index}.") for index in range(config.num_layers)),
        output_norm=tensors.read("output_norm.weight", config.hidden_size),
        output=tensors.read("output.weight", *vocabulary) if "output.weight" in tensors else embedding,
        rope_frequencies=_rope_frequencies(tensors, config),
    )
    if tensors.unread:
        names = sorted(tensors.unread)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ModelFileError(f"{file.path}: no use known for {', '.join(names[:3])}{more}")
    return weights


class _Tensors:
    """Reads tensors of a file and remembers which ones were not read."""

    def __init__(self, file):
        self.file = file
        self.unread = set(file.tensor_names)

    def __contains__(self, name):
        return name in self.file.tensor_names

    def read(self, name, *shape):
        self.unread.discard(name)
        return self.file.tensor(name, shape)


def _read_layer(tensors, config, prefix):
    hidden, ffn, head_dim = config.hidden_size, config.ffn_size, config.head_dim
    q_rows, kv_rows = config.num_q_heads * head_dim, config.num_kv_heads * head_dim

    # The llama converter interleaves the two rotary halves of every Q and K head. Putting them back
    # side by side leaves every q.k unchanged and lets the model rotate two contiguous halves.
    rotary = config.rope_dims if ARCHITECTURES[config.architecture] else 0
    order = np.r_[0:rotary:2, 1:rotary:2, rotary:head_dim]

    def side_by_side(array):
        return array.reshape(-1, head_dim, *array.shape[1:])[:, order].reshape(array.shape)

    def read(name, *shape):
        return tensors.read(prefix + name, *shape)

    def read_qkv(kind, *inputs):
        q, k = read(f"attn_q.{kind}", q_rows, *inputs), read(f"attn_k.{kind}", kv_rows, *inputs)
        return np.concatenate([side_by_side(q), side_by_side(k), read(f"attn_v.{kind}", kv_rows, *inputs)])

    def read_norm(name):
        if f"{prefix}{name}.weight" not in tensors:
            return None
        return side_by_side(read(f"{name}.weight", head_dim))

    return Layer(
        attn_norm=read("attn_norm.weight", hidden),
        qkv=read_qkv("weight", hidden),
        qkv_bias=read_qkv("bias") if f"{prefix}attn_q.bias" in tensors else None,
        q_norm=read_norm("attn_q_norm"),
        k_norm=read_norm("attn_k_norm"),
        attn_output=read("attn_output.weight", hidden, q_rows),
        ffn_norm=read("ffn_norm.weight", hidden),
        gate_up=np.concatenate([read("ffn_gate.weight", ffn, hidden), read("ffn_up.weight", ffn, hidden)]),
        ffn_down=read("ffn_down.weight", hidden, ffn),
    )


def _rope_frequencies(tensors, config):
    """Radians per position of each rotated pair, (rope_dims // 2,) float64."""
    file, rope = tensors.file, f"{config.architecture}.rope."
    unknown = [key for key in file.keys(rope) if key.removeprefix(rope) not in ROPE_SETTINGS]
    if unknown:
        known = ", ".join(rope + one for one in ROPE_SETTINGS)
        raise ModelFileError(f"{file.path}: no use known for {', '.join(unknown)}; known: {known}")
    base = file.number(f"{rope}freq_base", 10000.0)
    frequencies = base ** (-np.arange(0, config.rope_dims, 2) / config.rope_dims)
    # Llama 3 stretches long wavelengths by a factor per pair.
    if "rope_freqs.weight" in tensors:
        frequencies = frequencies / tensors.read("rope_freqs.weight", config.rope_dims // 2)
    # As in llama.cpp: a factor without a type scales linearly, and older files have it under another name.
    scaling = file.text(f"{rope}scaling.type", "linear")
    if scaling == "linear":
        frequencies = frequencies / file.number(f"{rope}scaling.factor", file.number(f"{rope}scale_linear", 1.0))
    elif scaling != "none":
        raise ModelFileError(f"{file.path}: unsupported RoPE scaling {shown(scaling)}; supported: none, linear")
    return frequencies
