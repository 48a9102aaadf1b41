"""Reads files of caches by the rules of docs/reference/file-format.md alone."""

import re
from hashlib import sha256
from pathlib import Path

import numpy as np
from fuzz_oracle import rotation

SIMD = Path(__file__).parents[2] / "kvfast" / "simd"
FLOATS = {"float32": 4, "float16": 2, "bfloat16": 2}


class Reader:
    """A file of a cache, by the rules of the page; with the arrays of a calibration, by the digests of its layers."""

    def __init__(self, tensors, header, rows=(), channels=()):
        self.calibrations = {}
        for pair in zip(rows, channels):
            shape = 2, *pair[0].shape
            self.calibrations[sha256(str(shape).encode() + b"".join(one.astype("<f4").tobytes() for one in pair)).hexdigest()[:32]] = (
                pair
            )
        self.tensors, self.header, self.settings = tensors, header, header["settings"]
        self.num_layers, self.block_size, self.unread = self.settings["num_layers"], header["block_size"], set(tensors)
        kind, n = self.settings["kind"], self.num_layers
        if kind == "latent":
            self.heads, self.dims = [1] * n, [(self.settings["latent_dim"], self.settings["rope_dim"])] * n
        else:
            of = self.settings["config"] if kind == "heads" else self.settings
            heads = of.get("num_kv_heads") or self.settings["num_heads"]
            self.heads = heads if isinstance(heads, list) else [heads] * n
            dims = [of["head_dim"], of.get("v_head_dim", of["head_dim"])]
            self.dims = list(zip(*(one if isinstance(one, list) else [one] * n for one in dims)))
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
        form, table, size, length = (
            self.formats[layer],
            self.header["tables"][self.group[layer]],
            self.block_size,
            self.header["seq_len"],
        )
        names = form["dtype"].split("/")
        dtype, dim = names[0] if side == "k" else names[-1], self.dims[layer][side == "v"]
        together = [one for one, group in zip(self.formats, self.group) if group == self.group[layer]]
        whole, seals = any("block_size" in one for one in together), "block_size" in form
        has_newest = seals or "num_recent_float_tokens" in form
        skipped = table["skipped_blocks"]
        windowed = "evicted_tokens" in table
        sinks = -(-self.settings.get("num_sink_tokens", 0) // size) if windowed else 0
        state = self.states_of(table, together)[sum(group == self.group[layer] for group in self.group[:layer])] if has_newest else {}
        full = (length - skipped * size) // size
        encoded = length // size * size if whole else length
        end = max(encoded, state["floats_begin"] + state["kept_codes"]) if seals else length
        tails = -(-(end - skipped * size) // size) - full
        heads = self.heads[layer]
        start = f"layers.{layer:0{len(str(self.num_layers - 1))}}.{side}."
        blocks = [self.take(f"{start}{head:0{len(str(heads - 1))}}", full) for head in range(heads)]
        if tails:
            tail = self.take(f"{start}tail", tails * heads).reshape(tails, heads, -1)
            blocks = [np.concatenate([one, tail[:, head]]) for head, one in enumerate(blocks)]
        codes = np.stack([self.decode(one, form, side, dtype, dim) for one in blocks], axis=1)
        begin, patches = state.get("floats_begin", length), dict(state.get("patches", []))
        if form.get("recent_by_query"):  # of tokens with both, a query reads those as codes that enough tokens follow
            newest, border = form.get("num_recent_float_tokens", 0), size if seals else 16
            begin = max(begin, (length - max(newest, 16)) // border * border)
        pieces, floats = {}, None
        if has_newest or "num_first_float_tokens" in form:
            order = self.pieces(table, together, sinks, length)
            pieces = {position: i for i, position in enumerate(order)}
            if order:
                kept = dtype if dtype in FLOATS else "float16"
                floats = self.take(f"{start}floats", len(order) * heads).reshape(len(order), heads, -1)
                floats = floats_of(floats, kept).reshape(len(order), heads, 16, -1)[..., :dim]
        result = np.empty((len(positions), heads, dim))
        for row, position in zip(result, positions):
            index, place = divmod(int(position), size)
            if position < form.get("num_first_float_tokens", 0) or position >= begin or place >= patches.get(index, size):
                row[...] = floats[pieces[position // 16 * 16], :, position % 16]
            else:
                row[...] = codes[(index if index < sinks else index - skipped) * size + place]
        if side == "k" and "calibration" in form:
            rows, channels = self.calibrations[form["calibration"]]
            bases = np.array(channels if form.get("per_channel") else rows, float)
            if not form.get("per_channel"):
                bases = bases @ rotation(dim)
            return np.einsum("phi,hij->phj", result, np.linalg.inv(bases))
        return result @ rotation(dim) if side in form.get("rotation", "") and dim else result

    def states(self):
        """The states of each checkpoint, by the number of tokens before it."""
        positions, found = self.header.get("checkpoints", []), {}
        for i, position in enumerate(positions):
            name = f"states.{i:0{len(str(len(positions)))}}"
            self.unread.discard(name)
            data, at, found[position] = self.tensors[name].tobytes(), 0, {}
            for state, form in sorted(self.header["states"].items()):
                dtype, count = np.dtype(form["dtype"]), int(np.prod(form["shape"], dtype=int))
                found[position][state] = np.frombuffer(data, dtype, count, at).reshape(form["shape"])
                at += count * dtype.itemsize
                assert not any(data[at : -(-at // 64) * 64])
                at = -(-at // 64) * 64
            assert at == len(data)
        return found

    def take(self, name, count):
        self.unread.discard(name)
        assert len(self.tensors[name]) == count
        return self.tensors[name]

    def pieces(self, table, together, sinks, length):
        """Positions at which the pieces of float rows begin, in their order."""
        found = []
        if any("num_first_float_tokens" in one for one in together) and length and (not table["skipped_blocks"] or sinks):
            found.append(0)
        states = [one for one in self.states_of(table, together) if one]
        if states:
            begin, patches = min(one["floats_begin"] for one in states), {}
            for index, n in (patch for one in states for patch in one.get("patches", [])):
                patches[index] = min(n, patches.get(index, n))
            for index, n in sorted(patches.items()):
                if index * self.block_size >= begin:
                    continue  # among those that follow
                found += range(index * self.block_size + n // 16 * 16, min((index + 1) * self.block_size, length), 16)
            found += range(begin // 16 * 16, length, 16) if begin < length else []
        return list(dict.fromkeys(found))

    @staticmethod
    def states_of(table, together):
        """What a table says of each of its layers; None of those whose newest tokens have codes alone."""
        states = iter(table.get("layers", [table] * len(together)))
        return [next(states) if {"block_size", "num_recent_float_tokens"} & set(form) else None for form in together]

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
        tiles = blocks[:, :at].reshape(len(blocks), lanes // 16, -1)
        codes = unpacked(tiles, bits, depths)
        codes = codes if as_keys else codes.swapaxes(1, 2)
        if not by_channel:
            levels = levels_of(codes, bits, codebook)
            scale = "float32" if bits == 8 or bits == 4 and codebook == "uniform" else "bfloat16"
            levels *= floats_of(blocks[:, at : at + size * FLOATS[scale]], scale)[..., None]
            at += size * FLOATS[scale]
        at = -(-at // 64) * 64
        if side == "k" and (form.get("centring") or form.get("per_channel")):
            means = floats_of(blocks[:, at : at + 2 * padded], "float16")[:, None]
            at += -(-2 * padded // 64) * 64
            if by_channel:
                steps = np.ascontiguousarray(blocks[:, at : at + 2 * padded]).view("<u2")
                levels = key_codes(tiles, steps, bits).astype(np.float64)
                unit = floats_of(((steps[:, :16] >> 15) << np.arange(16)).sum(1, dtype=np.uint16)[:, None].view(np.uint8), "bfloat16")
                levels *= ((steps & 0x3FFF) * unit)[:, None]
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
        if bits == 3:
            plane, nibbles = parts_of_threes(units)
            codes[:] = np.stack([plane & 7, plane >> 3 & 7, nibbles & 7, plane >> 6 | nibbles >> 1 & 4], axis=-2)
        for width, size in ((4, 128), (2, 64), (1, 32)):
            if bits & width and bits != 3:
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


def parts_of_threes(units):
    """The first 64 of 96 bytes of INT3, and the nibbles of the others, low ones first."""
    return units[..., :64], np.concatenate([units[..., 64:] & 15, units[..., 64:] >> 4], axis=-1)


def key_codes(tiles, steps, bits):
    """Codes (blocks, tokens, elements) of tiles of keys with a scale per channel, all as the high bits of codes of 8 bits (INT4) or 4."""
    units = tiles.reshape(*tiles.shape[:2], -1, 32 * bits)
    if bits == 3:
        plane, nibbles = parts_of_threes(units)
        parts = nibbles, plane << 1 & 14, plane >> 2 & 14, plane >> 4 & 12
    else:
        even, shared = units[..., :64], units[..., 64:]
        parts = shared, even & 240, even << 4 & 240, shared
    marks = (steps >> 14 & 1).reshape(len(steps), 4, -1)
    lines = np.zeros((*tiles.shape[:2], marks.shape[2], 64), np.uint8)
    for block, (wide, narrow, more, none) in enumerate(marks):
        order = np.argsort(narrow - wide.astype(int), kind="stable")
        count = len(order) // 4
        assert not tiles[block].any() or wide.sum() == narrow.sum() == count and not (wide & narrow).any()
        assert not none.any() and not (more & ~wide).any() and not (more.any() and bits == 3)
        places = order[:count], order[count : 3 * count : 2], order[count + 1 : 3 * count : 2], order[3 * count :]
        for place, part in zip(places, parts):
            lines[block][:, place] = part[block]
        if bits == 4:  # wide and narrow lines share bytes
            share = 5 + more[places[0]][:, None]
            lines[block][:, places[0]] &= (255 << 8 - share).astype(np.uint8)
            lines[block][:, places[3]] <<= share
    return lines.reshape(*tiles.shape[:2], -1, 16, 4).swapaxes(2, 3).reshape(len(tiles), -1, marks.shape[2] * 4)


def table_of(file, name):
    """Numbers of a table of the C sources."""
    (text,) = re.findall(rf"\b{name}\[[^=]*\] = {{([^}}]*)}}", (SIMD / file).read_text("utf-8"))
    return np.array([int(number) for number in re.findall(r"-?\d+", text)])


def levels_of(codes, bits, codebook):
    """Levels of codes (blocks, tokens, elements)."""
    if bits == 8:
        return codes - 128.0
    if bits == 4 and codebook == "uniform":
        return codes - 8.0
    if bits == 4:
        return table_of("common.h", "kv_gauss_levels")[codes] - 128.0
    if bits in (2, 3, 5) and codebook != "uniform":
        return table_of("coding/packed.h", f"kv_gauss_levels{bits}")[codes] - 128.0
    return (codes.astype(np.int64) << 8 - bits | 1 << 7 - bits) - 128.0
