"""Documents in any order, and texts longer than their cache, with the example runtime."""

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

import kvfast
from kvfast import llama


def new_cache(model, dtype="float32", max_seq_len=None):
    return kvfast.KVCache(*model.cache_shape, max_seq_len=max_seq_len, dtype=dtype)


def drawn(model, count, seed):
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, count).tolist()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_recomputed_document_equals_an_appended_one(tiny_model, dtype):
    model, _ = tiny_model
    first, second, text = (drawn(model, n, seed) for seed, n in enumerate((50, 70, 9)))
    documents = [llama.compute_document(model, tokens, dtype=dtype) for tokens in (first, second)]
    cache, full = new_cache(model, dtype), new_cache(model, dtype)
    llama.splice_documents(model, cache, documents, recompute=1000)
    expected = model.prefill([*first, *second, *text], full)
    assert np.abs(model.prefill(text, cache) - expected).max() < (1e-4 if dtype == "float32" else 0.1) * np.abs(expected).max()
    spliced = new_cache(model, dtype)
    llama.splice_documents(model, spliced, documents)
    assert len(spliced) == 120
    assert np.abs(model.prefill(text, spliced) - expected).max() > 1e-3 * np.abs(expected).max()


def test_one_document_is_not_changed_by_its_place(tiny_model):
    """Alone, at another place in the sequence: the answers are those of the unmoved one."""
    model, _ = tiny_model
    tokens, text = drawn(model, 60, 1), drawn(model, 8, 2)
    document = llama.compute_document(model, [*drawn(model, 40, 3), *tokens], dtype="float32")
    moved, plain = new_cache(model), kvfast.load(document)
    llama.splice_documents(model, moved, [document, document])
    moved.drop(0, 100, rope=model.rope)
    assert np.abs(model.prefill(text, moved) - model.prefill(text, plain)).max() < 1e-4


def test_refused_splice_leaves_the_cache_unchanged(tiny_model):
    model, _ = tiny_model
    cache = new_cache(model, max_seq_len=80)
    model.prefill(drawn(model, 20, 0), cache)
    before = cache.snapshot()
    document = llama.compute_document(model, drawn(model, 40, 1), dtype="float32")
    with pytest.raises(kvfast.CacheFullError):
        llama.splice_documents(model, cache, [document, document], recompute=8)
    assert cache.snapshot() == before
    with pytest.raises(ValueError, match="token ids"):
        llama.splice_documents(model, cache, [before], recompute=8)
    with pytest.raises(ValueError, match="recompute must be at least 0, got -1"):
        llama.splice_documents(model, cache, [document], recompute=-1)
    with pytest.raises(ValueError, match="keep must be at least 0 and less than the 20 tokens"):
        llama.shift_context(model, cache, 20)


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize("drafts", [False, True])
def test_generation_goes_on_beyond_its_cache(tiny_model, dtype, drafts):
    model, _ = tiny_model
    prompt = drawn(model, 30, 4)
    cache = new_cache(model, dtype, max_seq_len=64)
    drafter = llama.PromptLookup() if drafts else None
    tokens = list(llama.generate(model, prompt, cache, max_tokens=300, keep=4, drafter=drafter))
    assert len(tokens) == 300
    assert len(cache) <= 64
    short = new_cache(model, dtype, max_seq_len=64)
    assert list(llama.generate(model, prompt, short, max_tokens=300)) == tokens[:35]
    assert len(cache.block_indices()) <= 4  # of one before


def test_shifted_cache_generates_as_its_remaining_tokens(tiny_model):
    """In the first layer only positions change: keys and values that are computed again are those that moved."""
    model, _ = tiny_model
    tokens, cache, anew = drawn(model, 60, 5), new_cache(model), new_cache(model)
    model.prefill(tokens, cache)
    dropped = llama.shift_context(model, cache, 10)
    assert dropped == 25
    model.prefill([*tokens[:10], *tokens[35:]], anew)
    for read in (kvfast.KVCache.k, kvfast.KVCache.v):
        np.testing.assert_allclose(read(cache, 0), read(anew, 0), atol=1e-4)
