"""The values of a store: a header with the key's digest and a checksum, then the payload."""

from __future__ import annotations

import struct
from typing import Any

from kvfast.core.limits import MAX_TOKENS
from kvfast.errors import CorruptFileError

MAGIC, VERSION = b"kvfastpc", 1
# Magic, version, zeros, bytes of the payload, digest, checksum, tokens; then zeros, so that the payload starts at two cache lines.
_HEADER = struct.Struct("<8sIIQ32s16sQ48x")
HEADER_BYTES = _HEADER.size


def new_value(nbytes: int) -> tuple[bytearray, memoryview]:
    """A value with room for a payload of `nbytes` bytes, and the payload."""
    value = bytearray(HEADER_BYTES + nbytes)
    return value, memoryview(value)[HEADER_BYTES:]


def complete(value: bytearray, digest: bytes, secret: bytes, num_tokens: int) -> bytearray:
    """Write the header of a value whose payload is there. `num_tokens` are those of the prompt up to its end, for `num_tokens_of`."""
    payload = memoryview(value)[HEADER_BYTES:]
    _HEADER.pack_into(value, 0, MAGIC, VERSION, 0, len(payload), digest, _checksum(digest, payload, secret), num_tokens)
    return value


def payload_of(value: Any, digest: bytes, secret: bytes) -> memoryview:
    """The payload of a value; CorruptFileError if it is damaged, or of another key, version or secret."""
    value = memoryview(value)
    if len(value) < HEADER_BYTES:
        raise CorruptFileError(f"it must have a header of {HEADER_BYTES} bytes, got {len(value)} bytes")
    magic, version, zeros, nbytes, named, checksum, num_tokens = _HEADER.unpack(value[:HEADER_BYTES])
    payload = value[HEADER_BYTES:]
    if magic != MAGIC or zeros or num_tokens > MAX_TOKENS or any(value[80:HEADER_BYTES]):
        raise CorruptFileError("kvfast did not write it")
    if version != VERSION:
        raise CorruptFileError(f"it has version {version}; this kvfast reads version {VERSION}")
    if nbytes != len(payload):
        raise CorruptFileError(f"it must have {nbytes} bytes after its header, got {len(payload)}")
    if named != digest:
        raise CorruptFileError("it was stored under another key")
    if checksum != _checksum(digest, payload, secret):
        raise CorruptFileError("its checksum is wrong")
    return payload


def num_tokens_of(header: Any) -> int | None:
    """Tokens of the prompt up to the end of a value, from its first HEADER_BYTES bytes; None if kvfast did not write it."""
    magic, version, *_, num_tokens = _HEADER.unpack(header)
    return num_tokens if (magic, version) == (MAGIC, VERSION) and num_tokens <= MAX_TOKENS else None


def _checksum(digest, payload, secret):
    """16 bytes. With a secret, nobody else can make them; without, XXH3 finds damage several times as fast."""
    if secret:
        from hashlib import blake2b

        state = blake2b(digest, digest_size=16, key=secret, person=b"kvfast value")
    else:
        from xxhash import xxh3_128

        state = xxh3_128(digest)
    state.update(payload)
    return state.digest()
