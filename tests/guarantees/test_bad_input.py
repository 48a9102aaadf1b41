"""Bad input gets a clear error, and changes nothing."""

import copy
import subprocess
import sys

import numpy as np
import pytest
from cache_kinds import filled

import kvfast
import kvfast.llama_cpp


@pytest.fixture
def cache(rng):
    cache = kvfast.KVCache(2, 2, 16, max_seq_len=10, dtype="int8")
    k = rng.standard_normal((4, 2, 16)).astype(np.float32)
    filled(cache, k, k)
    before = [cache.k(0), cache.v(0), cache.k(1), cache.v(1)]
    yield cache
    after = [cache.k(0), cache.v(0), cache.k(1), cache.v(1)]
    assert len(cache) == 4 and all(np.array_equal(a, b) for a, b in zip(before, after))


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_lists_that_hold_themselves_are_refused():
    endless = [0]
    endless[0] = endless
    cache = kvfast.KVCache(1, 1, 16)
    for call in (lambda: cache.append(0, endless, endless), lambda: kvfast.PagedKVCache(1, 1, 16, num_blocks=2).match_prefix(endless)):
        with pytest.raises((ValueError, TypeError)):
            call()


def test_append(cache):
    good = ones(1, 2, 16)
    for bad in (ones(2, 16), ones(1, 1, 2, 16), ones(1, 3, 16), ones(1, 2, 15), ones(0, 2, 16), ones(2, 2, 16), ones(1, 2, 600)):
        for k, v in ((bad, good), (good, bad)):
            with pytest.raises(kvfast.DimensionMismatchError):
                cache.append(0, k, v)
    for dtype in (np.longdouble, np.int32, np.int8, ">f4", np.complex64):
        with pytest.raises(TypeError, match="must be float32, float16 or bfloat16"):
            cache.append(0, ones(1, 2, 16, dtype=dtype), good)
    with pytest.raises(TypeError):
        cache.append(0, object(), good)
    with pytest.raises(TypeError):
        cache.append(0, None, good)
    for layer in (-1, 2, 10**30):
        with pytest.raises(IndexError, match="between 0 and 1"):
            cache.append(layer, good, good)
    for layer in (0.0, "0", None):
        with pytest.raises(TypeError, match="layer must be an integer"):
            cache.append(layer, good, good)


def test_full(cache):
    with pytest.raises(kvfast.CacheFullError, match="room for 6 of 10 tokens, got 7") as error:
        cache.append(0, ones(7, 2, 16), ones(7, 2, 16))
    assert (error.value.needed, error.value.free) == (7, 6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite(cache, bad):
    k = ones(5, 2, 16)
    k[3, 1, 9] = bad
    for arguments in ((k, ones(5, 2, 16)), (ones(5, 2, 16), k), (k.astype(np.float16), ones(5, 2, 16))):
        with pytest.raises(kvfast.NonFiniteInputError, match=r"\[3, 1, 9\]"):
            cache.append(1, *arguments)
    with pytest.raises(kvfast.NonFiniteInputError, match=r"q must be finite"):
        cache.attend(0, k[3:4])


def test_beyond_float16(rng):
    cache = kvfast.KVCache(1, 1, 16, dtype="float16")
    with pytest.raises(kvfast.NonFiniteInputError, match="beyond the range of float16"):
        cache.append(0, ones(1, 1, 16) * 1e6, ones(1, 1, 16))
    assert cache.layer_length(0) == 0
    cache.append(0, ones(1, 1, 16) * 65504, ones(1, 1, 16))
    assert np.isfinite(cache.k(0)).all()


def test_attend(cache):
    q = ones(1, 4, 16)
    for bad in (ones(4, 16), ones(1, 3, 16), ones(1, 4, 17), ones(0, 4, 16)):
        with pytest.raises(kvfast.DimensionMismatchError):
            cache.attend(0, bad)
    with pytest.raises(ValueError, match="q must hold at most the 4 tokens of layer 0, got 5"):
        cache.attend(0, ones(5, 4, 16))
    with pytest.raises(TypeError):
        cache.attend(0, q.astype(np.longdouble))
    with pytest.raises(IndexError):
        cache.attend(2, q)
    for name, value in [
        ("scale", np.nan),
        ("scale", np.inf),
        ("scale", 1e300),
        ("softcap", -1.0),
        ("softcap", 1e300),
        ("sliding_window", 0),
        ("sliding_window", -3),
        ("num_splits", -1),
        ("num_threads", 0),
        ("num_threads", 10**9),
    ]:
        with pytest.raises(ValueError, match=name):
            cache.attend(0, q, **{name: value})
        with pytest.raises(ValueError):  # whatever is found first, nothing is written
            cache.attend(0, q, **{name: value}, out=ones(1, 2, 16))
    for name, value in [("scale", "x"), ("sliding_window", 1.5), ("num_splits", 1.5), ("num_threads", "2")]:
        with pytest.raises(TypeError, match=name):
            cache.attend(0, q, **{name: value})
    for name in ("sinks", "alibi_slopes"):
        with pytest.raises(kvfast.DimensionMismatchError, match=name):
            cache.attend(0, q, **{name: ones(3)})
        with pytest.raises(kvfast.NonFiniteInputError, match=name):
            cache.attend(0, q, **{name: ones(4) * np.nan})


def test_out(cache):
    q = ones(1, 4, 16)
    frozen = ones(1, 4, 16)
    frozen.flags.writeable = False
    for out, error in [
        (ones(1, 4, 17), ValueError),
        (ones(1, 4, 16, dtype=np.float64), TypeError),
        (frozen, ValueError),
        ([[[0.0]]], TypeError),
        (ones(1, 4, 32)[:, :, ::2], ValueError),
        (q, ValueError),
    ]:
        with pytest.raises(error):
            cache.attend(0, q, out=out)
    assert np.array_equal(q, ones(1, 4, 16)) and np.array_equal(frozen, q)


def test_empty_layer():
    with pytest.raises(ValueError, match="layer 0 holds no tokens"):
        kvfast.KVCache(1, 1, 16).attend(0, ones(1, 1, 16))


def test_advance_and_truncate(cache):
    with pytest.raises(ValueError, match="layer 0 has 4, layer 1 has 4"):
        cache.advance()
    for n in (0, -1):
        with pytest.raises(ValueError, match="n must be"):
            cache.advance(n)
    for n in (-1, 5):
        with pytest.raises(ValueError, match="between 0 and the 4 tokens"):
            cache.truncate(n)
    for call in (cache.advance, cache.truncate):
        with pytest.raises(TypeError, match="n must be an integer"):
            call(1.5)


def test_constructor():
    for arguments in [(0, 1, 16), (1, 0, 16), (1, 1, 0), (1, 1, 513), (-1, 1, 16), (2**40, 1, 16), (1, 1, 16, 0), (1, 1, 16, 2**62)]:
        with pytest.raises(ValueError, match="must be between"):
            kvfast.KVCache(*arguments)
    with pytest.raises(TypeError, match="head_dim must be an integer"):
        kvfast.KVCache(1, 1, 16.0)
    with pytest.raises(ValueError, match="choose one of int8, k8v4, .*float32, float16, bfloat16"):
        kvfast.KVCache(1, 1, 16, dtype="int9")
    with pytest.raises(kvfast.DimensionMismatchError, match="list of 2"):
        kvfast.KVCache(2, 1, 16, dtype=["int8"])
    with pytest.raises(MemoryError):
        kvfast.KVCache(2**16, 2**16, 512, max_seq_len=2**40)
    with pytest.raises(MemoryError):
        kvfast.KVCache(2**10, 2**10, 512, max_seq_len=2**26)


def test_plain_arrays():
    with pytest.raises(kvfast.DimensionMismatchError, match="k and v must have the same shape"):
        kvfast.attention(ones(1, 1, 8), ones(3, 1, 8), ones(4, 1, 8))
    with pytest.raises(kvfast.NonFiniteInputError):
        kvfast.attention(ones(1, 1, 8), ones(3, 1, 8) * np.inf, ones(3, 1, 8))
    with pytest.raises(kvfast.DimensionMismatchError):
        kvfast.merge_states(ones(1, 2, 8), ones(1, 3), ones(1, 2, 8), ones(1, 2))


def test_errors_tell_the_way_out(cache, rng):
    rows = ones(5, 2, 16)
    for call, error, text in (
        (lambda: cache.append(0, ones(2, 5, 16), rows), kvfast.DimensionMismatchError, r"pass k.transpose\(1, 0, 2\)"),
        (lambda: cache.append(0, rows, ones(2, 5, 16)), kvfast.DimensionMismatchError, r"pass v.transpose\(1, 0, 2\)"),
        (lambda: cache.append(0, ones(1, 2, 5, 16), rows), kvfast.DimensionMismatchError, r"pass k\[0\].transpose\(1, 0, 2\)"),
        (lambda: cache.attend(0, ones(4, 3, 16)), kvfast.DimensionMismatchError, r"pass q.transpose\(1, 0, 2\)"),
        (lambda: cache.append(0, ones(5, 2, 16, dtype=np.int64), rows), TypeError, r"got int64: pass k.astype\(np.float32\)"),
        (lambda: cache.append(0, ones(7, 2, 16), ones(7, 2, 16)), kvfast.CacheFullError, "larger max_seq_len, .*RingKVCache"),
    ):
        with pytest.raises(error, match=text):
            call()
    with pytest.raises(kvfast.DimensionMismatchError) as error:
        cache.append(0, ones(3, 5, 16), rows)
    assert "transpose" not in str(error.value)


@pytest.mark.parametrize("dtype", ["int9", "q4_0", np.int64, object(), "x" * 1000])
def test_an_unknown_format_names_all_there_are(dtype):
    with pytest.raises(ValueError, match="unknown storage dtype") as error:
        kvfast.KVCache(1, 1, 16, dtype=dtype)
    text = str(error.value)
    assert all(name in text for name in [*kvfast.PRESETS, "float32", "float16", "bfloat16", '"int8/int4"']) and len(text) < 400


def test_the_runtime_without_its_packages_names_them():
    code = "import sys; sys.modules['gguf'] = None; import kvfast.llama"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'ModuleNotFoundError: kvfast.llama needs the package gguf: pip install "kvfast[llama]"' in done.stderr


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_states_that_are_not_finite_are_refused(which, value):
    """Their log-sum-exps may be -inf, for a set without keys."""
    state = [np.ones((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)] * 2
    state = [one.copy() for one in state]
    state[which][1, 2] = value
    name = ("out_a", "lse_a", "out_b", "lse_b")[which]
    with pytest.raises(kvfast.NonFiniteInputError, match=rf"{name} must be finite.*got {value} at \[1, 2"):
        kvfast.merge_states(*state)


def test_states_that_are_far_apart(recwarn):
    out, far = np.ones((1, 1, 4), np.float32), np.full((1, 1), 3e38, np.float32)
    merged, lse = kvfast.merge_states(out, far, 2 * out, -far)
    assert (merged == 1).all() and lse == far and not recwarn
    assert np.isneginf(kvfast.merge_states(out, far * -np.inf, out, far * -np.inf)[1]).all()


@pytest.mark.parametrize("scale", [3e38, np.nan, np.inf])
def test_scales_that_lead_beyond_float32(scale):
    with pytest.raises(kvfast.NonFiniteInputError, match=r"code times scale must be within float32, got \w+ at \[1, 0\]"):
        kvfast.dequantize(np.full((2, 4), 127, np.int8), np.array([1, scale], np.float32))
    assert (kvfast.dequantize(np.ones((1, 4), np.int8), np.float32([3e38])) == np.float32(3e38)).all()


@pytest.mark.parametrize("dtype", ["int4", "int8"])
@pytest.mark.parametrize("side", ["k", "v"])
def test_rows_beyond_the_range_once_they_are_rotated(dtype, side):
    """A constant row of 128 elements has elements then that are larger by the root of 2."""
    cache, large = kvfast.KVCache(1, 2, 128, dtype=dtype), {"int4": 60000, "int8": 5e35}[dtype]
    rows = {name: np.ones((3, 2, 128), np.float32) for name in "kv"}
    rows[side][2, 1] = large
    if (dtype, side) == ("int4", "k"):
        rows[side][2, 1] = 65600  # these keys have no rotation
    with pytest.raises(kvfast.NonFiniteInputError, match=rf"^{side}\b") as told:
        cache.append(0, rows["k"], rows["v"])
    assert "2, 1" in str(told.value) and cache.layer_length(0) == 0


def test_errors_that_name_the_argument():
    cache, rows = kvfast.KVCache(1, 2, 64), np.ones((3, 2, 64), np.float32)
    for call, kind, text in [
        (lambda: cache.append(0, rows, None), TypeError, "v must be an array of float32, float16 or bfloat16, got None"),
        (lambda: cache.append(0, np.ma.masked_array(rows, mask=True), rows), TypeError, "k must not be a masked array: pass k.filled"),
        (lambda: cache.snapshot(metadata="abc"), TypeError, "metadata must map str to str, got 'abc'"),
        (lambda: kvfast.PromptCache(""), ValueError, "store must be a folder or a URL, got an empty text"),
    ]:
        with pytest.raises(kind, match=text):
            call()
        assert cache.layer_length(0) == 0
    cache.append(0, rows, rows)
    for name, given in [
        ("spans", [[1, 2], [3]]),
        ("sinks", [[1], [2, 3]]),
        ("tree_parents", [[-1], [0, 1]]),
        ("indices", [[0], [1, 2]]),
    ]:
        with pytest.raises(ValueError, match=f"{name} must be an array: "):
            cache.attend(0, rows, **{name: given})
    with pytest.raises(TypeError, match="got float64: make out with dtype=np.float32"):
        cache.attend(0, rows, out=np.zeros((3, 2, 64)))
    pool = kvfast.PagedKVCache(1, 2, 64, num_blocks=2)
    with pytest.raises(TypeError, match="sequences must be a list, got one Sequence"):
        pool.slot_mapping(pool.new_sequence(), 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"softcap": 1e-46}, "softcap must be a positive finite number of float32, got 1e-46"),
        ({"scale": "0.1"}, "scale must be a number, got '0.1'"),
        ({"scale": b"1"}, "scale must be a number, got a bytes"),
        ({"sinks": np.array([1 + 5j] * 4)}, "sinks must be numbers, got complex128"),
        ({"sinks": ["3"] * 4}, "sinks must be numbers, got <U1"),
        ({"alibi_slopes": np.zeros(4, "M8[s]")}, "alibi_slopes must be numbers, got datetime64"),
    ],
)
def test_numbers_that_are_none(options, text):
    cache = kvfast.KVCache(1, 2, 64)
    cache.append(0, *np.ones((2, 3, 2, 64), np.float32))
    with pytest.raises((TypeError, ValueError), match=text):
        cache.attend(0, np.ones((1, 4, 64), np.float32), **options)


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_a_block_size_that_is_no_integer(dtype):
    with pytest.raises(TypeError, match=r"block_size must be an integer, got 64\.0"):
        kvfast.KVCache(1, 2, 64, dtype=dtype, block_size=64.0)


def test_a_ring_with_a_rope_has_its_own_pairs():
    ring = kvfast.RingKVCache(1, 2, 64, 8, rope=kvfast.Rope())
    with pytest.raises(ValueError, match="leave out cos, sin and interleaved"):
        ring.write(0, np.ones((3, 512), np.float32), interleaved=True)
    assert ring.layer_length(0) == 0


def test_more_errors_that_tell_the_way_out(tmp_path):
    cache, rows = kvfast.KVCache(1, 2, 64, dtype="int8"), np.ones((3, 2, 64), np.float32)
    filled(cache, rows, rows)
    compressed = tmp_path / "compressed.safetensors"
    kvfast.KVCacheCompressor(kvfast.Quantize("int8-plain")).compress_kv_3d(rows.swapaxes(0, 1), rows.swapaxes(0, 1)).save(compressed)
    pool = kvfast.PagedKVCache(1, 2, 64, num_blocks=2)
    for call, kind, text in [
        (lambda: kvfast.load(cache.snapshot().to_bytes()), ValueError, r"Snapshot\.from_bytes reads those of a file"),
        (lambda: kvfast.load(compressed), kvfast.CorruptFileError, r"CompressedKV\.load reads compressed"),
        (lambda: kvfast.PromptCache(tmp_path / "prompts").save(cache, None), TypeError, "token_ids must be integers .* got None"),
        (lambda: pool.match_prefix([[1], [1, 2]]), ValueError, "token_ids must be integers of shape"),
        (lambda: copy.copy(pool), TypeError, "a PagedKVCache cannot be pickled or copied"),
    ]:
        with pytest.raises(kind, match=text):
            call()


def test_a_text_is_no_truth_value(tmp_path):
    """bool("False") is True: every flag says so before anything changes."""
    rows = np.ones((70, 2, 64), np.float32)
    cache, pool, q = kvfast.KVCache(1, 2, 64), kvfast.PagedKVCache(1, 2, 64, num_blocks=4), rows[:1]
    filled(cache, rows, rows)
    cache.save(tmp_path / "cache")
    sequence, slots = pool.new_sequence(), kvfast.PagedKVCache(1, 2, 64, num_blocks=4, dtype="int8-rotated")
    filled(sequence, rows, rows)
    compressed = kvfast.KVCacheCompressor(kvfast.Quantize()).compress_kv_3d(rows.swapaxes(0, 1), rows.swapaxes(0, 1))
    qkv, turn = np.ones((1, 6 * 64), np.float32), np.ones((1, 32), np.float32)
    for name, call in {
        "causal": lambda flag: cache.attend(0, q, causal=flag),
        "return_lse": lambda flag: cache.attend(0, q, return_lse=flag),
        "clamp_spans": lambda flag: cache.explain(0, clamp_spans=flag),
        "cascade": lambda flag: pool.attend_batch(0, q, [sequence], cascade=flag),
        "zero_nonfinite": lambda flag: slots.append_batch(0, q, q, [130], zero_nonfinite=flag),
        "as_computed": lambda flag: pool.match_prefix(np.arange(70), as_computed=flag),
        "interleaved": lambda flag: kvfast.KVCache(1, 2, 64).write(0, qkv, cos=turn, sin=turn, interleaved=flag),
        "convert": lambda flag: cache.restore(cache.snapshot(), convert=flag),
        "mmap": lambda flag: kvfast.load(tmp_path / "cache", mmap=flag),
        "secure": lambda flag: kvfast.KVCache(1, 2, 64, secure=flag),
    }.items():
        for wrong in ("False", 1, None):
            with pytest.raises(TypeError, match=f"{name} must be True or False, got"):
                call(wrong)
        call(np.False_)
    with pytest.raises(TypeError, match="causal must be True or False"):
        compressed.attend(rows[:1], causal="no")
    assert cache.layer_length(0) == sequence.layer_length(0) == 70


def test_a_mask_is_refused_wherever_an_array_is_due():
    """NumPy leaves out the mask in silence, and what lies under it would be read. `test_array_arguments` tries every public array by name."""

    def masked(values):
        return np.ma.masked_array(values, mask=np.ones_like(values, bool))

    rows, layout = np.ones((3, 2, 64), np.float32), {"block_table": [[0, 1]], "seq_lens": [3]}
    cache, slots = (
        kvfast.KVCache(1, 2, 64, dtype="int8-rotated", max_state_bytes=1 << 20),
        kvfast.PagedKVCache(1, 2, 64, num_blocks=2, dtype="int8-rotated"),
    )
    filled(cache, rows, rows)
    slots.append_batch(0, rows, rows, [0, 1, 2])
    before = cache.state_dict(), slots.attend_batch(0, rows[:1], **layout)
    for name, call in {
        "keep": lambda: cache.truncate(0, keep=masked([0, 2])),
        "spans": lambda: cache.attend(0, rows, spans=masked([[0, 2]])),
        "tree_parents": lambda: cache.attend(0, rows, tree_parents=masked([-1, 0])),
        r"spans\[0\]": lambda: slots.attend_batch(0, rows[:1], **layout, spans=[masked([[0, 2]])]),
        "block_table": lambda: slots.prepare_batch([masked([0, 1])], [3]),
        "block_ids": lambda: slots.are_coded(masked([0])),
        "first_float_rows": lambda: slots.take_blocks([0], masked(np.zeros(0, np.uint8))),
        "state 'a'": lambda: cache.add_checkpoint({"a": masked([1.0, 2.0])}),
        "rows": lambda: kvfast.Calibration(masked(np.eye(4)[None, None]), np.eye(4)[None, None]),
        "buffer": lambda: kvfast.PagedKVCache(1, 2, 64, num_blocks=1, dtype="int8-rotated", buffer=masked(np.zeros(1 << 16, np.uint8))),
        "token_ids": lambda: kvfast.llama_cpp.write_state(cache, token_ids=masked([1, 2, 3])),
    }.items():
        with pytest.raises(TypeError, match=f"^{name} must not be a masked array: pass {name}"):
            call()
    after = cache.state_dict(), slots.attend_batch(0, rows[:1], **layout)
    assert all(np.array_equal(array, after[0][name]) for name, array in before[0].items()) and np.array_equal(before[1], after[1])
    with pytest.raises(TypeError, match="num_tokens must be an integer, got masked"):
        pool = kvfast.PagedKVCache(1, 2, 64, num_blocks=2)
        pool.slot_mapping([pool.new_sequence()], masked([1]))


def test_errors_are_those_of_kvfast_and_name_the_argument(tmp_path):
    """Python's, NumPy's and Cython's own name none. `fuzz_api` looks for them."""
    cache, pool = kvfast.KVCache(1, 2, 64), kvfast.PagedKVCache(1, 2, 64, num_blocks=2)
    codes, scales = kvfast.quantize(ones(1, 2, 64), 4)
    (tmp_path / "text").write_text("no arrays")
    for call, kind, text in [
        (lambda: pool.block_table(5), TypeError, "sequences must be a list of sequences of this pool, got 5"),
        (lambda: pool.slot_mapping([], [[1], [1, 2]]), ValueError, "num_tokens must be one number or 0, one per sequence, got 2"),
        (lambda: kvfast.Sequence(pool, digests=7), TypeError, "digests must be a list with one .* got 7"),
        (lambda: pool.prepare_batch([[0]], None), TypeError, "seq_lens must be an array, got None"),
        (lambda: pool.prepare_batch([[0]], 5), ValueError, "seq_lens must be integers with 1 dimension, got 5"),
        (lambda: kvfast.PrefixKVCache(5), TypeError, "layers must be a list of CompressedKV, one for each layer, got 5"),
        (lambda: kvfast.Snapshot.from_arrays(None, [], 1), TypeError, "keys must be a list of arrays, one for each layer, got None"),
        (lambda: kvfast.calibrate(3, []), TypeError, "q must be a list of arrays, one for each layer, got 3"),
        (lambda: cache.snapshot(uncounted=1), ValueError, 'uncounted must be "raise" or "drop", got 1'),
        (lambda: cache.save(True), TypeError, "path must be a str or path-like, got True"),
        (lambda: kvfast.load(5), TypeError, "source must be a str or path-like, got 5"),
        (lambda: kvfast.Calibration.load(5), TypeError, "path must be a str or path-like, got 5"),
        (lambda: kvfast.Calibration.load(tmp_path / "text"), kvfast.CorruptFileError, "holds no calibration: it is not a .npz file$"),
        (lambda: kvfast.PromptCache(5), TypeError, "store must be a str or path-like, got 5"),
        (lambda: kvfast.use_isa(5), ValueError, "unknown ISA tier 5; this CPU can run"),
        (lambda: kvfast.KVCache(1, 2, 64, dtype={"type": "int8"}), TypeError, "a format has the fields dtype, .* got 'type'"),
        (lambda: kvfast.KVFormat(rotation=np.ones(2)), ValueError, "rotation must be .* got a ndarray of float64"),
        (lambda: kvfast.attention(*[ones(1, 1, 64)] * 3, precision=ones(2)), ValueError, "precision must be .* got a ndarray"),
        (lambda: kvfast.choose_format(*[ones(1, 1, 64)] * 3, max_error="x"), TypeError, "max_error must be a number, got 'x'"),
        (lambda: kvfast.choose_format(*[ones(1, 1, 64)] * 3, metric=ones(2)), ValueError, "metric must be"),
        (lambda: kvfast.dequantize(codes, scales, head_dim="x"), TypeError, "head_dim must be an integer, got 'x'"),
        (
            lambda: kvfast.PagedKVCache(1, 2, 64, num_blocks=1, buffer=5),
            TypeError,
            "buffer must be an array or a buffer of bytes, got int$",
        ),
        (lambda: cache.write(0, ones(1, 6 * 64), num_q_heads=ones(2)), TypeError, "num_q_heads must be an integer"),
        (lambda: cache.write(0, ones(1, 6 * 64), out=[[1], [1, 2]]), TypeError, "out must be a NumPy array, got list"),
        (lambda: kvfast.attention(None, *[ones(1, 1, 64)] * 2), TypeError, "q must be an array, got None"),
    ]:
        with pytest.raises(kind, match=text):
            call()
    sequence = pool.new_sequence()
    with pytest.raises(ValueError, match="^block_ids are blocks that no sequence has; while a pool has sequences"):
        pool.take_blocks([0])
    assert len(sequence) == cache.layer_length(0) == 0
