"""vLLM's OpenAI server over a tiny model, in processes of its own, and a client of it."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time


@contextlib.contextmanager
def vllm_server(folder, *options, ready="kvfast keeps the KV cache as int8"):
    """A server that is ready: its process and its port. It ends with all of its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    command += ["--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--kv-cache-dtype", "int8_per_token_head", *options]
    with open(folder / f"log-{port}", "w+") as log:
        environment = os.environ | {
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            wait_for(server, port, log, ready)
            yield server, port
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:  # how vLLM ends on a busy machine is not what this tests
                kill(server)


def storing(url):
    """Options of a server that has a store for prompts."""
    text = '{"kv_connector":"KVFastConnector","kv_role":"kv_both","kv_connector_extra_config":{"url":"%s"}}'
    return "--kv-transfer-config", text % url


def kill(server):
    """End a server and all of its processes, at once."""
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def get(port, path):
    """The body of a page."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == 200, answer.status
    return answer.read().decode()


def wait_for(server, port, log, ready):
    for _ in range(600):
        assert server.poll() is None, log.seek(0) or log.read()[-5000:]
        try:
            get(port, "/health")
            break
        except OSError:
            time.sleep(0.2)
    else:
        raise TimeoutError(log.seek(0) or log.read()[-5000:])
    log.seek(0)
    assert ready in log.read()


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
