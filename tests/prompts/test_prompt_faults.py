"""Prompts in stores that fail: nothing wrong is ever attended to, and nothing but time is lost."""

import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest
from cache_kinds import Stream, make
from prompt_tokens import only_warnings, use_store
from servers import Proxy, redis_server

import kvfast

pytest.importorskip("safetensors")
pytest.importorskip("redis", reason="needs the extra redis")

pytestmark = pytest.mark.usefixtures("short_pauses")

SECONDS = int(os.environ.get("KVFAST_STORE_SECONDS", "3"))  # `make stores` lets it run for five minutes
TOKENS = list(range(400))
STREAM = Stream(21, 400, layers=2)
WHOLE = STREAM.feed(make("growing", "int8-rotated"), 400)


@pytest.fixture
def server(tmp_path):
    with redis_server(tmp_path) as server:
        yield server


def prompts_at(port, **options):
    return kvfast.PromptCache(f"redis://127.0.0.1:{port}", **{"chunk_tokens": 64, "time_limit": 2.0} | options)


def restored(prompts, tokens=TOKENS):
    """Tokens that came back, after a comparison with what was computed."""
    cache = make("growing", "int8-rotated")
    found = prompts.restore(cache, [*tokens, 999])
    assert found == len(cache)
    assert cache.snapshot() == kvfast.load(WHOLE.snapshot().truncated(found)).snapshot()
    return found


@pytest.mark.parametrize("during", ["save", "restore"])
def test_a_server_that_is_killed(server, during):
    for i in range(6):
        with prompts_at(server.port, time_limit=1.0) as prompts:
            if during == "restore":
                assert prompts.save(WHOLE, TOKENS) and restored(prompts) == 400
            killer = threading.Timer(0.001 * i, server.kill)
            with only_warnings() as caught:  # before the server dies: what the thread of `touch` says must be among them
                killer.start()
                for _ in range(3):
                    if during == "save":
                        prompts.save(WHOLE, TOKENS)
                    else:
                        restored(prompts)
                killer.join()
                assert restored(prompts) == 0
            # The thread of `touch` may say after it what it could not save.
            told = [str(one.message) for one in caught if "prompts are not saved" not in str(one.message)]
            assert "prompts are computed, as redis://127.0.0.1" in told[-1]
            server.start()  # with nothing in it
            time.sleep(0.1)
            assert restored(prompts) == 0
            assert prompts.save(WHOLE, TOKENS) and restored(prompts) == 400


def test_a_server_that_is_full(tmp_path):
    with redis_server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server, prompts_at(server.port) as prompts:
        with only_warnings() as caught:
            kept = [prompts.save(WHOLE, TOKENS, model=str(i)) for i in range(40)]
            assert kept[0] and not kept[-1]
            assert all(
                prompts.restore(make("growing", "int8-rotated"), [*TOKENS, 1], model=str(i)) == 400 for i in range(40) if kept[i]
            )
        (caught,) = caught
        assert f"prompts are not saved, as {prompts.store.url} fails: it is full, " in str(caught.message)
        assert "maxmemory" in str(caught.message)
        assert prompts.stats.bytes_written == prompts.nbytes and prompts.stats.num_refused > 0
        assert restored(prompts) == 0


def test_a_server_that_removes_what_it_likes(tmp_path):
    with (
        redis_server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-random") as server,
        prompts_at(server.port) as prompts,
    ):
        found = []
        for i in range(40):
            prompts.save(WHOLE, [*TOKENS[:200], *(1000 * (i + 1) + token for token in TOKENS[200:])])
            cache = make("growing", "int8-rotated")
            found.append(prompts.restore(cache, TOKENS))
            assert cache.snapshot() == kvfast.load(WHOLE.snapshot().truncated(found[-1])).snapshot()
        assert 0 <= min(found) and max(found) == 192  # three chunks are common


def test_a_refused_connection_and_a_wrong_password(server, tmp_path):
    with prompts_at(1) as prompts, only_warnings() as caught:
        assert restored(prompts) == 0 and not prompts.save(WHOLE, TOKENS)
    assert len(caught) == 1
    with redis_server(tmp_path, "--requirepass", "right") as other, only_warnings() as caught:
        with kvfast.PromptCache(f"redis://:hunter2@127.0.0.1:{other.port}") as prompts:
            assert restored(prompts) == 0 and not prompts.save(WHOLE, TOKENS)
            assert "hunter2" not in repr(prompts) + prompts.store.url
        with kvfast.PromptCache(f"redis://:right@127.0.0.1:{other.port}", chunk_tokens=64) as prompts:
            assert prompts.save(WHOLE, TOKENS) and restored(prompts) == 400
    assert len(caught) == 1 and "hunter2" not in str(caught[0].message)


@pytest.mark.parametrize("manner", ["delayed", "dripping", "half-open", "cut"])
def test_a_connection_that_is_slow_or_breaks(server, manner):
    with prompts_at(server.port) as direct:
        assert direct.save(WHOLE, TOKENS)
    with Proxy(server.port) as proxy, prompts_at(proxy.port, time_limit=0.25) as prompts:
        assert restored(prompts) == 400
        proxy.manner, proxy.pause = manner, 30
        begin = time.monotonic()
        with only_warnings() as caught:
            assert restored(prompts) < 400
            assert time.monotonic() - begin < 10
            prompts.save(WHOLE, [*TOKENS[:300], *range(100)])
            while not caught and time.monotonic() - begin < 20:  # the thread that asks the store tells it
                time.sleep(0.05)
        assert caught
        proxy.manner = "plain"
        time.sleep(0.1)
        with only_warnings():
            assert restored(prompts) == 400 or restored(prompts) == 400  # what was late may have cost the first one


def test_what_another_wrote(server):
    """Another model, another tenant, another size of chunks, another version: not found, or refused."""
    with prompts_at(server.port) as prompts:
        prompts.save(WHOLE, TOKENS, model="other")
        prompts.save(WHOLE, TOKENS, salt=b"x")
        for options in ({"secret": b"theirs"}, {"chunk_tokens": 128}):
            with prompts_at(server.port, **options) as other:
                other.save(WHOLE, TOKENS)
        assert restored(prompts) == 0
        prompts.save(WHOLE, TOKENS)
        mine = [entry.key for entry in prompts.store.entries()]
        for key in mine:
            (value,) = prompts.store.get_many([key])
            data = bytearray(value.read(0, len(value)))
            data[8] += 1  # its version
            prompts.store.put(key, bytes(data))
        with only_warnings() as caught:
            assert restored(prompts) == 0
        assert "this kvfast reads version 1" in str(caught[0].message)


@pytest.mark.parametrize("kind", ["folder", "redis"])
def test_processes_share_a_store_and_are_killed(kind, server, tmp_path):
    """Eight processes, some of which are killed: no wrong byte, and a folder that stays within its bytes."""
    seconds = SECONDS
    store = str(tmp_path / "prompts") if kind == "folder" else f"redis://127.0.0.1:{server.port}"
    spawn, end, rng = multiprocessing.get_context("spawn"), time.monotonic() + seconds, np.random.default_rng(seconds)
    seen, seed = spawn.Value("i", 0), 0
    running, failed = [], []
    while time.monotonic() < end:
        while len(running) < 8:
            running.append(spawn.Process(target=use_store, args=(store, seed, max(1.0, end - time.monotonic()), seen)))
            running[-1].start()
            seed += 1
        time.sleep(0.5)
        if rng.random() < 0.4:
            os.kill(running[int(rng.integers(len(running)))].pid, signal.SIGKILL)
        if kind == "folder":
            files = [path for path in (tmp_path / "prompts").rglob("?-*") if path.parent.name != "unfinished"]
            total = sum(size_of(path) for path in files)
            assert total <= 400_000 + 8 * 40_000
        failed += [one.exitcode for one in running if one.exitcode not in (None, 0, -signal.SIGKILL)]
        running = [one for one in running if one.exitcode is None]
    for one in running:
        one.join()
    assert not failed and all(one.exitcode in (0, -signal.SIGKILL) for one in running)
    assert seen.value > 5


def size_of(path):
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
