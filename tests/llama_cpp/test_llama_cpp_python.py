"""`LlamaPromptCache` in llama-cpp-python itself, with SmolLM2: runs where both are installed."""

import signal
import subprocess
import sys
import time
import warnings

import pytest

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("safetensors")
pytest.importorskip("xxhash")

from kvfast.engines.llama_cpp.prompt_states import WholeState
from kvfast.llama_cpp import LlamaPromptCache

pytestmark = pytest.mark.model
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. However "
    "little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is so well fixed in "
    "the minds of the surrounding families, that he is considered as the rightful property of some one or other of their daughters. "
)
# Batches end where chunks end, so that what is computed after a chunk has the same bits in both cases.
BATCH, CHUNK, NEW_TOKENS = 64, 64, 12
TYPES = {
    "f16": {},
    "f16 with flash attention": {"flash_attn": True},
    "q8_0 and f16": {"type_k": 8},
    "q8_0": {"type_k": 8, "type_v": 8, "flash_attn": True},
    "q4_0": {"type_k": 2, "type_v": 2, "flash_attn": True},
}


def load(path, **options):
    return llama_cpp.Llama(str(path), **{"n_ctx": 768, "n_batch": BATCH, "n_ubatch": BATCH, "verbose": False, "n_threads": 2} | options)


def prompt(llm, length=200):
    return llm.tokenize(TEXT.encode() * 8)[:length]


def answer(llm, ids, count=NEW_TOKENS):
    """The text that follows; one warning at most would be an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return llm.create_completion(ids, max_tokens=count, temperature=0)["choices"][0]["text"]


@pytest.mark.parametrize("types", TYPES)
def test_a_fresh_llama_finds_prompts(smollm2_file, tmp_path, types):
    llm = load(smollm2_file, **TYPES[types])
    ids = prompt(llm)
    expected = answer(llm, ids)
    with LlamaPromptCache(tmp_path, llm, chunk_tokens=CHUNK) as prompts:
        llm.reset()
        llm.set_cache(prompts)
        assert answer(llm, ids) == expected
        computed = WholeState(llm.save_state().llama_state, 0, len(ids))
        prompts.flush()
        assert prompts.stats.bytes_written == prompts.cache_size > 0
    llm.close()
    llm = load(smollm2_file, **TYPES[types])
    with LlamaPromptCache(tmp_path, llm, chunk_tokens=CHUNK) as prompts:
        found = prompts[ids]
        assert found.n_tokens == 192
        llm.load_state(found)
        assert llm.save_state().llama_state == bytes(found.llama_state)
        chunk = bytearray(computed.forms.nbytes(192))
        computed.write_chunk(chunk, 0, 192)
        assert chunk == found.llama_state
        llm.reset()
        llm.set_cache(prompts)
        assert answer(llm, ids) == expected
        assert prompts.stats.num_restored_tokens == 2 * 192 and prompts.stats.bytes_written == 0
    llm.close()


def test_a_conversation_goes_on_in_a_fresh_llama(smollm2_file, tmp_path):
    messages = [{"role": "user", "content": TEXT + "Who wrote this?"}]

    def turn(llm):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return llm.create_chat_completion(messages, max_tokens=40, temperature=0)["choices"][0]["message"]

    llm, alone = load(smollm2_file), load(smollm2_file)
    with LlamaPromptCache(tmp_path, llm, chunk_tokens=CHUNK) as prompts:
        llm.set_cache(prompts)
        messages.append(turn(llm))
    messages.append({"role": "user", "content": "When?"})
    expected = turn(alone)
    llm.close()
    llm = load(smollm2_file)
    with LlamaPromptCache(tmp_path, llm, chunk_tokens=CHUNK) as prompts:
        llm.set_cache(prompts)
        assert turn(llm) == expected and prompts.stats.num_restored_tokens >= 128
    llm.close()
    alone.close()


def test_what_is_refused_is_computed(smollm2_file, tmp_path):
    llm = load(smollm2_file, logits_all=True)
    ids = prompt(llm, 80)
    expected = answer(llm, ids)
    with LlamaPromptCache(tmp_path, llm, chunk_tokens=CHUNK) as prompts:
        llm.set_cache(prompts)
        llm.reset()
        with pytest.warns(RuntimeWarning, match="logits_all"):
            assert llm.create_completion(ids, max_tokens=NEW_TOKENS, temperature=0)["choices"][0]["text"] == expected
        llm.reset()
        assert answer(llm, ids) == expected and prompts.cache_size == 0
    llm.close()


WORK = """
import sys
from kvfast.llama_cpp import LlamaPromptCache
sys.path.insert(0, sys.argv[3])
from test_llama_cpp_python import answer, load, prompt, CHUNK

llm = load(sys.argv[1], **eval(sys.argv[4]))
prompts = LlamaPromptCache(sys.argv[2], llm, chunk_tokens=CHUNK)
llm.set_cache(prompts)
text = answer(llm, prompt(llm, 340))
print(repr((text, prompts.stats.num_restored_tokens)), flush=True)
prompts.close()
"""


def test_processes_that_are_killed_while_they_store(smollm2_file, tmp_path, request):
    """Each is killed a little later after its answer. What it has stored is found, and sound."""
    command = [sys.executable, "-c", WORK, str(smollm2_file), str(tmp_path), str(request.path.parent), repr(TYPES["q8_0"])]
    texts, found = set(), []
    for delay in (0.0, 0.01, 0.03, 0.1, None, None):  # the last ones end by themselves
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            text, restored = eval(process.stdout.readline())
            if delay is not None:
                time.sleep(delay)
                process.send_signal(signal.SIGKILL)
            process.wait()
        texts.add(text)
        found.append(restored)
    assert len(texts) == 1 and found[0] == 0 and found == sorted(found) and found[-1] == 320, found
