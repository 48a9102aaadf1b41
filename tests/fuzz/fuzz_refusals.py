"""Calls that no cache may take, in the middle of its history: they are refused, and leave no trace."""

import contextlib
import functools
import tempfile

import numpy as np
from fuzz_inputs import often, one_of
from fuzz_oracle import Finding

import kvfast

REFUSALS = ValueError, TypeError, IndexError, OverflowError, RuntimeError  # of which kvfast's own errors are kinds
BEYOND = [1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 63) - 1, -2, -(1 << 31), -(1 << 32), -(1 << 62), -(1 << 63)]


def bits(array):
    return np.asarray(array).tobytes()


def pool_state(pool):
    """All that a pool tells of its blocks."""
    owners = pool._batches.owners().tolist()
    return {"free": pool.num_free_blocks, "known": pool.num_cached_blocks, "sequences": pool.num_sequences, "owners": owners}


def state(world, held):
    """All that can be seen of a sequence, and of the pool that it is in."""
    cache = held.cache
    seen = {"length": len(cache), "layers": [cache.layer_length(layer) for layer in range(cache.num_layers)]}
    for layer in range(cache.num_layers):
        if cache.layer_length(layer):
            seen[f"rows of layer {layer}"] = [bits(side) for side in world.decoded(cache, layer)]
    if hasattr(cache, "pool"):
        seen |= pool_state(cache.pool) | {"blocks": np.asarray(cache.block_indices()).tolist()}
    return seen


def check_refused(name, call, look):
    """Make a call that must be refused; `look` tells what must stay as it is."""
    before = look()
    try:
        call()
    except REFUSALS:
        pass
    else:
        raise Finding(f"was not refused | {name}")
    after = look()
    changed = [part for part in before if before[part] != after[part]]
    if changed:
        told = [f"{part}: {before[part]} to {after[part]}" for part in changed if not part.startswith("rows")]
        raise Finding(f"refused, and not as it was | {name}: {', '.join(changed)}", "; ".join(told)[:300])


def refuse(world, held, rng):
    """One bad call of a sequence."""
    cache, layer = held.cache, int(rng.integers(held.cache.num_layers))
    heads, (dim, v_dim), length = world.heads, world.dims, held.cache.layer_length(layer)
    n = int(one_of(rng, [1, 1, 2, 17, 65, 130]))
    k, v = np.ones((n, heads, dim), np.float32), np.ones((n, heads, v_dim), np.float32)
    put = functools.partial(put_rows, world, held)
    way = int(rng.integers(9))
    if way <= 2:  # one number somewhere, mostly in the last token
        bad = k if often(rng, 0.5) and dim or not v_dim else v
        at = n - 1 if often(rng, 0.7) else int(rng.integers(n))
        bad[at, int(rng.integers(heads)), int(rng.integers(bad.shape[2]))] = one_of(rng, [np.nan, np.inf, -np.inf])
        name = "append of what is not finite"
        call = functools.partial(put, layer, k, v, way == 2)
    elif way == 3:
        name, call = (
            "append of other shapes",
            functools.partial(put, layer, *one_of(rng, [(k[:, :, :-1], v), (k[:, :0], v), (k[0], v[0])])),
        )
    elif way == 4:
        name, call = "append to no layer", functools.partial(put, one_of(rng, [cache.num_layers, 1 << 32, 0.5, "0", None]), k, v)
    elif way == 5:
        room = getattr(cache, "max_seq_len", None)
        if hasattr(cache, "pool"):
            room = (cache.pool.num_free_blocks + 2) * cache.block_size
        elif room is None:
            return
        else:
            room -= length
        many = [np.broadcast_to(one[:1], (room + n, *one.shape[1:])) for one in (k, v)]
        name, call = "append beyond the room", functools.partial(put, layer, *many)
    elif way == 6:
        name = "truncate"
        call = functools.partial(cache.truncate, one_of(rng, [len(cache) + n, -n, (1 << 32) + len(cache), 1 << 64, 0.5]))
        if often(world.case.newest, 0.3):
            bad = one_of(world.case.newest, ([0, 0], [2, 1], [-1], [1 << 40], [0, (1 << 64) - 1], [0.5], [[0]], 0))
            name, call = "truncate to a branch", functools.partial(cache.truncate, len(cache), bad)
    elif way == 7:
        name, call = "advance", functools.partial(cache.advance, one_of(rng, [n, (1 << 32), 1 << 64, -1, 0.5]))
    else:
        name, q = "attend", np.ones((1, heads, world.dims[0] + (world.dims[1] if world.latent else 0)), np.float32)
        if often(rng, 0.5):
            q[0, 0, 0] = np.nan
        else:
            q = np.repeat(q, length + 1, 0)
        call = functools.partial(cache.attend, layer, q)
    world.case.note("refused", name)
    world.case.calls += 1
    check_refused(name, call, functools.partial(state, world, held))


def beyond(rng, array, at):
    """The numbers with one at `at` that no table can hold, as any array of integers: mostly one that is the same in fewer bits."""
    numbers = np.array(array, object)
    way, number = rng.random(), int(numbers[at])
    numbers[at] = (
        number + (int(one_of(rng, [-3, -1, 1, 1, 5])) << int(one_of(rng, [32, 32, 40]))) if way < 0.6 else int(one_of(rng, BEYOND))
    )
    if way > 0.8 or number < 0:  # as an unsigned number
        numbers[at] = number % (1 << 64) if number < 0 else (1 << 64) - int(rng.integers(1, 3))
        numbers = np.where(numbers < 0, 0, numbers) if numbers.min() < 0 else numbers
        return numbers.astype(np.uint64)
    return numbers.astype(np.int64) if often(rng, 0.7) else numbers.tolist()


def refuse_numbers(world, call, tables, rng):
    """The call of another scheduler with one number that fits no table, length, bound or slot."""
    name = str(one_of(rng, sorted(tables)))
    array, size = np.asarray(tables[name]), world.block_size
    if name == "block_table":  # of a block that is read, the last one
        row = int(rng.integers(len(array)))
        at = row, (int(tables["seq_lens"][row]) - 1) // size
    else:
        at = (int(rng.integers(len(array))),)
    changed = tables | {name: beyond(rng, array, at)}
    world.case.note("numbers", name, at, array[at], np.asarray(changed[name])[at])
    world.case.calls += 1
    told = f"a number that does not fit {name}"
    check_refused(told, functools.partial(call, **changed), functools.partial(pool_state, world.pool))


def filling(rng):
    """What the rows of a batch hold that have no slot: whatever memory held."""
    return one_of(rng, [0] * 12 + [np.nan, np.inf, 3e38])


@contextlib.contextmanager
def left_out(is_hostile):
    """What such rows hold must not matter."""
    try:
        yield
    except kvfast.NonFiniteInputError as error:
        if is_hostile:
            raise Finding("rows without a slot are refused", str(error)) from error
        raise


def put_rows(world, held, layer, k, v, fused=False):
    """Keys and values in one of the ways in which a cache takes them."""
    cache = held.cache
    if world.latent:
        cache.append(layer, np.concatenate([k[..., 0, :], v[..., 0, :]], axis=-1))
    elif fused:
        cache.write(layer, np.concatenate([one.reshape(len(one), -1) for one in (k, k, v)], axis=1))
    else:
        cache.append(layer, k, v)


def check_uncounted(world, held, n, rng):
    """Nothing that is made of a cache loses the tokens that were never counted without a word."""
    cache = held.cache
    name = str(one_of(rng, list(MAKERS)))
    held_tokens = [cache.layer_length(layer) for layer in range(cache.num_layers)]
    world.case.note("uncounted", name, n)
    world.case.calls += 1
    try:
        made = MAKERS[name](world, cache)
    except (ValueError, RuntimeError) as error:
        if str(n) not in str(error):
            raise Finding(f"the tokens that are not counted are not named | {name}", f"{n}: {error}") from error
        return
    kept = [made.layer_length(layer) for layer in range(made.num_layers)]
    if kept != held_tokens:
        raise Finding(f"tokens are lost in silence | {name}", f"{held_tokens} to {kept}")


def _through_file(_, cache):
    with tempfile.NamedTemporaryFile() as file:
        cache.save(file.name)
        return kvfast.load(file.name)


# What takes the tokens of a cache over.
MAKERS = {
    "snapshot": lambda _, cache: kvfast.load(cache.snapshot()),
    "state_dict": lambda world, cache: world.plain_class.from_state_dict(cache.state_dict()),
    "save": _through_file,
    "copy": lambda _, cache: cache.copy(),
    "fork": lambda _, cache: cache.fork(),
}
