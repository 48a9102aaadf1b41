"""Tokens that `advance` never counted: nothing leaves them out without a word."""

import numpy as np
import pytest
from cache_kinds import HEADS, KINDS, LAYERS, contents, fill, filled, make, same, tokens

import kvfast

MISSING = r"hold 40 tokens that were never counted .*call advance\(40\).*uncounted=\"drop\""


def opened(kind, rng, counted=30, uncounted=40, dtype="int4"):
    """A cache with tokens that it counts, and others after them that it does not."""
    cache = fill(make(kind, dtype), rng, counted)
    for layer in range(LAYERS):
        cache.append(layer, *tokens(rng, uncounted))
    return cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["snapshot", "state_dict"])
def test_uncounted_tokens_refuse_a_snapshot(kind, name, rng):
    cache = opened(kind, rng)
    before = contents(cache)
    with pytest.raises(ValueError, match=MISSING):
        getattr(cache, name)()
    assert same(before, cache)
    for wrong in ("keep", None):
        with pytest.raises(ValueError, match=f'uncounted must be "raise" or "drop", got {wrong!r}'):
            getattr(cache, name)(uncounted=wrong)
    kept = getattr(cache, name)(uncounted="drop")
    again = make(kind)
    again.restore(kept if name == "snapshot" else kvfast.Snapshot.from_state_dict(kept))
    assert len(again) == again.layer_length(0) == 30 and cache.layer_length(0) == 70
    cache.advance(40)
    assert cache.snapshot().seq_len == 70


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["int4", "int8", "float32", "k8v4"])
@pytest.mark.parametrize("name", ["fork", "copy"])
def test_forks_and_copies_have_all_tokens(kind, dtype, name, rng):
    """They go on as the cache itself does, however it goes on."""
    cache = opened(kind, rng, 30, 90, dtype)
    before, other = contents(cache), getattr(cache, name)()
    assert same(before, other)
    cache.advance(90)
    assert same(before[1:3], contents(other)[1:3])
    other.advance(90)
    assert same(cache, other)
    new = [tokens(rng, 20) for _ in range(LAYERS)]
    filled(other, each=new)
    cache.truncate(115)
    assert len(other) == 140 and len(cache) == 115


def test_truncated_forks_leave_the_rest_as_it_was(rng):
    cache = opened("growing", rng, 30, 90)
    other, before = cache.fork(), contents(cache)
    other.truncate(30)
    fill(other, rng, 100)
    assert same(before, cache)


def test_saves_and_prompts_are_refused(tmp_path, rng):
    pytest.importorskip("safetensors")
    cache = opened("growing", rng)
    with pytest.raises(ValueError, match=MISSING):
        cache.save(tmp_path / "cache")
    cache.save(tmp_path / "cache", uncounted="drop")
    assert len(kvfast.load(tmp_path / "cache")) == 30
    with kvfast.PromptCache(tmp_path / "prompts") as prompts:
        for save in (prompts.save, prompts.save_chunks):
            with pytest.raises(ValueError, match=MISSING):
                save(cache, np.arange(30))
        assert prompts.save(cache, np.arange(30), uncounted="drop")


def test_a_splice_of_such_a_cache_is_refused(rng):
    cache = fill(make("growing"), rng, 10)
    with pytest.raises(ValueError, match=MISSING):
        cache.splice(opened("growing", rng), rope=None)
    cache.splice(opened("growing", rng).snapshot(uncounted="drop"), rope=None)
    assert len(cache) == 40


def test_a_freed_sequence_saves_what_it_counted(tmp_path, rng):
    """A request that broke off: nobody asks for its last step."""
    pytest.importorskip("safetensors")
    pool = kvfast.PagedKVCache(LAYERS, HEADS, 20, num_blocks=40, dtype="int8")
    with kvfast.PromptCache(tmp_path) as prompts:
        pool.use_prompt_cache(prompts)
        sequence = pool.new_sequence()
        for advance in (True, False):
            for layer in range(LAYERS):
                sequence.append(layer, *tokens(rng, 128))
            if advance:
                sequence.advance(128, np.arange(128))
        sequence.free()
        assert pool.num_free_blocks == pool.num_blocks
        prompts.flush()
        assert prompts.restore(make("growing", "int8"), np.arange(200)) in (0, 128)


@pytest.mark.parametrize("kind", KINDS)
def test_truncate_takes_them_back(kind, rng):
    """It is the call that undoes a step which broke off, and tells who wants more than was counted what is missing."""
    cache = opened(kind, rng)
    with pytest.raises(ValueError, match=r"the 30 tokens of the cache, got 70: 40 more were never counted, call advance\(40\) first"):
        cache.truncate(70)
    cache.truncate(len(cache))
    assert [cache.layer_length(layer) for layer in range(LAYERS)] == [30] * LAYERS


@pytest.mark.parametrize("kind", KINDS)
def test_repr_tells_them(kind, rng):
    assert "tokens + 40 not counted" in repr(opened(kind, rng))
    assert "not counted" not in repr(fill(make(kind), rng, 30))
    assert "30 tokens + 7 not counted, " in repr(opened_latent())


def opened_latent():
    cache = filled(kvfast.MLAKVCache(1, 16, 8), np.ones((30, 24), np.float32))
    cache.append(0, np.ones((7, 24), np.float32))
    return cache


def test_latent_rows_are_not_left_out():
    for sequence in (False, True):
        cache = opened_latent()
        if sequence:
            pool = kvfast.PagedMLAKVCache(1, 16, 8, 8)
            cache = pool.new_sequence()
            cache.append(0, np.ones((7, 24), np.float32))
        with pytest.raises(ValueError, match=r"hold 7 tokens .*advance\(7\)"):
            cache.snapshot()
        assert cache.fork().layer_length(0) == cache.copy().layer_length(0) == cache.layer_length(0)


@pytest.mark.parametrize("kind", ["growing", "bounded", "sequence", "ring"])
@pytest.mark.parametrize("dtype", ["int4", "k4v3", "int8"])
def test_explain_names_what_stays_float16(kind, dtype, rng):
    """Where blocks are sealed. The tokens of a running step are not a slow path."""
    cache = opened(kind, rng, 30, 70, dtype)
    plan = cache.explain(0, 1)
    assert plan.uncounted == 70 and "100 tokens (70 not counted)" in str(plan)
    found = [note for note in plan.notes if "70 tokens were never counted" in note and "advance" in note]
    assert bool(found) == (dtype != "int8")
    assert not any("never counted" in note for note in cache.explain(0, 70).notes)
    cache.advance(70)
    plan = cache.explain(0, 1)
    assert plan.uncounted == 0 and "not counted" not in str(plan)


def test_explain_of_a_batch_counts_all_sequences(rng):
    pool = kvfast.PagedKVCache(LAYERS, HEADS, 20, num_blocks=40)
    some = [fill(pool.new_sequence(), rng, 30) for _ in range(2)]
    for sequence, n in zip(some, (50, 3)):
        sequence.append(0, *tokens(rng, n))
    plan = pool.explain_batch(0, (2, HEADS, 20), some)
    assert plan.uncounted == 53 and any("53 tokens were never counted" in note for note in plan.notes)


@pytest.mark.parametrize("kind", ["contiguous", "ring", "paged"])
@pytest.mark.parametrize("dtype", ["int4", "k8v4", "k4v3", "int8"])
@pytest.mark.parametrize("length", [63, 78, 79, 80, 143])
def test_guesses_that_nobody_counted_leave_no_trace(kind, dtype, length):
    """Also where their number would seal a block or release its floats."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 200, 2, 64), np.float32)
    q = rng.standard_normal((1, 8, 64), np.float32)

    def outputs(guesses, right):
        if kind == "paged":
            cache = kvfast.PagedKVCache(1, 2, 64, num_blocks=8, dtype=dtype).new_sequence()
        else:
            cache = kvfast.KVCache(1, 2, 64, dtype=dtype) if kind == "contiguous" else kvfast.RingKVCache(1, 2, 64, 150, dtype=dtype)
        filled(cache, k[:length], v[:length])
        if guesses:
            rows = [*range(length, length + right), *range(190 - guesses + right, 190)]
            cache.append(0, k[rows], v[rows])
            cache.truncate(length, keep=range(right))
        elif right:
            cache.append(0, k[length : length + right], v[length : length + right])
        if right:
            cache.advance(right)
        for i in range(length + right, length + 20):
            cache.append(0, k[i : i + 1], v[i : i + 1])
            yield cache.attend(0, q).tobytes()
            cache.advance(1)

    for right in (0, 1, 3):
        assert list(outputs(12, right)) == list(outputs(0, right))
