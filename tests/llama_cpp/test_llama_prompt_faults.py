"""Prompts of llama-cpp-python in stores that fail, lie and are shared: nothing but time is lost."""

import multiprocessing
import os
import random
import signal
import time

import numpy as np
import pytest
from llama_prompts import CHUNK, PROMPT, fresh, ids, only_warnings, restored
from llama_stand_in import Llama
from servers import Proxy, redis_server

from kvfast.prompts.stores import FolderStore

pytest.importorskip("safetensors")
pytest.importorskip("xxhash")

pytestmark = pytest.mark.usefixtures("short_pauses")


@pytest.fixture
def server(tmp_path):
    pytest.importorskip("redis", reason="needs the extra redis")
    with redis_server(tmp_path) as server:
        yield server


@pytest.mark.parametrize("damage", ["flipped", "cut", "swapped", "empty"])
@pytest.mark.parametrize("index", [0, 4, 8])
def test_a_damaged_chunk_is_computed_and_stored_again(folder, model, damage, index):
    expected = Llama(model).complete(PROMPT)
    with fresh(folder, model) as (llm, prompts):
        llm.complete(PROMPT)
        prompts.flush()
        store = FolderStore(folder)
        by_end = {}
        for entry in store.entries():
            (value,) = store.get_many([entry.key])
            with value:
                data = value.read(0, len(value))
            by_end[int(np.frombuffer(data, "<u8", 1, 72)[0])] = entry.key, bytes(data)
        key, data = by_end[(index + 1) * CHUNK]
        other = by_end[(index + 1) % 9 * CHUNK + CHUNK][1]
        flipped = data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]
        assert store.put(key, {"flipped": flipped, "cut": data[:-1], "swapped": other, "empty": b""}[damage])
        store.close()
    with fresh(folder, model) as (llm, prompts):
        with only_warnings(1):
            assert llm.complete(PROMPT) == expected
        assert prompts.stats.num_restored_tokens == index * CHUNK
        prompts.flush()
        assert prompts.stats.bytes_written == len(data)
    with fresh(folder, model) as (llm, prompts), only_warnings(0):
        assert llm.complete(PROMPT) == expected and prompts.stats.num_restored_tokens == restored()


def cache_at(port, **options):
    return {"store": f"redis://127.0.0.1:{port}", "cache": {"time_limit": 2.0} | options}


def test_a_server_that_is_killed_and_started_again(server, model):
    expected = Llama(model).complete(PROMPT)
    with fresh(path=model, **cache_at(server.port)) as (llm, prompts):
        assert llm.complete(PROMPT) == expected
        prompts.flush()
        server.kill()
        with only_warnings(1) as caught:
            for seed in range(3):
                assert llm.complete(ids(100, seed)) == Llama(model).complete(ids(100, seed))
                prompts.flush()
            llm.complete(ids(20, 9))
            assert llm.complete(PROMPT) == expected
            prompts.flush()
        assert "prompts are computed, as redis://" in str(caught[0].message)
        server.start()
        time.sleep(0.1)
        llm.complete(ids(20, 9))
        llm.complete(PROMPT)
        prompts.flush()
        assert prompts.cache_size > 0
    with fresh(path=model, **cache_at(server.port)) as (llm, prompts):
        assert llm.complete(PROMPT) == expected and prompts.stats.num_restored_tokens == restored()


def test_a_server_that_is_full(tmp_path, model):
    pytest.importorskip("redis", reason="needs the extra redis")
    with (
        redis_server(tmp_path, "--maxmemory", "2mb", "--maxmemory-policy", "noeviction") as server,
        fresh(path=model, layers=60, **cache_at(server.port)) as (llm, prompts),
        only_warnings(1) as caught,  # and a full server still works
    ):
        for seed in range(6):
            assert llm.complete(ids(100, seed)) == Llama(model, layers=60).complete(ids(100, seed))
            prompts.flush()
        assert 0 < prompts.cache_size == prompts.stats.bytes_written
        assert prompts.stats.bytes_refused > 1000 * prompts.stats.num_refused > 0
    assert "prompts are not saved, as redis://" in str(caught[0].message) and "it is full" in str(caught[0].message)


@pytest.mark.parametrize("manner", ["delayed", "dripping", "half-open", "cut", "lying"])
def test_a_connection_that_is_slow_or_breaks(server, model, manner):
    expected = Llama(model).complete(PROMPT)
    with fresh(path=model, **cache_at(server.port)) as (llm, _):
        llm.complete(PROMPT)
    with Proxy(server.port) as proxy, fresh(path=model, **cache_at(proxy.port, time_limit=0.25)) as (llm, prompts):
        proxy.manner, proxy.pause, proxy.lie = manner, 30, b"$-1\r\n"
        begin = time.monotonic()
        with only_warnings() as caught:
            assert llm.complete(PROMPT) == expected
            prompts.flush()
        assert time.monotonic() - begin < 10 and (caught or manner == "lying")
        proxy.manner = "plain"
        time.sleep(0.1)
        for _ in range(2):  # what was late may cost the first one
            llm.complete(ids(20, 9))
            assert llm.complete(PROMPT) == expected
        assert prompts.stats.num_hits >= 1


def test_values_of_another_store_are_not_believed(server, model):
    """Each key has the value of another one."""
    expected = Llama(model).complete(PROMPT)
    with fresh(path=model, **cache_at(server.port)) as (llm, prompts):
        llm.complete(PROMPT)
        prompts.flush()
        keys = [entry.key for entry in prompts.store.entries()]
        values = [bytes(value.read(0, len(value))) for value in prompts.store.get_many(keys)]
        for key, value in zip(keys, values[1:] + values[:1]):
            prompts.store.put(key, value)
    with fresh(path=model, **cache_at(server.port)) as (llm, prompts), only_warnings(1) as caught:
        assert llm.complete(PROMPT) == expected and prompts.stats.num_hits == 0
        assert "another key" in str(caught[0].message)


def use_store(store, path, seed, seconds, seen):
    """In a process of its own: answers, each of which is compared."""
    draw, end = random.Random(seed), time.monotonic() + seconds
    expected = {}
    while time.monotonic() < end:
        with fresh(store, path) as (llm, prompts):
            for _ in range(4):
                number = draw.randrange(6)
                prompt = ids(60) + ids(draw.choice([20, 90, 400]), number)
                key = len(prompt), number
                expected.setdefault(key, Llama(path).complete(prompt))
                assert llm.complete(prompt) == expected[key]
            with seen.get_lock():
                seen.value += prompts.stats.num_hits


@pytest.mark.parametrize("kind", ["folder", "redis"])
def test_processes_share_a_store_and_are_killed(kind, server, folder, model):
    store = str(folder) if kind == "folder" else f"redis://127.0.0.1:{server.port}"
    spawn, draw = multiprocessing.get_context("spawn"), random.Random(1)
    seen, running, end = spawn.Value("i", 0), [], time.monotonic() + 4
    seed = 0
    while time.monotonic() < end:
        while len(running) < 3:
            running.append(spawn.Process(target=use_store, args=(store, model, seed, max(1.0, end - time.monotonic()), seen)))
            running[-1].start()
            seed += 1
        time.sleep(1.2)
        os.kill(running.pop(draw.randrange(3)).pid, signal.SIGKILL)
    for one in running:
        one.join()
    assert [one.exitcode for one in running] == [0] * len(running) and seen.value > 0
    with fresh(store, model) as (llm, _), only_warnings(0):
        prompt = ids(60) + ids(90, 1)
        assert llm.complete(prompt) == Llama(model).complete(prompt)
