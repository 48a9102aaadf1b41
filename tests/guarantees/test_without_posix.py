"""What kvfast does where the modules and functions of POSIX are missing, as on Windows. Other differences are in docs/reference/versions.md."""

import json
import subprocess
import sys

import numpy as np
import pytest
from cache_kinds import filled

import kvfast

pytest.importorskip("safetensors")
WITHOUT = """
import importlib, json, os, pkgutil, sys
HIDDEN = ("fcntl", "resource", "pwd", "grp", "termios")
sys.modules.update(dict.fromkeys(HIDDEN))
import numpy, logging, random, shutil, sqlite3, subprocess, tempfile, threading, concurrent.futures  # Python's own have these functions
for name in ("fork", "register_at_fork", "sched_getaffinity", "preadv", "posix_fadvise", "fchmod", "sysconf", "getuid", "O_NONBLOCK"):
    delattr(os, name)
import kvfast
from kvfast.prompts.stores import FolderStore
from kvfast.planning.memory import available_memory

folder, path = sys.argv[1:]
k, v = numpy.load(path)
cache = kvfast.KVCache(1, 2, 32, dtype="int4")
cache.append(0, k, v)
cache.advance(len(k))
saved = os.path.join(folder, "cache.kv")
cache.save(saved)
cache.save(saved)  # in place of the first
q = k[-1:]
outs = [one.attend(0, q).ravel().tolist() for one in (cache, kvfast.load(saved), kvfast.load(saved, mmap=True))]
store = FolderStore(os.path.join(folder, "store"), max_bytes=1 << 20)
key, content = "a-" + "0" * 64, bytes(range(256)) * 256
assert store.put(key, content)
with store.get_many([key])[0] as value:
    assert value.read(1000, 50000) == content[1000:51000]
store.close()
assert available_memory("/nowhere") is None
for module in pkgutil.walk_packages(kvfast.__path__, "kvfast."):
    if not module.name.endswith("__main__") and module.name.split(".")[1] not in ("torch", "transformers", "vllm", "llama_cpp"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name not in HIDDEN, module.name  # another is an extra that is not installed
print(json.dumps([outs, kvfast.get_num_threads(), sorted(os.listdir(folder))]))
"""


def test_it_works_without_posix(tmp_path):
    rows = np.random.default_rng(1).standard_normal((2, 70, 2, 32)).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows)
    folder = tmp_path / "files"
    folder.mkdir()
    command = [sys.executable, "-W", "error", "-c", WITHOUT, str(folder), str(tmp_path / "rows.npy")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outs, num_threads, names = json.loads(done.stdout)
    cache = filled(kvfast.KVCache(1, 2, 32, dtype="int4"), *rows)
    assert outs == [cache.attend(0, rows[0, -1:]).ravel().tolist()] * 3
    assert num_threads >= 1 and names == ["cache.kv", "store"]
