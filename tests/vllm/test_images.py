"""vLLM with kvfast on a tiny model whose images' tokens see each other (Gemma 3), against transformers."""

import sys
from types import ModuleType
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")
Image = pytest.importorskip("PIL.Image", reason="vLLM reads images with Pillow")

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from vllm import ModelRegistry, SamplingParams
from vllm_engines import SMALL, in_engine, layers_of

# vLLM and PyTorch use parts of each other that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")

SIDE, IMAGE_TOKENS, NEW_TOKENS = 32, 16, 8
# What a processor puts into a text: the start, the end and the tokens of an image, and the lines around it.
BEGIN, END, SOFT = 501, 502, 503
NEWLINES = {"\n" * n: 503 + n for n in range(1, 5)}
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "vision_use_head": False}


def words():
    """A tokenizer whose words are the numbers of tokens."""
    names = {"<start_of_image>": BEGIN, "<end_of_image>": END, "<image_soft_token>": SOFT} | NEWLINES
    found = {str(i): i for i in range(SMALL["vocab_size"]) if i not in names.values()} | names
    one = tokenizers.Tokenizer(tokenizers.models.WordLevel(found, unk_token="0"))
    split = tokenizers.pre_tokenizers.Split
    one.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split(" ", "removed"), split(tokenizers.Regex("\n+"), "isolated")])
    tokens = dict(zip(("image_token", "boi_token", "eoi_token"), ("<image_soft_token>", "<start_of_image>", "<end_of_image>")))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=one, eos_token="2", pad_token="0", unk_token="0", bos_token="1", extra_special_tokens=tokens
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Such a model with random weights, and its processor."""
    where = tmp_path_factory.mktemp("gemma3_images")
    kinds = {"sliding_window": 70, "layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 32}
    config = transformers.Gemma3Config(
        text_config=SMALL | kinds,
        vision_config=VISION | {"image_size": SIDE, "patch_size": 4, "initializer_range": 0.2},
        mm_tokens_per_image=IMAGE_TOKENS,
        image_token_index=SOFT,
        boi_token_index=BEGIN,
        eoi_token_index=END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config)
    for parameter in model.parameters():  # biases and norms, which are zero at first
        if parameter.ndim == 1 and not parameter.any():
            torch.nn.init.normal_(parameter)
    model.save_pretrained(where)
    # The names that the files of such models have, and vLLM knows.
    weights = load_file(where / "model.safetensors")
    names = {name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in weights if "vision_model" not in name}
    save_file({names.get(name, name): one for name, one in weights.items()}, where / "model.safetensors", metadata={"format": "pt"})
    images = transformers.Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE}, do_pan_and_scan=False)
    transformers.Gemma3Processor(image_processor=images, tokenizer=words(), image_seq_length=IMAGE_TOKENS).save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def known():
    """The model is registered with vLLM, which would import it in a process of its own. It needs nothing of torchvision but the name,
    and wheels of that are for one build of PyTorch."""
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    missing = {name: ModuleType(name) for name in names} if "torchvision" not in sys.modules else {}
    if missing:
        missing[names[2]].functional = mock.Mock()
        sys.modules.update(missing)
    from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration

    for name in missing:
        del sys.modules[name]
    ModelRegistry.register_model("Gemma3ForConditionalGeneration", Gemma3ForConditionalGeneration)


def prompts():
    """Texts with an image, with two, and without; the images are near the end and far from it."""
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)) for _ in range(3)]
    a, b, c = (" ".join(map(str, rng.integers(4, 500, n))) for n in (5, 30, 100))
    image = "<start_of_image>"
    return [
        {"prompt": f"{a} {image} {b}", "multi_modal_data": {"image": images[:1]}},
        {"prompt": f"{c} {image} {b} {image} 7", "multi_modal_data": {"image": images[1:]}},
        {"prompt": b},
    ]


def of_transformers(folder, given, ids, spans=True):
    """The tokens that eager attention of transformers says after a prompt; without `spans`, images are read in causal order."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.tensor([ids])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": (ids == SOFT).long() * spans}
    if images := given.get("multi_modal_data", {}).get("image"):
        processor = transformers.AutoProcessor.from_pretrained(folder)
        inputs["pixel_values"] = processor.image_processor(images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        said = model.generate(**inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
    return said[0, ids.shape[1] :].tolist()


def test_images(folder, known):
    """In one batch and alone, in prompts that come in chunks, and again from the prefix cache."""
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, detokenize=False)

    def use(llm):
        assert {type(layer.impl).__module__ for layer in layers_of(llm).values()} == {"kvfast.engines.vllm.backend"}

        def said(*some):
            outputs = llm.generate(list(some), sampling, use_tqdm=False)
            return [list(one.outputs[0].token_ids) for one in outputs], [one.prompt_token_ids for one in outputs]

        together, ids = said(*prompts())
        assert said(*prompts())[0] == together and [said(one)[0][0] for one in prompts()] == together
        return together, ids

    options = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2}}
    found, ids = in_engine(folder, use, max_num_batched_tokens=128, **options)
    assert max(map(len, ids)) > 256
    assert found == [of_transformers(folder, *one) for one in zip(prompts(), ids)]
    assert found[0] != of_transformers(folder, prompts()[0], ids[0], spans=False)  # it matters
