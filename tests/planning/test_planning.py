"""Plans against real caches, files of models, and a machine's memory."""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
from model_configs import CONFIGS, GGUF_HYBRIDS, HYBRIDS

import kvfast
from kvfast import KVFormat
from kvfast.caches.buffer_layout import buffer_layout
from kvfast.planning import LayerShape, ModelShape
from kvfast.planning.memory import available_memory
from kvfast.planning.model_shape import read_shape
from kvfast.planning.plan import DTYPES
from kvfast.planning.vllm_blocks import DEFAULTS, VLLM_FORMATS, VLLM_NAMES, vllm_format

QUIET = {"memory": 1 << 30, "bandwidth": 1e10}  # nothing of this machine
OTHERS = [
    KVFormat("int4/bfloat16", per_channel=True, block_size=128, num_first_float_tokens=16),
    KVFormat("int4", per_channel=True, block_size=256, num_first_float_tokens=1),
    KVFormat("int8", rotation="v", centring=True),
    KVFormat("int8", num_first_float_tokens=4),
    KVFormat("int8/int4", num_recent_float_tokens=64),
    "int5/int2",
]
TINY_GGUF = runpy.run_path(Path(__file__).parents[1] / "data" / "tiny_gguf.py")


def of_heads(heads=2, dim=64, layers=2, **more):
    return dict(num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=heads, head_dim=dim, hidden_size=64, **more)


def most_of(cache, tokens, heads=2, dim=64, step=16):
    """The most bytes that a cache takes on its way to `tokens` tokens; those that are floats are given back on it."""
    rows, most = np.ones((step, heads, dim), np.float32), 0
    while len(cache) < tokens:
        n = min(step, tokens - len(cache))
        for layer in range(cache.num_layers):
            cache.append(layer, rows[:n], rows[:n])
        most = max(most, cache.nbytes)
        cache.advance(n)
    return max(most, cache.nbytes)


def filled(cache, tokens, heads=2, dim=64, step=16):
    """The cache with `tokens` tokens."""
    most_of(cache, tokens, heads, dim, step)
    return cache


@pytest.mark.parametrize("dtype", [*DTYPES, *OTHERS], ids=str)
@pytest.mark.parametrize("heads, dim", [(1, 64), (3, 64), (2, 20), (8, 128)])
def test_the_size_is_that_of_a_cache(dtype, heads, dim):
    for context in (300, 512):
        planned = kvfast.plan(of_heads(heads, dim), context=context, batch=3, dtype=dtype, **QUIET).dtypes[0]
        cache = kvfast.KVCache(2, heads, dim, context, dtype=dtype)
        most = most_of(cache, context, heads, dim)
        assert planned.cache == "KVCache" and planned.bytes_per_token == cache.bytes_per_token
        assert planned.bytes_per_sequence == most and planned.nbytes == 3 * most
        # The same tokens as sequences of one pool.
        blocks = 3 * -(-context // cache.block_size)
        pool = kvfast.PagedKVCache(2, heads, dim, blocks, cache.block_size, dtype=dtype)
        alone = kvfast.KVCache(2, heads, dim, context, dtype=dtype)
        for _ in range(3):
            filled(pool.new_sequence(), context, heads, dim)
        assert pool.nbytes == pytest.approx(3 * cache.nbytes, rel=0.02) or pool.nbytes < 3 * cache.nbytes
        assert pool.nbytes >= 3 * alone.nbytes * 0.99


@pytest.mark.parametrize("context", [1, 15, 16, 17, 63, 64, 65, 80, 81, 127, 128])
@pytest.mark.parametrize("dtype", ["int4", OTHERS[0], OTHERS[1], OTHERS[4]], ids=str)
def test_a_sequence_never_takes_more_than_planned(dtype, context):
    planned = kvfast.plan(of_heads(), context=context, dtype=dtype, **QUIET).dtypes[0].bytes_per_sequence
    cache = kvfast.KVCache(2, 2, 64, context, dtype=dtype)
    assert most_of(cache, context, step=1) == planned


@pytest.mark.parametrize("dtype", [*DTYPES, *OTHERS[:3]], ids=str)
def test_windows_are_those_of_a_ring(dtype):
    all_slide = of_heads(model_type="mistral", sliding_window=100)
    planned = kvfast.plan(all_slide, context=4096, dtype=dtype, **QUIET).dtypes[0]
    ring = kvfast.RingKVCache(2, 2, 64, 100, dtype=dtype)
    most = most_of(ring, 900)
    assert planned.cache == "RingKVCache" and planned.bytes_per_token == ring.bytes_per_token
    assert planned.bytes_per_sequence == pytest.approx(most, rel=0.002)  # a ring begins with a block, and alignment is by chunk
    assert planned.longest_context is None and planned.fits
    mixed = of_heads(layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"], sliding_window=100)
    ring = kvfast.RingKVCache(3, 2, 64, [100, None, 100], dtype=dtype)
    most = 0
    for context in (8 * ring.block_size, 8 * ring.block_size + 200):
        planned = kvfast.plan(mixed, context=context, dtype=dtype, **QUIET).dtypes[0]
        most = max(most, most_of(ring, context))
        # A ring that grows has taken memory for more blocks than hold tokens, unless they are just full.
        assert ring.nbytes_used <= planned.bytes_per_sequence <= 1.002 * most
        assert planned.bytes_per_sequence == pytest.approx(most, rel=0.002) or context % (8 * ring.block_size)
    short = kvfast.plan(mixed, context=100, dtype=dtype, **QUIET).dtypes[0]
    assert short.cache == "KVCache"  # no window that anything leaves


def test_latent_rows_are_those_of_their_cache():
    config = CONFIGS["DeepSeek-V2-Lite"] | {"num_hidden_layers": 2}
    planned = kvfast.plan(config, context=300, **QUIET)
    assert {one.dtype for one in planned.dtypes} == set(DTYPES) - {
        "k4v3",
        "int3",
        "int2",
        "int8-centred",
        "int4-recent",
    }  # without floats
    for one in planned.dtypes:
        cache = kvfast.MLAKVCache(2, 512, 64, 300, dtype=one.dtype)
        assert (one.cache, one.bytes_per_token, one.bytes_per_sequence) == ("MLAKVCache", cache.bytes_per_token, cache.nbytes)
    with pytest.raises(ValueError, match="latent rows"):
        kvfast.plan(config, dtype=OTHERS[0], **QUIET)
    with pytest.raises(ValueError, match="window"):
        kvfast.plan(config | {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, **QUIET)


def test_layers_of_several_shapes_and_formats():
    uneven = of_heads() | {"num_hidden_layers": 4, "num_key_value_heads": [2, 4, 0, 2]}
    planned = kvfast.plan(uneven, context=200, dtype=[["int8-rotated", "int4-plain", "float16"], "int8-rotated"], **QUIET)
    two, four = (
        kvfast.KVCache(len(dtypes), heads, 64, 200, dtype=dtypes)
        for heads, dtypes in ((2, ["int8-rotated", "float16"]), (4, ["int4-plain"]))
    )
    assert planned["mixed"].bytes_per_sequence == two.nbytes + four.nbytes
    assert planned["int8-rotated"].bytes_per_token == (2 * 2 + 4) * 2 * (64 + 4)
    assert "1 of 4 layers" in planned.notes[0]
    with pytest.raises(KeyError):
        planned["int4"]
    with pytest.raises(FrozenInstanceError):
        planned.batch = 4


@pytest.mark.parametrize("dtype", [*DTYPES, *OTHERS], ids=str)
@pytest.mark.parametrize("context", [64, 512, 4096])
def test_what_a_token_reads_is_what_attend_reads(dtype, context):
    cache = filled(kvfast.KVCache(2, 2, 64, context, dtype=dtype), context)
    planned = kvfast.plan(of_heads(), context=context, batch=5, dtype=dtype, **QUIET).dtypes[0]
    # Whole blocks have statistics; what attends reads of it otherwise is told to the byte.
    assert planned.bytes_read == pytest.approx(2 * cache.explain(0, (1, 2, 64)).bytes_read, rel=0.002)
    assert planned.tokens_per_second == pytest.approx(1e10 / planned.bytes_read)
    weighed = kvfast.plan(of_heads(), context=context, batch=5, dtype=dtype, weight_bytes=10**9, **QUIET).dtypes[0]
    assert weighed.tokens_per_second_with_weights == pytest.approx(5 / ((5 * planned.bytes_read + 10**9) / 1e10))


@pytest.mark.parametrize("dtype", [*DTYPES, *OTHERS], ids=str)
def test_what_a_token_reads_in_a_window(dtype):
    ring = filled(kvfast.RingKVCache(2, 2, 64, 512, dtype=dtype), 2048)
    slides = kvfast.plan(of_heads(model_type="mistral", sliding_window=512), context=2048, dtype=dtype, **QUIET).dtypes[0]
    assert slides.bytes_read == pytest.approx(2 * ring.explain(0, (1, 2, 64)).bytes_read, rel=0.002)


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "gpt-oss-20b", "DeepSeek-V3", "Gemma-3-4B"])
def test_what_fits_fits_and_no_more(name):
    memory, batch = 3 << 30, 7
    for one in kvfast.plan(CONFIGS[name], context=5000, batch=batch, memory=memory, bandwidth=1e10).dtypes:

        def at(context=5000, sequences=batch, dtype=one.dtype):
            return kvfast.plan(CONFIGS[name], context=context, batch=sequences, dtype=dtype, memory=memory, bandwidth=1e10).dtypes[0]

        assert at(one.longest_context).fits and not at(one.longest_context + 1).fits
        assert not at(sequences=one.largest_batch + 1).fits
        assert one.largest_batch == 0 or at(sequences=one.largest_batch).fits
        assert one.fits == (one.largest_batch >= batch) == (one.longest_context >= 5000)


def test_published_models():
    shapes = {name: read_shape(config) for name, config in CONFIGS.items()}
    kv = {name: (len(shape.layers), shape.layers[-1].num_kv_heads, shape.layers[-1].head_dim) for name, shape in shapes.items()}
    assert kv == {
        "Llama-3.2-1B": (16, 8, 64),
        "Qwen3-30B-A3B": (48, 4, 128),
        "Mistral-7B-v0.1": (32, 8, 128),
        "Falcon-7B": (32, 1, 64),
        "Gemma-2-2B": (26, 4, 256),
        "Gemma-3-1B": (26, 1, 256),
        "Gemma-3-4B": (34, 4, 256),
        "DeepSeek-V2-Lite": (27, 1, 512),
        "DeepSeek-V3": (61, 1, 512),
        "gpt-oss-20b": (24, 8, 64),
    }
    windows = {name: [layer.sliding_window for layer in shape.layers] for name, shape in shapes.items()}
    assert windows["Mistral-7B-v0.1"] == [4096] * 32
    assert windows["Gemma-2-2B"] == [4096, None] * 13
    assert windows["Gemma-3-1B"] == ([512] * 5 + [None]) * 4 + [512] * 2
    assert windows["Gemma-3-4B"] == ([1024] * 5 + [None]) * 5 + [1024] * 4
    assert windows["gpt-oss-20b"] == [128, None] * 12
    assert all(set(windows[name]) == {None} for name in ("Llama-3.2-1B", "Qwen3-30B-A3B", "DeepSeek-V3", "Falcon-7B"))
    assert shapes["DeepSeek-V3"].layers[0] == LayerShape(1, 512, None, 64)
    assert shapes["Llama-3.2-1B"].context_length == 131072
    # As in the table of docs/concepts/caches.md.
    sizes = {dtype: kvfast.plan(CONFIGS["Llama-3.2-1B"], dtype=dtype, **QUIET).dtypes[0].bytes_per_token for dtype in DTYPES}
    assert (sizes["float16"], sizes["int8"], sizes["k8v4"], sizes["int4"]) == (32768, 17408, 13056, 8960)


def test_layers_that_are_told_apart_otherwise():
    qwen = CONFIGS["Qwen3-30B-A3B"] | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 40}
    assert [layer.sliding_window for layer in read_shape(qwen).layers] == [None] * 40 + [64] * 8
    named = qwen | {"use_sliding_window": False, "layer_types": ["full_attention"] * 48}
    assert {layer.sliding_window for layer in read_shape(named).layers} == {None}
    unknown = read_shape(of_heads(model_type="new", sliding_window=64))
    assert unknown.layers[0].sliding_window is None and "64 tokens is not said" in unknown.notes[0]
    hybrid = read_shape(of_heads(layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"]))
    assert len(hybrid.layers) == 1 and "3 of 4 layers" in hybrid.notes[0]
    assert "chunked" in read_shape(of_heads(layer_types=["chunked_attention", "full_attention"])).notes[0]
    assert len(read_shape(of_heads(layers=6, num_kv_shared_layers=2)).layers) == 4
    assert read_shape({"n_layer": 2, "n_head": 4, "n_embd": 64}).layers == (LayerShape(4, 16),) * 2  # GPT-2's names


@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_that_keep_nothing_are_not_counted(name):
    right, config = HYBRIDS[name]
    shape = read_shape(config)
    assert len(shape.layers) == right
    number = config.get("text_config", config).get("num_hidden_layers", 56)
    assert any("keep no keys and values" in note for note in shape.notes) == (right < number and name != "distilbart-cnn-12-6")


def test_fields_that_name_layers():
    def windows(**fields):
        return [layer.sliding_window for layer in read_shape(of_heads(layers=6) | fields).layers]

    assert windows(attn_type_list=[0, 0, 1, 0, 0, 1]) == [None] * 2
    assert windows(layer_group_size=3) == windows(hybrid_layer_ids=[2, 5]) == [None] * 2
    assert windows(hybrid_layer_pattern=[0, 1, 1, 1, 1, 0], sliding_window=128) == [None, *[128] * 4, None]
    assert windows(local_layer_ids=[0, 1], sliding_window_size=64) == [64] * 2 + [None] * 4
    assert windows(sliding_window_pattern="LLG", sliding_window=64) == windows(global_attn_every_n_layers=3, sliding_window=64)
    assert windows(no_rope_layers=[1, 1, 0] * 2, attention_chunk_size=8) == [8, 8, None] * 2
    assert windows(no_rope_layers=[1, 1, 0] * 2) == [None] * 6
    assert windows(kv_source_layers=[0, 0, 2, 2, 2, 5]) == [None] * 3
    assert windows(layer_types=["indexed_attention"] * 6, index_head_dim=8) == [None] * 6
    assert windows(layer_types=["hybrid_sliding", "hybrid"] * 3, sliding_window=8) == [8, None] * 3
    far = 2**31 - 1  # a hostile file costs nothing
    assert windows(sliding_window_pattern=far, sliding_window=8) == windows(global_attn_every_n_layers=far, sliding_window=8) == [8] * 6
    assert (
        windows(attn_layer_period=far, attn_layer_offset=2) == [None] and windows(max_window_layers=far, sliding_window=8) == [None] * 6
    )
    assert "state in place of keys" in read_shape(of_heads(model_type="new", mamba_d_state=16)).notes[0]
    with pytest.raises(ValueError, match="no layer of this mamba2 keeps"):
        read_shape({"model_type": "mamba2", "num_hidden_layers": 4, "num_heads": 8, "head_dim": 64})


@pytest.mark.parametrize(
    "change, told",
    [
        ({"layers_block_type": ["mamba"]}, "layers_block_type must be a list of 2 names"),
        ({"hybrid_override_pattern": "MX"}, "'X'"),
        ({"attn_layer_indices": [2]}, "attn_layer_indices must list layers between 0 and 1"),
        ({"attn_layer_indices": "all"}, "attn_layer_indices must list"),
        ({"attn_type_list": [1]}, "list of 2 marks"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
        ({"attn_layer_period": 0, "attn_layer_offset": 0}, "attn_layer_period"),
        ({"block_types": 3}, "block_types must be a list"),
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"num_attention_heads": None}, "lacks num_attention_heads"),
        ({"head_dim": None, "hidden_size": None}, "lacks hidden_size"),
        ({"head_dim": None, "hidden_size": 4}, "hidden_size of 4 does not make 8 heads"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be a whole number of at least 1, got 'two'"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "at most 65536"),
        ({"num_key_value_heads": -2}, "num_key_value_heads"),
        ({"num_key_value_heads": [2, 2, 2]}, "one number or 2"),
        ({"num_key_value_heads": [0, 0]}, "no layer"),
        ({"head_dim": 1 << 20}, "head_dim"),
        ({"layer_types": ["full_attention"]}, "list of 2"),
        ({"layer_types": ["full_attention", "magic"]}, "'magic'"),
        ({"layer_types": ["sliding_attention"] * 2}, "lacks sliding_window"),
        ({"sliding_window": -4}, "sliding_window"),
        ({"kv_lora_rank": 512}, "lacks qk_rope_head_dim"),
        ({"kv_lora_rank": 5120, "qk_rope_head_dim": 64}, "head_dim"),
        ({"max_position_embeddings": 1.5}, "max_position_embeddings"),
    ],
)
def test_configurations_that_cannot_be(change, told, tmp_path):
    config = of_heads() | change
    with pytest.raises(ValueError, match=told):
        kvfast.plan(config, **QUIET)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=told):
        kvfast.plan(tmp_path, **QUIET)


def test_files_that_are_none(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError, match=r"Pass a config.json, its folder or a GGUF file: `hf download MODEL config.json`"):
        kvfast.plan(path)
    for contents in (b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"GGU"):
        path.write_bytes(contents)
        with pytest.raises(ValueError, match="neither a GGUF file nor JSON"):
            kvfast.plan(path)
    for contents in (b"[1]", b"3", b"null"):
        path.write_bytes(contents)
        with pytest.raises(ValueError, match="JSON object"):
            kvfast.plan(path)
    with path.open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(ValueError, match="less than 16 MiB"):
        kvfast.plan(path)
    with pytest.raises(TypeError, match="got int"):
        kvfast.plan(3)


@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"context": 0}, ValueError),
        ({"batch": 0}, ValueError),
        ({"context": 1.5}, TypeError),
        ({"dtype": "int9"}, ValueError),
        ({"dtype": [["int8"] * 3]}, ValueError),
        ({"bandwidth": 0}, ValueError),
        ({"bandwidth": "fast"}, ValueError),
        ({"memory": -1}, ValueError),
        ({"weight_bytes": 0}, ValueError),
        ({"weight_bytes_read": 1}, ValueError),
        ({"weight_bytes_read": 11, "weight_bytes": 10}, ValueError),
    ],
)
def test_arguments_that_cannot_be(arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        kvfast.plan(of_heads(), **(QUIET | arguments))


def test_sources_of_a_configuration(tmp_path):
    config = CONFIGS["gpt-oss-20b"]
    (tmp_path / "config.json").write_text(json.dumps(config))

    class Config:
        def to_dict(self):
            return config

    plans = [kvfast.plan(one, **QUIET) for one in (config, Config(), tmp_path, str(tmp_path / "config.json"))]
    assert plans[1:] == plans[:1] * 3 and plans[0].context == 131072
    assert kvfast.plan(plans[0].model, **QUIET) == plans[0]
    assert json.loads(json.dumps(plans[0].to_dict()))["dtypes"][0]["dtype"] == "float32"
    assert kvfast.plan(of_heads(), **QUIET).context == 4096


def test_measured_where_nothing_is_said():
    planned = kvfast.plan(of_heads(), dtype="int8", context=64)
    assert 1e8 < planned.bandwidth < 1e13
    assert planned.memory is None or 1 << 20 < planned.memory < 1 << 50


def test_gguf_files(tmp_path):
    path = tmp_path / "tiny.gguf"
    pytest.importorskip("gguf")
    TINY_GGUF["write_model"](path)
    from kvfast.llama import GGUFFile, LlamaModel, ModelFileError

    planned, model = kvfast.plan(path, context=100, dtype="int8-rotated", **QUIET), LlamaModel.from_gguf(path)
    cache = kvfast.KVCache(*model.cache_shape, 100, dtype="int8-rotated")
    assert planned.dtypes[0].bytes_per_sequence == cache.nbytes
    sizes = GGUFFile(path).tensor_bytes()
    assert planned.model.weight_bytes == sum(sizes.values()) < path.stat().st_size
    looked_up = sizes["token_embd.weight"] if "output.weight" in sizes else 0
    assert planned.model.weight_bytes_read == sum(sizes.values()) - looked_up
    assert planned.dtypes[0].tokens_per_second_with_weights < planned.dtypes[0].tokens_per_second
    assert planned.memory == QUIET["memory"] - planned.model.weight_bytes
    wider = kvfast.plan(path, context=100, dtype="int8-rotated", weight_bytes=2 * planned.model.weight_bytes, **QUIET).model
    assert wider.weight_bytes_read == 2 * planned.model.weight_bytes_read  # the same share of them
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(ModelFileError, match="damaged"):
        kvfast.plan(path)
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match="damaged"):
        kvfast.plan(path)


def write_gguf(path, arch, tensors=(), **values):
    import gguf

    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"{arch}.{key.replace('__', '.')}", value)
    for name, shape in tensors:
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_files_of_other_architectures(tmp_path):
    pytest.importorskip("gguf")
    heads = {"block_count": 6, "attention__head_count": 8, "embedding_length": 512}
    gemma = write_gguf(
        tmp_path / "gemma.gguf",
        "gemma3",
        **heads,
        attention__head_count_kv=2,
        attention__key_length=128,
        attention__value_length=128,
        attention__sliding_window=64,
        context_length=4096,
    )
    assert read_shape(gemma).layers == (LayerShape(2, 128, 64),) * 5 + (LayerShape(2, 128),)
    deepseek = write_gguf(
        tmp_path / "deepseek.gguf",
        "deepseek2",
        **heads,
        attention__head_count_kv=1,
        attention__key_length=576,
        attention__value_length=512,
        attention__kv_lora_rank=512,
        rope__dimension_count=64,
    )
    assert read_shape(deepseek).layers == (LayerShape(1, 512, None, 64),) * 6
    uneven = write_gguf(tmp_path / "uneven.gguf", "openelm", **heads, attention__head_count_kv=[1, 1, 2, 2, 4, 4])
    assert [layer.num_kv_heads for layer in read_shape(uneven).layers] == [1, 1, 2, 2, 4, 4]
    wide = write_gguf(tmp_path / "wide.gguf", "new", **heads, attention__key_length=64, attention__value_length=128)
    assert read_shape(wide).layers == (LayerShape(8, 64, v_head_dim=128),) * 6
    with pytest.raises(ValueError, match=r"lacks new\.block_count"):
        read_shape(write_gguf(tmp_path / "lacks.gguf", "new", embedding_length=512))
    experts = write_gguf(
        tmp_path / "experts.gguf",
        "new",
        **heads,
        expert_count=8,
        expert_used_count=2,
        tensors=[("token_embd.weight", (32, 8)), ("output.weight", (32, 8)), ("blk.0.ffn_up_exps.weight", (8, 4, 8))],
    )
    shape = read_shape(experts)
    assert (shape.weight_bytes, shape.weight_bytes_read) == (4 * (256 + 256 + 256), 4 * (256 + 64))


@pytest.mark.parametrize("arch", GGUF_HYBRIDS)
def test_gguf_files_of_hybrids(tmp_path, arch):
    """They tell by other numbers which layers have a state, and its sizes."""
    pytest.importorskip("gguf")
    config, numbers = GGUF_HYBRIDS[arch]
    path = write_gguf(tmp_path / "hybrid.gguf", arch, embedding_length=256, attention__head_count=16, **numbers)
    expected = read_shape({"hidden_size": 256, "num_attention_heads": 16} | config)
    found = read_shape(path)
    assert found.state_bytes == expected.state_bytes > 0
    assert (found.layers, found.notes) == (expected.layers, expected.notes)


def test_without_the_packages_of_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    code = f"import sys; sys.modules['gguf'] = None\nimport kvfast\nkvfast.plan({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and 'pip install "kvfast[llama]"' in done.stderr.splitlines()[-1]


def fake_system(root, available, cgroup="", **files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable:  {available} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


def test_memory_within_cgroups(tmp_path):
    assert available_memory(fake_system(tmp_path / "none", 500)) == 500 * 1024
    limits = {
        "a__b__memoryDOTmax": "max\n",
        "a__b__memoryDOTcurrent": 7,
        "a__memoryDOTmax": "100000\n",
        "a__memoryDOTcurrent": "60000\n",
        "a__memoryDOTstat": "anon 3\ninactive_file 5000\n",
    }
    assert available_memory(fake_system(tmp_path / "v2", 500, "0::/a/b\n", **limits)) == 45000
    assert available_memory(fake_system(tmp_path / "roomy", 5, "0::/a/b\n", **limits)) == 5 * 1024
    old = {"memory__memoryDOTlimit_in_bytes": 1000, "memory__memoryDOTusage_in_bytes": 1200}
    assert available_memory(fake_system(tmp_path / "v1", 500, "9:name=systemd:/\n4:cpu,memory:/gone\n0::/\n", **old)) == 0


def test_weights_share_the_memory_with_keys_and_values():
    def planned(**weights):
        return kvfast.plan(of_heads(), context=4096, dtype="int8", memory=4 << 20, bandwidth=1e10, **weights)

    alone, beside = planned(), planned(weight_bytes=3 << 20)
    assert (alone.memory, beside.memory) == (4 << 20, 1 << 20) and alone.dtypes[0].fits and not beside.dtypes[0].fits
    assert beside.dtypes[0].longest_context < alone.dtypes[0].longest_context
    assert beside == kvfast.plan(of_heads(), context=4096, dtype="int8", memory=4 << 20, bandwidth=1e10, weight_bytes=3 << 20)
    assert (beside.model.weight_bytes, beside.model.weight_bytes_read) == (3 << 20, 3 << 20)
    none = planned(weight_bytes=5 << 20)
    assert (none.memory, none.dtypes[0].longest_context, none.dtypes[0].largest_batch, none.dtypes[0].fits) == (0, 0, 0, False)
    # A mixture of experts has all of its weights in memory, and reads few of them.
    experts = planned(weight_bytes=3 << 20, weight_bytes_read=1 << 20)
    assert experts.memory == beside.memory
    assert experts.dtypes[0].tokens_per_second_with_weights == pytest.approx(1e10 / (beside.dtypes[0].bytes_read + (1 << 20)))


def test_weights_lie_outside_the_memory_that_vllm_has_for_keys_and_values():
    plans = [kvfast.plan(of_heads(), engine="vllm", weight_bytes=weights, **QUIET) for weights in (None, 1 << 29)]
    assert [plan.memory for plan in plans] == [QUIET["memory"]] * 2
    assert [plan["auto"].tokens_per_second_with_weights is None for plan in plans] == [True, False]


def test_the_default_is_that_of_the_caches():
    cache = kvfast.KVCache(1, 1, 16)
    assert kvfast.KVCache(1, 1, 16, dtype=DEFAULTS["kvfast"]).dtype == cache.dtype == kvfast.PagedKVCache(1, 1, 16, 4).dtype
    assert DEFAULTS["vllm"] == "auto"


def test_a_plan_prints_as_a_table():
    many = kvfast.plan(CONFIGS["gpt-oss-20b"], context=32768, batch=8, memory=6 << 30, bandwidth=2e10, weight_bytes=4 << 30)
    lines = str(many).splitlines()
    rules = [i for i, line in enumerate(lines) if set(line) == {"-"}]
    assert lines[0] == "gpt_oss: 12 layers x 8 KV heads of 64, window 128; 12 layers x 8 KV heads of 64"
    assert lines[1] == "8 sequences of 32,768 tokens" and rules == [2, 5, 6 + len(DTYPES)]
    rows = lines[rules[1] + 1 : rules[2]]
    assert [row.split()[0] for row in rows] == list(DTYPES) and {len(row) for row in rows} == {len(lines[2])}
    assert [row for row in rows if "*" in row] == [row for row in rows if row.startswith("int4 *")]
    int8 = many["int8"]
    for text in (f"{int8.bytes_per_token:,}", "no", f"{int8.longest_context:,}", str(int8.largest_batch)):
        assert text in rows[list(DTYPES).index("int8")].split()
    assert "2.0 GiB of memory for keys and values, next to 4.0 GiB of weights; 20.0 GB/s read." in lines
    assert "at most" in lines[4] and "from the read bandwidth alone" in str(many) and "* the default format." in lines
    assert repr(many) == f"MemoryPlan(gpt_oss, context=32768, batch=8, memory=2147483648, {len(DTYPES)} formats)"

    one = str(kvfast.plan(of_heads(model_type="mistral", sliding_window=8), dtype="int8", **QUIET))
    assert "1 sequence of 4,096 tokens" in one and " any " in one
    assert not any(text in one for text in ("weights", "default", "a GiB")) and "sequence" not in one.splitlines()[4]
    served = str(kvfast.plan(of_heads(), engine="vllm", **QUIET))
    assert "a GiB" in served and "auto *" in served and "* the default format of vLLM." in served


def test_a_prompt_that_does_not_fit_is_told():
    def told(memory):
        return str(kvfast.plan(of_heads(), context=4096, batch=2, dtype="int4", memory=memory, bandwidth=1e10))

    of_all = kvfast.plan(of_heads(), context=4096, batch=2, dtype="int4", **QUIET).dtypes[0]
    enough = of_all.bytes_of_prompt + of_all.bytes_per_sequence  # while the second comes, the first is there
    assert "in one append takes more" in told(enough) and "does not fit" not in told(enough)
    assert "(does not fit)" in told(enough - 1)


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "kvfast", "plan", *map(str, arguments)], capture_output=True, text=True, check=False)


def test_the_command(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["gpt-oss-20b"]))
    options = ["--context", 32768, "--batch", 8, "--memory", 4, "--bandwidth", 20, "--weights", 2]
    done = run(path, *options)
    assert done.returncode == 0, done.stderr
    told = (
        "12 layers x 8 KV heads of 64, window 128",
        "8 sequences of 32,768 tokens",
        "k8v4",
        "26,112",
        "int4 *",
        "1.9 GiB of weights",
    )
    for text in (*told, "20.0 GB/s"):
        assert text in done.stdout
    done = run(tmp_path, *options, "--json", "--dtype", "int8, int4")
    planned = kvfast.plan(
        path, context=32768, batch=8, memory=4 * 10**9, bandwidth=20e9, weight_bytes=2 * 10**9, dtype=["int8", "int4"]
    )
    assert json.loads(done.stdout) == json.loads(json.dumps(planned.to_dict()))
    path.write_text("{}")
    done = run(path)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {path} lacks num_hidden_layers") and not done.stdout
    assert run(path, "--bandwidth", -1).returncode == 2


def test_the_command_needs_numpy_alone(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["gpt-oss-20b"]))
    args = ["plan", str(path), "--memory", "8", "--bandwidth", "20", "--weights", "4", "--weights-read", "1"]
    packages = "rich", "gguf", "tokenizers", "safetensors", "xxhash", "threadpoolctl"
    code = f"import sys; sys.modules |= dict.fromkeys({packages!r})\nfrom kvfast.tools.cli import main; sys.exit(main({args!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    planned = kvfast.plan(path, memory=8 * 10**9, bandwidth=20e9, weight_bytes=4 * 10**9, weight_bytes_read=10**9)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{planned}\n", "")


@pytest.mark.parametrize("dtype", [*DTYPES, *OTHERS], ids=str)
def test_a_prompt_takes_what_is_planned_and_gives_it_back(dtype):
    """A whole prompt in one append has the peak that is told, and gives it back, whatever the steps are."""
    context = 2000
    planned = kvfast.plan(of_heads(), context=context, dtype=dtype, **QUIET).dtypes[0]
    rows = np.ones((context, 2, 64), np.float32)
    for steps in ([context], [1500, 500], [500] * 4, [context - 60] + [20] * 3):
        cache, most = kvfast.KVCache(2, 2, 64, context, dtype=dtype), 0
        for n in steps:
            for layer in range(2):
                cache.append(layer, rows[:n], rows[:n])
            most = max(most, cache.nbytes)
            cache.advance(n)
        assert most <= planned.bytes_of_prompt and (steps != [context] or most == planned.bytes_of_prompt)
        assert cache.nbytes <= planned.bytes_per_sequence
    all_slide = of_heads(model_type="mistral", sliding_window=100)
    planned = kvfast.plan(all_slide, context=context, dtype=dtype, **QUIET).dtypes[0]
    ring = kvfast.RingKVCache(2, 2, 64, 100, dtype=dtype)
    for layer in range(2):
        ring.append(layer, rows, rows)
    # Where float rows are those of the first tokens alone, there are fewer of them as yet.
    assert 0.9 * planned.bytes_of_prompt <= ring.nbytes <= planned.bytes_of_prompt
    ring.advance(context)
    filled(ring, context + 512)  # the blocks of the window are still those that came with the prompt, until it has moved on
    assert ring.nbytes <= planned.bytes_per_sequence


def test_blocks_of_vllm():
    """What `buffer_layout` gives each layer, in whole blocks of 64 tokens; turboquant leaves two layers at each end in bfloat16."""
    found = kvfast.plan(of_heads(3, 64, 30), context=8000, batch=8, engine="vllm", memory=1 << 30, bandwidth=1e10)
    assert [one.dtype for one in found.dtypes] == list(VLLM_NAMES)
    for name, form in VLLM_NAMES.items():
        inner, outer = (buffer_layout(1, 3, 64, 125, 64, each).nbytes for each in (form, "bfloat16"))
        ends = 4 if name.startswith("turboquant") else 0
        one = found[name]
        assert one.bytes_per_sequence == (30 - ends) * inner + ends * outer == one.bytes_per_token * 8000
        assert one.largest_batch == (1 << 30) // one.bytes_per_sequence and one.nbytes == 8 * one.bytes_per_sequence
        assert one.tokens_per_gib == (1 << 30) // one.bytes_per_token
    ratio = found["int8_per_token_head"].tokens_per_gib / found["auto"].tokens_per_gib
    assert 1.88 < ratio < 1.89 and found["auto"].bytes_per_token == 30 * 3 * 256
    assert found["int4_per_token_head"].tokens_per_gib > 3.6 * found["auto"].tokens_per_gib
    assert any("turboquant modes leave" in note for note in found.notes)


@pytest.mark.parametrize("name", [name for name in VLLM_FORMATS if "turboquant" not in name])
def test_codes_of_a_window_fit_into_the_blocks_of_vllm(name):
    """And a preset has its blocks by the name that is kvfast's own, from vLLM 0.33 on."""
    one, of_window = (buffer_layout(1, 2, 96, 1, 64, vllm_format(name, window)).nbytes for window in (None, 70))
    assert of_window <= one == kvfast.plan(of_heads(2, 96, 1), engine="vllm", dtype=name, **QUIET).dtypes[0].bytes_per_token * 64
    assert not name.startswith("kvfast_") or str(vllm_format(name, None)) == name.removeprefix("kvfast_").replace("_", "-")


def test_windows_of_vllm():
    """A window keeps its tokens and those of one step, however long the text is."""
    config = of_heads(sliding_window=4096, model_type="mistral")
    long, longer = (kvfast.plan(config, context=n, engine="vllm", dtype="auto", **QUIET).dtypes[0] for n in (100_000, 200_000))
    assert long.bytes_per_sequence == longer.bytes_per_sequence == long.bytes_per_token * 64 * (-(-(4095 + 2048) // 64) + 1)


def test_drafts_of_vllm():
    """Layers of drafts are layers of the model, and turboquant leaves the first and last two of a draft model in bfloat16."""
    target, draft = of_heads(2, 64, 8), of_heads(2, 64, 6)

    def tokens(dtype, model=target, **options):
        return kvfast.plan(model, engine="vllm", dtype=dtype, **options, **QUIET).dtypes[0].bytes_per_token

    for dtype in ("auto", "int4_per_token_head"):
        assert tokens(dtype, drafts=draft) == tokens(dtype, of_heads(2, 64, 14))
        assert tokens(dtype, drafts=1) == tokens(dtype, drafts=of_heads(2, 64, 1)) == tokens(dtype, of_heads(2, 64, 9))
    plain, coded = (buffer_layout(1, 2, 64, 1, 64, VLLM_NAMES[name]).nbytes // 64 for name in ("auto", "turboquant_3bit_nc"))
    assert tokens("turboquant_3bit_nc", drafts=1) == 4 * plain + 5 * coded
    assert tokens("turboquant_3bit_nc", drafts=draft) == 6 * plain + 8 * coded
    for wrong in (0, True, -1, 1 << 40):
        with pytest.raises((TypeError, ValueError), match="drafts must be"):
            tokens("auto", drafts=wrong)
    with pytest.raises(ValueError, match="plan the draft model for itself"):
        kvfast.plan(target, drafts=draft, **QUIET)


def test_groups_of_vllm():
    """Two layers without a window and two with one: three of another size make groups of two, with room for a fourth."""
    mixed = ModelShape("mixed", tuple(LayerShape(2, 64, window) for window in (None, 70) * 2), 4096)
    drafts = ModelShape("drafts", (LayerShape(2, 32),) * 3)
    block = 2 * buffer_layout(1, 2, 64, 1, 64, "int8-rotated").nbytes
    sizes = [
        kvfast.plan(mixed, context=8192, engine="vllm", dtype="int8_per_token_head", drafts=one, **QUIET) for one in (None, drafts)
    ]
    window = -(-(69 + 2048) // 64) + 1
    assert [one.dtypes[0].bytes_per_sequence for one in sizes] == [block * (128 + window), block * (128 + 2 * 128 + window)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"engine": "sglang"}, "engine must be kvfast or vllm, got 'sglang'"),
        ({"engine": "vllm", "dtype": "int8"}, "dtype must be auto, .* or kvfast_ and a preset for engine='vllm', got 'int8'"),
    ],
)
def test_engines_that_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        kvfast.plan(of_heads(), **options, **QUIET)


def test_latent_rows_are_not_planned_for_vllm():
    with pytest.raises(ValueError, match="no latent rows"):
        kvfast.plan(ModelShape("deepseek", (LayerShape(1, 512, rope_dim=64),), 4096), engine="vllm", **QUIET)


def test_the_command_plans_for_vllm(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(of_heads(3, 64, 30)))
    command = [sys.executable, "-m", "kvfast", "plan", str(tmp_path), "--engine", "vllm", "--memory", "1", "--bandwidth", "10"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "120"}).stdout
    assert "46,603" in text and "int4_per_token_head" in text and "170,435" in text
    found = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert found["dtypes"][0]["cache"] == "vLLM, bfloat16"


HEADS = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "dbrx", "d_model": 512, "n_heads": 8, "n_layers": 3, "attn_config": {"kv_n_heads": 2}}, [(2, None)] * 3),
        (
            {"model_type": "mpt", "d_model": 512, "n_heads": 8, "n_layers": 3, "attn_config": {"attn_type": "multiquery_attention"}},
            [(1, None)] * 3,
        ),
        (
            {
                "model_type": "mpt",
                "d_model": 512,
                "n_heads": 8,
                "n_layers": 3,
                "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2},
            },
            [(2, None)] * 3,
        ),
        (HEADS | {"model_type": "chatglm", "multi_query_attention": True, "multi_query_group_num": 2}, [(2, None)] * 4),
        (HEADS | {"model_type": "chatglm", "multi_query_attention": False, "multi_query_group_num": 2}, [(8, None)] * 4),
        (HEADS | {"model_type": "step3p5", "num_attention_groups": 2}, [(2, None)] * 4),
        (
            HEADS
            | {
                "model_type": "nemotron-nas",
                "num_key_value_heads": None,
                "block_configs": [
                    {"attention": {"n_heads_in_group": 4, "no_op": False}},
                    {"attention": {"n_heads_in_group": None, "no_op": True}},
                    {"attention": {"n_heads_in_group": 8}},
                    {"attention": {"n_heads_in_group": None, "replace_with_linear": True}},
                ],
            },
            [(2, None), (1, None)],
        ),
        (HEADS | {"model_type": "hunyuan", "num_key_value_heads": 2, "use_cla": True, "cla_share_factor": 2}, [(2, None)] * 2),
    ],
    ids=lambda one: one["model_type"] if isinstance(one, dict) else "",
)
def test_keys_of_other_names(config, expected):
    found = read_shape(config)
    assert [(layer.num_kv_heads, layer.sliding_window) for layer in found.layers] == expected
    assert not any("may tell" in note for note in found.notes) or config.get("multi_query_attention") is False


def test_a_key_that_may_tell_the_kv_heads_is_named():
    (note,) = read_shape(HEADS | {"model_type": "new", "num_query_groups": 2}).notes
    assert note.startswith("no key that kvfast knows tells the KV heads: all 8 query heads") and "num_query_groups may tell" in note


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"model_type": "nemotron-nas", "block_configs": [{}]}, "block_configs must be a list of 4 objects"),
        (
            {"model_type": "nemotron-nas", "block_configs": [{"attention": {"n_heads_in_group": 0}}] * 4},
            "n_heads_in_group must be a whole",
        ),
    ],
)
def test_wrong_keys_of_other_names(keys, text):
    with pytest.raises(ValueError, match=text):
        read_shape(HEADS | keys)
