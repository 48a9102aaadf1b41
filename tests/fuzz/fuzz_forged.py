"""Forged and damaged states, files and prompts for `fuzz_caches`: what is taken in serves many calls, and what it shows is finite."""

import contextlib
import copy
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from cache_kinds import FORMATS, RINGS
from damaged_files import Good, exchanged, mutated, places
from dict_store import DictStore
from file_parts import joined, parts, signed, with_tensors
from fuzz_histories import FOLDER
from fuzz_inputs import DIMS, often, one_of
from fuzz_oracle import Finding

import kvfast
from kvfast.prompts.envelope import HEADER_BYTES, complete

if sys.platform.startswith("linux"):
    import resource

CALLS = 100
FILES = 40  # of a case
SECONDS = 5  # of processors, for one file
REFUSED = kvfast.CorruptFileError, kvfast.IncompatibleSnapshotError
# Finite ones are far below the largest float: a scale of that size is another question than one that is not a number.
FLOATS = [np.nan, np.inf, -np.inf, 65504.0, -65504.0, 1e30, -1e30, 6e-8, 1e-45, 0.0, -0.0]
NOT_FINITE = [0x7FC0, 0x7F80, 0xFF80, 0xFFFF]  # as bfloat16, as the upper half of a float32, and as a float16
INFINITE = [0x7C00, 0xFC00]  # as float16
INTEGERS = [
    *(0, 1, -1, 127, 255, 1 << 15, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 62, (1 << 62) + 10),
    *(-(1 << 62) - 10, (1 << 63) - 1, -(1 << 63)),
]
SELDOM = "floats", "positions", "bounds", "header"  # few arrays of a state are these, and much depends on them
LITTLE = 1 << 28  # bytes
COUNTS = "rollback", "windows", "num_sink_tokens", "max_seq_len"
MOST_ELEMENTS = 1 << 20  # of a forged cache that is used; larger ones are hours of work


def forged_array(rng, array, name=""):
    """A copy with extremes of some dtype in some of its places."""
    raw = np.frombuffer(bytearray(array.tobytes()), np.uint8)
    own = array.dtype != np.uint8 and often(rng, 0.7)
    kind = np.dtype(array.dtype if own else one_of(rng, [np.uint16, np.uint16, np.float32, np.int64, np.int32]))
    places_in, count = len(raw) // kind.itemsize, int(one_of(rng, [1, 1, 2, 4, 40]))
    values = raw[: places_in * kind.itemsize].view(kind)
    if not places_in:
        return array
    if kind == np.uint16:
        values[rng.integers(places_in, size=count)] = one_of(rng, NOT_FINITE + INFINITE * name.endswith("floats"))
    elif kind.kind == "f":
        with np.errstate(over="ignore"):
            values[rng.integers(places_in, size=count)] = np.array([one_of(rng, FLOATS) for _ in range(count)]).astype(kind)
    elif own and often(rng, 0.4):  # they ascend, for whoever takes differences that wrap
        first, last = np.sort(rng.integers(places_in + 1, size=2))
        steps = rng.integers(1, np.iinfo(kind).max, last - first)
        with np.errstate(over="ignore"):
            values[first:last] = values[first:last] + np.cumsum(steps).astype(kind)
    else:
        values[rng.integers(places_in, size=count)] = np.array(INTEGERS)[rng.integers(len(INTEGERS), size=count)].astype(kind)
    return raw.view(array.dtype).reshape(array.shape)


def numbers_of(header):
    """Ways to all numbers and booleans of a header that kvfast itself has written, but for those of its callers."""
    for way in places(header):
        value = header
        for key in way:
            value = value[key]
        if isinstance(value, (bool, int, float)) and way[0] != "metadata":
            yield way, value


def other_type(rng, value):
    """The same number as another type, which no field of a header has."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return str(value)
    return one_of(rng, [float(value), str(value), *[bool(value)] * (value in (0, 1))])


def forged_header(rng, text):
    """The header with another value somewhere, and whether it is one that must be refused."""
    header, of_types = json.loads(text), often(rng, 0.5)
    numbers = list(numbers_of(header))
    places_of = [one for one in (header, header.get("settings", {})) if {*COUNTS} & {*one}]
    if places_of and often(rng, 0.5):  # as if the cache were huge
        inner = one_of(rng, places_of)
        name, value = one_of(rng, sorted({*COUNTS} & {*inner})), int(one_of(rng, [10**6, 10**7, 10**8, 1 << 31, 1 << 40]))
        inner[name] = [value] * len(inner[name]) if isinstance(inner[name], list) else value
        return json.dumps(header), ""
    if not of_types or not numbers:
        return json.dumps(exchanged(random.Random(int(rng.integers(1 << 62))), header)), ""
    way, value = one_of(rng, numbers)
    inner = header = copy.deepcopy(header)
    for key in way[:-1]:
        inner = inner[key]
    inner[way[-1]] = other_type(rng, value)
    return json.dumps(header), f"{way[-1]}: {inner[way[-1]]!r} for {value!r}"


@contextlib.contextmanager
def little_memory(most=LITTLE):
    """Let nothing map more bytes: what is saved here, and what it grows to, is far smaller, whatever it claims to be."""
    if not sys.platform.startswith("linux"):
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class ForgedWorld:
    """Something saved with other values in it, and checksums that are right; then calls as of anybody who trusts it."""

    def __init__(self, case):
        self.case, self.rng = case, case.rng
        self.must_refuse = ""  # what no reader may take in
        self.is_mapped = False  # full blocks are not read then

    def run(self):
        for _ in range(int(self.rng.integers(1, 6))):
            one_of(self.rng, [self.cache, self.cache, self.cache, self.compressed, self.compressed, self.prompt])()

    # What is saved.

    def saved_cache(self):
        rng = self.rng
        form = (
            FORMATS[one_of(rng, list(FORMATS))]
            if often(rng, 0.5)
            else one_of(rng, ["int4", "int4", "k4v3", "int8", "k8v4", "float16", "float32"])
        )
        layers, heads, dim = (int(one_of(rng, some)) for some in ([1, 2], [1, 2], [16, 20, 64]))
        kind = str(one_of(rng, ["full", "full", "ring", "latent"]))
        states = {"max_state_bytes": int(one_of(rng, [512, 1 << 20]))} if often(rng, 0.3) else {}
        if kind == "latent":
            cache = kvfast.MLAKVCache(layers, dim, 8, dtype=str(one_of(rng, ["int8", "float32", "int4"])), **states)
        elif kind == "ring":
            cache = kvfast.RingKVCache(layers, heads, dim, dtype=form, **RINGS[one_of(rng, list(RINGS)[:3])], **states)
        else:
            cache = kvfast.KVCache(layers, heads, dim, dtype=form, **states)
        for _ in range(int(rng.integers(1, 4))):
            self.append(cache, int(one_of(rng, [1, 17, 50, 64, 100])))
            if states:
                cache.add_checkpoint({"a": rng.standard_normal((3, 5)).astype(np.float16), "b": rng.integers(0, 9, 7)})
        self.case.note("saved", repr(cache))
        return cache

    def forge(self, arrays):
        """A state with something forged in it."""
        arrays = dict(arrays)
        for _ in range(int(one_of(self.rng, [1, 1, 1, 2]))):
            name = one_of(self.rng, sorted(arrays))
            few = sorted(one for one in arrays if one.endswith(SELDOM))
            if few and often(self.rng, 0.4):
                name = one_of(self.rng, few)
            if name.rpartition(".")[2] == "header":
                if self.must_refuse:  # a second change might undo the first
                    continue
                text, self.must_refuse = forged_header(self.rng, arrays[name].tobytes())
                arrays[name] = np.frombuffer(text.encode(), np.uint8)
            else:
                arrays[name] = forged_array(self.rng, arrays[name], name)
            self.case.note("forged", name, self.must_refuse)
        return arrays

    def through_file(self, data):
        """The bytes of a file, forged."""
        if often(self.rng, 0.4):
            header, body = parts(data)
            text, self.must_refuse = forged_header(self.rng, header["__metadata__"]["kvfast"])
            header["__metadata__"]["kvfast"] = text
            self.case.note("forged a header", self.must_refuse)
            return joined(signed(header), body)
        return with_tensors(data, self.forge)

    def read(self, reader, *arguments):
        """What a reader takes in, or None."""
        self.case.calls += 1
        try:
            with little_memory():
                found = reader(*arguments)
        except REFUSED:
            found = None
        if found is not None and self.must_refuse:
            raise Finding("a header's field of another type was taken in", self.must_refuse)
        self.must_refuse = ""
        return found

    def cache(self):
        cache, way = self.saved_cache(), self.rng.random()
        if way < 0.5:
            reader = type(cache).from_state_dict
            if often(self.case.newest, 0.5):
                reader = lambda state: kvfast.load(kvfast.Snapshot.from_state_dict(state))
            cache = self.read(reader, self.forge(cache.state_dict()))
        elif way < 0.75:
            cache = self.read(
                lambda data: kvfast.load(kvfast.Snapshot.from_bytes(data)), self.through_file(cache.snapshot().to_bytes())
            )
        else:
            with tempfile.NamedTemporaryFile(dir=FOLDER) as file:
                cache.save(file.name)
                with open(file.name, "rb") as good:
                    data = self.through_file(good.read())
                with open(file.name, "wb") as bad:
                    bad.write(data)
                self.is_mapped = often(self.rng, 0.3)
                cache = self.read(lambda: kvfast.load(file.name, mmap=self.is_mapped))
        if cache is not None:
            with little_memory():
                self.use(cache)
        self.is_mapped = False

    def prompt(self):
        """The values of a store."""
        rng, cache = self.rng, self.saved_cache()
        with kvfast.PromptCache(DictStore(), chunk_tokens=max(64, cache.block_size)) as prompts:
            prompts.save(cache, np.arange(len(cache)))
            prompts.flush()
            values = prompts.store.values
            key = one_of(rng, sorted(values))
            payload = forged_array(rng, np.frombuffer(values[key][HEADER_BYTES:], np.uint8))
            value = bytearray(values[key])
            value[HEADER_BYTES:] = payload.tobytes()
            num_tokens = int.from_bytes(value[72:80], "little")
            values[key] = bytes(complete(value, bytes.fromhex(key[2:]), b"", num_tokens))
            self.case.note("forged", key[:1])
            new = kvfast.load(cache.snapshot().truncated(0))
            self.legal("restore", prompts.restore, new, np.arange(len(cache) + 1))
        self.use(new)

    def compressed(self):
        rng = self.rng
        heads, dim, n = int(one_of(rng, [1, 2])), int(one_of(rng, DIMS[6:])), int(one_of(rng, [20, 65, 282]))
        method = one_of(
            rng, [kvfast.Quantize(), kvfast.Hybrid(), kvfast.LowRank(max(dim // 2, 1)), kvfast.VectorQuantization(16, seed=1)]
        )
        good = kvfast.KVCacheCompressor(method).compress_kv_3d(*rng.standard_normal((2, heads, n, dim), np.float32))
        self.case.note("compressed", method, heads, dim, n)
        if often(rng, 0.7):
            found = self.read(kvfast.CompressedKV.from_state_dict, self.forge(good.state_dict()))
        else:
            with tempfile.NamedTemporaryFile(dir=FOLDER) as file:
                good.save(file.name)
                with open(file.name, "rb") as good_file:
                    data = self.through_file(good_file.read())
                with open(file.name, "wb") as bad:
                    bad.write(data)
                found = self.read(kvfast.CompressedKV.load, file.name)
        if (
            found is None
            or found.layout.num_heads * found.layout.seq_len * found.layout.head_dim > MOST_ELEMENTS
            or found.layout.is_batched
        ):
            return
        heads, dim, n = found.layout.num_heads, found.layout.head_dim, found.layout.seq_len
        for _ in range(5):
            self.legal("decode", found.decode)
            self.legal("state_dict", lambda: kvfast.CompressedKV.from_state_dict(found.state_dict()) and ())
            for count in (1, min(n, 40)):
                self.legal("attend", found.attend, rng.standard_normal((count, heads, dim), np.float32))
        self.use(self.legal("prefix", lambda: kvfast.PrefixKVCache([found])), CALLS // 4)

    # What is done with it.

    def legal(self, name, call, *arguments):
        """A call that may say that numbers are too large, and nothing else."""
        self.case.calls += 1
        try:
            result = call(*arguments)
        except (kvfast.NonFiniteInputError, kvfast.MissingCheckpointError):
            return None
        except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            # Errors of a ring, whose length may be forged, and of mapped blocks that are read now.
            if "go back" in str(error) or "dropped" in str(error) or self.is_mapped and isinstance(error, REFUSED):
                return None
            raise Finding(f"a forged value was taken in, and {name} fails", f"{type(error).__name__}: {error}") from error
        shown = result if name == "decode" else (result,) if name == "k" else ()
        if not self.is_mapped and not all(np.isfinite(one).all() for one in shown):
            raise Finding(f"a forged value was taken in, and {name} is not finite")
        return result

    def append(self, cache, n):
        for layer in range(cache.num_layers):
            if isinstance(cache, kvfast.MLAKVCache):
                cache.append(layer, self.rng.standard_normal((n, cache.latent_dim + cache.rope_dim), np.float32))
            else:
                heads, dims = cache.num_kv_heads, (cache.head_dim, getattr(cache, "v_head_dim", cache.head_dim))
                cache.append(layer, *(self.rng.standard_normal((n, heads, dim), np.float32) for dim in dims))
        cache.advance(n)

    def use(self, cache, calls=CALLS):
        """Legal calls of all kinds."""
        rng = self.rng
        if cache is None:
            return
        self.case.note("taken in", repr(cache))
        latent, is_prefix = isinstance(cache, kvfast.MLAKVCache), isinstance(cache, kvfast.PrefixKVCache)
        heads, dim = (1, cache.latent_dim + cache.rope_dim) if latent else (cache.num_kv_heads, cache.head_dim)
        if heads * dim * cache.num_layers * max(len(cache), 100) > MOST_ELEMENTS:
            return
        for _ in range(calls):
            layer, way = int(rng.integers(cache.num_layers)), rng.random()
            if way < 0.4:
                n = int(one_of(rng, [1, 1, 2, 17, 70]))
                if (getattr(cache, "max_seq_len", None) or 1 << 60) >= len(cache) + n and len(cache) < 2000:
                    self.legal("append", self.append, cache, n)
                    if cache.layer_length(layer) != len(cache):
                        self.legal("truncate", cache.truncate, len(cache))
            elif way < 0.7:
                n = min(int(one_of(rng, [1, 1, 2, 17])), (cache.live if is_prefix else cache).layer_length(layer))
                if n:
                    self.legal("attend", cache.attend, layer, rng.standard_normal((n, heads * 2, dim), np.float32))
            elif way < 0.8:
                rows = [cache.get_latent] if latent else [cache.k, cache.v]
                for one in rows:
                    self.legal("k", one, layer)
            elif way < 0.9:
                least = max(len(cache) - 50, 0)
                if is_prefix:
                    continue
                self.legal("truncate", cache.truncate, int(rng.integers(least, len(cache) + 1)))
            elif way < 0.93 and getattr(cache, "checkpoints", ()):
                states = self.legal("states_at", cache.states_at, int(one_of(rng, list(cache.checkpoints))))
                if len(cache) and not cache._storage.num_uncounted:
                    self.legal("add_checkpoint", cache.add_checkpoint, states)
            elif not is_prefix:
                name = one_of(rng, ["copy", "snapshot", "state_dict", "fork"])
                made = self.legal(name, getattr(cache, name))
                if name == "state_dict" and made is not None:
                    cache = self.legal("from_state_dict", type(cache).from_state_dict, made) or cache
                elif name == "copy" and often(rng, 0.5):
                    cache = made
                elif name == "snapshot" and made is not None:
                    self.legal("restore", cache.restore, made)


class DamagedWorld(ForgedWorld):
    """Files with any damage: each is refused, or holds exactly what a good file holds, or its digests were made right again, or it
    is mapped, where nobody compares the checksums of blocks."""

    def run(self):
        rng = random.Random(int(self.rng.integers(1 << 62)))
        goods = [self.good(), self.good()]
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            path = Path(folder, "cache")
            for _ in range(FILES):
                data, is_signed = mutated(rng, rng.choice(goods), goods)
                path.write_bytes(data)
                self.is_mapped = rng.random() < 0.25
                start = time.process_time()
                outcome = self.load(path, goods, is_signed)
                self.case.outcomes[f"{outcome}, {'mapped' if self.is_mapped else 'read'}"] += 1
                if time.process_time() - start > SECONDS:
                    raise Finding("a damaged file takes long", f"{time.process_time() - start:.1f} s")

    def good(self):
        cache = self.saved_cache()
        ids = self.rng.integers(99, size=len(cache)) if often(self.rng, 0.3) else None
        return Good(cache.snapshot(ids, {"kind": type(cache).__name__}))

    def load(self, path, goods, is_signed):
        """What becomes of a file: "refused", "equal" to a good one, or "other"."""
        self.case.calls += 1
        self.case.note("a file", is_signed, self.is_mapped)
        try:
            with little_memory(LITTLE // 2):
                snapshot = kvfast.Snapshot.load(path, mmap=self.is_mapped)
        except REFUSED:
            return "refused"
        except ValueError as error:
            # The one other refusal: tensors that do not start where they can be mapped.
            if self.is_mapped and "cannot be mapped" in str(error):
                return "refused"
            raise
        is_equal = any(good.is_of(snapshot) for good in goods)
        if not (is_equal or is_signed or self.is_mapped):
            raise Finding("wrong data was accepted")
        with little_memory():
            self.use(kvfast.load(path, mmap=self.is_mapped), 5)
        return "equal" if is_equal else "other"
