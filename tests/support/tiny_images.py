"""Models of transformers that read images, with random weights, and what generates with them."""

import functools

import numpy as np
from tiny_transformers import NEW_TOKENS, SIZES, KVFastCache, torch, transformers

IMAGE, SIDE = 3, 4  # the id of an image's tokens, and its patches in a row, of which each is a token
IMAGE_TOKENS = SIDE * SIDE
WINDOW = 12  # tokens, fewer than an image has
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "initializer_range": 0.2}
VISION |= {"image_size": 4 * SIDE, "patch_size": 4}
KINDS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16}


def _gemma3():
    config = transformers.Gemma3Config(
        text_config=SIZES | KINDS | {"query_pre_attn_scalar": 20},
        vision_config=VISION,
        mm_tokens_per_image=IMAGE_TOKENS,
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _gemma4():
    text = {"use_bidirectional_attention": "vision", "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8}
    vision = {name: size for name, size in VISION.items() if name != "image_size"}
    config = transformers.Gemma4Config(
        text_config=SIZES | KINDS | text | {"global_head_dim": 32, "num_kv_shared_layers": 2},
        vision_config=vision | {"num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2, "patch_size": 2},
        image_token_id=IMAGE,
        tie_word_embeddings=False,
        video_token_id=95,
        audio_token_id=96,
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def _paligemma(model_type="gemma", **text):
    config = transformers.PaliGemmaConfig(
        text_config=SIZES | {"model_type": model_type, "head_dim": 16} | text,
        vision_config=VISION | {"model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=IMAGE,
        tie_word_embeddings=False,
        projection_dim=64,
        hidden_size=64,
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


MODELS = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "paligemma": _paligemma,
    "paligemma2": functools.partial(_paligemma, "gemma2", **KINDS, attn_logit_softcapping=2.0, query_pre_attn_scalar=20),
}


@functools.cache
def image_model(name):
    """A model of `MODELS`, the same weights each time."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.generation_config.eos_token_id = None
    return model


def inputs(name, *rows):
    """What a processor makes of texts with images: each row has numbers of tokens, None for an image; the shorter ones are padded on
    their left."""
    rng = np.random.default_rng(len(rows))
    ids = [np.concatenate([np.full(IMAGE_TOKENS, IMAGE) if n is None else rng.integers(4, 95, n) for n in row]) for row in rows]
    width, images = max(map(len, ids)), sum(row.count(None) for row in rows)
    ids = torch.from_numpy(np.stack([np.pad(row, (width - len(row), 0)) for row in ids]))
    found = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if images:
        found["pixel_values"] = torch.from_numpy(rng.standard_normal((images, 3, 4 * SIDE, 4 * SIDE)).astype(np.float32))
    if name == "gemma4":
        found["mm_token_type_ids"] = (ids == IMAGE).long()
        if images:
            found["pixel_values"] = found["pixel_values"].reshape(images, 4 * IMAGE_TOKENS, 12)  # of which four make a token
            found["image_position_ids"] = torch.tensor([[(x, y) for y in range(2 * SIDE) for x in range(2 * SIDE)]] * images)
    else:  # all of a prompt is the prefix of PaliGemma
        found["token_type_ids"] = torch.zeros_like(ids) if name.startswith("paligemma") else (ids == IMAGE).long()
    return found


def generated(model, implementation, given, dtype="float32", **options):
    """The tokens of transformers alone, or with a `KVFastCache`, and that cache."""
    model.set_attn_implementation(implementation)
    cache = KVFastCache(model.config, dtype) if implementation == "kvfast" else transformers.DynamicCache(config=model.config)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(**given, cache=cache, **options).tolist(), cache
