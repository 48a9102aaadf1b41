"""vLLM's OpenAI server over a cache of kvfast: streams at once, clients that go away, and the texts of one at a time."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

from vllm_engines import save_model, save_tokenizer

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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder),
        "--served-model-name",
        "tiny",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        "16",
        "--max-num-batched-tokens",
        "256",
        "--num-gpu-blocks-override",
        "60",
        "--kv-cache-dtype",
        "int8_per_token_head",
        "--block-size",
        "32",
    ]
    with open(folder / "log", "w+") as log:
        environment = os.environ | {
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            wait_for(server, port, log)
            yield port
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:  # how vLLM ends on a busy machine is not what this tests
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def wait_for(server, port, log):
    for _ in range(600):
        assert server.poll() is None, log.seek(0) or log.read()[-5000:]
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                break
        except OSError:
            time.sleep(0.2)
    else:
        raise TimeoutError(log.seek(0) or log.read()[-5000:])
    log.seek(0)
    assert "kvfast keeps the KV cache as int8" in log.read()


def stream(port, prompt, leave_after=None):
    """The words that follow a prompt, or the first if the client goes away, and by how much each was likelier than the next best."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "skip_special_tokens": False,
        "logprobs": 2,
    }
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer, words, leads = connection.getresponse(), [], []
    assert answer.status == 200, answer.read()
    try:
        for line in answer if leave_after != 0 else ():
            if line.startswith(b"data: {"):
                data = json.loads(line[6:])
                assert "error" not in data, data
                for choice in data["choices"]:
                    words += choice["text"].split()
                    leads += [max(best.values()) - min(best.values()) for best in choice["logprobs"]["top_logprobs"]]
            if leave_after is not None and len(words) >= leave_after:
                break
    finally:
        connection.close()
    return words, leads


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
