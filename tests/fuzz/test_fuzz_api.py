"""A short run of `fuzz_api`, and that it knows every public name."""

import inspect

import fuzz_api
import fuzz_names
import fuzz_recipes
import numpy as np
import pytest

import kvfast


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


def test_a_short_run():
    outcomes = fuzz_api.fuzz(1800, 20)
    assert outcomes["returned"] > 600 and outcomes["TypeError"] > 100 and outcomes["ValueError"] > 100


@pytest.mark.parametrize("break_it", ["error", "state", "finite"])
def test_what_no_call_may_do_is_found(monkeypatch, break_it):
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
    with pytest.raises(fuzz_api.Broken, match=told):
        fuzz_api.fuzz(20_000, 3)
