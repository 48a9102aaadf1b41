"""Servers that are gone, slow, full, restarted, or not what they should be."""

import logging
import os
import random
import shutil
import socket
import subprocess
import threading
import time
import warnings
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import pytest
import store_processes as processes
from dict_store import DictStore
from servers import HOST, Proxy, free_port, make_bucket, redis_server, s3_server
from store_values import key, read, shown, taken

import kvfast
from kvfast.errors import StoreError
from kvfast.prompts.stores import TieredStore, open_store, tiered
from kvfast.prompts.stores.redis import RedisStore

pytest.importorskip("redis", reason="needs the extra redis")
SECONDS = float(os.environ.get("KVFAST_STORE_SECONDS", "3"))  # `make stores` lets it run for five minutes
TIMEOUT = 1.0
SOON = 10  # seconds, on a busy machine; what is slow here takes 30 or more
DATA = os.urandom(3_000_000)


@pytest.fixture
def server(tmp_path):
    with redis_server(tmp_path) as server:
        yield server


def store_at(port, timeout=TIMEOUT, ends=()):
    return RedisStore(f"redis://{HOST}:{port}/0", timeout)


def calls_of(store):
    return [
        lambda: store.get_many([key(1)]),
        lambda: store.put(key(1), DATA),
        lambda: store.contains_many([key(1), key(2)]),
        lambda: store.touch([key(1)]),
        lambda: store.delete([key(1)]),
        lambda: list(store.entries()),
    ]


def test_refused():
    port = free_port()
    for call in calls_of(store_at(port)):
        begin = time.monotonic()
        with pytest.raises(StoreError, match=rf"redis://{HOST}:{port}/0: .*refused"):
            call()
        assert time.monotonic() - begin < SOON


@pytest.mark.parametrize("manner", ["half-open", "dripping", "delayed"])
def test_a_slow_server_costs_the_time_limit(server, manner):
    """Each call ends in time, also if each byte comes in time, but not the answer."""
    with Proxy(server.port) as proxy:
        store = store_at(proxy.port)
        assert store.put(key(1), b"1" * 10_000)
        proxy.manner, proxy.pause = manner, 30
        for call in (*calls_of(store), *calls_of(store_at(proxy.port))[:2]):  # also while connecting
            begin = time.monotonic()
            with pytest.raises(StoreError, match=r"[Tt]imeout|timed out"):
                call()
            assert TIMEOUT * 0.9 <= time.monotonic() - begin < SOON
        proxy.manner = "plain"
        assert read(store.get_many([key(1)])) == [b"1" * 10_000]


def test_a_slow_server_that_is_fast_enough(server):
    with Proxy(server.port) as proxy:
        store = store_at(proxy.port, 2)
        proxy.manner, proxy.pause = "delayed", 0.1
        assert store.put(key(1), b"1") and read(store.get_many([key(1)])) == [b"1"]


def test_a_server_that_takes_no_bytes_costs_the_time_limit():
    with socket.create_server((HOST, 0)) as listener:  # nobody reads
        begin = time.monotonic()
        with pytest.raises(StoreError):
            store_at(listener.getsockname()[1]).put(key(1), DATA * 4)
        assert time.monotonic() - begin < SOON


def test_cut_in_the_middle_of_an_answer(server):
    with Proxy(server.port) as proxy:
        store = store_at(proxy.port)
        store.put(key(1), DATA)
        proxy.manner = "cut"
        with pytest.raises(StoreError):
            store.get_many([key(1)])
        proxy.manner = "plain"
        assert read(store.get_many([key(1), key(2)])) == [DATA, None]  # nothing is left of the answer before


def test_cancel_ends_the_calls_of_other_threads(server):
    with Proxy(server.port) as proxy:
        store, failures = store_at(proxy.port, 60), []

        def work():
            try:
                store.get_many([key(1)])
            except StoreError as error:
                failures.append(str(error))

        store.put(key(1), b"1")
        proxy.manner = "half-open"
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        begin = time.monotonic()
        while any(thread.is_alive() for thread in threads):  # those that are still connecting are not there to be ended
            store.cancel()
            time.sleep(0.05)
            assert time.monotonic() - begin < SOON
        assert len(failures) == 3 and "the call took too long" in failures[0]
        proxy.manner = "plain"
        assert read(store.get_many([key(1)])) == [b"1"]


def test_a_server_that_was_started_again_is_empty(server):
    """Old connections are not a failure."""
    store = store_at(server.port, 5)
    assert store.put(key(1), b"1") and read(store.get_many([key(1)])) == [b"1"]
    server.kill()
    with pytest.raises(StoreError):
        store.get_many([key(1)])
    server.start()
    assert read(store.get_many([key(1)])) == [None]
    assert store.put(key(1), b"2")
    server.kill()
    server.start()
    assert store.contains_many([key(1)]) == [False]  # at once


@pytest.mark.parametrize("call", ["get", "put"])
def test_killed_in_the_middle(server, call):
    store, done, failures = store_at(server.port, 5), [], []

    def work():
        with suppress(StoreError):
            while True:
                if call == "put":
                    store.put(key(len(done)), DATA)
                else:
                    (value,) = read(store.get_many([key(1)]))
                    failures.extend([value] if value != DATA else [])
                done.append(1)

    store.put(key(1), DATA)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    server.kill()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert done and not failures
    server.start()
    assert read(store.get_many([key(1)])) == [None] and store.put(key(1), DATA) and read(store.get_many([key(1)])) == [DATA]


def test_a_full_server_that_removes_nothing_refuses(tmp_path):
    with redis_server(tmp_path, "--maxmemory", "20mb", "--maxmemory-policy", "noeviction") as server:
        store = store_at(server.port, 5)
        kept = [taken(store, key(i), DATA) for i in range(12)]
        assert kept[:3] == [True] * 3 and not kept[-1]
        assert list(store.contains_many([key(i) for i in range(12)])) == kept
        assert read(store.get_many([key(0), key(11)])) == [DATA, None]
        store.touch([key(0)])  # counting needs memory: no failure
        store.delete([key(i) for i in range(12)])
        assert store.put(key(11), DATA)


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu"])
def test_a_full_server_that_removes_makes_room(tmp_path, policy):
    with redis_server(tmp_path, "--maxmemory", "20mb", "--maxmemory-policy", policy) as server:
        store = store_at(server.port, 5)
        assert all(store.put(key(i), DATA) for i in range(12))
        values = read(store.get_many([key(i) for i in range(12)]))
        assert values.count(DATA) >= 3 and None in values and set(values) == {DATA, None}
        store.touch([key(i) for i in range(12)])
        entries = list(store.entries())
        assert 0 < len(entries) < 12 and {entry.nbytes for entry in entries} == {len(DATA)}


def test_time_to_live(server):
    store = RedisStore(f"redis://{HOST}:{server.port}/0?ttl=1", 5)
    for i in (1, 2):
        store.put(key(i), b"1")
    end = time.monotonic() + 1.6
    while time.monotonic() < end:
        store.touch([key(2)])
        time.sleep(0.1)
    assert store.contains_many([key(1), key(2)]) == [False, True]


def test_other_values_of_the_server_are_left_alone(server):
    import redis

    client = redis.Redis(port=server.port)
    client.set("mine", 1)
    client.rpush(f"kvfast:{key(1)}", "a list")
    client.set("kvfast:c-mine", 1)
    store = store_at(server.port)
    store.put(key(2), b"2")
    assert [entry.key for entry in store.entries()] == [key(2)]
    with pytest.raises(StoreError, match="WRONGTYPE"):
        store.get_many([key(1)])
    assert read(store.get_many([key(2)])) == [b"2"]
    store.delete([entry.key for entry in store.entries()])
    assert set(client.keys()) == {b"kvfast:c-mine", f"kvfast:{key(1)}".encode(), b"mine"}


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"+OK\r\n$99999999999999999999\r\n",
        b"$-5\r\n",
        b"*1000000000\r\n",
        b"\x00" * 1000,
        b"+OK\r\n+OK\r\n:5\r\n$3\r\nabc\r\n",
        b"%5\r\n",
        b"*1\r\n" * 5000,
        b"",
    ],
)
def test_what_is_no_redis_server(answer):
    with socket.create_server((HOST, 0)) as listener:

        def serve():
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client:
                        client.recv(1000)
                        client.sendall(answer)
                        time.sleep(0.1)

        threading.Thread(target=serve, daemon=True).start()
        store = store_at(listener.getsockname()[1])
        for call in calls_of(store)[:2]:
            begin = time.monotonic()
            with pytest.raises(StoreError):
                call()
            assert time.monotonic() - begin < SOON
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "lie",
    [
        b":5\r\n",
        b"*2\r\n:1\r\n:2\r\n",
        b"%1\r\n:1\r\n:2\r\n",
        b"#t\r\n",
        b",1.5\r\n",
        b"*0\r\n",
        b"*2\r\n:0\r\n*1\r\n:7\r\n",
        b"*2\r\n$1\r\n0\r\n*1\r\n:7\r\n",
    ],
)
def test_a_server_that_lies(server, lie):
    with Proxy(server.port) as proxy:
        store = store_at(proxy.port)
        store.put(key(1), b"1")
        proxy.manner, proxy.lie = "lying", lie
        for call in (lambda: store.get_many([key(1)]), lambda: list(store.entries())):
            with pytest.raises(StoreError, match="is not one of a Redis server|Protocol Error|Invalid RESP version"):
                call()
        for call in calls_of(store)[1:5]:
            with suppress(StoreError):
                call()


@pytest.mark.parametrize(
    "lie",
    [
        b"$5\r\nabcdefgh\r\n",
        b"$-7\r\nabc\r\n",
        b"$536870913\r\nabc\r\n",
        b"$" + b"1" * 3000 + b"\r\n",
        b"$1" * 9000,
        b"\r\n",
        b"$\r\n",
        b"$3",
    ],
)
def test_values_that_are_none(server, lie):
    """The connection is not used again: what came too much is not the answer to the next command."""
    with Proxy(server.port) as proxy:
        store = store_at(proxy.port)
        store.put(key(1), b"1")
        proxy.manner, proxy.lie = "lying", lie
        with pytest.raises(StoreError, match="is not one of a Redis server|timed out"):
            store.get_many([key(1)])
        proxy.manner = "plain"
        assert read(store.get_many([key(1), key(2), key(1)])) == [b"1", None, b"1"]


def test_an_answer_too_many(server):
    with Proxy(server.port) as proxy:
        store = store_at(proxy.port)
        store.put(key(1), b"1")
        proxy.manner, proxy.lie = "lying", b"$1\r\n5\r\n$1\r\n6\r\n"
        assert read(store.get_many([key(1)])) == [b"5"]
        proxy.manner = "plain"
        assert read(store.get_many([key(1)])) == [b"1"]


def test_tls(tmp_path, monkeypatch):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    certificate, secret, port = tmp_path / "certificate.pem", tmp_path / "key.pem", free_port()
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
        "-addext",
        f"subjectAltName=IP:{HOST}",
        "-out",
        certificate,
        "-keyout",
        secret,
    ]
    subprocess.run(command, check=True, capture_output=True)
    with redis_server(
        tmp_path,
        "--tls-port",
        str(port),
        "--tls-cert-file",
        str(certificate),
        "--tls-key-file",
        str(secret),
        "--tls-auth-clients",
        "no",
        "--tls-ca-cert-file",
        str(certificate),
    ):
        store = RedisStore(f"rediss://{HOST}:{port}/0?ssl_ca_certs={certificate}", 5)
        assert store.url == f"rediss://{HOST}:{port}/0"
        monkeypatch.chdir(tmp_path)
        near = RedisStore(f"rediss://{HOST}:{port}/0?ssl_ca_certs={certificate.name}", 5)
        monkeypatch.chdir(Path(__file__).parent)
        assert near.contains_many([key(1)]) == [False]
        assert store.put(key(1), DATA) and read(store.get_many([key(1), key(2)])) == [DATA, None]
        with pytest.raises(StoreError, match="certificate"):
            RedisStore(f"rediss://{HOST}:{port}/0", 5).get_many([key(1)])
        with Proxy(port) as proxy:
            store = RedisStore(f"rediss://{HOST}:{proxy.port}/0?ssl_ca_certs={certificate}", TIMEOUT)
            store.put(key(3), b"3")
            proxy.manner = "dripping"
            begin = time.monotonic()
            with pytest.raises(StoreError, match=r"[Tt]imeout|timed out"):
                store.get_many([key(1)])
            assert time.monotonic() - begin < SOON


@pytest.mark.parametrize("password, message", [("hunter2", "WRONGPASS|invalid"), ("", "NOAUTH|[Aa]uthenticat")])
def test_passwords_are_never_shown(tmp_path, password, message, caplog, capfd):
    with (
        redis_server(tmp_path, "--requirepass", "sesame4") as server,
        caplog.at_level(logging.DEBUG),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        wrong = RedisStore(f"redis://:{password}@{HOST}:{server.port}/0" if password else f"redis://{HOST}:{server.port}/0", 5)
        right = RedisStore(f"redis://default:sesame4@{HOST}:{server.port}/0", 5)
        texts = [repr(wrong), str(wrong), wrong.url, repr(right), right.url]
        for call in calls_of(wrong):
            with pytest.raises(StoreError, match=message) as failure:
                call()
            texts.append(shown(failure.value))
        assert right.put(key(1), b"1")
        prompts = kvfast.PromptCache(f"redis://:{password}@{HOST}:{server.port}/0" if password else f"redis://{HOST}:{server.port}/0")
        assert prompts.restore(kvfast.KVCache(2, 2, 20, dtype="int8"), [1, 2, 3]) == 0
        texts.append(repr(prompts))
        prompts.close()
        server.kill()
        with pytest.raises(StoreError) as failure:
            right.get_many([key(1)])
        texts += [shown(failure.value), *map(str, caught), caplog.text, *capfd.readouterr()]
    assert len(caught) >= 1
    assert not any(secret in text for text in texts for secret in ("hunter2", "sesame4"))


def test_eight_processes_on_one_server_with_kills(tmp_path):
    spawn, rng = get_context("spawn"), random.Random(4)
    failed, end, seeds, kills = spawn.Value("i", 0), time.monotonic() + SECONDS, iter(range(10**9)), 0
    with redis_server(tmp_path, "--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru") as server:
        url = f"redis://{HOST}:{server.port}/0"
        start = lambda: spawn.Process(target=processes.work, args=(url, None, end - time.monotonic(), next(seeds), failed))
        running = [start() for _ in range(8)]
        for one in running:
            one.start()
        try:
            while time.monotonic() < end:
                time.sleep(0.1)
                if rng.random() < 0.15:
                    place = rng.randrange(8)
                    running[place].kill()
                    running[place].join()
                    kills += 1
                    running[place] = start()
                    running[place].start()
            for one in running:
                one.join(60)
            assert [one.exitcode for one in running] == [0] * 8
        finally:
            for one in running:
                one.kill()
        store, numbers = store_at(server.port, 5), range(processes.KEYS)
        values = read(store.get_many([processes.key_of(number) for number in numbers]))
        assert kills and not failed.value and any(values)
        assert all(value is None or processes.is_sound(number, value) for number, value in zip(numbers, values))


def test_an_object_store_that_is_gone_slow_or_refuses(tmp_path, monkeypatch):
    pytest.importorskip("obstore", reason="needs the extra cloud")
    with s3_server(monkeypatch) as server, Proxy(server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{HOST}:{proxy.port}")
        store = open_store("s3://prompts/x", timeout=TIMEOUT)
        assert store.put(key(1), DATA[:20_000])
        for manner in ("half-open", "dripping", "cut"):
            proxy.manner = manner
            for call in (lambda: store.get_many([key(1)]), lambda: store.contains_many([key(i) for i in range(40)])):
                begin = time.monotonic()
                with pytest.raises(StoreError, match=r"^s3://prompts/x: ") as failure:
                    call()
                assert time.monotonic() - begin < SOON
                assert "hunter2" not in shown(failure.value) and "\n" not in str(failure.value)
        proxy.manner = "plain"
        assert read(store.get_many([key(1)])) == [DATA[:20_000]]
        server.kill()
        with pytest.raises(StoreError):
            store.get_many([key(1)])
        server.start()
        with pytest.raises(StoreError, match="s3://prompts/x: there is no such bucket"):
            store.put(key(1), b"1")
        make_bucket(server.port)
        assert read(store.get_many([key(1)])) == [None] and store.put(key(1), b"1")
        store.close()


def test_a_tier_serves_alone_while_its_far_store_is_gone(server, tmp_path):
    url, near = f"redis://{HOST}:{server.port}/0", tmp_path / "near"
    far, tier = store_at(server.port), open_store(url, near=near, timeout=TIMEOUT)
    for i in range(3):
        far.put(key(i), DATA)
    assert list(tier.contains_many([key(0), key(1), key(9)])) == [True, True, False]
    assert read(tier.get_many([key(0), key(9), key(1)])) == [DATA, None, DATA]
    tier.flush()
    assert tier.near.contains_many([key(i) for i in range(3)]) == [True, True, False]  # what was read is near
    assert tier.put(key(5), b"5") and far.contains_many([key(5)]) == [True] == tier.near.contains_many([key(5)])
    server.kill()
    with pytest.warns(RuntimeWarning, match=r"fails, and .*near serves alone: .*refused"):
        assert read(tier.get_many([key(2), key(1), key(5)])) == [None, DATA, b"5"]
    # Without a second warning, which would be an error here.
    assert list(tier.contains_many([key(2), key(1)])) == [False, True]
    assert tier.put(key(6), b"6") and read(tier.get_many([key(6)])) == [b"6"]
    tier.touch([key(6)])
    tier.close()


def test_a_tier_reads_from_far_while_its_folder_is_gone(server, tmp_path):
    tier = open_store(f"redis://{HOST}:{server.port}/0", near=tmp_path / "near")
    tier.put(key(1), DATA)
    for path in sorted((tmp_path / "near").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "near").rmdir()
    (tmp_path / "near").write_bytes(b"no folder")
    with pytest.warns(RuntimeWarning, match="near takes no values: cannot"):
        assert tier.put(key(2), b"2")
    assert read(tier.get_many([key(1), key(2)])) == [DATA, b"2"]
    tier.close()


@pytest.mark.parametrize(("call", "raises"), [("put", False), ("put", True), ("touch", True)])
@pytest.mark.parametrize("is_far", [True, False])
def test_a_tier_whose_one_store_takes_no_values_tells_it(is_far, call, raises, monkeypatch, caplog):
    near, far = DictStore(), DictStore()
    tier, full = TieredStore(near, far), far if is_far else near

    def refuse(*args):
        full.calls.append(call)
        if raises:
            raise StoreError("it has no room, indeed")

    full.url, full.put, full.touch = "full", refuse, refuse
    with pytest.warns(RuntimeWarning, match="full takes no values: it has no room"):
        assert tier.put(key(1), b"1") if call == "put" else tier.touch([key(1)]) is None
    assert tier.put(key(2), b"2") and full.calls == [call]  # and no other warning
    full.values[key(1)], full.values[key(3)] = b"1", b"3"
    assert read(tier.get_many([key(1), key(3)])) == [b"1", b"3"]  # it is still read
    monkeypatch.setattr(tiered.time, "monotonic", lambda clock=time.monotonic: clock() + tiered.PAUSE)
    del full.put, full.touch
    tier.touch([key(1)])
    assert not caplog.records  # nothing was put
    assert tier.put(key(4), b"4") and full.values[key(4)] == b"4"
    assert [one.message for one in caplog.records] == ["full takes values again"]
    tier.close()
