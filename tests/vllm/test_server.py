"""vLLM's OpenAI server over a cache of kvfast: streams at once, clients that go away, and the texts of one at a time."""

import threading

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

from vllm_engines import save_model, save_tokenizer
from vllm_server import stream, vllm_server

# vLLM and PyTorch use parts of each other that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")

# Requests that wait have their prompts cut elsewhere, so rounding differs. Where the two best tokens are as close as this, either may come.
TIE = 0.03
PROMPTS = [[3 + (i * i * 7 + 11 * i * n) % 497 for i in range(n)] for n in range(50, 850, 50)]


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    save_model("llama", folder)
    save_tokenizer(folder)
    with vllm_server(folder, "--num-gpu-blocks-override", "60", "--block-size", "32") as (_, port):
        yield port


def test_streams_at_once_have_the_texts_of_one_at_a_time(port):
    """The cache holds 1,920 tokens of the 6,800 of all prompts, so requests wait for others. Every fourth client goes away."""
    leaves = {i: i % 8 for i in range(0, len(PROMPTS), 4)}
    together = {}

    def one(i):
        together[i] = stream(port, PROMPTS[i], leaves.get(i))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(together) == len(PROMPTS)
    num_compared = 0
    for i, prompt in enumerate(PROMPTS):
        if i not in leaves:
            words, leads = stream(port, prompt)
            sure = next((k for k, lead in enumerate(leads) if lead < TIE), len(leads))
            assert together[i][0][:sure] == words[:sure]
            assert len(together[i][0]) == len(words) == len(leads) == 16
            num_compared += sure
    assert num_compared > 100
