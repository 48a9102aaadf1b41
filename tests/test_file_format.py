"""docs/reference/file-format.md: it names all that files hold and nothing else, and its rules decode them."""

import json
import re
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from cache_kinds import CENTRED, DIM, DTYPES, HEADS, LAYERS, PACKED, TRELLIS, fill, make, tokens
from cache_kinds import KINDS as CACHE_KINDS
from fuzz_oracle import rotation

import kvfast
from kvfast.multi_head_config import signs_of

safetensors = pytest.importorskip("safetensors")
xxhash = pytest.importorskip("xxhash")

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reference" / "file-format.md").read_text("utf-8")
SIMD = ROOT / "kvfast" / "simd"
FLOATS = {"float32": 4, "float16": 2, "bfloat16": 2}
METHODS = [kvfast.LowRank(8), kvfast.LowRank(energy=0.9, dtype="float32"), kvfast.Hybrid(quant_bits=4), kvfast.Hybrid(8),
           kvfast.VectorQuantization(16), kvfast.VectorQuantization(32, 4), kvfast.Quantize("int4"), kvfast.Quantize(8)]  # fmt: skip


# --- files of every kind -----------------------------------------------------------------------


def cut(cache, rng, n, *, loud=1.0):
    """A cache that went back into a finished block; where louder keys follow, it is patched."""
    fill(cache, rng, 150)
    cache.truncate(100)
    for layer in range(LAYERS if n else 0):
        k, v = tokens(rng, n)
        cache.append(layer, k * np.float32(loud), v)
    if n:
        cache.advance(n)
    return cache


def latent(rng, n, dtype="int8", rope_dim=12):
    cache = kvfast.MLAKVCache(LAYERS, 40, rope_dim, dtype=dtype)
    for layer in range(LAYERS):
        cache.append(layer, rng.standard_normal((n, 40 + rope_dim), np.float32))
    cache.advance(n)
    return cache


def heads(rng, n, window=None, **config):
    cache = kvfast.MultiHeadKVCache(3, kvfast.MultiHeadConfig(DIM, **config))
    cache.push_tokens(*rng.standard_normal((2, n, 3, DIM), np.float32))
    if window:
        cache.evict_outside_window(window)
    return cache


def mixed(rng, n):
    """Layers of different shapes and formats in one cache, those of the last two in one table."""
    cache = kvfast.KVCache(3, [1, 2, 2], [16, DIM, DIM], dtype=["int8", "int4", "float16"])
    for layer, (count, dim) in enumerate([(1, 16), (2, DIM), (2, DIM)]):
        cache.append(layer, *rng.standard_normal((2, n, count, dim), np.float32))
    cache.advance(n)
    return cache


ALL_OPTIONS = kvfast.KVFormat("int8/int4", rotation="kv", codebook="gaussian", centring=True, num_float_tokens=9, clip_search=True)
CACHES = {
    **{f"{kind} {dtype}": lambda rng, kind=kind, dtype=dtype: fill(make(kind, dtype), rng, 150)
       for kind in CACHE_KINDS for dtype in ("int4", "int8-plain")},
    **{f"growing {dtype}": lambda rng, dtype=dtype: fill(make("growing", dtype), rng, 150) for dtype in DTYPES},
    "every option": lambda rng: fill(make("growing", ALL_OPTIONS), rng, 150),
    "empty": lambda rng: make("growing"),
    "a long ring": lambda rng: fill(make("ring with sinks", "int4"), rng, 700),
    "cut": lambda rng: cut(make("growing"), rng, 0),
    "cut, going on": lambda rng: cut(make("growing"), rng, 10),
    "patched": lambda rng: cut(make("growing"), rng, 150, loud=50),
    "patched, open": lambda rng: cut(make("growing"), rng, 40, loud=50),
    "packed": lambda rng: fill(make("growing", "int7/int6"), rng, 90),
    "packed, even": lambda rng: fill(make("growing", "int2/int3"), rng, 90),
    "mixed": lambda rng: mixed(rng, 150),
    "mixed, full blocks": lambda rng: mixed(rng, 208),
    "latent": lambda rng: latent(rng, 150),
    "latent int4": lambda rng: latent(rng, 150, kvfast.KVFormat("int4", rotation="kv", codebook="gaussian")),
    "latent without rope": lambda rng: latent(rng, 70, "float16", 0),
    "heads": lambda rng: heads(rng, 150, bits=(5, 3)),
    "heads, evicted": lambda rng: heads(rng, 300, 70, bits=4, codebook="trellis", seed=7, num_q_heads=6),
}  # fmt: skip


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
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118  (it is no dict)


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
    for header in headers:
        assert set(header) == set(named("header")) and header["version"] == 3
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
        for kind in told if kinds == "all" else [] if "inside" in kinds else kinds.split(", "):
            told[kind] |= set(re.findall(r"`([^`]+)`", names))
    for name in CACHES:
        settings = json.loads(written(name)[1]["kvfast"])["settings"]
        assert set(settings) == told[settings["kind"]]


def test_names_of_tensors(written):
    found = {re.sub(r"^layers\.\d+", "layers.L", re.sub(r"\.\d+$", ".H", tensor)) for name in CACHES for tensor in written(name)[0]}
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
    assert set().union(*headers) | {"store"} == set(named("compressed header")) and {one["compressed"] for one in headers} == {1}
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
            mean, lift, bounds, centroids, codes = (state[f"0.store.{side}.{name}"] for name in ("mean", "lift", "bounds", "centroids", "codes"))
            assert [array.dtype.name for array in (mean, lift, bounds, centroids, codes)] == ["float32", "float16", "int32", "float16", "uint8"]
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


def test_prompt_cache(tmp_path):
    cache = fill(make("ring with sinks"), np.random.default_rng(0), 40)
    assert kvfast.PromptCache(tmp_path).save(cache, np.arange(40), model="a model")
    (path,) = tmp_path.iterdir()
    header = json.loads(read(path)[1]["kvfast"])
    known = json.dumps(["a model", header["settings"]]).encode(), np.arange(40).astype("<i8").tobytes()
    assert path.name == "-".join(blake2b(data, digest_size=16).hexdigest() for data in known) + ".safetensors"
    assert header["metadata"] == {"model": "a model"}


# --- the rules decode --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CACHES)
def test_rules_decode_it(written, name):
    """Keys and values of a file, by the rules of the page alone, are those that the cache shows."""
    if not (SIMD / "dispatch.c").is_file():
        pytest.skip("the sources, which hold the levels, are not here")
    tensors, metadata, cache = written(name)
    reader = Reader(tensors, json.loads(metadata["kvfast"]))
    for layer in range(reader.num_layers):
        shown = shown_by(cache, layer)
        positions = cache.positions(layer) if isinstance(cache, kvfast.RingKVCache) else np.arange(len(cache) - len(shown[0]), len(cache))
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
    assert reader.unread == {"token_ids"} - (set() if "token_ids" in tensors else {"token_ids"})


def shown_by(cache, layer):
    if isinstance(cache, kvfast.MLAKVCache):
        both = cache.get_latent(layer)[:, None]
        return both[..., :40], both[..., 40:]
    if isinstance(cache, kvfast.MultiHeadKVCache):
        return cache.decode_keys(), cache.decode_values()
    return cache.k(layer), cache.v(layer)


def unrotated(keys, positions, frequencies, interleaved):
    """Keys without the rotary embedding of their positions."""
    angles, pairs = np.outer(positions, frequencies)[:, None], len(frequencies)
    first = np.arange(pairs) * (2 if interleaved else 1)
    second = first + (1 if interleaved else pairs)
    x, y, result = keys[..., first], keys[..., second], keys.copy()
    result[..., first], result[..., second] = x * np.cos(angles) + y * np.sin(angles), y * np.cos(angles) - x * np.sin(angles)
    return result


class Reader:
    """A file of a cache, by the rules of the page."""

    def __init__(self, tensors, header):
        self.tensors, self.header, self.settings = tensors, header, header["settings"]
        self.num_layers, self.block_size, self.unread = self.settings["num_layers"], header["block_size"], set(tensors)
        kind, n = self.settings["kind"], self.num_layers
        if kind == "latent":
            self.heads, self.dims = [1] * n, [(self.settings["latent_dim"], self.settings["rope_dim"])] * n
        else:
            of = self.settings["config"] if kind == "heads" else self.settings
            heads = of.get("num_kv_heads") or self.settings["num_heads"]
            self.heads = heads if isinstance(heads, list) else [heads] * n
            dims = of["head_dim"] if isinstance(of["head_dim"], list) else [of["head_dim"]] * n
            self.dims = [(dim, dim) for dim in dims]
        self.formats = self.settings.get("dtype") or [self.format_of_heads(self.settings["config"])]
        kinds = list(zip(self.heads, self.dims, self.settings.get("windows", [None] * n)))
        groups = list(dict.fromkeys(kinds))
        assert len(groups) == len(header["tables"])
        self.group = [groups.index(one) for one in kinds]

    @staticmethod
    def format_of_heads(config):
        bits = config["bits"] if isinstance(config["bits"], list) else [config["bits"]] * 2
        return {"dtype": f"int{bits[0]}/int{bits[1]}", "rotation": "kv" * config["rotation"], "codebook": config["codebook"]}

    def rows(self, layer, side, positions):
        """float64 of shape (positions, heads, elements)."""
        form, table, size, length = self.formats[layer], self.header["tables"][self.group[layer]], self.block_size, self.header["seq_len"]
        names = form["dtype"].split("/")
        dtype, dim = names[0] if side == "k" else names[-1], self.dims[layer][side == "v"]
        together = [one for one, group in zip(self.formats, self.group) if group == self.group[layer]]
        whole, finishes = any("block" in one for one in together), "block" in form
        skipped = table["skipped_blocks"]
        windowed = "evicted_tokens" in table
        sinks = -(-self.settings.get("num_sink_tokens", 0) // size) if windowed else 0
        encoded = max(table["coded_tokens"], length // size * size) if whole else length
        full = (encoded - skipped * size) // size
        end = max(encoded, table["coded_tokens"] + table["kept_tokens"]) if finishes else length
        tails = -(-(end - skipped * size) // size) - full
        heads = self.heads[layer]
        start = f"layers.{layer:0{len(str(self.num_layers - 1))}}.{side}."
        blocks = [self.take(f"{start}{head:0{len(str(heads - 1))}}", full) for head in range(heads)]
        if tails:
            tail = self.take(f"{start}tail", tails * heads).reshape(tails, heads, -1)
            blocks = [np.concatenate([one, tail[:, head]]) for head, one in enumerate(blocks)]
        codes = np.stack([self.decode(one, form, side, dtype, dim) for one in blocks], axis=1)
        begin = table["coded_tokens"] if finishes else length
        patches = dict(table.get("patches", [])) if finishes else {}
        pieces, floats = {}, None
        if finishes or "num_float_tokens" in form:
            order = self.pieces(table, together, whole, sinks, length)
            pieces = {position: i for i, position in enumerate(order)}
            if order:
                kept = dtype if dtype in FLOATS else "float16"
                floats = self.take(f"{start}floats", len(order) * heads).reshape(len(order), heads, -1)
                floats = floats_of(floats, kept).reshape(len(order), heads, 16, -1)[..., :dim]
        result = np.empty((len(positions), heads, dim))
        for row, position in zip(result, positions):
            index, place = divmod(int(position), size)
            if position < form.get("num_float_tokens", 0) or position >= begin or place >= patches.get(index, size):
                row[...] = floats[pieces[position // 16 * 16], :, position % 16]
            else:
                row[...] = codes[(index if index < sinks else index - skipped) * size + place]
        return result @ rotation(dim) if side in form.get("rotation", "") and dim else result

    def take(self, name, count):
        self.unread.discard(name)
        assert len(self.tensors[name]) == count
        return self.tensors[name]

    def pieces(self, table, together, whole, sinks, length):
        """Positions at which the pieces of float rows begin, in their order."""
        found = []
        if any("num_float_tokens" in one for one in together) and length and (not table["skipped_blocks"] or sinks):
            found.append(0)
        if whole:
            for index, n in table.get("patches", []):
                found += range(index * self.block_size + n // 16 * 16, min((index + 1) * self.block_size, length), 16)
            found += range(table["coded_tokens"] // 16 * 16, length, 16) if table["coded_tokens"] < length else []
        return list(dict.fromkeys(found))

    def decode(self, blocks, form, side, dtype, dim):
        """Rows of blocks, (blocks, bytes), as (tokens, elements)."""
        size, padded = self.block_size, -(-dim // 16) * 16
        if not blocks.size:
            return np.empty((len(blocks) * size, dim))
        if dtype in FLOATS:
            return floats_of(blocks, dtype).reshape(-1, padded)[:, :dim]
        bits, by_channel = int(dtype[3:]), side == "k" and form.get("per_channel", False)
        codebook = "uniform" if by_channel else form.get("codebook", "uniform")
        as_keys = side == "k" or self.settings["kind"] == "latent"
        lanes, depths = (size, padded) if as_keys else (padded, size)
        at = size * padded * bits // 8
        codes = unpacked(blocks[:, :at].reshape(len(blocks), lanes // 16, -1), bits, depths)
        codes = codes if as_keys else codes.swapaxes(1, 2)
        levels = codes.astype(np.float64) if by_channel else levels_of(codes, bits, codebook, 4 if as_keys else 16)
        if not by_channel:
            scale = "float32" if bits == 8 or bits == 4 and codebook == "uniform" else "bfloat16"
            levels *= floats_of(blocks[:, at : at + size * FLOATS[scale]], scale)[..., None]
            at += size * FLOATS[scale]
        at = -(-at // 64) * 64
        if side == "k" and "block" in form:
            means = floats_of(blocks[:, at : at + 2 * padded], "float16")[:, None]
            at += -(-2 * padded // 64) * 64
            if by_channel:
                steps = np.ascontiguousarray(blocks[:, at : at + 2 * padded]).view("<u2")
                unit = floats_of(((steps[:, :16] >> 15) << np.arange(16)).sum(1, dtype=np.uint16)[:, None].view(np.uint8), "bfloat16")
                levels *= ((steps & 0x7FFF) * unit)[:, None]
                at += -(-2 * padded // 64) * 64
            levels += means
        assert at == blocks.shape[1]
        return levels.reshape(-1, padded)[:, :dim]


def floats_of(data, dtype):
    """float64 of bytes."""
    data = np.ascontiguousarray(data)
    if dtype == "bfloat16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return data.view({"float32": "<f4", "float16": "<f2"}[dtype]).astype(np.float64)


def unpacked(tiles, bits, depths):
    """Codes (blocks, lanes, depths) of tiles (blocks, lanes / 16, bytes)."""
    if bits in (8, 4):
        lines = tiles.reshape(*tiles.shape[:2], -1, 16, 4)
        codes = lines if bits == 8 else np.stack([lines & 15, lines >> 4], axis=3).reshape(*tiles.shape[:2], -1, 16, 4)
    else:
        units = tiles.reshape(*tiles.shape[:2], depths // 16, 32 * bits)
        codes, at, shift = np.zeros((*units.shape[:3], 4, 64), np.uint8), 0, 0  # four lines of 64 bytes
        for width, size in ((4, 128), (2, 64), (1, 32)):
            if bits & width:
                plane = units[..., at : at + size]
                for line in range(4):
                    if width == 4:
                        part = plane[..., line // 2 * 64 : line // 2 * 64 + 64] >> line % 2 * 4 & 15
                    elif width == 2:
                        part = plane >> 2 * line & 3
                    else:
                        part = np.concatenate([plane >> line & 1, plane >> line + 4 & 1], axis=-1)
                    codes[..., line, :] |= part << shift
                at, shift = at + size, shift + width
        codes = codes.reshape(*tiles.shape[:2], depths // 4, 16, 4)
    if bits == 4:  # in the order [depth / 8][half][lane % 16][depth % 4]
        codes = codes.reshape(*tiles.shape[:2], depths // 4, 16, 4)
    return codes.swapaxes(2, 3).reshape(len(tiles), -1, depths)


def table_of(file, name):
    """Numbers of a table of the C sources."""
    (text,) = re.findall(rf"\b{name}\[[^=]*\] = {{([^}}]*)}}", (SIMD / file).read_text("utf-8"))
    return np.array([int(number) for number in re.findall(r"-?\d+", text)])


def levels_of(codes, bits, codebook, step):
    """Levels of codes (blocks, tokens, elements)."""
    if bits == 8:
        return codes - 128.0
    if bits == 4 and codebook == "uniform":
        return codes - 8.0
    if bits == 4 and codebook == "gaussian":
        return table_of("dispatch.c", "kv_gauss_levels")[codes] - 128.0
    if bits == 4:
        contexts, table = table_of("trellis.h", "kv_trellis_contexts"), table_of("trellis.h", "kv_trellis_table")
        levels, state = np.empty(codes.shape), np.zeros(codes.shape[:2], np.int64)
        for depth in (depth for first in range(step) for depth in range(first, codes.shape[2], step)):
            code = codes[..., depth].astype(np.int64)
            levels[..., depth] = table[contexts[state] * 16 + code] - 128
            state = (state << 1 | code & 1) & 127
        return levels
    if bits in (2, 3, 5) and codebook != "uniform":
        return table_of("packed.h", f"kv_gauss_levels{bits}")[codes] - 128.0
    return (codes.astype(np.int64) << 8 - bits | 1 << 7 - bits) - 128.0


def test_formats_are_all_there():
    """What `CACHES` holds is every storage dtype, and every codebook of each."""
    forms = [CENTRED, PACKED, TRELLIS, ALL_OPTIONS, *map(kvfast.KVFormat.of, [*DTYPES, "int7/int6", "int2/int3"])]
    dtypes = {dtype for one in forms for dtype in one.dtype.split("/")}
    assert dtypes == {"float32", "float16", "bfloat16", *(f"int{bits}" for bits in range(2, 9))}
    assert {one.codebook for one in forms} == {"uniform", "gaussian", "trellis"} and HEADS > 1
