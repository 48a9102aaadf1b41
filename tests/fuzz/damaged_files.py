"""Ways to damage a file of a cache, for `fuzz_forged`.

Bits are flipped, bytes changed, parts cut out, doubled, swapped or appended; the length of the header changes, fields of the headers
are exchanged for others (with and without the digests made right again), or whole tensors.
"""

import copy
import json

import numpy as np
from file_parts import joined, parts, signed, with_tensors

VALUES = [
    *(0, 1, -1, 2, 3, 16, 32, 63, 64, 65, 100, 127, 128, 255, 256, 512, 513, 1 << 16, (1 << 16) + 1),
    *(1 << 31, (1 << 31) - 1, 1 << 32, 1 << 33, 1 << 40, (1 << 40) + 1, 1 << 60, 1 << 62, 1 << 63, 1 << 64),
    *(10**400, -(10**30), 0.0, -0.0),
    *(0.5, 64.0, 1e308, float("nan"), float("inf")),
    *(True, False, None, ""),
    *("64", "int8", "int4", "float32", "bf16", "k8v4", "int8/int4", "ring", "full", "cache", "\0"),
    *("\ud800", [], {}, [0]),
    *([64], ["int8", "int8"], ["int4", "float32"], [None, None], [64, 64], [[1.0]]),
    *([1.0] * 8, [float("nan")] * 8, ["a"] * 8, [0.1] * 400),
    *({"a": 1}, {"frequencies": [1.0] * 8, "interleaved": False}),
    *({"frequencies": [1e308, -1e308], "interleaved": 3}, {"frequencies": None}, {"dtype": "int4"}),
    *([{"dtype": "int8"}] * 2, [{"dtype": "int4", "per_channel": True, "block_size": 32}] * 2),
    {"dtype": "int4", "rotation": "kv", "centring": True, "block_size": 64},
    *([{"dtype": "int4", "num_first_float_tokens": 16}] * 2, {"skipped_blocks": 0}),
    {"skipped_blocks": 0, "floats_begin": 64, "kept_codes": 3},
    *({"skipped_blocks": 1, "evicted_tokens": 128}, [{"skipped_blocks": 0}] * 2),
]


class Good:
    """A good file."""

    def __init__(self, snapshot):
        self.snapshot = snapshot
        self.header, self.body = parts(snapshot.to_bytes())
        # The library writes metadata in any order; with one order, a seed makes the same files every time.
        self.header["__metadata__"] = dict(sorted(self.header["__metadata__"].items()))
        self.header["__metadata__"]["padding"] = ""
        self.data = joined(self.header, self.body)

    def is_of(self, snapshot):
        """Whether a snapshot is that of the file, its token ids and metadata included."""
        ids, expected = snapshot.token_ids, self.snapshot.token_ids
        return (
            snapshot == self.snapshot
            and snapshot.metadata == self.snapshot.metadata
            and (ids is None) == (expected is None)
            and (ids is None or np.array_equal(ids, expected))
        )


def places(value, at=()):
    """Ways to all places of nested lists and dicts."""
    yield at
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*at, key))


def exchanged(rng, value):
    """A copy with something exchanged, taken away or added at one place."""
    value = copy.deepcopy(value)
    way = rng.choice(list(places(value))[1:] or [()])
    if not way:
        return rng.choice(VALUES)
    inner = value
    for key in way[:-1]:
        inner = inner[key]
    old, choice = inner[way[-1]], rng.randrange(8)
    if choice == 0:
        del inner[way[-1]]
    elif choice == 1 and isinstance(inner, list):
        inner.append(copy.deepcopy(old))
    elif choice == 1:
        inner[
            rng.choice(
                [
                    *("more", "sliding_window", "dtype", "rotary_dim", "rope_theta", "max_seq_len", "frequencies"),
                    *("floats_begin", "kept_codes", "rotation", "codebook", "centring", "per_channel", "block_size"),
                    *("num_first_float_tokens", "num_recent_float_tokens", "recent_by_query", "clip_search"),
                ]
            )
        ] = rng.choice(VALUES)
    elif choice in (2, 3, 4) and isinstance(old, int):
        inner[way[-1]] = old + rng.choice([-64, -2, -1, 1, 2, 64, 1 << 20, 1 << 33])
    elif choice == 5 and isinstance(old, int):
        inner[way[-1]] = old * rng.choice([-1, 0, 2, 3, 64])
    else:
        # A value of another type is always refused.
        alike = [value for value in VALUES if type(value) is type(old)]
        inner[way[-1]] = copy.deepcopy(rng.choice(alike if alike and rng.random() < 0.7 else VALUES))
    return value


def damage(rng, good, goods):
    """Change the bytes of a file, more often near its beginning, where the headers are."""
    data = bytearray(good.data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        if not data:
            break
        used = len(json.dumps(good.header))
        at = rng.randrange(rng.choice([8, 64, used, len(data), len(data)]))
        at, choice = min(at, len(data) - 1), rng.randrange(10)
        if choice < 3:
            data[at] ^= 1 << rng.randrange(8)
        elif choice == 3:
            data[at] = rng.choice([0, 255, 32, 34, 48, 57, 91, 93, 123, 125, rng.randrange(256)])
        elif choice == 4:
            del data[at:]
        elif choice == 5:
            data += rng.randbytes(rng.choice([1, 8, 64, 4096])) if rng.random() < 0.5 else data[at : at + 4096]
        elif choice == 6:
            del data[at : at + rng.choice([1, 2, 8, 64, 4096])]
        elif choice == 7:
            data[at:at] = rng.randbytes(rng.choice([1, 2, 8, 64]))
        elif choice == 8:
            other, end = rng.choice(goods).data, at + rng.choice([8, 64, 4096])
            data[at:end] = other[at:end]
        else:
            length = int.from_bytes(data[:8], "little") + rng.choice([-4096, -8, -1, 1, 8, 4096, 1 << 32, 1 << 63])
            data[:8] = rng.choice([length % (1 << 64), rng.randrange(1 << 27), rng.randrange(1 << 64)]).to_bytes(8, "little")
    return bytes(data)


def forged(rng, good, sign):
    """Exchange fields of kvfast's header, of the checksums, or of the library's header."""
    header = copy.deepcopy(good.header)
    metadata, choice = header["__metadata__"], rng.randrange(8)
    for _ in range(rng.choice([1, 1, 2])):
        if choice < 6:
            value = exchanged(rng, json.loads(metadata["kvfast"]))
            try:
                metadata["kvfast"] = json.dumps(value)
            except ValueError:
                metadata["kvfast"] = "[" * rng.choice([10, 1000, 100000])
        elif choice == 6:
            metadata["checksums"] = json.dumps(exchanged(rng, json.loads(metadata["checksums"])))
        else:
            header = exchanged(rng, header)
            break
    if rng.random() < 0.02:
        metadata[rng.choice(["kvfast", "checksums"])] = rng.choice(
            ["", "{}", "null", "[" * 100000, "9" * 5000, '{"a":' * 90000, "\0", "NaN"]
        )
    if sign and isinstance(header, dict) and isinstance(header.get("__metadata__"), dict):
        try:
            signed(header)
        except (KeyError, TypeError):
            pass
    text = json.dumps(header).encode()
    return joined(text, good.body)


def other_tensors(rng, good):
    """Exchange whole tensors, with digests that are right."""

    def change(tensors):
        names = list(tensors)
        name, choice = rng.choice(names), rng.randrange(6)
        if choice == 0:
            del tensors[name]
        elif choice == 1:
            other = rng.choice(names)
            tensors[name], tensors[other] = tensors[other], tensors[name]
        elif choice == 2:
            tensors[name] = np.frombuffer(rng.randbytes(tensors[name].size), np.uint8).reshape(tensors[name].shape)
        elif choice == 3:
            tensors[rng.choice(["extra", "token_ids", "layers.2.k.0", "layers.0.K"])] = tensors[name]
        elif choice == 4:
            tensors[name] = tensors[name][..., : rng.randrange(tensors[name].shape[-1] + 1)]
        else:
            array = tensors[name]
            tensors[name] = array.reshape(-1) if rng.random() < 0.5 else array.view(np.int8)
        return tensors

    return with_tensors(good.data, change)


def mutated(rng, good, goods):
    """The bytes of a file, and whether its digests were made right again."""
    choice = rng.randrange(10)
    if choice < 5:
        return damage(rng, good, goods), False
    if choice < 8:
        return forged(rng, good, True), True
    if choice < 9:
        return forged(rng, good, False), False
    return other_tensors(rng, good), True
