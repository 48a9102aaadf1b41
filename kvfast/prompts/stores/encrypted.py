"""Values encrypted at rest."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from kvfast.files.encryption import HEAD_BYTES, TAG_BYTES, cipher_of, decrypted, named_keys, new_head, nonce_of
from kvfast.prompts.stores.store import Entry, Store, Value, check_key

KEY_FILE = "KVFAST_STORE_KEY_FILE"
MAGIC = b"kvfastA1"
NONCE = nonce_of(0)  # each value has a key of its own


class EncryptedStore(Store):
    """Another store, whose values are encrypted with AES-256-GCM.

    Each value has a key of its own, made from `keys` and a random salt. Its name is authenticated with it, so that a value that is changed,
    cut, or moved under another name is refused. Values of other keys, and those without encryption, are not found: one warning says so,
    and new ones take their place. Names are not encrypted: they are digests of tokens, with which a `secret` of `kvfast.PromptCache` hides
    whether a prompt that someone guesses is there.

    Parameters
    ----------
    store : Store
    keys : bytes or sequence of bytes
        Of 32 bytes each. The first one encrypts, and all decrypt: put a new key in front of the old ones.
    """

    def __init__(self, store: Store, keys: bytes | Sequence[bytes]) -> None:
        self.url, self._store, self._keys = store.url, store, named_keys(keys)
        self._has_others = False  # values that cannot be decrypted
        store.tell = lambda text, kind: self.tell(text, kind)

    def get_many(self, keys: Sequence[str]) -> list[Value | None]:
        return [value if value is None else self._opened(key, value) for key, value in zip(keys, self._store.get_many(keys))]

    def put(self, key: str, value: Any) -> bool:
        head = new_head(MAGIC, self._keys)
        return self._store.put(key, head + cipher_of(head, self._keys).encrypt(NONCE, value, head + check_key(key).encode()))

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        found = list(self._store.contains_many(keys))
        if self._has_others and any(found):  # there may be more of them, under names of those that are to be written
            for i, value in enumerate(self.get_many(keys)):
                found[i] = value is not None
                if value is not None:
                    value.__exit__()
        return found

    def touch(self, keys: Sequence[str], is_hit: bool = True) -> None:
        self._store.touch(keys, is_hit)

    def delete(self, keys: Sequence[str]) -> None:
        self._store.delete(keys)

    def entries(self) -> Iterator[Entry]:
        return self._store.entries()

    def cancel(self) -> None:
        self._store.cancel()

    def close(self) -> None:
        self._store.close()

    def _opened(self, key, value):
        """A value, which is decrypted when it is read; or None."""
        try:
            head = bytes(value.read(0, HEAD_BYTES)) if len(value) >= HEAD_BYTES + TAG_BYTES else b""
        except (EOFError, OSError):  # it has just gone
            value.__exit__()
            return None
        cipher = head.startswith(MAGIC) and cipher_of(head, self._keys)
        if cipher:
            return _EncryptedValue(value, cipher, head + key.encode())
        value.__exit__()
        if not self._has_others:
            self._has_others = True
            self.tell(f"values of {self.url} have another key, or none; what they had is computed", "new")
        return None


class _EncryptedValue(Value):
    def __init__(self, value, cipher, authenticated):
        self._value, self._cipher, self._authenticated = value, cipher, authenticated

    def __len__(self):
        return len(self._value) - HEAD_BYTES - TAG_BYTES

    def read(self, start, count, memory=None):
        if self._cipher is not None:
            sealed = self._value.read(HEAD_BYTES, len(self) + TAG_BYTES)
            super().__init__(decrypted(self._cipher, NONCE, sealed, self._authenticated))
            self._cipher = None
        return super().read(start, count)

    def __exit__(self, *exception):
        if self._cipher is None:
            super().__exit__()
        self._value.__exit__()


def keys_of_environment() -> list[bytes] | None:
    """The keys in the file that KVFAST_STORE_KEY_FILE names: one in a line, as 64 hexadecimal digits. None without the variable."""
    path = os.environ.get(KEY_FILE)
    if not path:
        return None
    with open(path, encoding="ascii", errors="replace") as file:
        lines = file.read().split()
    if not lines or not all(re.fullmatch(r"[0-9a-fA-F]{64}", line) for line in lines):
        raise ValueError(f"{path}, which {KEY_FILE} names, must have keys of 64 hexadecimal digits, one in a line")
    return [bytes.fromhex(line) for line in lines]
