"""A short run of `fuzz_caches`, what it found before, and that it can find something."""

import re
import subprocess
import sys
from pathlib import Path

import fuzz_caches
import fuzz_secrets
import fuzz_worlds
import numpy as np
import pytest
import reference
from fuzz_forged import ForgedWorld
from fuzz_oracle import exact_attention
from fuzz_schedulers import PreparedWorld
from fuzz_splices import SplicedWorld
from fuzz_stores import TenantsWorld
from fuzz_twins import Twins

import kvfast

# Cases that once found something, each as (seed, case).
FOUND = {
    "rows of another sequence": (0, 81),
    "float rows that are not there": (0, 618),
    "refused for rows that are not its own": (0, 114),
    "arrays of strides below 0": (0, 68),
    "a loud channel": (0, 239),
    "float32 through float16": (0, 240),
    "bfloat16 through float16": (0, 254),
    "a large softcap": (0, 3),
    "codes that move": (0, 1293),
    "codes that move in a pool": (0, 457),
}


def findings(seed, cases):
    return [found for number in cases for _, found in [fuzz_caches.run_case(seed, number)] if found]


def test_a_short_run():
    """In a process of its own, which tells the case if it crashes. CI has longer runs, with another seed each time."""
    command = [sys.executable, fuzz_caches.__file__, "--cases", "40", "--processes", "1", "--seed", "0"]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0 and "40 cases" in child.stdout, child.stdout + child.stderr


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_before(monkeypatch, name):
    monkeypatch.setattr(fuzz_caches, "LATER", {})  # the worlds that there were
    assert findings(FOUND[name][0], [FOUND[name][1]]) == []


def test_a_case_is_always_the_same():
    one, other = fuzz_caches.run_case(5, 7)[0], fuzz_caches.run_case(5, 7)[0]
    assert str(one.log) == str(other.log) and len(one.log) > 3


def test_exact_attention_is_that_of_the_reference(rng):
    q, k, v = (rng.standard_normal((n, heads, 5)) for n, heads in ((4, 6), (9, 2), (9, 2)))
    for options in (
        {},
        {"softcap": 2.0, "scale": 0.7},
        {"sliding_window": 3, "num_sink_tokens": 2, "causal": False},
        {"attention_chunk_size": 4, "num_sink_tokens": 1},
        {"spans": [(0, 2), (6, 8)], "sliding_window": 3},
        {"spans": [(0, 9)], "sliding_window": 3, "clamp_spans": True},
        {"parents": [-1, -1, 0, 1], "sliding_window": 3, "alibi_slopes": rng.random(6)},
        {"chosen": [[0, 5], [6, -1], [3, 4], [8, 0]], "softcap": 2.0},
        {"chosen": rng.permuted(np.tile(np.arange(5), (4, 2, 1)), axis=2)[..., :3], "sinks": rng.standard_normal(6)},
        {"sinks": rng.standard_normal(6), "alibi_slopes": rng.random(6)},
    ):
        out, lse = reference.attention(q, k, v, **options)
        exact = exact_attention(q, k, v, np.arange(9), np.arange(5, 9), **options)
        assert np.allclose(exact.out, out, rtol=1e-12) and np.allclose(exact.lse, lse, rtol=1e-12)


@pytest.mark.parametrize("broken", ["attend", "k", "both", "truncate"])
def test_what_no_cache_may_do_is_found(monkeypatch, broken):
    """The fuzzer itself can fail: on an output that is a little wrong, on rows, and on both that are wrong alike."""
    attend, k, v, truncate = (getattr(kvfast.KVCache, name) for name in ("attend", "k", "v", "truncate"))
    replaced = {
        "attend": {"attend": lambda self, layer, q, **options: _times(attend(self, layer, q, **options), 1.02)},
        "k": {"k": lambda self, layer: np.roll(k(self, layer), 1, axis=0)},
        "both": {
            "v": lambda self, layer: 2 * v(self, layer),
            "attend": lambda self, layer, q, **options: _times(attend(self, layer, q, **options), 2),
        },
        "truncate": {"truncate": lambda self, n, *keep: truncate(self, max(n - 1, 0), *keep)},
    }[broken]
    for name, function in replaced.items():
        monkeypatch.setattr(kvfast.KVCache, name, function)
    monkeypatch.setattr(fuzz_caches, "WORLDS", {fuzz_worlds.SingleWorld: 1})
    monkeypatch.setattr(fuzz_caches, "LATER", {})
    told = {"attend": "attend is not", "k": "keys of KVCache", "both": "values of KVCache", "truncate": "length"}[broken]
    assert any(told in signature for signature, _ in findings(1, range(20)))


@pytest.mark.parametrize("broken", ["salt", "fork", "scheduler", "forged", "splice"])
def test_what_nothing_beside_a_cache_may_do_is_found(monkeypatch, broken):
    """As above, of the worlds that came later."""
    pool, cache = kvfast.PagedKVCache, kvfast.KVCache
    match_prefix, attend_batch, attend = pool.match_prefix, pool.attend_batch, cache.attend
    world, owner, replaced, told = {
        "salt": (TenantsWorld, pool, {"match_prefix": lambda self, ids, salt: match_prefix(self, ids)}, "tenant"),
        "fork": (Twins, cache, {"fork": lambda self: self}, "a fork is not what it was"),
        "scheduler": (
            PreparedWorld,
            pool,
            {"attend_batch": lambda *given, **options: _times(attend_batch(*given, **options), 1.02)},
            "other bits",
        ),
        "forged": (ForgedWorld, cache, {"k": lambda self, layer: np.full(3, np.nan)}, "k is not finite"),
        "splice": (
            SplicedWorld,
            cache,
            {"attend": lambda *given, **options: _times(attend(*given, **options), 1.02)},
            "is not attention",
        ),
    }[broken]
    for name, function in replaced.items():
        monkeypatch.setattr(owner, name, function)
    monkeypatch.setattr(fuzz_caches, "WORLDS", {world: 1})
    monkeypatch.setattr(fuzz_caches, "LATER", {})
    assert any(told in found[0] for number in range(40) if (found := fuzz_caches.run_case(1, number)[1]))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/mem")
def test_what_is_in_memory_is_found(rng):
    hidden, needle = rng.integers(256, size=128, dtype=np.uint8), bytearray(128)
    kept = np.bitwise_not(hidden)
    np.bitwise_not(hidden, out=np.frombuffer(needle, np.uint8))
    assert fuzz_secrets.count([needle]) == [1]
    kept[:] = 0
    assert fuzz_secrets.count([needle]) == [0]


def _times(result, factor):
    out = result[0] if isinstance(result, tuple) else result
    out *= np.asarray(factor, out.dtype)
    return result


def test_crashes_and_hangs_are_found(tmp_path):
    script = tmp_path / "fuzz_itself.py"
    script.write_text(
        f"""
import os, sys, time
sys.path.insert(0, {str(Path(fuzz_caches.__file__).parent)!r})
import fuzz_caches

class Bad:
    def __init__(self, case):
        self.case = case

    def run(self):
        if self.case.number == 3:
            os.abort()
        if self.case.number == 8:
            time.sleep(60)
        while self.case.number == 13:
            pass
        if self.case.number % 5 == 1:
            raise fuzz_caches.Finding("one and the same", "each time")

fuzz_caches.WORLDS, fuzz_caches.LATER = {{Bad: 1}}, {{}}
fuzz_caches.SECONDS, fuzz_caches.ASLEEP = 1, 2
fuzz_caches.main()
"""
    )
    command = [sys.executable, script, "--cases", "40", "--processes", "2", "--seed", "4"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 1, child.stderr
    assert re.search(r"ended with -6 .*\n(.*\n)*?.*--seed 4 --case 3\n", child.stdout), child.stdout
    assert re.search(r"never came to its end .*\n(.*\n)*?.*--seed 4 --case 8\n", child.stdout), child.stdout
    assert re.search(r"never came to its end .*\n(.*\n)*?.*--seed 4 --case 13\n", child.stdout), child.stdout
    assert re.search(r"one and the same\n.*\n +8 times, .*--seed 4 --case 1\n", child.stdout), child.stdout
    assert "37 cases" in child.stdout and "4 findings" in child.stdout
