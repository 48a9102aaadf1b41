"""Layers of vLLM's models with formats of their own, by vLLM's option and by kvfast's variables, and with calibrations."""

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import numpy as np
from vllm_engines import generate, in_engine, layers_of, prompts, save_model, settle, stored

import kvfast
from kvfast.engines.vllm import by_layer
from kvfast.engines.vllm.prompts.transfers import Transfers

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = prompts((5, 40, 200))


def forms_of(llm):
    """The format of each layer, drafts last."""
    found = [(layer.impl.memory.pool.dtype, layer.impl.number) for layer in layers_of(llm).values()]
    return [dtype if isinstance(dtype, str) else dtype[number] for dtype, number in found]


def forms_and_texts(llm):
    """What layers store, and the same texts in one batch, in chunks, and alone."""
    alone = [generate(llm, [one])[0] for one in PROMPTS]
    assert generate(llm, PROMPTS) == alone
    return forms_of(llm), alone


def bases_of(layers, heads=2, seed=0):
    """Random ones, for layers of 32 elements."""
    draw = np.random.default_rng(seed)
    turned = np.linalg.qr(draw.standard_normal((2, layers, heads, 32, 32)))[0]
    return kvfast.Calibration(*(turned * np.exp(draw.uniform(-0.3, 0.3, (2, layers, heads, 1, 32)))))


def _options(**more):
    return {
        "kv_cache_dtype": "int8_per_token_head",
        "block_size": 64,
        "max_num_batched_tokens": 128,
        "enable_prefix_caching": False,
    } | more


@pytest.mark.parametrize("name", ["deep", "gemma3"])
@pytest.mark.parametrize("dtype", ["int8_per_token_head", "int4_per_token_head"])
def test_vllm_leaves_layers_in_the_dtype_of_the_model(folder_of, name, dtype):
    options = _options(kv_cache_dtype=dtype, kv_cache_dtype_skip_layers=["0", "1"])
    forms, _ = in_engine(folder_of(name), forms_and_texts, **options)
    assert forms[:2] == ["float32"] * 2 and "float32" not in forms[2:]


@pytest.mark.parametrize(
    ("name", "dtype", "asked", "forms"),
    [
        ("deep", "int4_per_token_head", "0,-1=int8_per_token_head", ["int8-rotated", *["int4-recent"] * 4, "int8-rotated"]),
        (
            "deep",
            "int8_per_token_head",
            "1=turboquant_k8v4;2=auto;-3=int4_per_token_head",
            ["int8-rotated", "k8v4", "float32", "int4-recent", "int8-rotated", "int8-rotated"],
        ),
        (
            "gemma3",  # every second layer has a window
            "int4_per_token_head",
            "0,1=int8_per_token_head",
            ["int8-rotated", "int8-rotated", "int4(rotation=kv, codebook=gaussian)", "int4-recent"],
        ),
    ],
)
def test_layers_have_formats_of_their_own(folder_of, monkeypatch, name, dtype, asked, forms):
    """Their texts do not depend on the batch, and those of the same format for all layers are those without the variable."""
    monkeypatch.setenv(by_layer.FORMATS, asked)
    found, mixed = in_engine(folder_of(name), forms_and_texts, **_options(kv_cache_dtype=dtype))
    assert found == forms
    monkeypatch.setenv(by_layer.FORMATS, f"{','.join(map(str, range(len(forms))))}={dtype}")
    _, same = in_engine(folder_of(name), forms_and_texts, **_options())
    monkeypatch.delenv(by_layer.FORMATS)
    _, plain = in_engine(folder_of(name), forms_and_texts, **_options(kv_cache_dtype=dtype))
    assert same == plain
    assert name == "gemma3" or mixed != plain  # whose words repeat


@pytest.mark.parametrize("dtype", ["int8_per_token_head", "int4_per_token_head", "turboquant_k8v4"])
def test_calibrated_layers(folder_of, tmp_path, monkeypatch, dtype):
    """Layers of floats and of a draft model have no bases."""
    save_model("llama", tmp_path / "drafts")
    bases_of(6).save(tmp_path / "bases.npz")
    options = _options(kv_cache_dtype=dtype)
    plain, words = in_engine(folder_of("deep"), forms_and_texts, **options)
    monkeypatch.setenv(by_layer.CALIBRATION, str(tmp_path / "bases.npz"))
    drafts = {"method": "draft_model", "model": str(tmp_path / "drafts"), "num_speculative_tokens": 2}
    forms, fitted = in_engine(folder_of("deep"), forms_and_texts, **options, speculative_config=drafts)
    assert forms[:6] == [one if one == "float32" else f"{one} calibrated" for one in plain]
    assert not any("calibrated" in one for one in forms[6:]) and len(forms) == 10
    assert fitted != words and fitted[0][0] == words[0][0]


def test_stored_prompts_are_of_one_setting(folder_of, tmp_path, monkeypatch):
    monkeypatch.setattr(Transfers, "rates", lambda self: None)  # fetch, although these models compute as fast

    def adds(seed):
        """Whether a prompt adds to the store, with these bases."""
        bases_of(4, seed=seed).save(tmp_path / f"{seed}.npz")
        monkeypatch.setenv(by_layer.CALIBRATION, str(tmp_path / f"{seed}.npz"))

        def use(llm):
            generate(llm, prompts((300,)))
            settle(llm)

        before = len(list((tmp_path / "store").rglob("*")))
        in_engine(folder_of("llama"), use, **_options(kv_transfer_config=stored(tmp_path / "store")))
        return len(list((tmp_path / "store").rglob("*"))) > before

    assert [adds(0), adds(0), adds(1)] == [True, False, True]


@pytest.mark.parametrize(
    ("name", "variable", "value", "message"),
    [
        ("deepseek", by_layer.FORMATS, "0=auto", "latent rows of all layers in one format: leave KVFAST_LAYER_FORMATS and"),
        (
            "deep",
            by_layer.FORMATS,
            "0=int9",
            "KVFAST_LAYER_FORMATS must be like .*, layers and one of auto, int8_per_token_head, .*, got '0=int9'",
        ),
        ("deep", by_layer.FORMATS, "first=auto", "got 'first=auto'"),
        ("deep", by_layer.FORMATS, "0,1", "got '0,1'"),
        ("deep", by_layer.FORMATS, "3,6=auto", "must have layers from -6 to 5 of this model, got 6"),
        ("deep", by_layer.FORMATS, "-7=auto", "got -7"),
        ("deep", by_layer.CALIBRATION, "5 2", "KVFAST_CALIBRATION must be of a model with 6 layers, got one with 5"),
        ("deep", by_layer.CALIBRATION, "6 1", "the calibration is for 1 KV heads of 32 elements, and the cache has 2 of 32"),
        ("deep", by_layer.CALIBRATION, "", "No such file"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder_of, tmp_path, monkeypatch, name, variable, value, message):
    """Before the first request."""
    if variable == by_layer.CALIBRATION:
        if value:
            bases_of(*map(int, value.split())).save(tmp_path / "bases.npz")
        value = str(tmp_path / "bases.npz")
    monkeypatch.setenv(variable, value)
    with pytest.raises((ValueError, OSError), match=message):
        in_engine(folder_of(name), print, **_options())
