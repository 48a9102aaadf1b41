"""Arrays of other libraries, by protocol: DLPack, ml_dtypes, torch, jax."""

import ctypes
import gc

import ml_dtypes
import numpy as np
import pytest

import kvfast
from kvfast.caches.buffer_layout import buffer_layout
from kvfast.caches.multi_head import MultiHeadConfig
from kvfast.core.interchange import _DLTensor, as_array, as_numpy


class Managed(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Foreign:
    """An object that speaks DLPack and nothing else, as other libraries do; `device` and `code` as there."""

    def __init__(self, array, device=1, code=None):
        self.array = array
        self.bits = array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
        self.device, self.code = device, code or (4 if array.dtype == ml_dtypes.bfloat16 else 2)

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, **options):
        array, ndim = self.bits, self.bits.ndim
        whole = ctypes.c_int64 * ndim
        self.keep = whole(*array.shape), whole(*(step // array.itemsize for step in array.strides))
        tensor = _DLTensor(array.ctypes.data, self.device, 0, ndim, self.code, array.itemsize * 8, 1, *self.keep, 0)
        self.managed = Managed(tensor, None, None)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        self.name = b"dltensor"
        return new(ctypes.addressof(self.managed), self.name, None)


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def kv(rng, request):
    return rng.standard_normal((2, 40, 2, 32)).astype(request.param)


def used(k, v, q, dtype="float32"):
    """What a cache gives back of such arrays, and its output."""
    cache = kvfast.KVCache(1, 2, 32, 64, dtype=dtype)
    cache.append(0, k, v)
    return cache.k(0).copy(), cache.v(0).copy(), cache.attend(0, q)


def test_objects_that_speak_dlpack_alone(kv):
    k, v = kv
    for wanted, got in zip(used(k, v, k[-3:]), used(Foreign(k), Foreign(v), Foreign(k[-3:]))):
        np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(used(Foreign(k[:, ::-1]), v, k[-3:])[0], used(k[:, ::-1], v, k[-3:])[0])  # strides
    np.testing.assert_array_equal(kvfast.attention(Foreign(k), Foreign(k), Foreign(v)), kvfast.attention(k, k, v))
    cache, out = kvfast.KVCache(1, 2, 32), np.zeros((40, 2, 32), np.float32)
    qkv = kv.transpose(1, 0, 2, 3)[:, [0, 0, 1]].reshape(40, -1)
    np.testing.assert_array_equal(cache.write(0, Foreign(qkv)), k.astype(np.float32))
    cache.attend(0, k, out=out)
    rows = kvfast.MLAKVCache(1, 32, 0)
    rows.append(0, Foreign(k[:, 0]))
    assert rows.layer_length(0) == 40


def test_memory_is_shared_and_outlives_its_object(rng):
    given = rng.standard_normal((3, 2, 32)).astype(ml_dtypes.bfloat16)
    array = as_array(Foreign(given))
    assert array.dtype == np.uint16 and np.shares_memory(array, given)
    assert as_array(given) is given
    assert as_array(Foreign(np.empty((0, 2, 32), ml_dtypes.bfloat16))).shape == (0, 2, 32)


@pytest.mark.parametrize("foreign", [False, True])
def test_float64_is_rounded_once(rng, foreign):
    """What takes rows takes NumPy's default type, and gives the bits of its float32."""
    k, v, q = (rng.standard_normal((n, heads, 32)) for n, heads in ((70, 2), (70, 2), (3, 4)))

    def results(given):
        cache = kvfast.KVCache(1, 2, 32, dtype="int8")
        cache.append(0, given(k), given(v))
        yield cache.attend(0, given(q))
        yield kvfast.attention(given(q), given(k), given(v))
        yield from kvfast.quantize(given(k))[:2]
        latent = kvfast.MLAKVCache(1, 24, 8)
        latent.append(0, given(k[:, 0]))
        yield latent.attend(0, given(q))
        heads = kvfast.MultiHeadKVCache(2, MultiHeadConfig(32))
        heads.push_tokens(given(k), given(v))
        yield heads.v()
        pool = kvfast.PagedKVCache(1, 2, 32, 4)
        sequence = pool.new_sequence()
        pool.append_batch(0, given(k), given(v), pool.slot_mapping([sequence], 70))
        yield pool.attend_batch(0, given(q[:1]), [sequence])

    wide = results((lambda array: Foreign(np.ascontiguousarray(array))) if foreign else np.asarray)
    for found, expected in zip(wide, results(lambda array: array.astype(np.float32)), strict=True):
        assert np.array_equal(np.asarray(found), np.asarray(expected))


def test_float64_beyond_float32_is_refused(rng):
    k = rng.standard_normal((3, 2, 32))
    cache = kvfast.KVCache(1, 2, 32)
    k[1, 1, 5] = 1e300
    with pytest.raises(kvfast.NonFiniteInputError, match=r"k must be finite, got inf at \[1, 1, 5\]"):
        cache.append(0, k, k)
    assert cache.layer_length(0) == 0
    with pytest.raises(TypeError, match="out must be float32, float16 or bfloat16"):
        kvfast.attention(k[:1], k[:1], k[:1], out=np.zeros((1, 2, 32)))


def test_other_arrays_are_refused(rng):
    k = rng.standard_normal((3, 2, 32)).astype(np.float32)
    cache = kvfast.KVCache(1, 2, 32)
    with pytest.raises(TypeError, match="memory of the CPU"):
        cache.append(0, Foreign(k, device=2), k)
    with pytest.raises(TypeError, match="DLPack type 9"):
        cache.append(0, Foreign(k, code=9), k)

    class Refuses(Foreign):
        def __dlpack__(self, **options):
            raise BufferError("no")

    with pytest.raises(TypeError, match="no$"):
        cache.append(0, k, Refuses(k))
    assert cache.layer_length(0) == 0


class Lazy(Foreign):
    """As a tensor of PyTorch with its negative bit: its memory has the numbers before they are negated, and DLPack does not say so."""

    def is_neg(self):
        return True

    def is_conj(self):
        return False

    def resolve_conj(self):
        return self

    def resolve_neg(self):
        self.resolved = Foreign(-self.array)  # capsules here do not own what they tell of
        return self.resolved


def test_numbers_that_are_still_to_be_negated(kv):
    k, v = kv
    for wanted, got in zip(used(-k, -v, -k[-3:]), used(Lazy(k), Lazy(v), Lazy(k[-3:]))):
        np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(kvfast.attention(Lazy(k), Lazy(k), Lazy(v)), kvfast.attention(-k, -k, -v))
    rows = kvfast.MLAKVCache(1, 32, 0)
    rows.append(0, Lazy(k[:, 0]))
    np.testing.assert_array_equal(rows.get_latent(0)[0, 0] < 0, -k[0, 0, 0] < 0)
    lazy = Lazy(k)
    assert as_array(lazy).tobytes() == (-k).tobytes()


def test_memory_to_write_to_is_not_still_to_be_negated():
    layout = buffer_layout(1, 2, 64, 4, dtype="int8")
    memory = [np.zeros((4, layout.block_nbytes[0] // 4), np.float32)]
    with pytest.raises(TypeError, match="must be memory that NumPy can share, got a copy of a Lazy"):
        kvfast.PagedKVCache(1, 2, 64, 4, dtype="int8", buffer=[Lazy(memory[0])])


def test_torch_that_is_still_to_be_negated(rng):
    torch = pytest.importorskip("torch")
    k = rng.standard_normal((40, 2, 32)).astype(np.float32)
    lazy = torch.complex(torch.from_numpy(k), torch.from_numpy(k)).conj().imag
    assert lazy.is_neg()
    for wanted, got in zip(used(-k, -k, -k[-3:]), used(lazy, lazy, lazy[-3:])):
        np.testing.assert_array_equal(got, wanted)
    with pytest.raises(TypeError, match="out must"):
        kvfast.attention(k, k, k, out=lazy)


def test_the_memory_of_tensors():
    """One function for every engine, which knows what PyTorch is still to negate."""
    torch = pytest.importorskip("torch")
    numbers = torch.arange(-3, 3)
    for dtype, bits in (("float32", np.float32), ("bfloat16", np.uint16), ("int8", np.uint8), ("int64", np.int64)):
        tensor = numbers.to(getattr(torch, dtype))
        view, lazy = as_numpy(tensor), torch._neg_view(tensor)
        assert view.dtype == bits and view.ctypes.data == tensor.data_ptr() and lazy.is_neg()
        np.testing.assert_array_equal(as_numpy(lazy), as_numpy(-tensor))


def test_outputs_by_dlpack(rng):
    k = rng.standard_normal((20, 2, 32)).astype(np.float32)
    cache = kvfast.KVCache(1, 2, 32, 64, dtype="float32")
    cache.append(0, k, k)
    np.testing.assert_array_equal(np.from_dlpack(cache.attend(0, k)), cache.attend(0, k))
    np.testing.assert_array_equal(np.from_dlpack(cache.k(0)), k)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch(rng, dtype):
    torch = pytest.importorskip("torch")
    k, v = (torch.from_numpy(rng.standard_normal((40, 2, 32)).astype(np.float32)).to(getattr(torch, dtype)) for _ in "kv")
    plain = [one.float().numpy() for one in (k, v)]
    for wanted, got in zip(used(*plain, plain[0]), used(k, v, k)):
        np.testing.assert_array_equal(got, wanted)
    assert as_array(k).ctypes.data == k.data_ptr() and as_array(k.transpose(0, 1)).ctypes.data == k.data_ptr()
    cache = kvfast.KVCache(1, 2, 32, 64, dtype="float32")
    cache.append(0, k, v)
    out = torch.zeros((40, 2, 32), dtype=getattr(torch, dtype))
    cache.attend(0, k, out=as_array(out))  # into torch's own memory
    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        into = torch.zeros((40, 4, 32), dtype=getattr(torch, dtype))[:, 1:3]
        assert cache.attend(0, k, out=into) is into and torch.equal(into, out)
    else:
        with pytest.raises(TypeError, match="must be a NumPy array, or a tensor .* got Tensor"):
            cache.attend(0, k, out=out)
    for wrong in (out.double(), out.mT, out[:, :, :0], out.clone().requires_grad_(), out[0].expand(40, 2, 32), [[[1.0]]]):
        with pytest.raises((TypeError, kvfast.DimensionMismatchError), match="out must"):
            cache.attend(0, k, out=wrong)
    with pytest.raises(ValueError, match="out must not share memory with q"):
        cache.attend(0, out, out=out)
    torch.testing.assert_close(out.float(), torch.from_numpy(cache.attend(0, k)), rtol=1e-2, atol=1e-2)
    assert torch.from_dlpack(cache.k(0)).data_ptr() == cache.k(0).ctypes.data
    held = as_array(torch.ones((100, 2, 32), dtype=getattr(torch, dtype)))
    gc.collect()
    torch.zeros((100, 2, 32), dtype=getattr(torch, dtype))
    assert (held == held[0, 0, 0]).all() and held[0, 0, 0] != 0
    with pytest.raises(TypeError, match="grad"):
        cache.append(0, k.float().requires_grad_(), v.float())
    with pytest.raises(TypeError, match="device"):
        cache.append(0, k.to("meta"), v)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_jax(rng, dtype):
    jax = pytest.importorskip("jax")
    k, v = (jax.numpy.asarray(rng.standard_normal((40, 2, 32)), dtype) for _ in "kv")
    plain = [np.asarray(one.astype("float32")) for one in (k, v)]
    for wanted, got in zip(used(*plain, plain[0]), used(k, v, k)):
        np.testing.assert_array_equal(got, wanted)
    cache = kvfast.KVCache(1, 2, 32, 64)
    cache.append(0, k, v)
    with pytest.raises(ValueError, match="read-only"):
        cache.attend(0, k, out=np.asarray(k))
    np.testing.assert_array_equal(jax.numpy.from_dlpack(cache.attend(0, k)), cache.attend(0, k))
