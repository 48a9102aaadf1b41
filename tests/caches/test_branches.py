"""`truncate(n, keep=...)`: of a tree of drafts the right branch stays, in the bits that it would have had alone."""

import numpy as np
import pytest
from cache_kinds import ANY_BLOCK, DIM, FORMATS, HEADS, KINDS, LAYERS, MIXED, contents, filled, make, same, stored, tokens
from selection import parametrize

import kvfast

MOVING = [kind for kind in KINDS if kind != "ring that rotates"]
BRANCHES = [[0, 2, 3, 7, 19], [1], [], [0, 1, 2], [5, 6, 7, 8, 9, 30, 38], [39], list(range(1, 40, 2))]
MEETINGS = [(kind, name) for kind in MOVING for name in FORMATS]
every_kind_and_format = parametrize(
    ("kind", "name"),
    MEETINGS,
    [(kind, name) for i, name in enumerate(FORMATS) for kind in (MOVING[i % len(MOVING)], "growing")]
    + [(kind, name) for kind in MOVING for name in ("int4", "int8")],
)


def rows(rng, n, layers=LAYERS):
    return [tokens(rng, n) for _ in range(layers)]


def append(cache, given, positions=slice(None), counted=False):
    for layer, (k, v) in enumerate(given):
        if len(k[positions]):
            cache.append(layer, k[positions], v[positions])
    if counted and len(given[0][0][positions]):
        cache.advance(len(given[0][0][positions]))
    return cache


@every_kind_and_format
@pytest.mark.parametrize("at", range(len(BRANCHES)))
def test_a_branch_has_the_bits_of_its_tokens_alone(kind, name, at, rng):
    """Whatever other drafts there were, over any end of a block: they move before they are counted."""
    length, branch = [60, 4, 16, 64, 190, 150, 5][at], BRANCHES[at]
    if length < FORMATS[name].num_first_float_tokens and not FORMATS[name].seals:
        length = 16
    text, drafts = rows(rng, length), rows(rng, 40)
    cache = append(make(kind, FORMATS[name]), text, counted=True)
    alone = append(append(make(kind, FORMATS[name]), text, counted=True), drafts, branch)
    append(cache, drafts)
    cache.truncate(length, branch)
    assert len(cache) == length and cache.layer_length(0) == cache.layer_length(1) == length + len(branch)
    assert same(cache, alone)
    if branch:
        cache.advance(len(branch))
        alone.advance(len(branch))
    more = rows(rng, 70)
    assert same(append(cache, more, counted=True), append(alone, more, counted=True)) and stored(cache) == stored(alone)


@every_kind_and_format
@pytest.mark.parametrize("at", range(len(BRANCHES)))
def test_counted_drafts_are_kept_as_if_appended_again_or_refused(kind, name, at, rng):
    length, branch = [3, 20, 64, 95, 110, 150, 97][at], BRANCHES[at]
    cache = append(make(kind, FORMATS[name], long=kind in ("growing", "bounded", "sequence")), rows(rng, length), counted=True)
    drafts = rows(rng, 40)
    append(cache, drafts, counted=True)
    again, before = cache.copy(), contents(cache)
    held = stored(cache)
    try:
        cache.truncate(length, branch)
    except ValueError as error:
        assert any(text in str(error) for text in ("is sealed: call", "as floats: call", "as codes: call", "cannot go back"))
        assert "tokens after it again" in str(error) or "cannot go back" in str(error)
        assert same(cache, before) and stored(cache) == held and len(cache) == length + 40
        return
    stays = next((i for i, row in enumerate(branch) if row != i), len(branch))
    again.truncate(length + stays)
    assert same(cache, append(again, drafts, branch[stays:], counted=True)) and stored(cache) == stored(again)


def test_counted_tokens_stay_counted(rng):
    """A branch may begin among complete tokens and end among others."""
    for dtype in ANY_BLOCK:
        given = rows(rng, 60)
        cache, alone = (append(make("growing", dtype), given, slice(0, 30), counted=True) for _ in range(2))
        append(cache, given, slice(30, 60))
        cache.truncate(20, [1, 5, 9, 10, 15, 39])
        assert len(cache) == 23 and cache.layer_length(0) == 26
        alone.truncate(20)
        append(alone, given, [21, 25, 29], counted=True)
        assert same(cache, append(alone, given, [30, 35, 59]))
        cache.advance(3)
        assert len(cache) == 26
        cache.truncate(20, [0, 1, 2])  # nothing moves
        alone.truncate(20 + 3)
        assert same(cache, alone)


def test_layers_of_different_formats_and_lengths(rng):
    given = rows(rng, 100, 3)
    cache, alone = (append(make("growing", MIXED), given, slice(0, 50), counted=True) for _ in range(2))
    for layer, (k, v) in enumerate(given):
        cache.append(layer, k[50 : 60 + 10 * layer], v[50 : 60 + 10 * layer])
    before = contents(cache)
    with pytest.raises(ValueError, match="below the 10 tokens that layer 0 holds from position n=50 on, got 10"):
        cache.truncate(50, [3, 10])
    assert same(cache, before)
    cache.truncate(50, [3, 9])
    assert same(cache, append(alone, given, [53, 59]))


@pytest.mark.parametrize("dtype", ["int8", "int4", "float32"])
def test_snapshots_and_forks_have_the_tree_yet(dtype, rng):
    given = rows(rng, 100)
    pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, 40, dtype=dtype)
    for cache in (make("growing", dtype), pool.new_sequence()):
        append(cache, given, slice(0, 50), counted=True)
        append(cache, given, slice(50, 60), counted=True)
        snapshot, fork = cache.snapshot(), cache.fork()
        before, held = contents(fork), stored(snapshot)
        cache.truncate(50, [2, 4, 9])
        assert same(fork, before) and stored(snapshot) == held and not same(cache, before)
        cache.restore(snapshot)
        assert same(cache, before)
        fork.truncate(50, [2, 4, 9])
        cache.truncate(50, [2, 4, 9])
        assert same(cache, fork)


def test_a_full_pool_refuses_and_nothing_changes(rng):
    given = rows(rng, 96)
    pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, 3, dtype="int8-rotated", block_size=32)
    sequence = append(pool.new_sequence(), given, slice(0, 80), counted=True)
    fork = sequence.fork()
    before = contents(sequence)
    with pytest.raises(kvfast.CacheFullError):
        sequence.truncate(40, [3, 30])
    assert same(sequence, before) and same(fork, before) and len(sequence) == 80
    fork.free()
    sequence.truncate(40, [3, 30])
    assert len(sequence) == 42


def test_ids_follow_and_known_blocks_stay(rng):
    given, ids = rows(rng, 64), np.arange(100, 164)
    pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, 20, dtype="int8-rotated", block_size=16)
    sequence = pool.new_sequence()
    append(sequence, given)
    sequence.advance(64, ids)
    sequence.truncate(20, [1, 2, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40])
    kept = [*ids[:20], *ids[[20 + i for i in (1, 2, *range(30, 41))]]]
    assert sequence.snapshot().token_ids.tolist() == kept and len(sequence) == 33
    assert pool.match_prefix([*ids, 0]).num_cached_tokens == 64  # the blocks of before, as they were
    append(sequence, given, slice(0, 20))
    sequence.advance(20, ids[:20])
    found = pool.match_prefix(np.array([*kept, *ids[:20]]))
    assert found.num_cached_tokens == 48 and np.array_equal(found.k(1), sequence.k(1)[:48])
    sequence.truncate(0, [5])
    assert sequence.snapshot().token_ids.tolist() == [105]
    sequence.truncate(0, [])
    append(sequence, given, slice(0, 3)).advance(3, [1, 2, 3])
    assert sequence.snapshot().token_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int8/bfloat16", "int4", "float32"])
def test_latents(dtype, paged, rng):
    given = rng.standard_normal((2, 90, 48 + 16)).astype(np.float32)
    pools = [kvfast.PagedMLAKVCache(1, 48, 16, 20, dtype=dtype) if paged else None for _ in range(2)]
    cache, alone = (pool.new_sequence() if paged else kvfast.MLAKVCache(1, 48, 16, dtype=dtype) for pool in pools)
    for one in (cache, alone):
        filled(one, given[0, :60])
    branch = [1, 3, 4, 17, 29]
    cache.append(0, given[0, 60:])
    cache.truncate(60, branch)
    alone.append(0, given[0, 60:][branch])
    assert np.array_equal(cache.get_latent(0), alone.get_latent(0))
    cache.advance(5)
    alone.advance(5)
    assert stored(cache) == stored(alone)


def test_windows_go_by_the_new_length(rng):
    """A ring has what it needs for as long as its rollback lasts, for drafts that were counted."""
    for rollback in (0, 8, 40):
        given = rows(rng, 140)
        ring = kvfast.RingKVCache(LAYERS, HEADS, DIM, sliding_window=32, num_sink_tokens=3, rollback=rollback, dtype="int8-plain")
        append(ring, given, slice(0, 100), counted=True)
        alone = ring.copy()
        append(ring, given, slice(100, 130), counted=True)
        if rollback < 30:
            before = contents(ring)
            with pytest.raises(ValueError, match="cannot go back to 102 tokens"):
                ring.truncate(100, [0, 1, 5, 8])
            assert same(ring, before)
            continue
        ring.truncate(100, [0, 1, 5, 8])
        assert same(ring, append(alone, given, [100, 101, 105, 108], counted=True))


def test_branch_that_cannot_move_is_refused(rng):
    given = rows(rng, 90)
    turned = append(make("ring that rotates", "int8"), given, counted=True)
    spliced = append(kvfast.KVCache(LAYERS, HEADS, DIM, dtype="int8"), given, counted=True)
    spliced.drop(10, 20, rope=kvfast.Rope())
    start = append(make("growing", FORMATS["int8/float16"]), given, slice(0, 30))
    for cache, n, text in (
        (turned, 85, r"rotated each key for its row; call truncate\(85\), and append"),
        (spliced, 75, r"to position 75, among the 80 tokens that were spliced or shifted: call truncate\(75\)"),
        (start, 0, r"to position 0, as layer 0 keeps the first 4 tokens as floats: call truncate\(0\)"),
    ):
        before = contents(cache)
        with pytest.raises(ValueError, match=text):
            cache.truncate(n, [1, 3])
        assert same(cache, before)
    turned.truncate(85, [0, 1])
    start.truncate(0, [0, 1, 2, 3, 20])
    assert len(turned) == 87 and start.layer_length(0) == 5
    spliced.truncate(75, [])
    assert len(spliced) == 75


@pytest.mark.parametrize(
    "keep, error, text",
    [
        ([1, 1], ValueError, "keep must rise, from 0 for the token at position n=50, got 1 at 1"),
        ([3, 2], ValueError, "got 2 at 1"),
        ([-1], ValueError, "got -1 at 0"),
        ([10], ValueError, "keep must be below the 10 tokens that layer 0 holds from position n=50 on, got 10"),
        ([2**62], ValueError, f"got {2**62}"),
        ([2**64 - 1], ValueError, "keep must hold integers"),
        ([0.0], kvfast.DimensionMismatchError, "keep must be integers with 1 dimension, got float64"),
        ([[0]], kvfast.DimensionMismatchError, "1 dimension"),
        (3, kvfast.DimensionMismatchError, "1 dimension"),
        ([True], kvfast.DimensionMismatchError, "got bool"),
    ],
)
def test_bad_branches(keep, error, text, rng):
    for kind in KINDS:
        cache = append(make(kind, "int8"), rows(rng, 60), counted=True)
        before = contents(cache)
        with pytest.raises(error, match=text):
            cache.truncate(50, keep)
        assert same(cache, before)
    with pytest.raises(ValueError, match="n must be between 0 and the 60 tokens"):
        cache.truncate(61, [0])
