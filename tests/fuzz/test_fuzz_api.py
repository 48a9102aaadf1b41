"""A short run of `fuzz_api`, and that it knows every public name."""

import collections
import functools
import inspect
import random
import re

import fuzz_api
import fuzz_caches
import fuzz_names
import fuzz_recipes
import numpy as np
import pytest

import kvfast
from kvfast.caches.sequence_cache import SequenceCache


def test_every_public_name_has_a_recipe():
    assert fuzz_recipes.parameters_without_recipe() == []
    names = fuzz_names.public_names()
    assert {name for name in kvfast.__all__ if callable(getattr(kvfast, name))} <= names.keys()
    for name in vars(kvfast.KVCache):
        assert name.startswith("_") or f"KVCache.{name}" in names
    assert names["KVCache.append"][1] == "KVCache" and names["KVCache.from_state_dict"][1] is None


def test_a_new_name_without_a_recipe_is_told(monkeypatch):
    def new(what_nobody_knows):
        pass

    monkeypatch.setattr(kvfast, "new", new, raising=False)
    monkeypatch.setattr(kvfast, "__all__", [*kvfast.__all__, "new"])
    assert fuzz_recipes.parameters_without_recipe() == ["new(what_nobody_knows)"]


# What messages call a parameter, where it is not its name; and what all of the worlds below refuse before they look at numbers.
CALLED = {"i": "head", "num_q_heads": "(num_q_heads|heads of q)", "quant_bits": "bits", "block_id": "block_ids"}
REFUSED = {"states_at", "drop", "MLAKVCache.write", "MLASequence.write"}


def filled_world(seed, folder):
    """One in which most calls succeed."""
    world = fuzz_api.World(random.Random(seed), folder)
    pool = kvfast.PagedMLAKVCache(2, 20, 0, num_blocks=20)
    for one in (kvfast.MLAKVCache(2, 20, 0), pool.new_sequence(), pool):
        world.add(one)
    for one in world.objects:
        if isinstance(one, SequenceCache) and not len(one):
            rows = np.ones((40, one.head_dim) if hasattr(one, "rope_dim") else (40, one.num_kv_heads, one.head_dim), np.float32)
            for layer in range(one.num_layers):
                one.append(layer, rows, *[] if hasattr(one, "rope_dim") else [rows])
            one.advance(40)
        elif isinstance(one, kvfast.MultiHeadKVCache):
            one.push_tokens(*np.ones((2, 3, one.num_heads, one.head_dim), np.float32))
        elif isinstance(one, kvfast.PrefixKVCache):
            for layer in range(one.num_layers):
                one.append(layer, *np.ones((2, 40, one.num_kv_heads, one.head_dim), np.float32))
        if isinstance(one, SequenceCache):
            one.save(folder / world.rng.choice("ab"))
    for make in (kvfast.RingKVCache, kvfast.RingKVCache, kvfast.KVCache):
        world.add(make(2, 2, 20, 64))
    return world


def wrong_calls(worlds, name, parameter):
    """(function of the parameter, wrong values of it) in several worlds, for a parameter that is a number or a flag by its recipe."""
    function, owner = fuzz_names.public_names()[name]
    for world in worlds * 8:
        target = world.any(world.rng, owner) if owner else None
        if owner and target is None:
            continue
        call = fuzz_recipes.Call(world, target)
        drawn = [fuzz_recipes.recipe_of(name, parameter)(call) for _ in range(9)]
        kinds = {type(one) for one in drawn} - {type(None)}
        if kinds != {bool} and not kinds & {int, float}:
            continue
        wrong = (1, "x", None, np.int64(1), []) if kinds == {bool} else (True, np.True_)
        needed = [one for one, optional in fuzz_names.parameters(function).items() if not optional or one in ("sequences", "config")]
        given = {one: fuzz_recipes.recipe_of(name, one)(call) for one in needed}
        parts = given.pop("parts", [])
        yield functools.partial(function, *([target] if owner else []), *parts, **given), wrong


def test_numbers_refuse_truth_values_and_flags_all_but_these(tmp_path):
    """True would be the number 1, and "False" a true value. A new argument has a recipe, and is tried by it."""
    worlds, untried, accepted = [filled_world(seed, tmp_path) for seed in range(4)], [], []
    for name, (function, _) in fuzz_names.public_names().items():
        for parameter in fuzz_names.parameters(function) if function is not None and name not in fuzz_names.RECORDS else ():
            told = None
            for call, wrong in wrong_calls(worlds, name, parameter):
                told = set()
                for value in wrong:
                    try:
                        call(**{parameter: value})
                    except (*fuzz_api.ALLOWED, OSError) as error:
                        told.add(bool(re.search(rf"\b{CALLED.get(parameter, parameter)}\b", str(error))))
                    else:
                        accepted.append((name, parameter, value))
                if told == {True}:
                    break
            if told not in (None, {True}) and not {name, name.rpartition(".")[2]} & REFUSED:
                untried.append((name, parameter))
    assert (accepted, untried) == ([], [])


def test_a_short_run(monkeypatch):
    monkeypatch.setattr(fuzz_caches, "WORLDS", {fuzz_api.CallsWorld: 1})
    monkeypatch.setattr(fuzz_caches, "LATER", {})
    outcomes = collections.Counter()
    for number in range(6):
        case, found = fuzz_caches.run_case(20, number)
        outcomes += case.outcomes
        assert found is None
    assert outcomes["returned"] > 600 and outcomes["TypeError"] > 100 and outcomes["ValueError"] > 100


@pytest.mark.parametrize("break_it", ["error", "state", "finite"])
def test_fuzzer_finds_broken_calls(monkeypatch, break_it):
    """The fuzzer itself can fail."""
    append, attend = kvfast.KVCache.append, kvfast.KVCache.attend

    def broken_append(self, layer, k, v):
        if break_it == "error" and getattr(k, "dtype", None) != np.float32:
            raise KeyError("not an error of kvfast")
        if break_it == "state" and self.layer_length(0) and isinstance(layer, int) and layer == 0:
            append(self, 0, self.k(0)[:1].copy(), self.v(0)[:1].copy())
            raise ValueError("refused, but one token longer")
        return append(self, layer, k, v)

    def broken_attend(self, layer, q, **options):
        out = attend(self, layer, q, **options)
        return np.full_like(out, np.nan) if break_it == "finite" and isinstance(out, np.ndarray) else out

    for name, function, real in (("append", broken_append, append), ("attend", broken_attend, attend)):
        function.__signature__ = inspect.signature(real)
        monkeypatch.setattr(kvfast.KVCache, name, function)
    monkeypatch.setitem(fuzz_api.NAMES, "KVCache.append", (broken_append, "KVCache"))
    monkeypatch.setitem(fuzz_api.NAMES, "KVCache.attend", (broken_attend, "KVCache"))
    told = {"error": "is not an error of kvfast", "state": "not as it was", "finite": "not finite"}[break_it]
    monkeypatch.setattr(fuzz_caches, "WORLDS", {fuzz_api.CallsWorld: 1})
    monkeypatch.setattr(fuzz_caches, "LATER", {})
    assert any(told in found[1] for number in range(60) if (found := fuzz_caches.run_case(3, number)[1]))
