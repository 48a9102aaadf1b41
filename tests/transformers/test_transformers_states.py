"""kvfast.transformers: recurrent states as checkpoints of a cache's rows."""

import copy
import functools

import numpy as np
import pytest
from cache_kinds import filled
from dict_store import DictStore
from selection import exhaustive
from tiny_architectures import small_model
from tiny_transformers import QUIET, KVFastCache, error, interrupt, logits, ours, prompt, stock, torch, transformers

import kvfast
from kvfast.planning.model_shape import read_shape

pytestmark = QUIET

SHORT = ["qwen3_next", "lfm2", "falcon_h1", "nemotron_h", "kimi_linear", "lfm3"]
LONG = ["bamba", "granitemoehybrid", "zamba2", "olmo_hybrid", "bailing_hybrid", "qwen3_5_text", "zaya", "lfm2_moe"]
FAMILIES = [*SHORT, *(pytest.param(name, marks=exhaustive) for name in LONG)]
model_of = functools.cache(small_model)


@pytest.fixture(params=FAMILIES)
def model(request):
    return model_of(request.param)


def cache_of(used, dtype="float32", **options):
    used.set_attn_implementation("kvfast")
    return KVFastCache(used.config, dtype, **options)


def run(model, ids, cache):
    """Logits, with positions for models that would count them from 0."""
    model.set_attn_implementation("kvfast")
    positions = torch.arange(cache.get_seq_length(), cache.get_seq_length() + ids.shape[1])[None].expand(len(ids), -1)
    with torch.no_grad():
        return model(ids, cache=cache, position_ids=positions).logits


def checkpoints(cache):
    return cache._rows.rows[0].checkpoints


# --- when there are checkpoints ----------------------------------------------------------------


def test_prompt_and_generation_leave_checkpoints():
    model, ids = model_of("lfm2"), prompt(1, 70)[0]
    cache = cache_of(model, checkpoint_tokens=8)
    for start, stop in ((0, 20), (20, 37), *((i, i + 1) for i in range(37, 60)), (60, 62), (62, 63)):
        run(model, ids[:, start:stop], cache)
    assert checkpoints(cache) == (20, 37, 45, 53, 60, 62)
    row = cache.rows[0]
    assert row.checkpoints[-1] == 63 and len(cache.rows[0].checkpoints) == 7  # a second look copies nothing
    assert cache.nbytes == row.nbytes and row.nbytes - 7 * _nbytes(row) > 0
    small = cache_of(model, max_state_bytes=3 * _nbytes(row))
    for start in range(0, 60, 10):
        run(model, ids[:, start : start + 10], small)
    assert len(small.rows[0].checkpoints) == 3 and small.rows[0].checkpoints[-1] == 60


def _nbytes(row):
    return sum(-(-one.nbytes // 64) * 64 for one in row.states_at().values())


# --- going back --------------------------------------------------------------------------------


def test_going_back_to_a_checkpoint_has_the_bits_of_before(model):
    ids, cache = prompt(2, 70)[0], cache_of(model)
    run(model, ids[:, :20], cache)
    expected = run(model, ids[:, 20:], copy.deepcopy(cache))
    run(model, ids[:, 20:33], cache)
    run(model, ids[:, 33:34], cache)
    cache.crop(-14)
    assert cache.get_seq_length() == len(cache.rows[0]) == 20
    assert torch.equal(run(model, ids[:, 20:], cache), expected)
    cache.crop(-70)
    assert torch.equal(run(model, ids[:, :20], cache)[:, -1], run(model, ids[:, :20], cache_of(model))[:, -1])


def test_between_checkpoints_nothing_changes(model):
    ids, cache = prompt(1, 40)[0], cache_of(model)
    run(model, ids[:, :20], cache)
    run(model, ids[:, 20:30], cache)
    expected = run(model, ids[:, 30:], copy.deepcopy(cache))
    for _ in range(2):
        with pytest.raises(
            kvfast.MissingCheckpointError, match="after 27 tokens, and the nearest checkpoint before is after 20"
        ) as caught:
            cache.crop(-3)
        assert caught.value.nearest == 20
    assert torch.equal(run(model, ids[:, 30:], cache), expected)


def test_a_model_computes_what_lies_after_the_checkpoint(model):
    ids, cache, computed = prompt(1, 70)[0], cache_of(model, model=model), cache_of(model)
    run(model, ids[:, :20], cache)
    run(model, ids[:, 20:40], cache)
    cache.crop(-7)
    assert cache.get_seq_length() == len(cache.rows[0]) == 33
    run(model, ids[:, :33], computed)
    assert error(run(model, ids[:, 33:], cache), run(model, ids[:, 33:], computed)) < 1e-4
    other = copy.deepcopy(cache)
    for one in (cache, other):
        one.crop(-11)
        assert one.get_seq_length() == 59


def test_a_step_that_broke_off_is_noticed_and_taken_back(model):
    """Between any two layers: the states of some are those of a token that others do not know."""
    ids = prompt(1, 40)[0]
    for layer in model.base_model.layers[1:]:
        cache, known = cache_of(model), cache_of(model, model=model)
        for one in (cache, known):
            for first, last in ((0, 20), (20, 30), (30, 31), (31, 32)):
                run(model, ids[:, first:last], one)
            interrupt(layer, functools.partial(run, model, ids[:, 32:33], one))
        ahead = cache.get_seq_length() - 32
        for call in (run, lambda *of: of[-1].rows, lambda *of: copy.deepcopy(of[-1])):
            with pytest.raises(RuntimeError, match="did not reach every layer"):
                call(model, ids[:, 33:], cache)
        with pytest.raises(kvfast.MissingCheckpointError, match="nearest checkpoint before is after 30"):
            cache.crop(-ahead)
        with pytest.raises(RuntimeError, match=r"crop\(-2\) goes back to a checkpoint"):
            run(model, ids[:, 33:], cache)
        cache.crop(-2)
        known.crop(-ahead)
        assert cache.get_seq_length() == 30 and known.get_seq_length() == 32
        for one, seen in ((cache, 30), (known, 32)):
            computed = cache_of(model)
            run(model, ids[:, :seen], computed)
            assert error(run(model, ids[:, seen:], one), run(model, ids[:, seen:], computed)) < 1e-4
            assert len(one.rows[0]) == 40


def test_a_first_step_that_broke_off_leaves_nothing(model):
    ids = prompt(1, 20)[0]
    for layer in model.base_model.layers[1:]:
        cache = cache_of(model)
        interrupt(layer, functools.partial(run, model, ids, cache))
        cache.crop(-cache.get_seq_length())
        assert cache.get_seq_length() == 0 and torch.equal(run(model, ids, cache), run(model, ids, cache_of(model)))


def test_a_model_computes_again_behind_padding(model):
    ids, mask = prompt(1, 40, (7,))
    cache = cache_of(model, model=model)
    for first, last in ((0, 20), (20, 31)):
        logits(model, ids[:, first:last], "kvfast", cache, mask[:, :last])
    cache.crop(-4)
    assert cache.get_seq_length() == 27 and len(cache.rows[0]) == 20
    computed = cache_of(model)
    logits(model, ids[:, :27], "kvfast", computed, mask[:, :27])
    found = [logits(model, ids[:, 27:], "kvfast", one, mask) for one in (cache, computed)]
    assert error(*found) < 1e-4
    ids, mask = ids.repeat(1, 3)[:, :87], torch.cat([mask, torch.ones(1, 47, dtype=torch.long)], 1)
    cache = cache_of(model, model=model)
    tokens = ours(model, ids, mask, cache, prompt_lookup_num_tokens=5)
    assert tokens.tolist() == stock(model, ids, mask).tolist()
    other = copy.deepcopy(cache)
    model.set_attn_implementation("kvfast")
    other.crop(-3)
    assert len(other.rows[0]) == 80 + 15 - 3


def test_assisted_generation(model):
    ids = prompt(1, 8)[0].repeat(1, 4)
    mask = torch.ones_like(ids)
    for _ in range(2):
        cache = cache_of(model, model=model)
        assert ours(model, ids, mask, cache, prompt_lookup_num_tokens=5).tolist() == stock(model, ids, mask).tolist()
        assert len(cache.rows[0]) == ids.shape[1] + 15


def test_batches_go_back_together_and_are_not_computed_again():
    model, ids = model_of("qwen3_next"), prompt(3, 40)[0]
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[1, :6] = 0
    cache = cache_of(model, model=model)
    logits(model, ids[:, :20], "kvfast", cache, mask[:, :20])
    expected = logits(model, ids[:, 20:], "kvfast", copy.deepcopy(cache), mask)
    logits(model, ids[:, 20:31], "kvfast", cache, mask[:, :31])
    with pytest.raises(kvfast.MissingCheckpointError, match="take a batch of one"):
        cache.crop(-3)
    cache.crop(-11)
    assert torch.equal(logits(model, ids[:, 20:], "kvfast", cache, mask), expected)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=exhaustive) for seed in range(1, 6))])
def test_any_history_against_computing_anew(model, seed, tmp_path):
    """Pieces, single tokens, crops, copies and files, and in the end the tokens of computing the text at once."""
    pytest.importorskip("safetensors")
    rng, text = np.random.default_rng(seed), []
    cache, saved = cache_of(model, model=model, checkpoint_tokens=7), None
    for _ in range(14):
        kind = rng.choice(["piece", "piece", "token", "crop", "copy", "save", "load"])
        if kind in ("piece", "token") or not text:
            new = rng.integers(3, 97, rng.integers(2, 20) if kind == "piece" else 1).tolist()
            run(model, torch.tensor([new]), cache)
            text += new
        elif kind == "crop":
            keep = int(rng.choice([len(text) - rng.integers(1, min(9, len(text)) + 1), *checkpoints(cache), 0]))
            cache.crop(keep - len(text)) if keep < len(text) else None
            del text[keep:]
        elif kind == "copy":
            cache = copy.deepcopy(cache)
        elif kind == "save":
            cache.rows[0].save(tmp_path / "row", token_ids=text)
            saved = list(text)
        elif saved is not None:
            cache.reset()
            cache.restore([kvfast.Snapshot.load(tmp_path / "row")])
            text = list(saved)
        assert cache.get_seq_length() == len(text)
    more, computed = prompt(1, 6)[0], cache_of(model)
    if text:
        run(model, torch.tensor([text]), computed)
    # Pieces of a text and the whole differ by up to 1e-2 in transformers itself (zamba2).
    assert error(run(model, more, cache), run(model, more, computed)) < 3e-2


def test_plan_knows_the_bytes_of_a_checkpoint(model):
    half = copy.deepcopy(model).to(torch.bfloat16)
    cache = cache_of(half, "int8")
    run(half, prompt(1, 20)[0], cache)
    shape = read_shape(half.config)
    if model.config.model_type == "zaya":
        assert shape.state_bytes == 0 and any("states of 4 layers are not counted" in note for note in shape.notes)
        return
    assert shape.state_bytes == _nbytes(cache.rows[0])
    found, without = (kvfast.plan(half.config, context=20, dtype="int8", memory=1 << 30, checkpoints=n)["int8"] for n in (1, 0))
    assert found.bytes_per_sequence - without.bytes_per_sequence == shape.state_bytes
    if not any(cache._rows.windows) and getattr(half.config, "kv_lora_rank", None) is None:
        assert abs(found.bytes_per_sequence / kvfast.load(cache.rows[0].snapshot(), max_seq_len=20).nbytes - 1) < 0.02


# --- outside the process -----------------------------------------------------------------------


def test_snapshots_come_back(model):
    ids, cache = prompt(2, 50)[0], cache_of(model, "int8")
    run(model, ids[:, :30], cache)
    snapshots = [row.snapshot() for row in cache.rows]
    expected = run(model, ids[:, 30:], cache)
    other = cache_of(model, "int8")
    other.restore([kvfast.Snapshot.from_state_dict(one.state_dict()) for one in snapshots])
    assert other.get_seq_length() == 30 and torch.equal(run(model, ids[:, 30:], other), expected)
    with pytest.raises(ValueError, match="fills an empty cache"):
        other.restore(snapshots)


def test_states_of_another_model_are_refused():
    ids, cache = prompt(1, 30)[0], cache_of(model_of("qwen3_next"))
    run(model_of("qwen3_next"), ids, cache)
    row, other = cache.rows[0], cache_of(model_of("olmo_hybrid"))
    states = row.states_at()
    moved = kvfast.KVCache(row.num_layers, row.num_kv_heads, row.head_dim, dtype="float32", max_state_bytes=1 << 20)
    filled(moved, each=[(row.k(layer), row.v(layer)) for layer in range(row.num_layers)])
    empty = cache_of(model_of("qwen3_next"))
    with pytest.raises(kvfast.MissingCheckpointError):
        empty.restore([moved.snapshot()])
    moved.add_checkpoint({f"{int(name.split('.')[0]) + 1}.{name.split('.', 1)[1]}": one for name, one in states.items()})
    with pytest.raises(kvfast.IncompatibleSnapshotError, match="must be of the layers"):
        empty.restore([moved.snapshot()])
    assert not empty.is_initialized and empty.get_seq_length() == 0
    with pytest.raises(kvfast.IncompatibleSnapshotError):
        other.restore([row.snapshot()])


@pytest.mark.parametrize("dtype", ["int8-rotated", "int8", "int4"])
def test_prompts_come_back_from_a_store(model, dtype):
    """A prompt that goes on, and one that parts from it within a chunk."""
    store, ids = DictStore(), prompt(1, 200)[0]
    first = cache_of(model, dtype, prompt_cache=kvfast.PromptCache(store, chunk_tokens=64))
    assert first.restore_prompt(ids, "tiny") == 0 and not first.is_initialized
    for start in range(0, 200, 64):
        run(model, ids[:, start : start + 64], first)
    assert first.save_prompt(ids, "tiny")
    longer = torch.cat([ids, prompt(1, 5)[0]], 1)
    parting = torch.cat([ids[:, :150], prompt(1, 5)[0]], 1)
    chunks = not any(first._rows.windows)  # layers with windows come back at the end of a prompt alone
    for text, found in ((longer, 200), (parting, 128 * chunks), (ids, 192 * chunks)):
        second = cache_of(model, dtype, prompt_cache=kvfast.PromptCache(store, chunk_tokens=64))
        assert second.restore_prompt(text, "tiny") == found == second.get_seq_length()
        computed = cache_of(model, dtype)
        for start in range(0, found, 64):
            run(model, text[:, start : min(found, start + 64)], computed)
        got, expected = (run(model, text[:, found:], one) for one in (second, computed))
        # Else the newest tokens were read as floats.
        assert torch.equal(got, expected) or (dtype != "int8-rotated" and text is not longer)


def test_models_without_pieces_are_not_assisted():
    for name in ("jamba", "recurrent_gemma"):
        with pytest.raises(ValueError, match=f"model must be None for {name}"):
            cache_of(model_of(name), model=model_of(name))
    cache = cache_of(model_of("recurrent_gemma"))
    run(model_of("recurrent_gemma"), prompt(1, 20)[0], cache)
    assert cache.rows[0].checkpoints == ()  # as its states are in its layers
    with pytest.raises(kvfast.MissingCheckpointError):
        cache.crop(-3)


def test_other_models_take_and_need_no_states():
    config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=9)
    cache = KVFastCache(config, max_state_bytes=1, model=object())
    assert cache.is_croppable
    with pytest.raises(ValueError, match="max_state_bytes must be at least 1"):
        KVFastCache(model_of("lfm2").config, max_state_bytes=0)
