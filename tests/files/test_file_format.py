"""docs/reference/file-format.md: it names all that files hold and nothing else, and its rules decode them."""

import json
import re
import struct
from collections import Counter
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from cache_kinds import DIM, DTYPES, HEADS, KINDS, LAYERS, fill, filled, make, tokens
from file_reader import FLOATS, SIMD, Reader

import kvfast
from kvfast.caches.multi_head import MultiHeadConfig
from kvfast.codec.multi_head import signs_of

safetensors = pytest.importorskip("safetensors")
xxhash = pytest.importorskip("xxhash")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "file-format.md").read_text("utf-8")
METHODS = [
    *(kvfast.LowRank(8), kvfast.LowRank(energy=0.9, dtype="float32"), kvfast.Hybrid(quant_bits=4)),
    *(kvfast.Hybrid(8), kvfast.VectorQuantization(16), kvfast.VectorQuantization(32, 4)),
    *(kvfast.Quantize("int4"), kvfast.Quantize(8)),
]


# --- files of every kind -----------------------------------------------------------------------


def cut(cache, rng, n, *, loud=1.0):
    """A cache that went back into a sealed block; where louder keys follow, it is patched."""
    fill(cache, rng, 150)
    cache.truncate(100)
    return filled(cache, each=[(k * np.float32(loud), v) for k, v in (tokens(rng, n) for _ in range(LAYERS))]) if n else cache


def latent(rng, n, dtype="int8", rope_dim=12):
    return fill(kvfast.MLAKVCache(LAYERS, 40, rope_dim, dtype=dtype), rng, n)


def with_states(cache, rng):
    for _ in range(3):
        fill(cache, rng, 50).add_checkpoint({"b": rng.standard_normal((3, 5)).astype(np.float16), "a": rng.integers(0, 9, 7)})
    return cache


def heads(rng, n, window=None, **config):
    cache = kvfast.MultiHeadKVCache(3, MultiHeadConfig(DIM, **config))
    cache.push_tokens(*rng.standard_normal((2, n, 3, DIM), np.float32))
    if window:
        cache.evict_outside_window(window)
    return cache


def mixed(rng, n):
    """Layers of different shapes and formats in one cache, those of the last two in one table."""
    return fill(kvfast.KVCache(3, [1, 2, 2], [16, DIM, DIM], dtype=["int8", "int4", "float16"]), rng, n)


def two_widths(rng, n, dtype="int4", v_head_dim=(12, DIM, 40)):
    """Values narrower and wider than their keys, each layer in a table of its own."""
    return fill(kvfast.KVCache(3, 2, DIM, dtype=dtype, v_head_dim=v_head_dim), rng, n)


ALL_OPTIONS = kvfast.KVFormat(
    "int8/int4",
    rotation="kv",
    codebook="gaussian",
    centring=True,
    num_first_float_tokens=9,
    num_recent_float_tokens=32,
    clip_search=True,
)
SPREAD = np.linspace(0.3, 3, DIM, dtype=np.float32)
CALIBRATION = kvfast.calibrate(*(np.random.default_rng(98).standard_normal((2, LAYERS, 320, HEADS, DIM), np.float32) * SPREAD))
CACHES = {
    **{
        f"calibrated {name}": lambda rng, name=name: fill(
            make("growing", replace(kvfast.PRESETS[name], calibration=CALIBRATION)), rng, 333
        )
        for name in ("int2", "int3", "int4", "k8v4")
    },
    **{
        f"{kind} {dtype}": lambda rng, kind=kind, dtype=dtype: fill(make(kind, dtype), rng, 150)
        for kind in KINDS
        for dtype in ("int4", "int8-plain")
    },
    **{f"growing {dtype}": lambda rng, dtype=dtype: fill(make("growing", dtype), rng, 150) for dtype in DTYPES},
    "every option": lambda rng: fill(make("growing", ALL_OPTIONS), rng, 150),
    "int3": lambda rng: fill(make("growing", "int3"), rng, 333),
    "int3, a ring": lambda rng: fill(make("ring with sinks", "int3"), rng, 444),
    "int3, cut": lambda rng: cut(make("growing", kvfast.KVFormat("int3", per_channel=True)), rng, 150, loud=50),
    "recent": lambda rng: fill(make("growing", "k8v4"), rng, 150),
    "recent, a ring": lambda rng: fill(make("ring with sinks", kvfast.KVFormat("int3/bfloat16", num_recent_float_tokens=48)), rng, 333),
    "empty": lambda rng: make("growing"),
    "states": lambda rng: with_states(kvfast.KVCache(LAYERS, HEADS, DIM, dtype="int8", max_state_bytes=1 << 20), rng),
    "states, a ring": lambda rng: with_states(kvfast.RingKVCache(LAYERS, HEADS, DIM, 40, max_state_bytes=1 << 20), rng),
    "a long ring": lambda rng: fill(make("ring with sinks", "int4"), rng, 700),
    "cut": lambda rng: cut(make("growing"), rng, 0),
    "cut, going on": lambda rng: cut(make("growing"), rng, 10),
    "patched": lambda rng: cut(make("growing"), rng, 150, loud=50),
    "patched, open": lambda rng: cut(make("growing"), rng, 40, loud=50),
    "own rules": lambda rng: fill(make("growing", ["int4", "int2"]), rng, 204),
    "own rules, a ring": lambda rng: fill(make("ring with sinks", ["int2", "int4"]), rng, 444),
    "own rules, patched": lambda rng: cut(make("growing", ["int8-centred", "int4"]), rng, 150, loud=50),
    "packed": lambda rng: fill(make("growing", "int7/int6"), rng, 90),
    "packed, even": lambda rng: fill(make("growing", "int2/int3"), rng, 90),
    "mixed": lambda rng: mixed(rng, 150),
    "mixed, full blocks": lambda rng: mixed(rng, 208),
    "two widths": lambda rng: two_widths(rng, 150),
    "two widths, all options": lambda rng: two_widths(rng, 150, ALL_OPTIONS, 40),
    "two widths, floats": lambda rng: two_widths(rng, 150, ["bfloat16", "int5/int3", "float32/int8"]),
    "latent": lambda rng: latent(rng, 150),
    "latent int4": lambda rng: latent(rng, 150, kvfast.KVFormat("int4", rotation="kv", codebook="gaussian")),
    "latent without rope": lambda rng: latent(rng, 70, "float16", 0),
    "heads": lambda rng: heads(rng, 150, bits=(5, 3)),
    "heads, evicted": lambda rng: heads(rng, 300, 70, bits=4, seed=7, num_q_heads=6),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The tensors and the metadata of a file by the name of its cache, and the cache."""
    folder, known = tmp_path_factory.mktemp("files"), {}

    def write(name):
        if name not in known:
            cache = CACHES[name](np.random.default_rng(0))
            snapshot = cache.snapshot() if name.startswith("heads") else cache.snapshot(np.arange(len(cache)))
            snapshot.save(folder / "cache")
            known[name] = *read(folder / "cache"), cache
        return known[name]

    return write


def read(path):
    """Tensors by their names, and the metadata."""
    with safetensors.safe_open(path, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118  (it is not a dict)


def compressed(method, batch=False):
    k, v = np.random.default_rng(1).standard_normal((2, 2, 2, 300, DIM), np.float32)
    k[..., 7, :] *= 30  # a token that is worth being exact
    return kvfast.KVCacheCompressor(method).compress_kv(k, v) if batch else kvfast.KVCacheCompressor(method).compress_kv_3d(k[0], v[0])


# --- what the page names -----------------------------------------------------------------------


def named(title):
    """What the first column of the page's table with this title holds."""
    (table,) = re.findall(rf"^\| {title} \|.*\n\| ---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return Counter(name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split(" | ")[0]))


def test_container(written):
    for name in CACHES:
        tensors, metadata, _ = written(name)
        assert set(metadata) == set(named("metadata"))
        assert {array.dtype for array in tensors.values()} <= {np.dtype(np.uint8)}
        assert json.loads(metadata["checksums"]) == {name: xxhash.xxh3_128_hexdigest(array) for name, array in tensors.items()}
        text = f"{metadata['kvfast']}\0{metadata['checksums']}"
        assert metadata["digest"] == xxhash.xxh3_128_hexdigest(text.encode()) and not metadata["padding"].strip(" ")


def test_tensors_lie_as_told(tmp_path):
    fill(make("ring with sinks"), np.random.default_rng(0), 150).save(tmp_path / "cache", np.arange(150))
    data = (tmp_path / "cache").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    del header["__metadata__"]
    at = 0
    for name in sorted(header):
        assert header[name]["data_offsets"][0] == at
        at = header[name]["data_offsets"][1]
    assert start % 4096 == 0 and start + at == len(data)


def test_header(written):
    headers = [json.loads(written(name)[1]["kvfast"]) for name in CACHES]
    of_states = {"states", "checkpoints", "max_state_bytes"}
    for header in headers:
        absent = {"salted"} | (set() if "has_states" in header["settings"] else of_states)
        assert set(header) == set(named("header")) - absent and header["version"] == 2
    settings, inside = set().union(*(one["settings"] for one in headers)), Counter()
    for name in ("rope", "config"):
        inside += Counter(set().union(*(one["settings"].get(name) or {} for one in headers)))
    assert named("settings") == Counter(settings) + inside
    kinds = re.findall(r"`(\w+)` \(`", next(line for line in PAGE.splitlines() if line.startswith("| `kind` |")))
    assert set(kinds) == {one["settings"]["kind"] for one in headers}
    formats = [form for one in headers for form in one["settings"].get("dtype", [])]
    assert set().union(*formats) == set(named("format"))
    tables = [table for one in headers for table in one["tables"]]
    assert set().union(*tables) == set(named("tables"))


def test_kinds_of_settings(written):
    """The second column of the table of settings is true."""
    (table,) = re.findall(r"^\| settings \| kinds .*\n\| ---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    told = {kind: set() for kind in ("full", "ring", "latent", "heads")}
    for row in table.splitlines():
        names, kinds = row.strip("| ").split(" | ")[:2]
        for kind in told if kinds == "all" else [] if "inside" in kinds else kinds.removesuffix(", where it differs").split(", "):
            told[kind] |= set(re.findall(r"`([^`]+)`", names))
    for name in CACHES:
        _, metadata, cache = written(name)
        settings = json.loads(metadata["kvfast"])["settings"]
        one_width = settings["kind"] in ("full", "ring") and cache.v_head_dim == cache.head_dim
        absent = ({"v_head_dim"} if one_width else set()) | (set() if name.startswith("states") else {"has_states"})
        assert set(settings) == told[settings["kind"]] - absent


def test_names_of_tensors(written):
    found = {re.sub(r"^layers\.\d+", "layers.L", re.sub(r"\.\d+$", ".H", tensor)) for name in CACHES for tensor in written(name)[0]}
    found = {one.replace("states.H", "states.N") for one in found}
    assert found == set(named("tensor"))


def test_compressed(tmp_path):
    headers, tensors = [], {}
    for method in METHODS:
        for batch in (False, True):
            compressed(method, batch).save(tmp_path / "compressed")
            arrays, metadata = read(tmp_path / "compressed")
            headers.append(json.loads(metadata["kvfast"]))
            tensors |= arrays
            assert set(metadata) == set(named("metadata"))
    parts = [part for header in headers for part in header["parts"]]
    assert set().union(*headers) | {"store"} == set(named("compressed header")) and {one["compressed"] for one in headers} == {2}
    rows = {row.split("`")[1]: row for row in PAGE.splitlines() if row.startswith("| `")}
    for name, fields in {
        "layout": set().union(*(one["layout"] for one in headers)),
        "method": set().union(*(one["method"] for one in headers)),
        "parts": set().union(*parts),
        "store": set().union(*(part["store"] for part in parts)),
    }.items():
        told = set(re.findall(r"`(\w+)`", rows[name].split(" | ", 1)[1]))
        assert {one for one in told if one[0].islower()} - {"lift"} == fields
    found = {re.sub(r"layers\..*", "layers.*", re.sub(r"\.\d+\.(k|v|coord)", r".G.\1", re.sub(r"^\d+", "P", name))) for name in tensors}
    assert found == set(named("compressed tensor"))


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_arrays_of_compressed(method):
    """A state has the dtypes and shapes that the page tells, and what it stands for follows from them."""
    one = compressed(method)
    state = one.state_dict()
    header = json.loads(state.pop("header").tobytes())
    (part,), dim = header["parts"], header["layout"]["head_dim"]
    exact = state.get("0.positions", np.empty(0, np.int64))
    assert (exact.dtype, exact.shape) == (np.int64, (part["num_exact"],)) and (np.diff(exact) > 0).all()
    rest = np.delete(np.arange(300), exact)
    for side, decoded in zip("kv", one.decode()):
        rows = np.empty((2, 300, dim), np.float32)
        if len(exact):
            rows[:, exact] = nested(state, "0.exact.", side)
        if "count" in part["store"]:
            subvectors, count = part["store"]["subvectors"], part["store"]["count"]
            mean, lift, bounds, centroids, codes = (
                state[f"0.store.{side}.{name}"] for name in ("mean", "lift", "bounds", "centroids", "codes")
            )
            assert [array.dtype.name for array in (mean, lift, bounds, centroids, codes)] == [
                "float32",
                "float16",
                "int32",
                "float16",
                "uint8",
            ]
            if count <= 16:
                codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(2, len(rest), -1)[..., :subvectors]
            for head in range(2):
                coordinates = np.empty((len(rest), dim), np.float32)
                for i, (first, last) in enumerate(zip(bounds[head], bounds[head, 1:])):
                    table = centroids[head, first * count : last * count].reshape(count, last - first)
                    coordinates[:, first:last] = table[codes[head, :, i]]
                rows[head, rest] = coordinates @ lift[head].astype(np.float32) + mean[head]
        elif "ranks" in part["store"]:
            for group, members in enumerate(part["store"]["heads"]):
                mean, lift = (state[f"0.store.{group}.{side}.{name}"] for name in ("mean", "lift"))
                assert lift.dtype.name == part["store"]["basis"] and lift.shape == (len(members), part["store"]["ranks"][group], dim)
                coordinates = nested(state, f"0.store.{group}.coordinates.", side)
                rows[np.ix_(members, rest)] = coordinates @ lift.astype(np.float32) + mean[:, None]
                assert np.any(mean) == (header["method"]["name"] != "LowRank")
        else:
            rows[:, rest] = nested(state, "0.store.", side)
        np.testing.assert_allclose(rows, decoded, rtol=1e-4, atol=1e-4)


def nested(state, prefix, side):
    """Decoded keys or values, (heads, tokens, dim), of a cache among the arrays of another state."""
    cache = kvfast.KVCache.from_state_dict({name.removeprefix(prefix): one for name, one in state.items() if name.startswith(prefix)})
    return (cache.k(0) if side == "k" else cache.v(0)).swapaxes(0, 1)


def digest(person, *parts, secret=b""):
    state = blake2b(b"".join(parts), digest_size=32, key=secret, person=person)
    return state.digest()


@pytest.mark.parametrize("secret", [b"", b"a secret"])
def test_values_of_a_prompt_cache(tmp_path, secret):
    """Keys and payloads follow from the page alone."""
    few = replace(kvfast.PRESETS["int4"], num_first_float_tokens=4)  # which leave a part of their piece empty
    cache, token_ids = fill(make("growing", few), np.random.default_rng(0), 150), np.arange(150)
    kvfast.PromptCache(tmp_path, chunk_tokens=64, secret=secret).save(cache, token_ids, model="a model")
    values = {path.name: path.read_bytes() for path in tmp_path.rglob("?-*")}
    state = cache.state_dict()
    header = json.loads(state["header"].tobytes())
    fields = json.dumps([header["version"], "a model", "", header["settings"], header["block_size"]], sort_keys=True)
    nodes = [digest(b"prompts", fields.encode(), (64).to_bytes(8, "little"), secret=secret)]
    for i in range(2):
        nodes.append(digest(b"node", nodes[-1], token_ids[64 * i : 64 * i + 64].astype("<i8").tobytes(), secret=secret))
    chunks = [digest(b"chunk", node, secret=secret) for node in nodes[1:]]
    tail = token_ids[128:].astype("<i8").tobytes()
    end, tails = digest(b"end", nodes[2], tail, secret=secret), digest(b"tails", nodes[2], tail[: 16 * 8], secret=secret)
    keys = [*(f"c-{one.hex()}" for one in chunks), f"e-{end.hex()}", f"t-{tails.hex()}"]
    assert sorted(values) == sorted(keys)
    payloads = {}
    for key, one, count in zip(keys, [*chunks, end, tails], [64, 128, 150, 0]):
        value, payload = values[key], values[key][128:]
        if secret:
            checksum = blake2b(one + payload, digest_size=16, key=secret, person=b"kvfast value").digest()
        else:
            checksum = xxhash.xxh3_128_digest(one + payload)
        assert value[:128] == b"kvfastpc" + struct.pack("<IIQ", 1, 0, len(payload)) + one + checksum + struct.pack("<Q", count) + bytes(
            48
        )
        payloads[key] = payload
    sides = [f"layers.{layer}.{side}" for layer in range(2) for side in "kv"]
    for i in range(2):
        blocks = b"".join(state[f"{side}.{head}"][i].tobytes() for side in sides for head in range(2))
        payload = payloads[keys[i]]
        assert payload.startswith(blocks)
        floats = np.frombuffer(payload[len(blocks) :], np.float16).reshape(-1, 16, 32)
        kept = np.concatenate([state[f"{side}.floats"][:2] for side in sides]).view(np.float16).reshape(-1, 16, 32)[: len(floats)]
        assert len(floats) == (0 if i else 8)
        assert np.array_equal(floats[:, :4], kept[:, :4]) and not np.any(floats[:, 4:])
    payload = payloads[keys[2]]
    (nbytes,) = struct.unpack_from("<I", payload)
    assert json.loads(payload[4 : 4 + nbytes]) == header["tables"]
    rest = b"".join(state[f"{side}.{name}"].tobytes() for side in sides for name in ("tail", "floats") if f"{side}.{name}" in state)
    assert payload[4 + nbytes :] == rest
    assert payloads[keys[3]] == struct.pack("<I", 22) + tail


def test_states_in_a_store(tmp_path):
    cache = with_states(kvfast.KVCache(LAYERS, HEADS, DIM, dtype="int8", max_state_bytes=1 << 20), np.random.default_rng(0))
    fill(cache, np.random.default_rng(0), 42).add_checkpoint(cache.states_at(150))  # after 192 tokens
    fill(cache, np.random.default_rng(0), 8).add_checkpoint(cache.states_at(100))
    kvfast.PromptCache(tmp_path, chunk_tokens=64).save(cache, np.arange(200), model="a model")
    state = cache.state_dict()
    header = json.loads(state["header"].tobytes())
    fields = json.dumps([header["version"], "a model", "", header["settings"], header["block_size"]], sort_keys=True)
    node = digest(b"prompts", fields.encode(), (64).to_bytes(8, "little"))
    for i in range(3):
        node = digest(b"node", node, np.arange(64 * i, 64 * i + 64).astype("<i8").tobytes())
    end = digest(b"end", node, np.arange(192, 200).astype("<i8").tobytes())
    for before, place in ((node, 3), (end, 4)):
        payload = next(tmp_path.rglob(f"s-{digest(b'states', before).hex()}")).read_bytes()[128:]
        (nbytes,) = struct.unpack_from("<I", payload)
        assert json.loads(payload[4 : 4 + nbytes]) == header["states"]
        assert payload[4 + nbytes :] == state[f"states.{place}"].tobytes()
    assert len(list(tmp_path.rglob("s-*"))) == 2


# --- the rules decode --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CACHES)
def test_rules_decode_it(written, name, tmp_path):
    """Keys and values of a file, by the rules of the page alone, are those that the cache shows."""
    if not (SIMD / "common.h").is_file():
        pytest.skip("the sources, which hold the levels, are not here")
    tensors, metadata, cache = written(name)
    CALIBRATION.save(tmp_path / "calibration.npz")
    reader = Reader(tensors, json.loads(metadata["kvfast"]), **np.load(tmp_path / "calibration.npz"))
    for layer in range(reader.num_layers):
        shown = shown_by(cache, layer)
        positions = cache.positions(layer) if hasattr(cache, "positions") else np.arange(len(cache) - len(shown[0]), len(cache))
        if isinstance(cache, kvfast.MultiHeadKVCache):
            length = reader.header["seq_len"]
            positions = np.arange(length - len(cache), length)
        for side, rows in zip("kv", shown):
            found = reader.rows(layer, side, positions)
            if reader.settings["kind"] == "heads" and reader.settings["config"]["rotation"]:
                found *= signs_of(reader.settings["config"]["seed"], *found.shape[1:])
            if side == "k" and reader.settings.get("rope"):
                found = unrotated(found, positions, **reader.settings["rope"])
            np.testing.assert_allclose(found, rows, rtol=1e-3, atol=2e-3 if reader.settings.get("rope") else 2e-5)
    states = reader.states()
    assert tuple(states) == getattr(cache, "checkpoints", ())
    for n, found in states.items():
        given = cache.states_at(n)
        assert found.keys() == given.keys() and all(np.array_equal(found[one], given[one]) for one in given)
    assert reader.unread == {"token_ids"} & set(tensors)


def shown_by(cache, layer):
    if isinstance(cache, kvfast.MLAKVCache):
        both = cache.get_latent(layer)[:, None]
        return both[..., :40], both[..., 40:]
    if isinstance(cache, kvfast.MultiHeadKVCache):
        return cache.k(), cache.v()
    return cache.k(layer), cache.v(layer)


def unrotated(keys, positions, frequencies, interleaved):
    """Keys without the rotary embedding of their positions."""
    angles, pairs = np.outer(positions, frequencies)[:, None], len(frequencies)
    first = np.arange(pairs) * (2 if interleaved else 1)
    second = first + (1 if interleaved else pairs)
    x, y, result = keys[..., first], keys[..., second], keys.copy()
    result[..., first], result[..., second] = x * np.cos(angles) + y * np.sin(angles), y * np.cos(angles) - x * np.sin(angles)
    return result


def test_every_storage_dtype_and_codebook_is_among_them(written):
    settings = [json.loads(written(name)[1]["kvfast"])["settings"] for name in CACHES]
    formats = [form for one in settings for form in one.get("dtype") or [Reader.format_of_heads(one["config"])]]
    assert {dtype for one in formats for dtype in one["dtype"].split("/")} == {*FLOATS, *(f"int{bits}" for bits in range(2, 9))}
    assert {one.get("codebook", "uniform") for one in formats} == {"uniform", "gaussian"}
    assert {one.get("rotation", "") for one in formats} >= {"", "v", "kv"}
