"""The caches of llama.cpp, scored like those of kvfast."""

import contextlib
import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
pytest.importorskip("rich")

import kvfast
from kvfast import evaluation
from kvfast.tools.evaluation import llama_cpp_caches
from kvfast.tools.evaluation.llama_cpp_caches import CacheTypes, LlamaCpp, parse_cache_types

TOKENS = np.random.default_rng(0).integers(0, 250, 150).tolist()


STANDS_FOR = {0: "float32", 8: "int8", 2: "int4"}  # by ggml's numbers


class FakeBindings:
    """llama-cpp-python's functions, which call kvfast: f32, q8_0 and q4_0 stand for float32 and plain int8 and int4."""

    LLAMA_FTYPE_ALL_F32 = 0

    def __init__(self, model):
        self.model = model
        self.contexts, self.batches, self.models = set(), set(), set()
        self.chunks, self.made, self.logits, self.fail = [], [], {}, None

    def llama_model_quantize_default_params(self):
        class Params(ctypes.Structure):
            _fields_ = [("ftype", ctypes.c_int), ("allow_requantize", ctypes.c_bool)]

        return Params(ftype=7)

    def llama_model_quantize(self, source, copy, options):
        assert options._obj.ftype == 0 and options._obj.allow_requantize
        return int(self.fail == "quantize")

    def llama_model_default_params(self):
        return SimpleNamespace(use_extra_bufts=True, n_gpu_layers=-1)

    def llama_model_load_from_file(self, path, options):
        assert not options.use_extra_bufts and options.n_gpu_layers == 0
        if self.fail == "load":
            return None
        self.models.add(1)
        return 1

    def llama_model_free(self, model):
        self.models.remove(model)

    def llama_model_get_vocab(self, model):
        return model

    def llama_vocab_n_tokens(self, vocab):
        return self.model.config.vocab_size

    def llama_context_default_params(self):
        return SimpleNamespace()

    def llama_init_from_model(self, model, options):
        rotates = options.type_k != 0
        llama_cpp_caches._log.extend(["llama_kv_cache: ", f"attn_rot_k = {rotates:d}, n\n", "last words\n"])
        if self.fail == "context" and rotates:
            return None
        names = [STANDS_FOR[number] for number in (options.type_k, options.type_v)]
        cache = kvfast.KVCache(*self.model.cache_shape, options.n_ctx, k_dtype=names[0], v_dtype=names[1])
        handle = len(self.made) + 1
        self.made.append((cache, options))
        self.contexts.add(handle)
        return handle

    def llama_batch_init(self, size, embd, sequences):
        def numbers():
            return [None] * size

        seq_id = [[None] for _ in range(size)]
        batch = SimpleNamespace(token=numbers(), pos=numbers(), n_seq_id=numbers(), logits=numbers(), seq_id=seq_id)
        self.batches.add(id(batch))
        return batch

    def llama_decode(self, handle, batch):
        cache, options = self.made[handle - 1]
        size = batch.n_tokens
        if self.fail == "decode":
            return 1
        assert size <= options.n_batch == options.n_ubatch
        assert batch.pos[:size] == list(range(len(cache), len(cache) + size))
        assert all(batch.logits[:size]) and batch.n_seq_id[:size] == [1] * size
        self.chunks.append(size)
        self.logits[handle] = self.model.logits(self.model.forward(batch.token[:size], cache))
        return 0

    def llama_get_logits(self, handle):
        return self.logits[handle].ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def llama_batch_free(self, batch):
        self.batches.remove(id(batch))

    def llama_free(self, handle):
        self.contexts.remove(handle)

    def all_freed(self):
        return not (self.contexts or self.batches or self.models)


@pytest.fixture
def bindings(tiny_model, monkeypatch):
    fake = FakeBindings(tiny_model[0])
    monkeypatch.setattr(llama_cpp_caches, "_library", lambda: fake)
    llama_cpp_caches._log.clear()
    return fake


def test_cache_types_are_parsed():
    types = parse_cache_types("f16, q8_0,q8_0/q4_0 ,q8_0/q8_0")
    assert types == [("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0")]
    assert [str(pair) for pair in types] == ["f16", "q8_0", "q8_0/q4_0"]
    assert [pair.bits for pair in types] == [(16, 16), (8.5, 8.5), (8.5, 4.5)]
    assert all(sum(CacheTypes(name, name).bits) for name in llama_cpp_caches.CACHE_TYPES)
    for wrong in ("", "q8_0,", "int8", "q8_0/q4_0/q4_0", "/q8_0"):
        with pytest.raises(ValueError, match="f16"):
            parse_cache_types(wrong)


@pytest.mark.parametrize("chunk_size", [512, 64, 40])
def test_llama_cpp_is_scored_as_kvfast_is(tiny_model, bindings, chunk_size):
    model, done = tiny_model[0], []
    model.batch_invariant = True  # kvfast's caches share a batch, the others have each their own
    types = parse_cache_types("f32,q8_0,q8_0/q4_0,q4_0")
    with LlamaCpp("model.gguf", model.cache_shape) as peer:
        scores = peer.evaluate(TOKENS, types, chunk_size=chunk_size, progress=done.append)
    assert bindings.all_freed()
    assert peer.rotated == ["q8_0", "q8_0/q4_0", "q4_0"]
    assert [options.flash_attn_type for _, options in bindings.made] == [0, 0, 1, 1, 1]
    assert sum(done) == len(TOKENS) - 1 and max(bindings.chunks) <= chunk_size
    caches = [
        kvfast.KVCache(*model.cache_shape, max_seq_len=150, k_dtype=k, v_dtype=v)
        for k, v in [("float32",) * 2, ("int8",) * 2, ("int8", "int4"), ("int4",) * 2]
    ]
    for found, expected in zip(scores, evaluation.evaluate(model, TOKENS, caches, chunk_size=chunk_size), strict=True):
        for name in ("num_predictions", "nll", "nll_float32", "kl", "top1"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-5, abs=1e-6)
    assert [found.name for found in scores] == [f"llama.cpp {pair}" for pair in types]
    assert [found.bits_per_element for found in scores] == [32, 8.5, 6.5, 4.5]
    assert [found.bytes_per_token for found in scores] == [96 * bits // 8 for bits in (32, 8.5, 6.5, 4.5)]


def test_llama_cpp_scores_several_texts(tiny_model, bindings):
    with LlamaCpp("model.gguf", tiny_model[0].cache_shape) as peer:
        first, second = (peer.evaluate(tokens, [CacheTypes("q4_0", "q4_0")])[0] for tokens in (TOKENS, TOKENS[::-3]))
        with pytest.raises(ValueError, match="two tokens"):
            peer.evaluate([1], [CacheTypes("q4_0", "q4_0")])
    assert bindings.all_freed() and peer.rotated == ["q4_0"]
    mean = evaluation.mean_score([first, second])
    assert mean.num_predictions == 149 + 49 and mean.runtime == "llama.cpp"
    assert mean.kl == pytest.approx((149 * first.kl + 49 * second.kl) / 198)


@pytest.mark.parametrize("step", ["quantize", "load", "context", "decode"])
def test_llama_cpps_failures_are_told_and_free_everything(tiny_model, bindings, step):
    bindings.fail = step
    llama_cpp_caches._log.append("last words\n")
    with pytest.raises(RuntimeError, match=r"^llama\.cpp .*: last words$"), contextlib.ExitStack() as stack:
        peer = stack.enter_context(LlamaCpp("model.gguf", tiny_model[0].cache_shape))
        peer.evaluate(TOKENS, [CacheTypes("q8_0", "q8_0")])
    assert bindings.all_freed()
