"""Prompts of llama-cpp-python in a store, by a stand-in of its ``Llama``: whose answers tell of each wrong byte."""

import os
import pickle
import random
import struct
import threading
import weakref

import llama_stand_in
import pytest
from llama_prompts import CHUNK, PROMPT, fresh, ids, restored
from llama_stand_in import Llama, Served, common, state_bytes
from prompt_tokens import only_warnings

from kvfast.engines.llama_cpp import prompt_cache
from kvfast.engines.llama_cpp.prompt_settings import weights_of
from kvfast.llama_cpp import LlamaPromptCache
from kvfast.prompts.stores import FolderStore
from kvfast.tools import cli

pytest.importorskip("safetensors")
pytest.importorskip("xxhash")

TYPES = [(1, 1, False), (8, 1, False), (1, 1, True), (8, 8, True), (2, 2, True), (8, 2, True)]  # of K and V, and flash attention


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("caches", [1, 2])  # of a model with windows, all of whose tokens are kept
def test_a_fresh_process_finds_prompts(folder, model, types, caches):
    expected = Llama(model, *types).complete(PROMPT)
    with fresh(folder, model, *types, caches=caches) as (llm, prompts):
        assert PROMPT not in prompts and llm.complete(PROMPT) == expected and llm.num_computed == len(PROMPT) + 7
        computed = llm.save_state().llama_state
        prompts.flush()
        assert prompts.stats.bytes_written == prompts.cache_size > 0 and prompts.stats.num_hits == 0
    with fresh(folder, model, *types, caches=caches) as (llm, prompts):
        assert PROMPT in prompts
        found = prompts[PROMPT]
        assert found.n_tokens == restored() and found.input_ids[: found.n_tokens].tolist() == PROMPT[: found.n_tokens]
        llm.load_state(found)
        assert state_bytes(llm) == bytes(found.llama_state)  # in each byte as a state of these tokens
        llm.rows.clear()
        llm.n_tokens = 0
        assert llm.complete(PROMPT) == expected and llm.num_computed == len(PROMPT) - restored() + 7
        assert llm.save_state().llama_state == computed and llm._seed == 3
        prompts.flush()
        assert prompts.stats.num_restored_tokens == 2 * restored() and prompts.stats.bytes_written == 0


def test_what_is_there_is_not_stored_again(folder, model):
    """Prompts with a common beginning; a conversation, whose second prompt holds the first answer."""
    begin, tails = ids(100), (ids(40, 1), ids(40, 2))
    with fresh(folder, model) as (llm, prompts):
        answers = [llm.complete(begin + tail, 30) for tail in tails]
        prompts.flush()
        each = prompts.stats.bytes_written // len(list(prompts.store.entries()))
        tokens = len(begin + tails[0]) + 29
        shared = common(begin + tails[0], begin + tails[1]) // CHUNK
        assert prompts.stats.bytes_written == each * (2 * (tokens // CHUNK) - shared)
        longer = begin + tails[0] + answers[0] + ids(20, 3)
        expected = Llama(model).complete(longer)
        assert llm.complete(longer) == expected
        assert prompts.stats.num_hits == 1  # the model held the beginning, and the store had more
    with fresh(folder, model) as (llm, prompts):
        assert llm.complete(longer) == expected and prompts.stats.num_restored_tokens == restored(longer)
        assert llm.complete(longer) == expected and prompts.stats.num_hits == 1  # which it holds
        for prompt in (longer[:CHUNK], longer[:1], [], longer[1:]):
            with pytest.raises(KeyError, match="no more of this prompt"):
                prompts[prompt]
    with fresh(folder, model) as (_, prompts):
        assert prompts[[*longer[: 2 * CHUNK], *([5] * CHUNK)]].n_tokens == 2 * CHUNK


@pytest.mark.parametrize("types", [(1, 1, False), (8, 8, True)])
def test_recurrent_states_after_chunks(folder, model, types):
    """Those of the prompt's last chunk are found, and where two prompts part the third finds some."""
    options = {"kind": Served, "model": "hybrid", "has_states": True}
    prompts_of = [ids(100) + ids(60, seed) for seed in (1, 2, 3, 3)]
    for prompt, found in zip(prompts_of, (0, 0, 6 * CHUNK, 9 * CHUNK)):
        with fresh(folder, model, *types, **options) as (llm, prompts):
            assert llm.complete(prompt) == Llama(model, *types).complete(prompt)
            assert prompts.stats.num_restored_tokens == found
    states = [entry.key for entry in FolderStore(folder).entries() if entry.key.startswith("s-")]
    assert len(states) == 4
    FolderStore(folder).delete(states)
    with fresh(folder, model, *types, **options) as (llm, prompts):
        assert llm.complete(prompt) == Llama(model, *types).complete(prompt) and prompts.stats.num_restored_tokens == 0


def test_a_state_begins_where_the_store_ends(folder, model):
    with fresh(folder, model, kind=Served) as (llm, prompts):
        prompt = PROMPT
        for turn in range(4):
            if turn == 2:
                prompts.flush()
                prompts.store.delete([entry.key for entry in prompts.store.entries()][:1])
            prompt = prompt + llm.complete(prompt) + ids(30, turn)
            prompts.flush()
            assert (llm.num_saved == llm.n_tokens) == (turn in (0, 3))  # the whole one again, as a chunk was missed
    with fresh(folder, model) as (llm, prompts):
        assert llm.complete(prompt) == Llama(model).complete(prompt)
        assert prompts.stats.num_restored_tokens >= (len(prompt) - 40) // CHUNK * CHUNK


def test_contexts_share_a_store(folder, model):
    with fresh(folder, model) as (llm, prompts):
        other = Llama(model)
        other.set_cache(prompts.of(other))
        expected = llm.complete(PROMPT)
        prompts.flush()
        assert other.complete(PROMPT) == expected and prompts.stats.num_restored_tokens == restored()


def test_the_command_line_lists_them(folder, model, capsys):
    pytest.importorskip("rich")
    with fresh(folder, model) as (llm, _):
        llm.complete(PROMPT)
    assert cli.main(["store", str(folder)]) == 0
    told = capsys.readouterr().out
    assert all(f" {(i + 1) * CHUNK} " in told for i in range(9))


def different(model, tmp_path):
    """What makes another Llama, or cache, for each of which nothing is found."""
    adapter = tmp_path / "adapter.gguf"
    adapter.write_bytes(b"adapter")
    lora = {"lora_path": str(adapter)}
    yield {"type_k": 8}, {}
    yield {"flash_attn": True}, {}
    yield {"kv_overrides": {"llama.rope.freq_base": 5.0}}, {}
    yield lora, {}
    yield lora | {"lora_scale": 0.5}, {}
    yield {"metadata": {"phi3.rope.scaling.original_context_length": "1000"}}, {}
    yield {"metadata": {"phi3.rope.scaling.original_context_length": "1000"}, "context": 4096}, {}
    yield {}, {"secret": b"hunter2"}
    yield {}, {"model": "another name"}
    yield {}, {"chunk_tokens": 2 * CHUNK}


def test_what_changes_keys_and_values_is_in_the_key(folder, model, tmp_path, monkeypatch):
    def found(options=(), cache=()):
        with fresh(folder, model, cache=dict(cache), **dict(options)) as (llm, prompts):
            llm.complete(PROMPT)
            return prompts.stats.num_hits

    assert (found(), found(), found({"context": 4096})) == (0, 1, 1)
    for options in different(model, tmp_path):
        assert (found(*options), found(*options)) == (0, 1)
    (tmp_path / "adapter.gguf").write_bytes(b"another")
    assert found({"lora_path": str(tmp_path / "adapter.gguf")}) == 0
    for name in ("rope_freq_base", "rope_scaling_type", "yarn_ext_factor", "yarn_orig_ctx", "swa_full", "attention_type"):
        with monkeypatch.context() as patched:
            make = llama_stand_in.context_params
            patched.setattr(llama_stand_in, "context_params", lambda *types, make=make, name=name: _with(make(*types), name))
            assert found() == 0
    with monkeypatch.context() as patched:
        patched.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
        assert found() == 0
    with monkeypatch.context() as patched:
        patched.setattr(llama_stand_in, "__version__", "0.4")
        assert found() == 0
    with open(model, "ab") as file:
        file.write(b"!")
    assert found() == 0


def _with(parameters, name):
    setattr(parameters, name, 7)
    return parameters


def test_all_files_of_a_split_model_are_read(folder, tmp_path):
    paths = [tmp_path / f"model-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    for path in paths:
        path.write_bytes(path.name.encode())

    def found():
        with fresh(folder, str(paths[0])) as (llm, prompts):
            llm.complete(PROMPT)
            return prompts.stats.num_hits

    assert (found(), found()) == (0, 1)
    (tmp_path / "other-00004-of-00003.gguf").write_bytes(b"of no part")
    assert found() == 1
    paths[2].write_bytes(b"damaged")
    assert found() == 0


def test_a_relative_path_is_that_of_the_model_that_was_loaded(folder, model, monkeypatch):
    """The weights are read in the background, when the program may have changed its directory."""
    go = threading.Event()
    monkeypatch.setattr(prompt_cache, "weights_of", lambda path: weights_of(path) if go.wait(10) else None)
    home, name = os.path.split(model)
    monkeypatch.chdir(home)
    with fresh(folder, name) as (llm, _):
        monkeypatch.chdir("/")
        go.set()
        llm.complete(PROMPT)
    with fresh(folder, model) as (llm, prompts):
        llm.complete(PROMPT)
        assert prompts.stats.num_hits == 1


@pytest.mark.parametrize("types", [(1, 1, False), (8, 8, True)])
def test_cells_in_any_order(folder, model, types, monkeypatch):
    """As contexts have them that dropped tokens and went on."""

    def shuffled(llm):
        positions = list(range(len(llm.rows)))
        random.Random(1).shuffle(positions)
        return state_bytes(llm, positions)

    with fresh(folder, model, *types) as (llm, _), monkeypatch.context() as patched:
        patched.setattr(llama_stand_in, "state_bytes", shuffled)
        expected = llm.complete(PROMPT)
    with fresh(folder, model, *types) as (llm, prompts):
        assert llm.complete(PROMPT) == expected and prompts.stats.num_restored_tokens == restored()


REFUSED = {
    "recurrent": ({"model": "recurrent"}, "recurrent"),
    "hybrid": ({"model": "hybrid"}, "recurrent"),
    "encoder": ({"model": "encoder"}, "not causal"),
    "not causal": ({"ctx": "not causal"}, "not causal"),
    "logits": ({"_logits_all": True}, "logits_all"),
    "another memory": ({"more": b"\1\0\0\0"}, "the number of cells"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_are_refused(folder, model, kind):
    options, why = REFUSED[kind]
    expected = [Llama(model).complete(ids(50, seed)) for seed in range(3)]
    with fresh(folder, model, **options) as (llm, prompts):
        with only_warnings(1) as caught:
            assert [llm.complete(ids(50, seed)) for seed in range(3)] == expected
            prompts.flush()
        assert why in str(caught[0].message) and prompts.cache_size == prompts.stats.num_hits == 0


@pytest.mark.parametrize(
    "change", [{"positions": [*range(1, 157), 200]}, {"positions": [*range(156), 0]}, {"sequence": 1}, {"streams": 2}, {"streams": 0}]
)
def test_states_that_are_not_understood(folder, model, change, monkeypatch):
    def other(llm):
        renamed = dict(change)
        data = bytearray(state_bytes(llm, sequence=renamed.get("sequence", 0), streams=renamed.get("streams", 1)))
        for i, position in enumerate(renamed.get("positions", ())):
            struct.pack_into("<i", data, 17 + 12 * i, position)
        return bytes(data)

    monkeypatch.setattr(llama_stand_in, "state_bytes", other)
    with fresh(folder, model) as (llm, prompts), only_warnings(1) as caught:
        for _ in range(2):
            llm.complete(PROMPT)
            prompts.flush()
        assert prompts.cache_size == 0 and "computed, and not stored" in str(caught[0].message)


def test_images_and_other_models_are_refused(folder, model):
    def text_alone(**options):
        return None

    with fresh(folder, model) as (llm, prompts):
        llm.chat_handler = text_alone
        llm.complete(PROMPT)
        prompts.flush()
        size = prompts.cache_size
        assert size > 0
        llm.chat_handler = object()
        with only_warnings(1) as caught:
            llm.complete(ids(100, 5))
            llm.complete(ids(100, 6))
            prompts.flush()
        assert "images" in str(caught[0].message) and prompts.cache_size == size
    with fresh(folder, model) as (llm, prompts), only_warnings(1) as caught:
        other = Llama(model)
        other.set_cache(prompts)
        other.complete(ids(100, 5))
        prompts.flush()
        assert prompts.stats.bytes_written == 0 and "another Llama" in str(caught[0].message)


def test_a_class_of_a_program_that_is_derived_from_llama(folder, model):
    class Mixin:
        pass

    class Mine(Llama, Mixin):
        pass

    expected = Llama(model).complete(PROMPT)
    for hits in (0, 1):
        llm = Mine(model)
        with LlamaPromptCache(folder, llm, chunk_tokens=CHUNK) as prompts:
            llm.set_cache(prompts)
            assert llm.complete(PROMPT) == expected and prompts.stats.num_hits == hits


def test_weights_that_cannot_be_read(folder, tmp_path):
    with fresh(folder, str(tmp_path / "gone-00001-of-00002.gguf" / "x-00001-of-00002.gguf")) as (llm, prompts):
        with only_warnings() as caught:
            assert llm.complete(PROMPT) == Llama("").complete(PROMPT)
            prompts.flush()
        assert 1 <= len(caught) <= 2 and prompts.cache_size == 0


def test_bytes_are_bounded(folder, model):
    with fresh(folder, model) as (llm, prompts):
        llm.complete(PROMPT)
        each = prompts.cache_size // 9
    most = 20 * each
    with fresh(folder, model, cache={"max_bytes": most}) as (llm, prompts):
        for seed in range(6):
            llm.complete(ids(150, seed))
            assert prompts.cache_size <= most
    with fresh(folder, model, cache={"max_bytes": most}) as (llm, prompts):
        llm.complete(ids(150, 5))
        assert prompts.stats.num_restored_tokens == restored()
        llm.complete(ids(600, 7))  # of which the first chunks are kept
        prompts.flush()
        llm.rows.clear()
        llm.n_tokens = 0
        assert prompts[ids(600, 7)].n_tokens > 15 * CHUNK


def test_a_fetch_that_would_take_longer_is_not_begun(folder, model, monkeypatch):
    with fresh(folder, model) as (llm, prompts):
        llm.complete(PROMPT)
    monkeypatch.setattr(llama_stand_in, "perf", llama_stand_in.SimpleNamespace(n_p_eval=1000, t_p_eval_ms=1.0))
    with fresh(folder, model) as (llm, prompts):
        llm.complete(ids(100, 1))
        prompts.flush()
        prompts.chunks.rate.value = 1.0  # bytes in a second
        llm.complete(PROMPT)
        assert prompts.stats.num_hits == 0 and llm.num_computed == len(PROMPT) + 7
        prompts.chunks.rate.value = 1e12
        llm.complete(ids(20, 2))
        llm.complete(PROMPT)
        assert prompts.stats.num_hits == 1


def test_what_is_not_a_llama_or_is_over(folder, model):
    with pytest.raises(TypeError, match=r"llama_cpp\.Llama, got str"):
        LlamaPromptCache(folder, model)
    llm = Llama(model)
    for wrong, message in (({"chunk_tokens": 0}, "chunk_tokens"), ({"time_limit": 0}, "time_limit"), ({"max_bytes": -1}, "max_bytes")):
        with pytest.raises(ValueError, match=message):
            LlamaPromptCache(folder, llm, **wrong)
    with pytest.raises(TypeError, match="secret"):
        LlamaPromptCache(folder, llm, secret="hunter2")
    prompts = LlamaPromptCache(folder, llm)
    assert bool(prompts) and str(folder) in repr(prompts)
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(prompts)
    llm.set_cache(prompts)
    alive = weakref.ref(llm)
    del llm
    assert alive() is None  # a cache does not keep gigabytes
    with pytest.raises(ValueError, match="is gone"):
        prompts[PROMPT]
    prompts.close()
    prompts.close()
    with pytest.raises(ValueError, match=r"closed: llm.set_cache\(None\)"):
        prompts[PROMPT]
