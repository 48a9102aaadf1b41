"""While Python ends, sessions are still saved and read: in exit handlers, and in threads that outlive the main one."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("safetensors")

CODE = """
import atexit, os, sys, threading, time, warnings
import kvfast, numpy as np

warnings.simplefilter("error")
folder, where, is_used = sys.argv[1], sys.argv[2], sys.argv[3] == "used"

def cache_of(n=1000):
    cache = kvfast.KVCache(4, 8, 64, dtype="int8")
    for layer in range(4):
        cache.append(layer, *np.ones((2, n, 8, 64), np.float32))
    cache.advance(n)
    return cache

def work(name):
    cache, path = cache_of(), os.path.join(folder, name)
    cache.save(path)
    assert kvfast.load(path).snapshot() == cache.snapshot()
    assert kvfast.Snapshot.from_bytes(cache.snapshot().to_bytes()) == cache.snapshot()
    for options in ({}, {"background": True}):
        prompts = kvfast.PromptCache(os.path.join(folder, name + "s"), **options)
        assert prompts.save(cache, range(1000))
        prompts.flush()
        other = kvfast.KVCache(4, 8, 64, dtype="int8")
        assert prompts.restore(other, range(1000)) == 999
        prompts.close()
    known = kvfast.KVCache(4, 8, 64, dtype="int8")
    assert opened is None or opened.restore(known, range(1000)) == 999
    print("done", flush=True)

opened = None
if is_used:
    opened = kvfast.PromptCache(os.path.join(folder, "before"))
    opened.save(cache_of(), range(1000))
    work("first")
if where == "handler":
    atexit.register(work, "talk")
else:
    def later():
        threading.main_thread().join()
        time.sleep(0.2)
        work("talk")
    threading.Thread(target=later).start()
"""


@pytest.mark.parametrize("where", ["handler", "thread"])
@pytest.mark.parametrize("used", ["used", "fresh"])
def test_saving_and_reading_while_python_ends(where, used, tmp_path):
    done = subprocess.run([sys.executable, "-c", CODE, tmp_path, where, used], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.split() == ["done"] * (2 if used == "used" else 1)
    assert os.path.isfile(tmp_path / "talk") and not [name for name in os.listdir(tmp_path) if name.endswith(".part")]
