"""Speculative decoding: the same tokens, the same bits, the same cache as without; and its drafters."""

import runpy
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
from selection import exhaustive, parametrize

import kvfast
from kvfast import llama
from kvfast.tools.llama import model as model_module
from kvfast.tools.llama.model import FEW_TOKENS
from kvfast.tools.llama.prompts import QUESTIONS

TEXT = runpy.run_path(Path(__file__).parents[1] / "support" / "make_llama_reference.py")["TEXT"]
PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]
CACHES = ["float32", "int8", "int4", "ring", "paged", "paged with a window"]
OTHERS = [kind for kind in CACHES if kind != "int8"]


def new_cache(model, kind="int8"):
    if kind == "ring":
        return kvfast.RingKVCache(*model.cache_shape, sliding_window=64, num_sink_tokens=2, dtype="int8-plain", rollback=5)
    if kind == "paged":
        return kvfast.PagedKVCache(*model.cache_shape, num_blocks=32, block_size=16, dtype="int8").new_sequence()
    if kind == "paged with a window":
        window = {"sliding_window": 64, "num_sink_tokens": 2, "rollback": 5}
        return kvfast.PagedKVCache(*model.cache_shape, num_blocks=8, block_size=16, dtype="int8-plain", **window).new_sequence()
    return kvfast.KVCache(*model.cache_shape, max_seq_len=512, dtype=kind)


def generated(model, cache, prompt=PROMPT, **options):
    return list(llama.generate(model, prompt, cache, **options))


def assert_same_cache(actual, expected):
    assert len(actual) == len(expected)
    for layer in range(actual.num_layers):
        assert actual.layer_length(layer) == len(actual)
        assert np.array_equal(actual.k(layer), expected.k(layer))
        assert np.array_equal(actual.v(layer), expected.v(layer))


class Oracle:
    """Knows the text, but is wrong about every `error`-th token of it, with 0 about none. A lenient one bears another text."""

    is_lenient = False

    def __init__(self, text, error=0):
        self.text, self.error, self.limits = text, error, []

    def draft(self, context, cache, limit):
        assert len(cache) == len(context) - 1
        assert self.is_lenient or context == self.text[: len(context)]
        self.limits.append(limit)
        positions = range(len(context), min(len(context) + limit, len(self.text)))
        wrong = [self.error > 0 and i % self.error == 0 for i in positions]
        return [int(self.text[i] == 0) if w else self.text[i] for i, w in zip(positions, wrong, strict=True)]


class TreeOracle(Oracle):
    """Knows the text, as the branch with this number of a tree; the other branches are wrong from their first token on."""

    def __init__(self, text, error=0, branch=1):
        super().__init__(text, error)
        self.branch = branch

    def draft(self, context, cache, limit):
        right, tree = super().draft(context, cache, limit), llama.DraftTree()
        for number in range(3):
            wrong = [(right[0] + number + 1) % 256, *right[1:3]] if right else []
            tree.add(right[: limit - 2 * self.branch] if number == self.branch else wrong[:2], limit)
        return tree


# --- bits --------------------------------------------------------------------------------------


@pytest.fixture
def threads_of_the_blas():
    """As many as kvfast has, as where a model runs."""
    with threadpool_limits(kvfast.get_num_threads(), user_api="blas"):
        yield


with_threads = pytest.mark.usefixtures("threads_of_the_blas")


@with_threads
@pytest.mark.parametrize("block_bytes", [1, 1000, 1 << 21])
def test_few_rows_get_the_bits_of_each_alone(monkeypatch, rng, block_bytes):
    monkeypatch.setattr(model_module, "BLOCK_BYTES", block_bytes)
    for outputs, inputs in [(1, 1), (37, 24), (960, 577)]:
        weight = rng.standard_normal((outputs, inputs), dtype=np.float32)
        for layout in (weight, np.asfortranarray(weight), weight.astype(np.float64)):
            x = rng.standard_normal((FEW_TOKENS, inputs), dtype=np.float32)
            out = model_module.row_by_row(x, layout)
            np.testing.assert_allclose(out, x @ weight.T, rtol=1e-4, atol=1e-4)
            for i in range(len(x)):
                assert np.array_equal(out[i : i + 1], model_module.row_by_row(x[i : i + 1], layout))


@with_threads
@pytest.mark.model
def test_few_rows_get_the_bits_of_each_alone_with_real_weights(smollm2, rng):
    _, model, _ = smollm2
    layer = model.weights.layers[7]
    for weight in (layer.qkv, layer.attn_output, layer.gate_up, layer.ffn_down, model.weights.output):
        x = rng.standard_normal((FEW_TOKENS, weight.shape[1]), dtype=np.float32)
        alone = np.concatenate([model._linear(x[i : i + 1], weight) for i in range(len(x))])
        for count in range(2, len(x) + 1):
            assert np.array_equal(model._linear(x[:count], weight), alone[:count])


@with_threads
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_few_tokens_get_the_bits_of_each_alone(tiny_model, rng, kind, batch_invariant):
    model, _ = tiny_model
    model.batch_invariant = batch_invariant
    tokens = rng.integers(0, model.config.vocab_size, 60)
    for count in (2, FEW_TOKENS):
        together, alone = new_cache(model, kind), new_cache(model, kind)
        hidden = [model.forward(tokens[i : i + count], together) for i in range(0, len(tokens), count)]
        expected = [model.forward([token], alone) for token in tokens]
        assert np.array_equal(np.concatenate(hidden), np.concatenate(expected))
        assert_same_cache(together, alone)


@with_threads
@pytest.mark.model
@parametrize("context", [5, 300], usual=[5])
@parametrize("dtype", ["int8", "float32"], usual=["int8"])
def test_few_tokens_get_the_bits_of_each_alone_in_a_real_model(smollm2, rng, dtype, context):
    _, model, tokenizer = smollm2
    tokens = tokenizer.encode(TEXT * 3)[: context + FEW_TOKENS]
    together = new_cache(model, dtype)
    model.forward(tokens[:context], together)
    alone = together.copy()
    hidden = model.forward(tokens[context:], together)
    expected = np.concatenate([model.forward([token], alone) for token in tokens[context:]])
    assert np.array_equal(hidden, expected)
    assert np.array_equal(model.logits(hidden), np.stack([model.logits(row) for row in expected]))
    assert_same_cache(together, alone)


# --- drafters ----------------------------------------------------------------------------------


def lookup(context, limit=7, **options):
    return llama.PromptLookup(**options).draft(context, None, limit)


def test_lookup_finds_what_followed():
    context = [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4]
    assert lookup(context) == [5, 6, 7]
    assert lookup(context, limit=2) == [5, 6]
    assert lookup(context, max_draft=1) == [5]
    assert lookup(context, ngram=4) == []
    assert lookup(context, ngram=2) == lookup(context, ngram=1) == [5, 6, 7]


def test_lookup_without_a_match_is_silent():
    for context in ([], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 1, 2], [1, 2, 3, 9, 1, 2, 4]):
        assert lookup(context) == []


def test_latest_match_wins():
    assert lookup([1, 2, 3, 4, 4, 4, 1, 2, 3, 5, 5, 5, 1, 2, 3]) == [5, 5, 5]


def test_lookup_guesses_as_far_as_the_passage_is_alike():
    passage = list(range(20))
    for alike in range(3, 10):
        end = 2 + alike
        assert lookup([*passage, 99, *passage[2:end]]) == passage[end : end + min(alike, 7)]


def test_lookup_continues_a_loop():
    assert lookup([8, 9, 8, 9, 8, 9, 8]) == [9, 8, 9, 8, 9]
    assert lookup([3] * 12) == [3] * 7


def test_lookup_reads_a_growing_context_once_and_another_one_anew():
    drafter = llama.PromptLookup()
    context = [1, 2, 3, 4, 5, 6, 1, 2]
    assert drafter.draft(context, None, 7) == []
    for token in (3, 4, 5):
        context.append(token)
        assert drafter.draft(context, None, 7) == lookup(context) != []
    assert drafter.draft([7, 1, 2, 3], None, 7) == []
    assert drafter.draft(context, None, 7) == lookup(context)

    class Counting(list):
        slices = 0

        def __getitem__(self, index):
            self.slices += isinstance(index, slice)
            return super().__getitem__(index)

    context = Counting(range(1000))
    drafter.draft(context, None, 7)
    assert context.slices >= 997
    context.slices = 0
    context.append(5)
    drafter.draft(context, None, 7)
    assert context.slices == 2


def test_a_lookup_guesses_what_followed_several_times():
    context = [1, 2, 3, 4, 5, 6, 1, 2, 3, 9, 5, 7, 1, 2, 3, 4, 8, 8, 0, 2, 3]
    tree = llama.TreeLookup().draft(context, None, 7)
    assert (tree.tokens, tree.parents) == ([4, 8, 8, 9, 5, 7, 5], [-1, 0, 1, -1, 3, 4, 0])
    tree = llama.TreeLookup(max_passages=1, max_draft=2).draft(context, None, 7)
    assert (tree.tokens, tree.has_branches) == ([4, 8], False)
    assert llama.TreeLookup(ngram=3, least=3).draft(context, None, 7).tokens == []
    assert llama.TreeLookup().draft([1, 2, 3, 4, 9, 9, 1, 2, 3], None, 7).tokens == [4, 9, 9, 1]
    for text in ([], [1], [1, 2], [1, 2, 3, 4]):
        assert llama.TreeLookup().draft(text, None, 7) == llama.DraftTree()


def test_a_tree_of_lookups_has_what_one_lookup_says(rng):
    """With as many tokens in common it holds the guesses of `PromptLookup`, of any text, read at once or as it grows."""
    for _ in range(20):
        text, growing = rng.integers(0, 4, 60).tolist(), llama.TreeLookup(max_passages=60, max_draft=200)
        context = text[:1]
        for token in text[1:]:
            context.append(token)
            tree, parent = growing.draft(context, None, 200), -1
            assert tree == llama.TreeLookup(max_passages=60, max_draft=200).draft(list(context), None, 200)
            assert all(parent < number for number, parent in enumerate(tree.parents))
            for guess in lookup(list(context), limit=60, max_draft=60):
                parent = tree.child(parent, guess)
                assert parent is not None


def test_bad_drafter_options_are_refused():
    for name, make in [
        ("ngram", lambda: llama.PromptLookup(ngram=0)),
        ("max_draft", lambda: llama.PromptLookup(max_draft=0)),
        ("between 1 and ngram, got 4 and 3", lambda: llama.TreeLookup(least=4)),
        ("max_passages", lambda: llama.TreeLookup(max_passages=0)),
        ("max_draft", lambda: llama.TreeLookup(max_draft=0)),
    ]:
        with pytest.raises(ValueError, match=name):
            make()


# --- the same text and the same cache ------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "top_p": 0.9, "seed": 3}])
@pytest.mark.parametrize("kind", CACHES)
def test_text_and_cache_are_those_of_plain_generation(tiny_model, kind, sampling):
    model, _ = tiny_model
    plain = new_cache(model, kind)
    expected = generated(model, plain, max_tokens=60, sampler=llama.Sampler(**sampling))
    text = [*PROMPT, *expected]

    def compared(drafter):
        cache, stats = new_cache(model, kind), llama.SpeculationStats()
        options = {"max_tokens": 60, "sampler": llama.Sampler(**sampling), "drafter": drafter, "stats": stats}
        assert generated(model, cache, **options) == expected
        assert_same_cache(cache, plain)
        assert stats.num_steps + stats.num_accepted == 59
        return stats

    most = 5 if kind in ("ring", "paged with a window") else FEW_TOKENS - 1
    right = compared(Oracle(text))
    assert right.num_accepted == right.num_drafted
    assert right.num_steps == -(-59 // (most + 1))
    wrong = compared(Oracle(text, 1))
    assert wrong.num_accepted == 0
    assert wrong.num_drafted > 50 * most
    partly = compared(Oracle(text, 3))
    assert 0 < partly.num_accepted < partly.num_drafted
    compared(llama.PromptLookup(ngram=1))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "top_p": 0.9, "seed": 3}])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("branch", [0, 1, 2])
def test_trees_give_the_text_of_plain_generation(tiny_model, kind, sampling, branch):
    """The branch that begins a tree has the bits, too. Others are rounded otherwise, and codes may then be a step away."""
    model, _ = tiny_model
    prompt, plain = PROMPT * 2, new_cache(model, kind)
    expected = generated(model, plain, prompt, max_tokens=60, sampler=llama.Sampler(**sampling))
    for error in (0, 3):
        cache, stats = new_cache(model, kind), llama.SpeculationStats()
        drafter = TreeOracle([*prompt, *expected], error, branch)
        drafter.is_lenient = branch > 0 and kind != "float32"
        options = {"max_tokens": 60, "sampler": llama.Sampler(**sampling), "drafter": drafter, "stats": stats}
        text = generated(model, cache, prompt, **options)
        assert stats.num_steps + stats.num_accepted == 59 and len(cache) == len(plain)
        # A text that has left what the drafter knows, as other roundings may draw another token, has drafts accepted by chance.
        assert stats.num_accepted > (0 if drafter.is_lenient else 15)
        assert cache.context_lens.tolist() == [len(plain)] * cache.num_layers
        assert drafter.is_lenient or text == expected
        if branch == 0:
            assert_same_cache(cache, plain)
        elif kind == "float32":
            np.testing.assert_allclose(cache.k(1), plain.k(1), rtol=1e-3, atol=1e-4)


def test_tree_lookups_give_the_text_of_plain_generation(tiny_model):
    model, _ = tiny_model
    prompt, stats = PROMPT * 3, llama.SpeculationStats()
    expected = generated(model, new_cache(model, "float32"), prompt, max_tokens=80)
    drafter = llama.TreeLookup(least=1)
    assert generated(model, new_cache(model, "float32"), prompt, max_tokens=80, drafter=drafter, stats=stats) == expected
    assert 0 < stats.num_accepted < stats.num_drafted


def test_where_a_cache_keeps_no_branch_the_first_is_checked(tiny_model):
    model, _ = tiny_model
    for branch in (0, 1):  # in the first tokens, which a format may keep as floats
        for dtype in ("int8", kvfast.KVFormat("int8", num_first_float_tokens=16)):
            cache, stats = kvfast.KVCache(*model.cache_shape, dtype=dtype), llama.SpeculationStats()
            drafter = TreeOracle([*PROMPT[:3], *generated(model, cache.copy(), PROMPT[:3], max_tokens=30)], 0, branch)
            text = generated(model, cache, PROMPT[:3], max_tokens=30, drafter=drafter, stats=stats)
            assert text == drafter.text[3:] and 0 < stats.num_accepted


def test_trees_in_a_cache_that_was_shifted(tiny_model):
    """A context shift leaves a spliced cache, whose drafts come after what was moved."""
    model, _ = tiny_model
    expected, stats = generated(model, new_cache(model), max_tokens=30), llama.SpeculationStats()
    full = [kvfast.KVCache(*model.cache_shape, max_seq_len=24, dtype="float32") for _ in range(2)]
    shifted = generated(model, full[0], max_tokens=60, keep=4)

    class Trees:
        def draft(self, context, cache, limit):
            tree, at = llama.DraftTree(), 1 + stats.num_steps + stats.num_accepted
            for guess in (0, *shifted[at : at + 1], 2):  # the right one is a branch, if there is one
                tree.add([guess, *shifted[at + 1 : at + 3]], limit)
            return tree

    assert generated(model, full[1], max_tokens=60, keep=4, drafter=Trees(), stats=stats) == shifted and full[1].is_spliced
    assert shifted[:10] == expected[:10] and stats.num_accepted > 20


def test_a_tree_that_a_model_checks(tiny_model):
    """Each draft has the hidden state that it has after its ancestors alone."""
    model, _ = tiny_model
    cache, tokens, parents = new_cache(model, "float32"), [3, 1, 4, 1, 5, 9, 2], [-1, 0, 0, 2, -1, 4]
    model.forward(PROMPT, cache)
    hidden = model.forward(tokens, cache, parents)
    assert len(cache) == len(PROMPT) and cache.layer_length(1) == len(PROMPT) + 7
    for row in range(7):
        path = [row]
        while path[0] > 0:
            path.insert(0, parents[path[0] - 1] + 1)
        alone = new_cache(model, "float32")
        model.forward(PROMPT, alone)
        np.testing.assert_allclose(hidden[row], model.forward([tokens[i] for i in path], alone)[-1], rtol=1e-4, atol=1e-5)
        kept = cache.copy()
        kept.truncate(len(kept), path)
        kept.advance(len(path))
        for layer in range(kept.num_layers):
            np.testing.assert_allclose(kept.k(layer), alone.k(layer), rtol=1e-4, atol=1e-5)


def test_statistics():
    stats = llama.SpeculationStats()
    assert (stats.acceptance_rate, stats.tokens_per_step) == (0, 1)
    stats = llama.SpeculationStats(num_steps=10, num_drafted=20, num_accepted=15)
    assert (stats.acceptance_rate, stats.tokens_per_step) == (0.75, 2.5)


def test_statistics_add_up(tiny_model):
    model, _ = tiny_model
    text = [*PROMPT, *generated(model, new_cache(model), max_tokens=9)]
    stats = llama.SpeculationStats()
    for _ in range(2):
        generated(model, new_cache(model), max_tokens=9, drafter=Oracle(text), stats=stats)
    assert stats == llama.SpeculationStats(num_steps=2, num_drafted=14, num_accepted=14)


@pytest.mark.parametrize("error", [0, 4])
def test_an_end_in_a_draft(tiny_model, error):
    model, _ = tiny_model
    expected = generated(model, new_cache(model), max_tokens=40, sampler=llama.Sampler(1.5, seed=3))
    for end in dict.fromkeys(expected[:20]):
        plain, cache = new_cache(model), new_cache(model)
        sampler, again = (llama.Sampler(1.5, seed=3) for _ in range(2))
        options = {"max_tokens": 40, "end_ids": {end}}
        ended = generated(model, plain, sampler=sampler, **options)
        assert ended == expected[: expected.index(end)]
        drafter = Oracle([*PROMPT, *expected], error)
        assert generated(model, cache, sampler=again, drafter=drafter, **options) == ended
        assert_same_cache(cache, plain)
        assert again._random.bit_generator.state == sampler._random.bit_generator.state


def test_no_more_than_asked_for(tiny_model):
    model, _ = tiny_model
    expected = generated(model, new_cache(model), max_tokens=12)
    for count in range(13):
        plain, cache = new_cache(model), new_cache(model)
        generated(model, plain, max_tokens=count)
        drafter = Oracle([*PROMPT, *expected, *PROMPT])
        assert generated(model, cache, max_tokens=count, drafter=drafter) == expected[:count]
        assert_same_cache(cache, plain)


def test_a_full_cache(tiny_model):
    model, _ = tiny_model
    text = [*PROMPT, *generated(model, new_cache(model), max_tokens=40)]
    for room in range(8, 20):
        plain, cache = (kvfast.KVCache(*model.cache_shape, max_seq_len=room) for _ in range(2))
        expected = generated(model, plain)
        assert len(expected) == room - 7
        assert generated(model, cache, drafter=Oracle(text)) == expected
        assert_same_cache(cache, plain)


def test_a_full_pool(tiny_model):
    model, _ = tiny_model
    text = [*PROMPT, *generated(model, new_cache(model), max_tokens=80)]
    lengths = []
    for drafter in (None, Oracle(text)):
        pool = kvfast.PagedKVCache(*model.cache_shape, num_blocks=3, block_size=16, dtype="int8")
        with pool.new_sequence() as sequence:
            output = []
            with pytest.raises(kvfast.CacheFullError):
                output.extend(llama.generate(model, PROMPT, sequence, drafter=drafter))
            lengths.append((len(output), len(sequence)))
            assert output == text[8 : 8 + len(output)]
    assert lengths == [(41, 48)] * 2


@pytest.mark.parametrize(("rollback", "most"), [(0, None), (1, 1), (3, 3), (64, FEW_TOKENS - 1)])
def test_drafts_keep_within_the_rollback(tiny_model, rollback, most):
    model, _ = tiny_model
    window = {"rollback": rollback, "dtype": "int8"}
    plain, ring = (kvfast.RingKVCache(*model.cache_shape, 16, **window) for _ in range(2))
    sequence = kvfast.PagedKVCache(*model.cache_shape, 12, 16, sliding_window=16, **window).new_sequence()
    expected = generated(model, plain, max_tokens=50)
    for cache, error in ((ring, 0), (ring, 1), (sequence, 0), (sequence, 1)):
        cache.clear()
        drafter = Oracle([*PROMPT, *expected], error)
        assert generated(model, cache, max_tokens=50, drafter=drafter) == expected
        assert_same_cache(cache, plain)
        assert max(drafter.limits, default=None) == most


def test_too_long_a_draft_is_cut(tiny_model):
    model, _ = tiny_model
    expected = generated(model, new_cache(model), max_tokens=30)

    class Eager(Oracle):
        def draft(self, context, cache, limit):
            return super().draft(context, cache, 30)

    assert generated(model, new_cache(model), max_tokens=30, drafter=Eager([*PROMPT, *expected])) == expected


# --- stopping early ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CACHES)
def test_closing_leaves_the_cache_at_what_was_yielded(tiny_model, kind):
    model, _ = tiny_model
    expected = generated(model, new_cache(model, kind), max_tokens=30, sampler=llama.Sampler(1.5, seed=3))
    for count in range(1, 20):
        caches, states = [], []
        for drafter in (None, Oracle([*PROMPT, *expected]), Oracle([*PROMPT, *expected], 4), TreeOracle([*PROMPT, *expected], 4, 0)):
            caches.append(new_cache(model, kind))
            sampler = llama.Sampler(1.5, seed=3)
            tokens = llama.generate(model, PROMPT, caches[-1], max_tokens=30, sampler=sampler, drafter=drafter)
            assert list(islice(tokens, count)) == expected[:count]
            tokens.close()
            states.append(sampler._random.bit_generator.state)
        assert len(caches[0]) == len(PROMPT) + count - 1
        assert_same_cache(caches[1], caches[0])
        assert_same_cache(caches[2], caches[0])
        assert_same_cache(caches[3], caches[0])
        assert states[0] == states[1] == states[2] == states[3]


def test_closing_leaves_a_changed_cache_alone(tiny_model):
    model, _ = tiny_model
    text = [*PROMPT, *generated(model, new_cache(model), max_tokens=30)]
    cache = new_cache(model)
    tokens = llama.generate(model, PROMPT, cache, drafter=Oracle(text))
    assert list(islice(tokens, 3)) == text[8:11]
    cache.clear()
    model.forward(PROMPT[:3], cache)
    tokens.close()
    assert len(cache) == 3
    sequence = new_cache(model, "paged")
    tokens = llama.generate(model, PROMPT, sequence, drafter=Oracle(text))
    assert list(islice(tokens, 3)) == text[8:11]
    sequence.free()
    tokens.close()


@pytest.mark.parametrize("where", ["sampler", "model", "drafter"])
def test_a_failure_leaves_the_cache_at_what_was_yielded(tiny_model, monkeypatch, where):
    model, _ = tiny_model
    expected = generated(model, new_cache(model), max_tokens=30)
    calls = iter(range(100))
    cache, drafter = new_cache(model), Oracle([*PROMPT, *expected])

    def sampler(logits):
        if where == "sampler" and next(calls) == 12:
            raise KeyboardInterrupt
        return int(logits.argmax())

    def failing(original):
        def call(*args):
            if next(calls) == 2:
                raise KeyboardInterrupt
            return original(*args)

        return call

    if where == "model":
        monkeypatch.setattr(model, "logits", failing(model.logits))
    if where == "drafter":
        drafter.draft = failing(drafter.draft)
    output = []
    with pytest.raises(KeyboardInterrupt):
        output.extend(token for token in llama.generate(model, PROMPT, cache, sampler=sampler, drafter=drafter))
    assert cache.context_lens.tolist() == [len(cache)] * 2
    again = new_cache(model)
    model.forward(PROMPT, again)
    for token in expected[: len(cache) - len(PROMPT)]:
        model.forward([token], again)
    assert_same_cache(cache, again)


# --- a real model --------------------------------------------------------------------------------


def repeating_prompts(tokenizer, count):
    """Passages of a text, each with its first words again at its end."""
    tokens = tokenizer.encode(TEXT)
    return [[*tokens[start : start + 60], *tokens[start : start + 6]] for start in range(0, 13 * count, 13)]


def compare(model, prompts, make_drafter, kind="int8", max_tokens=24, **sampling):
    """Generate with and without a drafter, and check that nothing differs; returns the counts."""
    stats = llama.SpeculationStats()
    # Two BLAS threads that wait for each other take minutes where others use the processors.
    with threadpool_limits(1, user_api="blas"):
        compare_each(model, prompts, make_drafter, kind, max_tokens, sampling, stats)
    return stats


def compare_each(model, prompts, make_drafter, kind, max_tokens, sampling, stats):
    for prompt in prompts:
        plain, cache = new_cache(model, kind), new_cache(model, kind)
        expected = generated(model, plain, prompt, max_tokens=max_tokens, sampler=llama.Sampler(**sampling))
        options = {"sampler": llama.Sampler(**sampling), "drafter": make_drafter(), "stats": stats}
        assert generated(model, cache, prompt, max_tokens=max_tokens, **options) == expected
        assert_same_cache(cache, plain)


@pytest.mark.model
@exhaustive
def test_six_texts_are_the_same_by_lookup(smollm2):
    _, model, tokenizer = smollm2
    prompts = repeating_prompts(tokenizer, 3) + [tokenizer.encode(question) for question in QUESTIONS[:3]]
    stats = compare(model, prompts, llama.PromptLookup)
    assert stats.num_accepted > 15


@pytest.mark.model
@parametrize("kind", OTHERS, usual=OTHERS[-1:])
def test_other_caches_give_the_same_text_by_lookup(smollm2, kind):
    _, model, tokenizer = smollm2
    stats = compare(model, repeating_prompts(tokenizer, 1), llama.PromptLookup, kind)
    assert stats.num_accepted > 0


@pytest.mark.model
@exhaustive
def test_sampled_texts_are_the_same_by_lookup(smollm2):
    _, model, tokenizer = smollm2
    stats = compare(model, repeating_prompts(tokenizer, 3), llama.PromptLookup, temperature=0.8, top_p=0.95, seed=7)
    assert 0 < stats.num_accepted < stats.num_drafted
