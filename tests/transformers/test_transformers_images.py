"""kvfast.transformers: tokens that see each other, in models with images and with prefixes, and in masks that come as a matrix."""

import numpy as np
import pytest
from tiny_images import MODELS, WINDOW, generated, image_model, inputs
from tiny_transformers import QUIET, KVFastCache, error, logits, new_model, prompt, torch, transformers

from kvfast.engines.transformers import masks
from kvfast.engines.transformers.attention import attention
from kvfast.engines.transformers.masks import lazy_mask
from kvfast.engines.transformers.received import Received
from kvfast.engines.transformers.spans import UnknownMaskError, recognise

pytestmark = QUIET
TYPES = {name: "mm_token_type_ids" if name == "gemma4" else "token_type_ids" for name in MODELS}
TEXTS = [([5, None, 7],), ([30, None, None, 9],), ([5, None, 7], [None, 20, None, 3]), ([8], [3, 9])]


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.fixture
def llama():
    return new_model("llama", num_hidden_layers=2)


def logits_of(model, implementation, cache, given):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**given, cache=cache).logits


# --- models ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", TEXTS)
def test_greedy(name, rows):
    """Images are longer than the window, and a row with padding has its images in other places than its neighbour."""
    model, given = image_model(name), inputs(name, *rows)
    tokens, cache = generated(model, "kvfast", given)
    assert tokens == generated(model, "eager", given)[0]
    assert [len(row) + 1 for row in cache.rows] == (
        given["attention_mask"].sum(1) + len(tokens[0]) - given["input_ids"].shape[1]
    ).tolist()
    other = given | {TYPES[name]: torch.full_like(given["input_ids"], name.startswith("paligemma"))}  # none see each other
    if name.startswith("paligemma") or "pixel_values" in given:
        own, causal = (logits_of(model, "eager", None, one) for one in (given, other))
        assert error(own, causal) > 0.1


def test_beams(name):
    model, given = image_model(name), inputs(name, [5, None, 7], [None, 9])
    options = {"num_beams": 3, "num_return_sequences": 2}
    assert generated(model, "kvfast", given, **options)[0] == generated(model, "eager", given, **options)[0]


@pytest.mark.parametrize("dtype, limit", [("float32", 1e-5), ("int8", 0.1)])
def test_a_conversation_with_a_second_image(name, dtype, limit):
    """A prompt, a token after it, then another image, and a token again."""
    model, given = image_model(name), inputs(name, [6, None, 4, 1, 2, None, 5, 1])
    caches = {"kvfast": KVFastCache(model.config, dtype), "eager": transformers.DynamicCache(config=model.config)}
    for image, (first, last) in enumerate(((0, 26), (26, 27), (27, 50), (50, 51))):
        part = {"input_ids": given["input_ids"][:, first:last], "attention_mask": given["attention_mask"][:, :last]}
        if image % 2 == 0:
            part |= {
                key: one[image // 2 : image // 2 + 1] for key, one in given.items() if key in ("pixel_values", "image_position_ids")
            }
            part[TYPES[name]] = given[TYPES[name]][:, :last]
        found, expected = (logits_of(model, implementation, cache, part) for implementation, cache in caches.items())
        assert error(found, expected) < limit


def test_a_mask_is_looked_at_once_for_all_layers_of_a_kind(name, monkeypatch):
    looked = []
    monkeypatch.setattr(masks, "recognise", lambda *given: looked.append(given) or recognise(*given))
    model = image_model(name)
    logits_of(model, "kvfast", KVFastCache(model.config), inputs(name, [5, None, 7]))
    assert len(looked) == (1 if name == "paligemma" else 2)  # the last layers of gemma4 keep nothing, and get a mask of their own


def test_texts_have_the_bits_of_causal_attention(name):
    if name.startswith("paligemma"):
        pytest.skip("its texts are prefixes")
    model, given = image_model(name), inputs(name, [40])
    assert (given.pop(TYPES[name]) == 0).all()
    plain = logits_of(model, "kvfast", KVFastCache(model.config), given)
    given[TYPES[name]] = torch.zeros_like(given["input_ids"])
    assert logits_of(model, "kvfast", KVFastCache(model.config), given).equal(plain)


# --- masks -------------------------------------------------------------------------------------


def random_mask(rng, before, n, window, clamp, padded):
    """A mask in which random tokens see each other, and what is padding."""
    length, batch = before + n, 3
    kept = np.ones((batch, length), bool)
    for row in range(batch if padded else 0):
        kept[row, : rng.integers(0, length)] = False
    groups = np.full((batch, length), -1)
    for row in groups:
        edges = np.sort(rng.choice(length + 1, 2 * rng.integers(1, min(5, (length + 1) // 2 + 1)), replace=False))
        for i, (start, stop) in enumerate(edges.reshape(-1, 2)):
            row[start:stop] = i
    at, key = np.arange(before, length)[:, None], np.arange(length)
    near, together = key > at - (window or length + 1), (groups[:, at] == groups[:, None]) & (groups[:, at] >= 0)
    seen = near & ((key <= at) | together) if clamp else near & (key <= at) | together
    return seen, kept


def shown(options, at, length, window):
    """What a row's options say that queries see."""
    at, key = at[:, None], np.arange(length)
    near = key > at - (window or length + 1)
    seen = near & (key <= at)
    for start, stop in options.get("spans", ()):
        inside = (start <= at) & (at < stop) & (start <= key) & (key < stop)
        seen = seen | (inside & near if options["clamp_spans"] else inside)
    return seen


@pytest.mark.parametrize("window", [None, 5, 12])
@pytest.mark.parametrize("clamp", [False, True])
def test_recognised_masks_show_what_they_are_made_of(rng, window, clamp):
    many = 0
    for _ in range(150):
        before, n = int(rng.choice([0, 0, 3, 17])), int(rng.integers(1, 40))
        seen, kept = random_mask(rng, before, n, window, clamp, rng.random() < 0.5)
        blocks = np.split(seen, [n // 2, n // 2 + 1], axis=1)
        for row, options in enumerate(recognise([one for one in blocks if one.shape[1]], kept, window, None)):
            new = kept[row, before:]
            length = int(kept[row].sum())
            expected = seen[row][new][:, kept[row]]
            at = np.arange(length - int(new.sum()), length)
            assert np.array_equal(shown(options, at, length, window), expected)
            many += len(options.get("spans", ())) > 1
    assert many > 50


def test_any_other_mask_is_not_recognised(rng):
    refused = 0
    for _ in range(200):
        n = int(rng.integers(3, 20))
        seen, kept = random_mask(rng, 0, n, None, False, False)
        row, query, key = int(rng.integers(3)), int(rng.integers(n)), int(rng.integers(n))
        seen[row, query, key] ^= True
        try:
            options = recognise([seen], kept, None, None)
        except UnknownMaskError as refusal:
            refused += 1
            assert f"of row {row} sees" in str(refusal)
        else:  # it is still one that spans can show
            assert np.array_equal(shown(options[row], np.arange(n), n, None), seen[row])
    assert 100 < refused < 200


def received(llama, batch, n):
    llama.set_attn_implementation("kvfast")
    cache = KVFastCache(llama.config, "float32")
    return cache, cache.update(torch.randn(batch, 2, n, 16), torch.randn(batch, 2, n, 16), 0)


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda seen: seen[:, :, :, 0].zero_(), r"token 1 of row 0 sees 1 tokens from 1 to 1"),
        (lambda seen: seen[:, :, 4, 2].zero_(), r"token 4 of row 0 sees 4 tokens from 0 to 4"),
        (lambda seen: seen[:, :, 2, 5].fill_(True), r"token 2 of row 0 sees 4 tokens from 0 to 5"),
        (lambda seen: seen[1, :, 4].zero_(), r"token 4 of row 1 sees nothing"),
    ],
)
def test_refused_matrices_name_the_token(llama, change, text):
    seen = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    change(seen)
    if text.endswith("1 to 1"):
        seen[:, :, 0, 0] = True
    cache, (key, value) = received(llama, 2, 6)
    with pytest.raises(ValueError, match=f"the mask of LlamaAttention is another one: {text}"):
        attention(llama.model.layers[0].self_attn, torch.zeros(2, 4, 6, 16), key, value, seen)
    assert cache._rows.rows[0].layer_length(0) == 0


@pytest.mark.parametrize(
    "mask, text",
    [
        (torch.zeros(1, 1, 6, 6) - torch.arange(6), "adds numbers to scores"),
        (torch.ones(1, 1, 6, 6, dtype=torch.int64), "adds numbers to scores"),
        (torch.stack((torch.ones(1, 6, 6).tril(), torch.ones(1, 6, 6)), 1).bool(), "its heads differ"),
        (torch.ones(6, 6, dtype=torch.bool), r"it has the shape \(6, 6\)"),
        (torch.ones(3, 1, 6, 6, dtype=torch.bool), r"it has the shape \(3, 1, 6, 6\)"),
    ],
)
def test_matrices_that_are_no_masks(llama, mask, text):
    _, (key, value) = received(llama, 2, 6)
    with pytest.raises(ValueError, match=text):
        attention(llama.model.layers[0].self_attn, torch.zeros(2, 4, 6, 16), key, value, mask)


def test_a_matrix_of_another_step_is_refused(llama):
    _, (key, value) = received(llama, 1, 6)
    with pytest.raises(RuntimeError, match="holds 0 tokens and got 6 more, and the mask is one for 3 and 6"):
        attention(llama.model.layers[0].self_attn, torch.zeros(1, 4, 6, 16), key, value, torch.ones(1, 1, 6, 9, dtype=torch.bool))


@pytest.mark.parametrize("as_floats", [False, True])
def test_matrices_of_a_prefix_and_of_padding(llama, as_floats):
    """A prompt, more of it, and single tokens, whose masks come as matrices: what no query sees is padding."""
    ids, _ = prompt(2, 40)
    seen = torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()
    seen[:, :, :21, :21] = True
    seen[1, :, :, :7] = seen[1, :, :7] = False
    own, other = KVFastCache(llama.config, "float32"), transformers.DynamicCache(config=llama.config)
    for first, last in ((0, 25), (25, 39), (39, 40)):
        mask = seen[:, :, first:last, :last]
        added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        found = logits(llama, ids[:, first:last], "kvfast", own, added if as_floats else mask)
        expected = logits(llama, ids[:, first:last], "eager", other, added)
        stored = slice(max(0, 7 - first), None)
        assert error(found[0], expected[0]) < 1e-5 and error(found[1, stored], expected[1, stored]) < 1e-5
    assert [len(row) for row in own.rows] == [40, 33]


def test_bidirectional_attention_is_one_span(llama):
    _, (key, value) = received(llama, 1, 30)
    torch.manual_seed(0)
    query = torch.randn(1, 4, 30, 16)
    mask = lazy_mask(1, 30, 30, mask_function=transformers.masking_utils.bidirectional_mask_function)
    found, _ = attention(llama.model.layers[0].self_attn, query, key, value, mask, is_causal=False)
    k, v = (one.tensor.repeat_interleave(2, 1) for one in (key, value))
    assert isinstance(key, Received)
    assert error(found.transpose(1, 2), torch.nn.functional.scaled_dot_product_attention(query, k, v)) < 1e-5


def test_windows_that_no_function_names(llama):
    """An overlay that is laid over a causal mask is looked at, and refused where the layer has another window."""
    overlay = transformers.masking_utils.sliding_window_causal_mask_function(WINDOW)
    for n, refused in ((WINDOW, False), (WINDOW + 1, True)):
        _, (key, value) = received(llama, 1, n)
        call = (llama.model.layers[0].self_attn, torch.zeros(1, 4, n, 16), key, value, lazy_mask(1, n, n, mask_function=overlay))
        if refused:
            with pytest.raises(ValueError, match=f"token {WINDOW} of row 0 sees {WINDOW} tokens from 1 to {WINDOW}"):
                attention(*call)
        else:
            attention(*call)


def test_large_masks_are_looked_at_in_pieces(llama, monkeypatch):
    monkeypatch.setattr(masks, "_FEW_ELEMENTS", 100)
    mask = prompt(2, 40, (0, 5))[1]
    seen = torch.full((2, 40), -1)
    seen[:, 10:30] = 0
    function = transformers.masking_utils.or_masks(
        transformers.masking_utils.causal_mask_function, transformers.masking_utils.blockwise_overlay(seen)
    )
    made = lazy_mask(2, 40, 40, mask_function=function, attention_mask=mask.bool(), allow_is_causal_skip=False)
    _, (key, value) = received(llama, 2, 40)
    query = torch.randn(2, 4, 40, 16)
    found, _ = attention(llama.model.layers[0].self_attn, query, key, value, made)
    k, v = (one.tensor.repeat_interleave(2, 1) for one in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=made.matrix()).transpose(1, 2)
    assert error(found[0], expected[0]) < 1e-5 and error(found[1, 5:], expected[1, 5:]) < 1e-5


def test_assisted_generation_after_an_image():
    model, given = image_model("gemma3"), inputs("gemma3", [5, None, 7])
    expected = generated(model, "eager", given)[0]
    assert generated(model, "kvfast", given, prompt_lookup_num_tokens=4)[0] == expected
