"""Bytes that are encrypted at rest, with AES-256-GCM and keys that can change.

They begin with a head: a magic number, a name of the key, and a salt, from which they have a key of their own. A file is encrypted in
pieces, which are authenticated with their number, and with the length of the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvfast.core.text import needed_for
from kvfast.errors import CorruptFileError

KEY_BYTES = 32
MAGIC_BYTES, ID_BYTES, SALT_BYTES, TAG_BYTES = 8, 8, 32, 16
HEAD_BYTES = MAGIC_BYTES + ID_BYTES + SALT_BYTES
# The head of a file has its length, too.
FILE_MAGIC, FILE_HEAD_BYTES, PIECE_BYTES = b"kvfastF1", HEAD_BYTES + 8, 1 << 16


def named_keys(keys: bytes | Sequence[bytes]) -> dict[bytes, bytes]:
    """Keys by the names that heads have of them; a TypeError or ValueError, which shows none, if they are not keys."""
    several = [keys] if isinstance(keys, bytes) else keys
    if not isinstance(several, Sequence):
        raise TypeError(f"key must be {KEY_BYTES} bytes, or a sequence of such keys, got {type(keys).__name__}")
    if not several or not all(isinstance(one, bytes) and len(one) == KEY_BYTES for one in several):
        raise ValueError(f"a key must be {KEY_BYTES} bytes, or several of them")
    from hmac import digest  # `import kvfast` shall not load it

    with needed_for("encryption needs", "encrypted"):
        import cryptography  # noqa: F401
    return {digest(one, b"name of a key", "sha256")[:ID_BYTES]: one for one in several}


def new_head(magic: bytes, keys: dict[bytes, bytes]) -> bytes:
    """The head of what the first one of `named_keys` is to encrypt."""
    return magic + next(iter(keys)) + os.urandom(SALT_BYTES)


def cipher_of(head: bytes, keys: dict[bytes, bytes]) -> Any:
    """AES-GCM with the key of this head, and of no other; None if it needs another one than `keys`."""
    secret = keys.get(head[MAGIC_BYTES:][:ID_BYTES])
    if secret is None:
        return None
    from hmac import digest

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(digest(secret, b"key of a value" + head, "sha256"))


def file_bytes(nbytes: int) -> int:
    """Bytes of an encrypted file, of a file of `nbytes`."""
    return FILE_HEAD_BYTES + nbytes + -(-nbytes // PIECE_BYTES) * TAG_BYTES


def encrypted(parts: Iterable[Any], nbytes: int, keys: dict[bytes, bytes]) -> Iterator[bytes]:
    """The parts of an encrypted file, of the `nbytes` bytes of these parts."""
    head = new_head(FILE_MAGIC, keys) + nbytes.to_bytes(8, "little")
    yield head
    cipher, number, piece = cipher_of(head, keys), 0, bytearray()
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), PIECE_BYTES):
            piece += view[start : start + PIECE_BYTES]
            if len(piece) >= PIECE_BYTES:
                yield cipher.encrypt(nonce_of(number), bytes(piece[:PIECE_BYTES]), None)
                number, piece = number + 1, piece[PIECE_BYTES:]
    if piece:
        yield cipher.encrypt(nonce_of(number), bytes(piece), None)


def decrypted(cipher: Any, nonce: bytes, data: bytes, authenticated: bytes | None = None) -> bytes:
    from cryptography.exceptions import InvalidTag

    try:
        return cipher.decrypt(nonce, data, authenticated)
    except InvalidTag:
        raise CorruptFileError("it was changed, cut, or moved here from another name") from None


def nonce_of(number: int) -> bytes:
    return number.to_bytes(12, "little")
