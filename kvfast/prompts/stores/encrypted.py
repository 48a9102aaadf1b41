"""Values encrypted at rest."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from kvfast.errors import CorruptFileError
from kvfast.prompts.stores.store import Entry, Store, Value, check_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KEY_FILE = "KVFAST_STORE_KEY_FILE"
KEY_BYTES = 32
# A value is a head, which has the magic number, a name of the key, and a salt; then bytes of AES-256-GCM, with its tag at the end.
MAGIC, SALT_BYTES, TAG_BYTES = b"kvfastA1", 32, 16
ID_BYTES = 8
HEAD_BYTES = len(MAGIC) + ID_BYTES + SALT_BYTES
NONCE = bytes(12)  # each value has a key of its own


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
        name, secret = next(iter(self._keys.items()))
        head = MAGIC + name + os.urandom(SALT_BYTES)
        return self._store.put(key, head + _cipher(secret, head).encrypt(NONCE, value, head + check_key(key).encode()))

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
        secret = self._keys.get(head[len(MAGIC) :][:ID_BYTES])
        if head.startswith(MAGIC) and secret is not None:
            return _EncryptedValue(value, _cipher(secret, head), head + key.encode())
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
            from cryptography.exceptions import InvalidTag

            sealed = self._value.read(HEAD_BYTES, len(self) + TAG_BYTES)
            try:
                super().__init__(self._cipher.decrypt(NONCE, sealed, self._authenticated))
            except InvalidTag:
                raise CorruptFileError("it was changed, cut, or moved here from another name") from None
            self._cipher = None
        if start + count > len(self):
            raise EOFError(f"it must have {start + count} bytes, got {len(self)}")
        return self._data[start : start + count]

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


def named_keys(keys: bytes | Sequence[bytes]) -> dict[bytes, bytes]:
    """Keys by the names that values have of them; a ValueError, which shows none, if they are not keys."""
    several = [keys] if isinstance(keys, bytes) else list(keys)
    if not several or not all(isinstance(one, bytes) and len(one) == KEY_BYTES for one in several):
        raise ValueError(f"a key of a store must be {KEY_BYTES} bytes, or several of them")
    from hmac import digest  # `import kvfast` shall not load it

    try:
        import cryptography  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('encrypted stores need cryptography: pip install "kvfast[encrypted]"', name=error.name) from None
    return {digest(one, b"name of a key", "sha256")[:ID_BYTES]: one for one in several}


def _cipher(secret, head):
    from hmac import digest

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(digest(secret, b"key of a value" + head, "sha256"))
