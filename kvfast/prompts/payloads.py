"""The payloads of chunks, of ends of prompts, of recurrent states, and of lists of tails."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfast.core.limits import MAX_TOKENS
from kvfast.errors import CorruptFileError
from kvfast.files import block_bytes, chunk_bytes
from kvfast.files.fields import STATES, TABLES, check_fields, parsed
from kvfast.prompts.envelope import new_value
from kvfast.storage.sequences.checkpoints import Checkpoint, StateForms

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_TAILS = 64  # in a list; the newest stay
MAX_HEADER = 1 << 20  # bytes of the header of an end


class ChunkForm:
    """The form of the chunks of a cache, whose storage may be that of any cache with the settings and the block size."""

    def __init__(self, storage: Any, chunk_tokens: int) -> None:
        self.blocks = chunk_tokens // storage.block_size
        self._of_blocks = chunk_bytes.chunk_nbytes(storage, self.blocks)
        self._of_floats = chunk_bytes.first_floats_nbytes(storage)

    def nbytes(self, index: int) -> int:
        """Bytes of the payload of a chunk; 0 if no layer keeps all tokens, and there are no chunks."""
        return self._of_blocks + (self._of_floats if index == 0 else 0)

    def read(self, storage: Any, index: int) -> bytearray:
        """The value of a chunk, without its header."""
        value, payload = new_value(self.nbytes(index))
        chunk_bytes.copy_blocks(storage, index * self.blocks, (index + 1) * self.blocks, payload[: self._of_blocks], False)
        if index == 0:
            block_bytes.copy_rows(chunk_bytes.first_float_rows(storage, True), payload[self._of_blocks :], False)
        return value

    def write(self, storage: Any, index: int, payload: memoryview, start: int = 0, floats: bool = True) -> None:
        """Write a payload to the blocks of a sequence, from its block `start` on.

        Without `floats`, the float rows of the first tokens are left out: the end of a prompt has them too. CorruptFileError, before
        anything is written, for NaN and infinity.
        """
        chunk_bytes.check_floats(storage, self.blocks, payload)
        chunk_bytes.copy_blocks(storage, index * self.blocks, (index + 1) * self.blocks, payload[: self._of_blocks], True, start)
        if floats and index == 0 and start == 0:
            block_bytes.copy_rows(chunk_bytes.first_float_rows(storage, False), payload[self._of_blocks :], True)


class End:
    """The rest of a prompt after its last chunk: open blocks, float rows, and layers with windows.

    `storage` is that of an empty cache with the settings and the block size. CorruptFileError comes before anything is allocated by what
    the payload claims.
    """

    def __init__(self, payload: memoryview, storage: Any, num_chunk_blocks: int, seq_len: int) -> None:
        self.seq_len, self._skip = seq_len, num_chunk_blocks
        try:
            self.states, self._rows = _header_and_rest(payload)
            check_fields(self.states, TABLES, "tables")
            block_bytes.check_rest(storage, num_chunk_blocks, seq_len, self.states, self._rows)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error) as error:
            raise CorruptFileError(f"it describes no end of {seq_len} tokens: {error}") from None

    def open(self, storage: Any) -> None:
        """Make an empty sequence one of `seq_len` tokens, all of whose bytes remain to be written."""
        block_bytes.reopen(storage, self.seq_len, self.states)

    def write(self, storage: Any) -> None:
        """Write the bytes after the chunks."""
        block_bytes.copy_rows(block_bytes.rest(storage, self._skip, False), self._rows, True)

    @staticmethod
    def read(storage: Any, num_chunk_blocks: int) -> bytearray:
        """The value of the end of a sequence, without its header."""
        rows = block_bytes.rest(storage, num_chunk_blocks, True)
        value, rest = _value_with_header(storage.resume_states(), sum(row.nbytes for row in rows))
        block_bytes.copy_rows(rows, rest, False)
        return value


def states_value(checkpoint: Checkpoint) -> bytearray:
    """The value of recurrent states, without its header."""
    value, rest = _value_with_header(checkpoint.forms.fields, len(checkpoint.data))
    rest[:] = checkpoint.data
    return value


def states_of(payload: memoryview, secure: bool) -> Checkpoint:
    """The states in a value; CorruptFileError for other bytes, before anything is allocated by what they claim."""
    try:
        fields, given = _header_and_rest(payload)
        check_fields(fields, STATES, "states")
        forms = StateForms(fields)
        if len(given) != forms.nbytes:
            raise ValueError(f"{len(given)} bytes, where {forms.nbytes} are needed")
    except (ValueError, RecursionError, struct.error) as error:
        raise CorruptFileError(f"it holds no states: {error}") from None
    data = forms.empty(secure)
    data[:] = np.frombuffer(given, np.uint8)
    return Checkpoint(forms, data)


def _value_with_header(fields, nbytes):
    """A value of the length of a header, the header as JSON and `nbytes` bytes; and where those belong."""
    header = json.dumps(fields, separators=(",", ":")).encode()
    value, payload = new_value(4 + len(header) + nbytes)
    payload[: 4 + len(header)] = struct.pack("<I", len(header)) + header
    return value, payload[4 + len(header) :]


def _header_and_rest(payload):
    (nbytes,) = struct.unpack_from("<I", payload)
    if nbytes > min(MAX_HEADER, len(payload) - 4):
        raise ValueError(f"a header of {nbytes} bytes")
    return parsed(bytes(payload[4 : 4 + nbytes])), payload[4 + nbytes :]


def tails_value(tails: list[NDArray[np.int64]]) -> bytearray:
    """The value of a list of tails, without its header. The newest is the first: the token ids of each after a node."""
    data = b"".join(struct.pack("<I", len(tail)) + tail.astype("<i8").tobytes() for tail in tails[:MAX_TAILS])
    value, payload = new_value(len(data))
    payload[:] = data
    return value


def tails_of(payload: memoryview) -> list[NDArray[np.int64]]:
    """The tails of a list; CorruptFileError for other bytes."""
    tails, at = [], 0
    while at < len(payload) and len(tails) < MAX_TAILS:
        if len(payload) - at < 4:
            raise CorruptFileError("a list of tails ends within a length")
        (count,) = struct.unpack_from("<I", payload, at)
        at += 4
        if count > min(MAX_TOKENS, (len(payload) - at) // 8):
            raise CorruptFileError(f"a tail of {count} tokens must lie in the {len(payload) - at} bytes that are left")
        tails.append(np.frombuffer(payload, "<i8", count, at).astype(np.int64))
        at += 8 * count
    return tails
