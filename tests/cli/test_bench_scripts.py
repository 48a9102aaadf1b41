"""Each script of bench/ that no other test runs works, with small sizes, and prints what it found."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
QUICK = "--threads 1 --rounds 1"
TORCH, CPP = "torch transformers accelerate", "llama_cpp diskcache"
BENCHES = "(1-int8 or write or multihead and 8 or snapshot or file or fork) and not (ring or paged or shared or True or 16384)"
# Have tests of their own, are imported by others, need packages of Debian, or are only for pytest.
OTHERS = {"baseline", "peers", "conftest", "engine_process", "llama_folder", "simulated_cache", "texts"}
OTHERS |= {"bench_attend", "bench_encode", "bench_multihead", "bench_torch", "bench_write"}

# Name, the packages or programs that it needs, its options, and what it prints.
SCRIPTS = [
    ("accuracy", "", "--model MODEL --texts FOLDER/texts --tokens 70 --json FOLDER/x.json", r"'q4_0', .*'floats': True"),
    ("bench_caches", "", f"--contexts 128 --prefix 64 --megabytes 1 {QUICK}", r"float16 +128 .*\d\n(?s:.*)fork and free .* us"),
    ("bench_chosen", "", f"--contexts 8192,16384 --dtypes int8 {QUICK}", r"single tokens .* ms: \d.*x; all of it \d"),
    ("bench_fast", "", f"--context 512 --megabytes 1 {QUICK}", r"SmolLM2-135M +int4 +1 +\d.* ms, \d"),
    ("bench_formats", "", f"--contexts 128 --megabytes 1 {QUICK}", r"SmolLM2-135M .*copyto( +\d+\.\d+){8}\n"),
    ("bench_ggml_attention", CPP, f"--shape 4,2,32 --tokens 64 --types q8_0 --check {QUICK}", r"kvfast .* ms \(error \de-0[5-9]\)"),
    ("bench_hybrid_prompts", TORCH, "--context 300 --rounds 1 --tiny", r"\(256 tokens\).*are the same"),
    ("bench_llama_cpp", CPP, f"MODEL --types q8_0 --contexts 64 --prompts 64 --tokens 1 {QUICK}", r"kind decode .* ratio \d"),
    ("bench_llama_cpp_prompts", f"smollm2 {CPP}", "--store FOLDER/store --context 128 --rounds 0", r"kvfast, .* the same text"),
    ("bench_mla", "", f"--contexts 64 {QUICK}", r"int8, paged x 4 +64( +\S+){6}\n"),
    ("bench_prompt_cache", "", "--model MODEL --store FOLDER/store --tokens 99 --rounds 1 --prompts 2", r" 98 tokens .* the same 16 t"),
    ("bench_serve", "smollm2 llama_cpp fastapi", "FOLDER/x.json --lengths 400 --rounds 1", r'"from the store": \[\n +\d'),
    ("bench_snapshot", "", "--context 64 --rounds 1", r"load +\d(?s:.*)map +\d"),
    ("bench_store", "", "--short", r"folder, restore .* int4 +\d+ MB/s"),
    (
        "bench_transformers",
        f"smollm2 {TORCH}",
        "--prompts 1 --new-tokens 2 --context 32 --tokens 1 --rounds 1 --dtypes float32",
        r"kvfast int4 .*\d",
    ),
    ("bench_vllm", "vllm", "--attention --context 64 --sequences 1 --rounds 1", r"kvfast int4.* \d\.\d\dx"),
    ("bench_vllm_prompts", "smollm2 vllm", "--store FOLDER/store --context 128 --rounds 0", r"the same 16 tokens: True"),
    ("cycles", "llvm-mca-19 aarch64-linux-gnu-gcc", "", r"int8\t4\tZen 4\t.*\d"),
    ("precision", "", "--cancelling 1", r" int4 values .*64: \d\.\de-0[4-9]"),
    ("studies/bench_model", "", "TEXT --model MODEL --tokens 256 --formats int8 --rounds 1", r"256 queries: model +\d+ us"),
    ("studies/bench_neighbours", "", "--model MODEL --neighbours 1 --max-tokens 2 --rounds 1", r"of the fair share of \d"),
    ("studies/bench_session", "", "--model MODEL --tokens 99 --rounds 1", r"first tokens: \['[^,]*'\]\n(?s:.*)PromptCache +\d+ ms"),
    ("studies/bench_splice", "", f"--queries 4 --documents 2 --tokens 16 {QUICK}", r"2 x 16 tokens take \d.* ms: \d.*x"),
    ("studies/bench_torch", TORCH, f"--context 64 --calls 1 {QUICK}", r"product between attends +\d+ us"),
    ("studies/layers", "", "TEXT TEXT --model MODEL --tokens 40 --others-tokens 40 --formats k4v3", r", by layer: \d.*of int4"),
    ("studies/light_values", "smollm2", "--contexts 64 --queries 3", r"not read, fast, output known +\d.*%"),
    ("studies/llama_cpp_fidelity", CPP, "MODEL TEXT --types q8_0 --context 256 --prompts 2 --prompt 20 --tokens 3", r"to fast: KL \d"),
    ("studies/llama_cpp_state", CPP, "--model MODEL --types f16 --tokens 2", r"f16 .* [78]/8 "),
    ("studies/splicing", "", "--model MODEL --text TEXT --size 32 --tokens 16 --passages 1 --formats int4", r"\| shifted \| \d.*%"),
    ("studies/vllm_same_answers", "vllm", "--model llama --prompts 2 --longest 20 --tokens 2", r" 0 of \d+ answers differ"),
]


def run(script, options, **environment):
    """What a script prints, run as its docstring says."""
    environment |= {"PYTHONIOENCODING": "utf-8", "PYTEST_XDIST_WORKER": ""}  # without benches for pytest else
    command = [sys.executable, *script.split(), *options]
    done = subprocess.run(command, cwd=CHECKOUT, env=os.environ | environment, capture_output=True, encoding="utf-8", check=False)
    if "kvfast llama-cpp build" in done.stderr:
        pytest.skip("kvfast's backend for llama.cpp is not built")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "needs", "options", "printed"),
    [pytest.param(*one, id=one[0], marks=[pytest.mark.model] if "smollm2" in one[1] else []) for one in SCRIPTS],
)
def test_script(request, tmp_path, name, needs, options, printed):
    environment = {}
    for need in ["gguf", "tokenizers", "rich", *needs.split()]:
        if need == "smollm2":
            path = request.getfixturevalue("smollm2_file")
            if "llama_cpp" not in needs:  # whose backend is in the same folder
                os.symlink(path, tmp_path / path.name)
                environment["KVFAST_CACHE"] = str(tmp_path)
        elif "-" not in need:
            pytest.importorskip(need)
        elif shutil.which(need) is None:
            pytest.skip(f"{need} is not installed")
    tiny = runpy.run_path(CHECKOUT / "tests" / "data" / "tiny_gguf.py")
    tiny["SIZES"]["head_dim"] = 32
    tiny["write_model"](model := tmp_path / "tiny.gguf")
    (texts := tmp_path / "texts").mkdir()
    for text in ("austen", "python", "german", "chinese", "calibration"):
        (texts / f"{text}.txt").write_text("".join(f"The one the other - then the 12 others. {i}\n" for i in range(300)))
    for word, path in {"MODEL": model, "TEXT": texts / "austen.txt", "FOLDER": tmp_path}.items():
        options = re.sub(rf"\b{word}\b", str(path), options)
    assert re.search(printed, run(f"bench/{name}.py", options.split(), **environment), re.MULTILINE)


def test_benches_for_pytest():
    pytest.importorskip("pytest_benchmark")
    printed = run("-m pytest bench --benchmark-disable -q -p no:cacheprovider", ["-k", BENCHES])
    assert int(re.search(r"(\d+) passed", printed)[1]) > 30 and "failed" not in printed


def test_every_script_is_known():
    paths = [path for pattern in ("*.py", "studies/*.py") for path in (CHECKOUT / "bench").glob(pattern)]
    found = {path.relative_to(CHECKOUT / "bench").with_suffix("").as_posix() for path in paths}
    assert found == OTHERS | {name for name, *_ in SCRIPTS}
