"""Every public name of kvfast, called with whatever a caller might give, in any order, for `fuzz_caches`.

A case is a small world of caches of every kind, snapshots, compressed caches and files, on which a few hundred calls
are made: any public function, class, method or property, with arguments that fit, of which none, one, two or all are then
exchanged for others: wrong types, huge numbers, arrays of other dtypes, shapes, strides and memory layouts, elements at
the limits of floats. A call may return, or raise one of the errors that kvfast names, with a text. It must not end the
process, hang, raise anything else, return a number that is not finite where all that it was given is, or leave a trace
when it refuses: lengths and stored bytes are compared.
"""

import collections
import contextlib
import os
import random
import re
import tempfile
import warnings
from pathlib import Path

import numpy as np
from cache_kinds import DIM, DTYPES, HEADS, LAYERS, RINGS, fill, make
from fuzz_forged import little_memory
from fuzz_histories import FOLDER
from fuzz_names import RECORDS, parameters, public_names
from fuzz_oracle import Finding
from fuzz_recipes import FORMATS, PROTOCOL, Call, recipe_of
from hostile_values import Misfit, hostile, is_finite

import kvfast
from kvfast.caches.multi_head import MultiHeadConfig
from kvfast.caches.paged_sequence import Sequence
from kvfast.caches.pool import Pool
from kvfast.caches.sequence_cache import SequenceCache

CALLS = 300  # of a case
MOST_BYTES = 8 << 30  # of address space: what is asked for beyond it is refused by the system
MOST_OF_A_KIND = 4
MOST_STREAMS = 64  # layers times heads of a cache that stays
ALLOWED = (ValueError, TypeError, IndexError, BufferError, OverflowError, MemoryError, kvfast.CacheFullError)
WITH_FILES = {"path", "source", "store", "model"}  # parameters that also may raise what the system says of files
# What these return may be infinite by their definition: a product with any scale, the log-sum-exp of nothing, no bound.
INFINITE = {"dequantize", "merge_states", "plan"}
SLOW = {"read_bandwidth", "peak_rate", "fidelity", "choose_format", "plan", "show_config", "config"}
CHANGING = {"append", "advance", "truncate", "write", "append_batch", "slot_mapping", "restore", "snapshot", "fork"}
OFTEN = CHANGING | {"attend", "attend_batch"}
WRITING = CHANGING | {
    *("write_batch", "clear", "free", "splice", "drop", "append_kv", "push_token", "evict_outside_window"),
    *("decompress_to_cache", "copy", "match_prefix", "deepcopy"),
}


# What Python, NumPy and Cython say where nobody has looked at an argument: it names none.
UNTOLD = re.compile(
    r"has no len\(\)|object of type|not iterable|0-d array|truth value of an array|inhomogeneous|has incorrect type|Expected \w+, got|"
    r"expected str, bytes|unsupported operand|not supported between|keyword argument|only integer|only length-1|cannot be interpreted|"
    r"must be real number|an integer is required|bytes-like object|mix strings|ufunc|object has no attribute|not subscriptable"
)


class World:
    """The objects of a case, and where random choices come from."""

    def __init__(self, rng, folder):
        self.rng, self.folder = rng, folder
        self.numbers = np.random.default_rng(rng.randrange(1 << 63))
        self.objects, self.returned = [], collections.Counter()
        for kind in ("growing", "bounded", "sequence", rng.choice(list(RINGS))):
            self.add(fill(make(kind, rng.choice(DTYPES)), self.numbers, rng.choice([0, 1, 40, 130])))
        self.add(self.objects[-2].pool)
        pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks=20, dtype=rng.choice(FORMATS))
        window = {"sliding_window": rng.choice([5, 20, 60]), "num_sink_tokens": rng.choice([0, 1]), "rollback": rng.choice([0, 64])}
        ring_pool = kvfast.PagedKVCache(LAYERS, HEADS, DIM, num_blocks=20, dtype=rng.choice(FORMATS), **window)
        mla_pool = kvfast.PagedMLAKVCache(LAYERS, 20, 8, num_blocks=20)
        mla = kvfast.MLAKVCache(LAYERS, 20, rng.choice([0, 8]), dtype=rng.choice(["int8", "float32"]))
        heads = kvfast.MultiHeadKVCache(2, MultiHeadConfig(20, rng.choice([4, 8, (3, 5)])))
        k, v = self.numbers.standard_normal((2, 2, 40, 20), np.float32)
        compressor = kvfast.KVCacheCompressor(
            rng.choice([kvfast.Hybrid(), kvfast.Quantize(), kvfast.LowRank(4), kvfast.VectorQuantization(4)])
        )
        compressed = compressor.compress_kv_3d(k, v)
        for one in (
            *(pool, pool.new_sequence(), ring_pool, ring_pool.new_sequence(), mla_pool, mla_pool.new_sequence()),
            *(mla, heads, heads.head(0), compressor, compressed, heads.config),
            *(kvfast.PrefixKVCache([compressed] * 2), self.objects[0].snapshot(), kvfast.KVFormat("int8")),
            *(kvfast.PromptCache(folder / "folder"), compressor.method),
        ):
            self.add(one)

    def add(self, one):
        """Let an object be called, in the place of another if there are enough of its kind. One with 65,536 layers is a
        good answer to a bad question, but hours of work for the calls that follow."""
        if getattr(one, "num_layers", 1) * getattr(one, "num_kv_heads", getattr(one, "num_heads", 1)) > MOST_STREAMS:
            return
        alike = [i for i, other in enumerate(self.objects) if type(other) is type(one)]
        if len(alike) >= MOST_OF_A_KIND:
            self.objects[self.rng.choice(alike)] = one
        else:
            self.objects.append(one)

    def any(self, rng, *kinds):
        found = [one for one in self.objects if type(one).__name__ in kinds]
        return rng.choice(found) if found else None

    def hostile(self, fitting):
        return self.rng.choice(self.objects) if self.rng.random() < 0.05 else hostile(self.rng, fitting)


def decoded(cache, layer):
    """The rows of a layer; or why it does not have them: the largest floats may be too large once they are rotated back."""
    try:
        return [np.array(side).tobytes() for side in cache._decoded(layer)]
    except kvfast.NonFiniteInputError as error:
        return str(error)


def state(one):
    """Lengths and stored bytes of a cache, to be compared."""
    if isinstance(one, SequenceCache):
        if one._storage.closed:
            return "freed"
        shown = [decoded(one, layer) for layer in range(one.num_layers)]
        states = one._storage.segment_list() if one._storage.is_spliced else one._storage.resume_states()
        return len(one), one.context_lens.tolist(), shown, states
    if isinstance(one, kvfast.Snapshot | kvfast.CompressedKV):
        if isinstance(one, kvfast.Snapshot) and one._storage.is_spliced:
            return [array.tobytes() for side in one.to_arrays() for array in side]
        return {name: array.tobytes() for name, array in one.state_dict().items()}
    if isinstance(one, Pool):
        pool = one._batches.pool
        if not one._batches.is_external:
            return one.num_sequences, one.num_free_blocks, one.num_cached_blocks, one._batches.owners().tolist()
        return [
            pool.bytes_of_head(layer, 0, pool.num_blocks, head, side).tobytes()
            for layer in range(pool.num_layers)
            for head in range(pool.num_kv_heads)
            for side in (False, True)
        ]
    if isinstance(one, kvfast.MultiHeadKVCache):
        return len(one), one.k().tobytes(), one.v().tobytes()
    if isinstance(one, kvfast.PrefixKVCache):
        return state(one.live)
    return None


def arguments(call, name, function):
    """Arguments of one call by name: fitting, or with some or all of them exchanged."""
    rng, given = call.rng, {}
    for parameter, optional in parameters(function).items():
        recipe = recipe_of(name, parameter) if name not in RECORDS else None
        if not optional or rng.random() < 0.2:
            given[parameter] = call.world.hostile(None) if recipe is None else recipe(call)
    if name.endswith(("attend_batch", "explain_batch", "top_k_batch")):  # sequences or a plain table, seldom both
        left_out = rng.choice([("block_table", "seq_lens")] * 3 + [("sequences",)])
        for parameter in left_out:
            given.pop(parameter, None)
        if "sequences" in left_out:
            given |= {one: recipe_of(name, one)(call) for one in ("block_table", "seq_lens")}
        elif "sequences" not in given:
            given["sequences"] = call.batch
    if name.endswith(".splice"):  # which takes them one by one
        given["parts"] = recipe_of(name, "parts")(call)
    luck = rng.random()
    if given and luck > 0.5:
        count = len(given) if luck > 0.95 else rng.choice([1, 1, 2])
        for parameter in rng.sample(sorted(given), min(count, len(given))):
            given[parameter] = call.world.hostile(given[parameter])
    return given


def perform(world, name, function, owner, outcomes, log):
    """Make one call, and judge it."""
    rng = world.rng
    target = world.any(rng, owner) if owner else None
    if owner and target is None:
        return
    kind, method = name.rpartition(".")[::2]
    given = {}
    try:
        call = Call(world, target)
        if function is not None and owner is not None or function is not None and kind not in PROTOCOL:
            given = {} if kind == "protocol" else arguments(call, name, function)
    except ALLOWED:  # a target that was freed, or made so that nothing fits
        given = {}
        if function is not None and kind != "protocol":
            given = {one: world.hostile(None) for one, optional in parameters(function).items() if not optional}
    log.append((name, given))
    involved = [one for one in (target, *given.values()) if state_of(one)]
    involved += [one.pool for one in involved if isinstance(one, Sequence)]
    involved += [one for one in world.objects if isinstance(one, Sequence) and one.pool in involved]
    watched = involved if method in WRITING or rng.random() < 0.02 else []
    before = [state(one) for one in watched]
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            if function is None:
                result = getattr(target, method)
            elif owner is None:
                result = function(**given)
            elif "parts" in given:
                parts = given["parts"]
                result = function(
                    target,
                    *(parts if isinstance(parts, list) else [parts]),
                    **{one: value for one, value in given.items() if one != "parts"},
                )
            else:
                result = function(target, **given)
    except Exception as error:
        allowed = (*ALLOWED, OSError) if WITH_FILES & given.keys() else ALLOWED
        if kind == "protocol":
            allowed = (*allowed, AttributeError)  # not every object can do all
        if not isinstance(error, allowed):
            raise Finding(f"{type(error).__name__} is not an error of kvfast", str(error)) from error
        if not str(error) and not isinstance(error, MemoryError) and "Misfit" not in repr(given):
            raise Finding(f"{type(error).__name__} without a text") from error
        if UNTOLD.search(str(error)) and kind != "protocol" and function is not None:
            raise Finding(f"{type(error).__name__} that names no argument", str(error)) from error
        outcomes[type(error).__name__] += 1
        if before != [state(one) for one in watched]:
            raise Finding("refused, and not as it was", str(error)) from error
        return
    is_record = kind in RECORDS or name in RECORDS
    if kind != "protocol" and not is_record and any(isinstance(one, np.ma.MaskedArray) for one in given.values()):
        raise Finding("took a masked array, whose mask it cannot know")
    outcomes["returned"] += 1
    world.returned[name] += 1
    parts = result if isinstance(result, tuple) else (result,)
    if name not in INFINITE and not is_record and is_finite(list(given.values())) and not is_finite(parts):
        raise Finding("not finite, of finite arguments")
    for one in parts:
        if type(one).__name__ in KINDS and name not in RECORDS:
            world.add(one)


def state_of(one):
    return isinstance(
        one, SequenceCache | Pool | kvfast.Snapshot | kvfast.CompressedKV | kvfast.MultiHeadKVCache | kvfast.PrefixKVCache
    )


NAMES = public_names()
NAMES |= {f"protocol.{name}": (function, None) for name, function in PROTOCOL.items()}
KINDS = {owner for _, owner in NAMES.values() if owner} | {
    *("Hybrid", "LowRank", "Quantize", "VectorQuantization", "KVFormat", "MultiHeadConfig")
}


def weight(name):
    return 0.02 if name in SLOW else 8 if name.rpartition(".")[2] in OFTEN else 0.3 if NAMES[name][0] is None else 1


class CallsWorld:
    """A few hundred calls on objects of all kinds."""

    def __init__(self, case):
        self.case = case

    def run(self):
        rng = random.Random(int(self.case.rng.integers(1 << 62)))
        log, names = collections.deque(maxlen=8), list(NAMES)
        threads, home = kvfast.get_num_threads(), os.getcwd()
        with little_memory(MOST_BYTES), tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            try:
                os.chdir(folder)  # a path may be any text
                world = World(rng, Path(folder))
                for name in rng.choices(names, [weight(one) for one in names], k=CALLS):
                    self.call(world, name, log)
            finally:
                os.chdir(home)
                kvfast.set_num_threads(threads)

    def call(self, world, name, log):
        function, owner = NAMES[name]
        if name.startswith("protocol."):
            owner = type(world.rng.choice(world.objects)).__name__
        self.case.calls += 1
        try:
            perform(world, name, function, owner, self.case.outcomes, log)
        except Exception as error:
            told = [f"  {one}({', '.join(f'{key}={short(value)}' for key, value in given.items())})" for one, given in log]
            signature = getattr(error, "signature", type(error).__name__)
            raise Finding(f"{signature} | {name}", "\n".join([str(error), *told])) from error


def short(value):
    if isinstance(value, np.ndarray):
        return f"<{value.dtype} {value.shape} strides {value.strides}>"
    if isinstance(value, Misfit):
        return "<Misfit>"
    return repr(value)[:200]
