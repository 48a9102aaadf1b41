"""Prompts of llama-cpp-python in stores that fail and lie: nothing but time is lost. What a store may do is tried in tests/prompts."""

import time

import numpy as np
import pytest
from llama_prompts import CHUNK, PROMPT, fresh, ids, restored
from llama_stand_in import Llama
from prompt_tokens import only_warnings
from servers import redis_server

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
