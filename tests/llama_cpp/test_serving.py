"""`python -m kvfast serve` in processes of its own, with SmolLM2: runs where the extra is installed. What is refused needs no model."""

import concurrent.futures
import contextlib
import http.client
import json
import runpy
import shlex
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from command_line import command, run, run_here
from servers import HOST, Server, free_port

STORY, SEA = "Write a story about a fox.", "Write about the sea."
LONG = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. " * 20


def posted(port, question, path="chat/completions", *, key=None, **options):
    """A connection on which a request was sent."""
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    asked = {"messages": [{"role": "user", "content": question}]} if path.startswith("chat") else {"prompt": question}
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    connection.request("POST", f"/v1/{path}", json.dumps({"temperature": 0, "max_tokens": 24} | asked | options), headers)
    return connection


def answer(port, question, **options):
    """(status, JSON) of an answer at once."""
    with contextlib.closing(posted(port, question, **options)) as connection:
        response = connection.getresponse()
        return response.status, json.load(response)


def text(port, question, **options):
    status, found = answer(port, question, **options)
    assert status == 200, found
    return found["choices"][0]["message"]["content"]


def events(port, question, **options):
    """The events of a stream, as they come."""
    with contextlib.closing(posted(port, question, stream=True, **options)) as connection:
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def pieces(port, question, **options):
    return [one["choices"][0]["delta"].get("content") or "" for one in events(port, question, **options)]


def get(port, path):
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=30)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.load(response)


def figures(port):
    """Those of Prometheus."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=30)) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line.startswith("kvfast_"))
    return {name.removeprefix("kvfast_"): float(value) for name, _, value in pairs}


@contextlib.contextmanager
def serving(path, *options):
    for package in ("llama_cpp", "fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(package)
    server = Server(lambda port: command("serve", path, "--context", 1024, *options, "--port", port), lambda port: get(port, "/health"))
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def port(smollm2_file):
    """That of a server without a store."""
    with serving(smollm2_file, "--store", "none") as server:
        yield server.port


@pytest.mark.model
def test_answers_and_streams(port):
    status, found = get(port, "/v1/models")
    assert status == 200 and [one["id"] for one in found["data"]] == ["SmolLM2-135M-Instruct.Q4_1"]
    status, found = answer(port, STORY)
    assert status == 200 and found["model"] == "SmolLM2-135M-Instruct.Q4_1" and found["usage"]["completion_tokens"] == 24
    streamed = pieces(port, STORY)
    assert len(streamed) > 10 and "".join(streamed) == found["choices"][0]["message"]["content"]
    (first, *_) = answer(port, "Once upon a time", path="completions", stop=["."])[1]["choices"]
    assert first["finish_reason"] in ("stop", "length") and "." not in first["text"]
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    assert set(json.loads(text(port, "Who is Jo?", response_format={"type": "json_object", "schema": schema}))) == {"name"}


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_two_clients_at_once(port, stream):
    """The first is not interrupted, and the list of models waits for none."""
    alone = [text(port, question, max_tokens=40) for question in (STORY, SEA)]
    found = {}

    def ask(i, question):
        found[i] = "".join(pieces(port, question, max_tokens=40)) if stream else text(port, question, max_tokens=40)

    threads = [threading.Thread(target=ask, args=one) for one in enumerate((STORY, SEA))]
    for thread in threads:
        thread.start()
    assert get(port, "/v1/models")[0] == 200
    for thread in threads:
        thread.join()
    assert [found[0], found[1]] == alone


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("question", "count"), [(STORY, 240), (LONG, 1)])  # within the answer, and within the prompt
def test_a_client_that_leaves_ends_its_computation(port, stream, question, count):
    begin = time.monotonic()
    text(port, f"First: {question}", max_tokens=count)
    whole = time.monotonic() - begin
    connection = posted(port, f"Second: {question}", max_tokens=count, stream=stream)
    time.sleep(whole / 8)
    connection.close()
    begin = time.monotonic()
    text(port, SEA, max_tokens=1)
    assert time.monotonic() - begin < whole / 2


@pytest.mark.model
def test_conversations_at_once_keep_their_contexts(smollm2_file):
    """Each finds its beginning in memory, and has the tokens of one that is alone."""

    def talk(first):
        messages = [{"role": "user", "content": first}]
        for question in ("And then?", "Why?", None):
            found = text(server.port, None, messages=messages, max_tokens=40)
            messages += [{"role": "assistant", "content": found}, {"role": "user", "content": question}]
        return messages

    told = []
    for how in (map, concurrent.futures.ThreadPoolExecutor().map):
        with serving(smollm2_file, "--store", "none", "--parallel", 2) as server:
            told.append(list(how(talk, (STORY, SEA))))
            found = figures(server.port)
        held, computed = (found[f'prompt_tokens_total{{source="{one}"}}'] for one in ("memory", "computed"))
        assert held > 2 * computed
    assert told[0] == told[1]


@pytest.mark.model
def test_too_many_requests_are_told_to_come_again(smollm2_file):
    with serving(smollm2_file, "--store", "none", "--max-waiting", 1) as server:
        stream = events(server.port, STORY, max_tokens=900)
        next(stream)
        with contextlib.closing(posted(server.port, SEA, max_tokens=1)):
            time.sleep(0.2)
            for options in ({}, {"stream": True}):
                with contextlib.closing(posted(server.port, SEA, max_tokens=1, **options)) as connection:
                    response = connection.getresponse()
                    assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
                    assert json.load(response)["error"]["message"] == "too many requests wait for an answer"
            assert figures(server.port)["waiting_requests"] == 1 and get(server.port, "/v1/models")[0] == 200
        time.sleep(2)  # within which a client that waited and left is missed
        assert figures(server.port)["waiting_requests"] == 0
        waiting = posted(server.port, SEA, max_tokens=1)
        stream.close()
        assert waiting.getresponse().status == 200
        waiting.close()


@pytest.mark.model
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"question": 3 * LONG}, "maximum context length is 1024 tokens"),
        ({"question": "hi", "grammar": "root ::= ("}, "the grammar"),
        ({"question": "hi", "logprobs": True, "top_logprobs": 1}, "logprobs is not supported"),
        ({"question": "", "path": "completions"}, "the prompt is empty"),
    ],
)
def test_errors_are_told(port, options, why):
    status, found = answer(port, **options)
    assert status in (400, 500) and why in found["error"]["message"]
    *_, last = events(port, **options)  # which llama-cpp-python's server ends without a word
    assert why in last["error"]["message"]
    assert get(port, "/extras/detokenize")[0] == 404  # with which a client could end the process
    assert text(port, "hi", max_tokens=1)


@pytest.mark.model
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "f16"])
def test_a_server_that_is_killed_in_the_middle_of_an_answer(smollm2_file, tmp_path, kind):
    with serving(smollm2_file, "--cache-type", kind, "--store", "none") as server:
        expected = text(server.port, LONG, max_tokens=40)
    with serving(smollm2_file, "--cache-type", kind, "--store", tmp_path) as server:
        stream = events(server.port, LONG, max_tokens=40)
        for _ in range(10):
            next(stream)
        time.sleep(0.3)  # as long as a long answer would go on
        server.kill()
        server.start()
        status, found = answer(server.port, LONG, max_tokens=40)
        assert status == 200 and found["choices"][0]["message"]["content"] == expected
        assert answer(server.port, 3 * LONG)[0] == 400
        count, reason = found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]
        found = figures(server.port)
    assert found['prompt_tokens_total{source="store"}'] >= 5 * 64 and 0 < found['prompt_tokens_total{source="computed"}'] <= 64
    assert found["answers_total"] == found["seconds_to_first_token_count"] == found["failed_requests_total"] == 1
    assert (count, reason) == (40, "length") or reason == "stop" and count < 40
    assert found["answer_tokens_total"] == count + (reason == "stop")  # with the token that ends it
    assert found["waiting_requests"] == 0 < found["store_bytes_fetched"]


@pytest.mark.model
def test_a_key_and_a_store_that_fails(smollm2_file, tmp_path):
    (tmp_path / "key").write_text("hunter2\n")
    (tmp_path / "store").mkdir()
    with serving(smollm2_file, "--store", tmp_path / "store", "--api-key-file", tmp_path / "key") as server:
        assert answer(server.port, "hi")[0] == answer(server.port, "hi", key="hunter")[0] == 401
        (tmp_path / "store").rename(tmp_path / "gone")
        (tmp_path / "store").write_text("")
        assert text(server.port, LONG, key="hunter2")


@pytest.mark.model
def test_a_conversation_with_a_name_goes_on(smollm2_file, tmp_path, monkeypatch):
    for package in ("llama_cpp", "fastapi", "prometheus_client", "rich"):
        pytest.importorskip(package)
    monkeypatch.setenv("KVFAST_CACHE", str(tmp_path))
    talk = ["chat", smollm2_file, "--context", "1024", "--temperature", "0", "--max-tokens", "40"]
    code, whole, _ = run(*talk, "--store", "none", input=f"{STORY}\n{SEA}\n")
    assert code == 0 and "> " in whole and " 0 of " not in whole
    named = [*talk, "--name", "mine", "--system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"]
    code, first, _ = run(*named, input=f"{STORY}\n")
    assert code == 0 and "0 of " in first
    code, second, _ = run(*named, input=f"{SEA}\n")
    assert code == 0 and "64 of " in second and STORY in second
    kept = json.loads((tmp_path / "chats" / "mine.json").read_text("utf-8"))
    assert [one["role"] for one in kept] == ["system", "user", "assistant", "user", "assistant"]
    assert all(one["content"] in whole for one in kept if one["role"] == "assistant")
    code, _, err = run(*talk, "--name", "../mine", input="hi\n")
    assert code == 1 and "--name must be letters" in err


@pytest.mark.model
def test_a_conversation_with_a_server(smollm2_file, tmp_path):
    pytest.importorskip("rich")
    (tmp_path / "key").write_text("hunter2\n")
    talk = ["--temperature", "0", "--max-tokens", "8"]
    with serving(smollm2_file, "--store", "none", "--api-key-file", tmp_path / "key") as server:
        address = f"http://{HOST}:{server.port}/v1"
        code, out, _ = run("chat", address, *talk, "--api-key-file", tmp_path / "key", input=f"{STORY}\n{SEA}\n")
        assert code == 0 and out.count("first token after") == 2
        assert figures(server.port)["answers_total"] == 2
        messages = [{"role": "user", "content": STORY}]
        assert text(server.port, None, key="hunter2", messages=messages, max_tokens=8)[:20] in out
        assert "Invalid API key" in run("chat", address, *talk, input="hi\n")[1]
    assert "no answer from" in run("chat", address, *talk, input="hi\n")[1]


@pytest.fixture
def packages(monkeypatch):
    """As if the packages of the extra were there."""
    monkeypatch.setattr("kvfast.tools.cli.serve._need", lambda package: None)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nothere.gguf"], "No such file or directory; give a GGUF file"),
        (["{tmp}/wrong.gguf"], "is not a GGUF file"),
        (["{tmp}"], "has no config.json"),
        (["{tmp}/tiny.gguf"], "heads of 12 elements do not fit into the blocks of 32 of q8_0: use --cache-type f16"),
        (["{tmp}/tiny.gguf", "--cache-type", "f16", "--port", "{taken}"], "; --port and --host choose another address"),
        (["{tmp}/tiny.gguf", "--cache-type", "f16", "--port", "99999"], "a port is at most 65535, got 99999"),
        (["{tmp}/tiny.gguf", "--cache-type", "f16", "--port", "0", "--store", "{tmp}/wrong.gguf/x"], "; --store names another one"),
        (["{tmp}/tiny.gguf", "--cache-type", "f16", "--port", "0", "--store", "redis://{free}", "--store-size", "1"], "for folders"),
        (["{tmp}/tiny.gguf", "--api-key-file", "{tmp}/none"], "No such file or directory"),
        (["{tmp}/tiny.gguf", "--api-key-file", "{tmp}/empty"], "has no key"),
        (["owner/name", "--threads", "2"], "--threads is for GGUF files"),
    ],
)
def test_what_is_wrong_is_told_before_the_model_is_loaded(tmp_path, packages, arguments, why):
    pytest.importorskip("gguf")
    (tmp_path / "wrong.gguf").write_text("wrong")
    (tmp_path / "empty").write_text("\n")
    runpy.run_path(Path(__file__).parents[1] / "data" / "tiny_gguf.py")["write_model"](tmp_path / "tiny.gguf")
    with socket.create_server((HOST, 0)) as taken:
        places = {"tmp": tmp_path, "taken": taken.getsockname()[1], "free": f"{HOST}:{free_port()}"}
        code, out, err = run_here("serve", *(one.format(**places) for one in arguments))
    assert (code, out) == (1, "") and why in err and err.count("\n") == 1


def test_a_model_of_hugging_face_is_one_of_vllm(tmp_path, monkeypatch):
    pytest.importorskip("obstore")
    (tmp_path / "key").write_text("hunter2\n")
    found = []
    monkeypatch.setattr("os.execve", lambda *args: found.append(args))
    monkeypatch.setattr("kvfast.tools.cli.serve.find_spec", lambda name: name)
    options = [
        "--context",
        2048,
        "--parallel",
        3,
        "--cache-type",
        "q4_0",
        "--host",
        "0.0.0.0",
        "--port",
        81,
        "--store",
        "memory://prompts",
    ]
    code, out, _ = run_here("serve", "owner/name", *options, "--api-key-file", tmp_path / "key")
    ((path, command, environment),) = found
    assert code == 0 and out == shlex.join(command) + "\n" and path == command[0] == sys.executable
    named = " ".join(command)
    for part in (
        "--model owner/name",
        "--max-model-len 2048",
        "--max-num-seqs 3",
        "--kv-cache-dtype int4_per_token_head",
        "--host 0.0.0.0",
        "--port 81",
    ):
        assert part in named
    assert '"kv_connector_extra_config": {"url": "memory://prompts"}' in named
    assert environment["VLLM_API_KEY"] == "hunter2" and "hunter2" not in out


def test_without_the_extra(monkeypatch):
    monkeypatch.setattr("kvfast.tools.cli.serve.find_spec", lambda name: None)
    assert run_here("serve") == (2, "", 'error: the serve extra is needed: pip install "kvfast[serve]"\n')
    code, _, err = run_here("serve", "owner/name", "--store", "none")
    assert (code, err) == (2, 'error: the vllm extra is needed: pip install "kvfast[vllm]"\n')
