"""The form of a state of llama.cpp: which of its bytes belong to which tokens.

All numbers are little-endian::

    state   a head, which depends on the call that wrote it; then the cache
    cache   u32 number of streams; of each u32 number of cells, and if there are any: cells, layers
    cells   of each i32 position, u32 1, i32 sequence
    layers  u32 whether values are transposed, u32 number of layers,
            keys of each: i32 type, u64 bytes of a row, the rows,
            values of each: the same, or transposed: i32 type, u32 bytes of an element, u32 elements of a row, the columns
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from kvfast import CorruptFileError, IncompatibleSnapshotError

MOST_STREAMS = 256
CELL_BYTES = 12
LONGEST_NAME = 64
ROWS, COLUMNS = struct.Struct("<iQ"), struct.Struct("<iII")  # what comes before those of a layer


@dataclass(frozen=True)
class Part:
    """The keys or the values of a layer.

    `kind` is the number of their ggml type. `width` is 1, and `size` the bytes of a row; if they are transposed, they are the
    elements of a row, and the bytes of an element.
    """

    kind: int
    width: int
    size: int


@dataclass(frozen=True)
class Form:
    """All of a state but its tokens and their rows. States of one model and of contexts with the same options have the same form.

    `head` comes before the cache. Values are `transposed`, to columns, without flash attention.
    """

    head: bytes
    keys: tuple[Part, ...]
    values: tuple[Part, ...]
    transposed: bool

    def nbytes(self, num_tokens):
        """Bytes of the state of `num_tokens` tokens."""
        rows = sum(part.width * part.size for part in (*self.keys, *self.values)) * num_tokens
        before = ROWS.size * len(self.keys) + (COLUMNS if self.transposed else ROWS).size * len(self.values)
        return len(self.head) + 16 + CELL_BYTES * num_tokens + before + rows

    def new(self, num_tokens, start=0):
        """A state of tokens from the position `start` on, whose rows are zeros.

        Returns its bytes, and views of the rows of keys, then of values, of each layer: uint8 of shape (width, num_tokens, size).
        """
        data = bytearray(self.nbytes(num_tokens))
        return data, self.write(memoryview(data), num_tokens, start)

    def write(self, data, num_tokens, start=0):
        """As `new`, into writable bytes. Returns the parts, whose rows are left as they are."""
        at = len(self.head)
        data[:at] = self.head
        struct.pack_into("<II", data, at, 1, num_tokens)
        cells = np.frombuffer(data, "<i4", 3 * num_tokens, at + 8).reshape(num_tokens, 3)
        cells[:, 0], cells[:, 1], cells[:, 2] = np.arange(start, start + num_tokens), 1, 0
        at += 8 + cells.nbytes
        struct.pack_into("<II", data, at, self.transposed, len(self.keys))
        at, parts = at + 8, []
        for side in (self.keys, self.values):
            for part in side:
                if self.transposed and side is self.values:
                    COLUMNS.pack_into(data, at, part.kind, part.size, part.width)
                    at += COLUMNS.size
                else:
                    ROWS.pack_into(data, at, part.kind, part.size)
                    at += ROWS.size
                parts.append(np.frombuffer(data, np.uint8, part.width * num_tokens * part.size, at))
                parts[-1] = parts[-1].reshape(part.width, num_tokens, part.size)
                at += parts[-1].nbytes
        return parts


class Reader:
    """Reads numbers and arrays from bytes, and never beyond their end."""

    def __init__(self, data):
        self.data, self.at, self._begin = memoryview(data).cast("B"), 0, 0

    def take(self, size, what):
        if size > len(self.data) - self.at:
            raise CorruptFileError(
                f"the state of llama.cpp ends at byte {len(self.data):,}, and {what} takes {size:,} bytes from {self.at:,} on"
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def numbers(self, form, what):
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form), what))

    def architecture(self):
        """The head of the state of a whole context (``llama_state_get_data``): the name of the model's architecture."""
        (size,) = self.numbers("I", "the length of a name")
        name = bytes(self.take(size, "the name of the architecture"))
        if not 1 <= size <= LONGEST_NAME or not name.isascii():
            raise CorruptFileError("a state of a context of llama.cpp must begin with the name of an architecture")
        return name.decode()

    def head(self):
        """What was read since the last cache, or the last head."""
        self._begin, begin = self.at, self._begin
        return bytes(self.data[begin : self.at])

    def only_cache(self):
        """The cache, which must be the only one, as `cache` returns it."""
        found = self.cache()
        if self.at != len(self.data):
            raise IncompatibleSnapshotError(
                f"{len(self.data) - self.at:,} bytes follow the KV cache: models with several caches, for "
                "sliding windows or recurrent layers, are not known"
            )
        return found

    def cache(self):
        """A cache, after a head that was read. CorruptFileError, or IncompatibleSnapshotError for another kind of state.

        Returns its form; int32 of shape (num_cells, 3) with each cell's position, 1 and sequence; and views as those of `Form.new`,
        in the order of the cells.
        """
        head = self.head()
        (streams,) = self.numbers("I", "the number of streams")
        if not 1 <= streams <= MOST_STREAMS:
            raise CorruptFileError(f"a state of llama.cpp must have 1 to {MOST_STREAMS} streams, got {streams}")
        found = None
        for _ in range(streams):
            (cells,) = self.numbers("I", "the number of cells")
            if cells and found:
                raise IncompatibleSnapshotError(f"the state of a sequence must have one stream, got {streams}")
            if cells:
                found = self._stream(head, cells)
        if found is None:
            raise CorruptFileError("the state of llama.cpp holds no tokens")
        self._begin = self.at
        return found

    def _stream(self, head, count):
        cells = np.frombuffer(self.take(CELL_BYTES * count, "the cells"), "<i4").reshape(count, 3)
        if (cells[:, 1] != 1).any():
            raise IncompatibleSnapshotError(
                "the cells of the state are not those of one sequence, or the model has positions of several dimensions"
            )
        transposed, layers = self.numbers("II", "the layers")
        if transposed not in (0, 1) or not 1 <= layers <= len(self.data):
            raise CorruptFileError(f"the state has a transposition of {transposed} and {layers} layers")
        sides, arrays = [], []
        for side in ("keys", "values"):
            read = self._columns if transposed and side == "values" else self._rows
            found = [read(count, f"the {side} of layer {layer}") for layer in range(layers)]
            sides.append(tuple(part for part, _ in found))
            arrays += [array for _, array in found]
        return Form(head, *sides, bool(transposed)), cells, arrays

    def _rows(self, count, what):
        kind, size = self.numbers("iQ", f"the size of {what}")
        if not 1 <= size <= len(self.data):
            raise CorruptFileError(f"rows of {what} have {size:,} bytes")
        return self._array(count, Part(kind, 1, size), what)

    def _columns(self, count, what):
        kind, size, width = self.numbers("iII", f"the size of {what}")
        if not 1 <= width <= len(self.data) or size not in (1, 2, 4, 8):
            raise CorruptFileError(f"{what}, transposed, are {width:,} elements of {size} bytes")
        return self._array(count, Part(kind, width, size), what)

    def _array(self, count, part, what):
        data = self.take(part.width * count * part.size, what)
        return part, np.frombuffer(data, np.uint8).reshape(part.width, count, part.size)
