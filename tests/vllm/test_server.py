"""vLLM's OpenAI server over a cache of kvfast with a store for prompts: streams at once, clients that go away, the texts of one at a time,
and what a server that was killed has left."""

import threading
import time

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

from vllm_engines import answers, prompts, save_model, save_tokenizer, values
from vllm_server import get, kill, storing, stream, vllm_server

from kvfast.engines.vllm.prompts.figures import FIGURES

# vLLM and PyTorch use parts of each other that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")

# Requests that wait have their prompts cut elsewhere, so rounding differs. Where the two best tokens are as close as this, either may come.
TIE = 0.03
PROMPTS = [[3 + (i * i * 7 + 11 * i * n) % 497 for i in range(n)] for n in range(50, 850, 50)]
NUM_BLOCKS, BLOCK_SIZE = 60, 32


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(the folder of a model, the options of its servers, the port of one)."""
    folder = tmp_path_factory.mktemp("served")
    save_model("llama", folder)
    save_tokenizer(folder)
    options = ("--num-gpu-blocks-override", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE), *storing(folder / "store"))
    with vllm_server(folder, *options) as (_, port):
        yield folder, options, port


def test_a_server_goes_on_with_what_a_killed_one_has_stored(served):
    """16 clients whose prompts share a beginning. The server is killed while it computes and stores. The other one finds what is there,
    and its metrics tell so."""
    folder, options, port = served
    [begin] = prompts((500,))
    given = [begin + tail for tail in prompts([60] * 16, seed=1)]
    with vllm_server(folder, *options) as (server, port_of_killed):
        clients = [threading.Thread(target=quietly, args=(port_of_killed, one)) for one in given]
        for client in clients:
            client.start()
        while len(values(folder / "store")) < 2:
            assert any(client.is_alive() for client in clients)
            time.sleep(0.02)
        kill(server)
        for client in clients:
            client.join()
    words = [stream(port, one)[0] for one in given]
    assert [stream(port, one)[0] for one in given[:3]] == words[:3]
    found = {
        line.split("{")[0]: float(line.split()[-1])
        for line in get(port, "/metrics").splitlines()
        if line.startswith("vllm:kvfast_prompts_")
    }
    assert {f"vllm:kvfast_prompts_{name}_total" for name in FIGURES} <= set(found)
    assert found["vllm:kvfast_prompts_num_hits_total"] >= 1 and found["vllm:kvfast_prompts_num_restored_tokens_total"] >= 128
    [expected] = answers(folder, None, given, kv_cache_dtype="int8_per_token_head", most=16)
    assert words == [[str(one) for one in tokens] for tokens in expected]


def quietly(port, prompt):
    try:
        stream(port, prompt)
    except (OSError, ValueError, AssertionError):
        pass  # the server was killed


def test_streams_at_once_have_the_texts_of_one_at_a_time(served):
    """The cache holds 1,920 tokens of the 6,800 of all prompts, so requests wait for others. Every fourth client goes away."""
    _, _, port = served
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
