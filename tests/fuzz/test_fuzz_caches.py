"""A short run of `fuzz_caches`, what it found before, and that it can find something."""

import collections
import re
import subprocess
import sys
from pathlib import Path

import fuzz_caches
import fuzz_secrets
import fuzz_worlds
import numpy as np
import pytest
from fuzz_blocks import BlocksWorld
from fuzz_forged import DamagedWorld, ForgedWorld
from fuzz_others import HeadsWorld
from fuzz_pools import LatentPoolWorld, PoolWorld
from fuzz_schedulers import PreparedWorld
from fuzz_splices import SplicedWorld
from fuzz_stores import TenantsWorld
from fuzz_twins import Twins
from selection import exhaustive

import kvfast

# What has a model of its own, or the bits of other caches.
HELD = [BlocksWorld, SplicedWorld, HeadsWorld, Twins, PoolWorld, LatentPoolWorld, PreparedWorld, DamagedWorld]
HELD += [fuzz_worlds.SingleWorld, fuzz_worlds.RingWorld, fuzz_worlds.LatentWorld]

ROPE = kvfast.Rope(theta=9000.0)  # another than that of the fuzzer
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


def alone(monkeypatch, world):
    monkeypatch.setattr(fuzz_caches, "WORLDS", {world: 1})
    monkeypatch.setattr(fuzz_caches, "LATER", {})


def findings(seed, cases):
    return [found for number in cases for _, found in [fuzz_caches.run_case(seed, number)] if found]


def test_a_short_run():
    """In a process of its own, which tells the case if it crashes. CI has longer runs, with another seed each time."""
    command = [sys.executable, fuzz_caches.__file__, "--cases", "40", "--processes", "1", "--seed", "0"]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0 and "40 cases" in child.stdout, child.stdout + child.stderr


@pytest.mark.parametrize("cases", [25, pytest.param(400, marks=exhaustive)])
@pytest.mark.parametrize("world", HELD)
def test_each_kind_of_cache(monkeypatch, world, cases):
    alone(monkeypatch, world)
    assert findings(2, range(cases)) == []


def test_damage_is_refused_most_of_the_time(monkeypatch):
    alone(monkeypatch, DamagedWorld)
    outcomes = sum((fuzz_caches.run_case(1, number)[0].outcomes for number in range(20)), collections.Counter())
    files = outcomes.total()
    assert files == 800 and outcomes["refused, read"] > files / 2
    assert min(outcomes["equal, read"], outcomes["other, mapped"]) > files / 200


@pytest.mark.parametrize("name", FOUND)
def test_earlier_findings_stay_fixed(monkeypatch, name):
    monkeypatch.setattr(fuzz_caches, "LATER", {})  # the worlds that there were
    assert findings(FOUND[name][0], [FOUND[name][1]]) == []


def test_a_case_is_always_the_same():
    one, other = fuzz_caches.run_case(5, 7)[0], fuzz_caches.run_case(5, 7)[0]
    assert str(one.log) == str(other.log) and len(one.log) > 3


@pytest.mark.parametrize("broken", ["attend", "k", "both", "truncate"])
def test_fuzzer_finds_a_broken_cache(monkeypatch, broken):
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
    alone(monkeypatch, fuzz_worlds.SingleWorld)
    told = {"attend": "attend is not", "k": "keys of KVCache", "both": "values of KVCache", "truncate": "length"}[broken]
    assert any(told in signature for signature, _ in findings(1, range(20)))


@pytest.mark.parametrize("broken", ["salt", "prefix", "steps", "fork", "heads", "scheduler", "forged", "splice", "rope"])
def test_fuzzer_finds_broken_neighbours(monkeypatch, broken):
    """As above, of the worlds that came later."""
    pool, cache = kvfast.PagedKVCache, kvfast.KVCache
    match_prefix, attend_batch, attend, append, splice = pool.match_prefix, pool.attend_batch, cache.attend, cache.append, cache.splice
    world, owner, replaced, told = {
        "salt": (TenantsWorld, pool, {"match_prefix": lambda self, ids, salt: match_prefix(self, ids)}, "tenant"),
        "prefix": (BlocksWorld, pool, {"match_prefix": lambda self, ids, salt: match_prefix(self, ids)}, "tokens of a prefix"),
        "steps": (
            fuzz_worlds.SingleWorld,
            cache,
            {"append": lambda self, layer, k, v: append(self, layer, k, v * (1 + (len(v) == 1) * np.float32(1e-3)))},
            "not as a fresh cache",
        ),
        "heads": (HeadsWorld, kvfast.MultiHeadKVCache, {"evict_outside_window": lambda self, window: window}, "evict_outside_window"),
        "rope": (
            SplicedWorld,
            cache,
            {"splice": lambda self, *parts, rope, recomputed: splice(self, *parts, rope=rope and ROPE, recomputed=recomputed)},
            "not what was given",
        ),
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
    alone(monkeypatch, world)
    assert any(told in found[0] for number in range(40) if (found := fuzz_caches.run_case(1, number)[1]))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/mem")
def test_fuzzer_finds_secrets_in_memory(rng):
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
