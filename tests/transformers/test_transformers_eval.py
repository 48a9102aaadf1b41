"""`python -m kvfast eval` with models of Hugging Face."""

import hashlib
import json
import string

import numpy as np
import pytest
from command_line import run_here
from tiny_transformers import QUIET, cache_argument, new_model, torch, transformers

import kvfast
from kvfast.transformers import KVFastCache

pytest.importorskip("tokenizers")
pytest.importorskip("gguf")
pytest.importorskip("rich")
pytestmark = QUIET
WORDS = "The one and the other, and then 12 of the others. " * 12


def folder_of(name, folder):
    """A folder with a model of `tiny_transformers` that reads characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {one: number for number, one in enumerate((string.ascii_letters + string.digits + " .,")[:97])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    new_model(name).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_report(name, tmp_path):
    folder, text, path = folder_of(name, tmp_path / "tiny-1.5B"), tmp_path / "text.txt", tmp_path / "report.json"
    text.write_text(WORDS, encoding="utf-8")
    code, out, err = run_here(
        "eval", "--model", folder, "--text", text, "--tokens", 200, "--formats", "float32,int8-rotated,int4-plain", "--report", path
    )
    assert code == 0, err
    report = json.loads(path.read_text("utf-8"))
    model, (of_text,) = report["model"], report["texts"]
    weights = (folder / "model.safetensors").read_bytes()
    assert (model["name"], model["sha256"]) == ("tiny-1.5B", hashlib.sha256(weights).hexdigest())
    assert (model["num_layers"], model["num_kv_heads"], model["vocab_size"]) == (4, 2, 97)
    assert report["versions"]["transformers"] == transformers.__version__ and report["versions"]["kvfast"] == kvfast.__version__
    assert (of_text["characters"], of_text["tokens"]) == (len(WORDS), 200)
    exact, rotated, int4 = of_text["results"]
    assert exact["kl"] == 0 < rotated["kl"] < int4["kl"] and exact["nll_difference"] == 0
    assert "attention_seconds" not in exact and "int4-plain" in out
    if name == "llama":
        assert rotated["bits_per_element"] == pytest.approx(8 * (16 + 4) / 16 * 256 / 199)  # 199 rows and their scales, in blocks of 64
    found = path.read_text("utf-8")
    assert str(tmp_path) not in found and WORDS[:30] not in found
    code, out, err = run_here("eval", "--compare", path)
    assert code == 0 and "tiny-1.5B" in out, err


def test_figures_are_those_of_transformers(tmp_path):
    from kvfast import evaluation
    from kvfast.tools.cli import hugging_face

    model, tokenizer = hugging_face.load(folder_of("llama", tmp_path))
    tokens = tokenizer.encode(WORDS)[:100]
    (score,) = evaluation.evaluate(model, tokens, [model.new_cache(100, dtype="int4-plain")], chunk_size=25)
    own = new_model("llama")
    own.set_attn_implementation("kvfast")
    logs = []
    for dtype in ("float32", "int4-plain"):
        cache, found = KVFastCache(own.config, dtype), []
        for ids in np.split(np.array(tokens[:-1]), [25, 50, 75]):
            with torch.no_grad():
                found.append(own(torch.from_numpy(ids)[None], **{cache_argument(): cache}).logits[0])
        logs.append(torch.log_softmax(torch.cat(found).double(), -1))
    assert score.kl == pytest.approx((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean().item(), rel=1e-6)
    assert score.nll == pytest.approx(-logs[1][np.arange(99), tokens[1:]].mean().item(), rel=1e-6)


def test_what_needs_a_gguf_file(tmp_path):
    folder, text = folder_of("llama", tmp_path), tmp_path / "text.txt"
    text.write_text(WORDS, encoding="utf-8")
    for option, given in (("--task", "retrieval"), ("--compress", "int8"), ("--llama-cpp", "q8_0")):
        code, _, err = run_here("eval", "--model", folder, "--text", text, option, given)
        assert (code, err) == (1, f"error: {option} is for GGUF files\n")
