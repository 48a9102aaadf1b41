"""Caches in files: safetensors with a versioned header and a checksum per tensor.

The safetensors library checks the structure of a file. The bytes of the blocks are written from the memory of the cache, and read directly
into it, or mapped; those of an encrypted file are decrypted a piece at a time.
"""

import contextlib
import json
import math
import os
import sys
from importlib import import_module
from itertools import accumulate
from threading import Lock

import numpy as np

from kvfast.core.checks import check_flag, checked_path
from kvfast.core.replacing import replacing
from kvfast.core.text import needed_for
from kvfast.core.threads import get_num_threads
from kvfast.core.workers import Workers
from kvfast.errors import CorruptFileError, IncompatibleSnapshotError
from kvfast.files import encryption, state

ALIGNMENT = 4096  # of the tensors in a file, so that they can be mapped: a page, which is also whole cache lines
BYTES_AT_ONCE = 1 << 20  # bytes that are read at a time, and then hashed while they are in the processor's cache
FEW_BYTES = 1 << 20  # of a file: one thread has read and hashed them before others have begun
_seeking = Lock()  # where a system reads only where a file was left


def need_files():
    """Raise ModuleNotFoundError without the packages of ``kvfast[files]``."""
    _import("safetensors.numpy")
    _import("xxhash")


def write(settings, storage, token_ids, metadata, is_salted, path, key=None):
    """Write the complete tokens of a storage; see `state.header_of`."""
    need_files()  # to fail before the work
    write_tensors(_tensors_of(storage, token_ids), state.header_of(settings, storage, metadata, is_salted), path, key)


def to_bytes(settings, storage, token_ids, metadata, is_salted):
    """The bytes of the file that `write` writes."""
    need_files()
    return b"".join(_parts_of(_tensors_of(storage, token_ids), state.header_of(settings, storage, metadata, is_salted)))


def _tensors_of(storage, token_ids):
    tensors = state.arrays_of(storage)
    if token_ids is not None:
        # As bytes, like the others: the library sorts tensors by dtype, and the blocks must start at a page.
        tensors["token_ids"] = token_ids.astype("<i8").view(np.uint8).reshape(-1, 8)
    return tensors


def _parts_of(tensors, header):
    """The parts of a file: its header with the checksums of all tensors, and these, by their names as the library sorts them."""
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    sums = _results(nbytes, _import("xxhash").xxh3_128_hexdigest, zip(tensors.values()))
    checksums = json.dumps(dict(zip(tensors, sums)), separators=(",", ":"))
    metadata = {"kvfast": header, "checksums": checksums, "digest": _digest(header, checksums), "padding": ""}
    metadata["padding"] = " " * (-len(_header_of(tensors, metadata)) % ALIGNMENT)
    return [_header_of(tensors, metadata), *(tensors[name].reshape(-1) for name in sorted(tensors))]


def write_tensors(tensors, header, path, key=None):
    """Write arrays of bytes and a header. At any moment, the file at `path` is the old or the new one, and complete."""
    keys, path = key is not None and encryption.named_keys(key), os.path.realpath(checked_path(path, "path"))
    parts = _parts_of(tensors, header)
    with replacing(path) as new:
        _drop_pages(path)
        with open(new, "wb") as file:
            file.writelines(encryption.encrypted(parts, sum(map(len, parts)), keys) if keys else parts)


# Slow imports that only files need are inside the functions: at the top, they would slow down `import kvfast`.


def _results(nbytes, function, calls):
    """Results of calls with such arguments, by as many threads as kvfast has, unless there are few bytes to work on."""
    if nbytes <= FEW_BYTES:
        return [function(*arguments) for arguments in calls]
    with Workers(get_num_threads()) as workers:
        return workers.results(function, calls)


def remove_file(path):
    """Remove a file, if it exists and the system allows it."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def read_at(descriptor, memory, start):
    """Read a file from byte `start` on, until memory is full or the file ends. Returns the number of bytes."""
    at = 0
    while at < len(memory):
        if hasattr(os, "preadv"):
            count = os.preadv(descriptor, [memory[at:]], start + at)
        else:
            with _seeking, open(descriptor, "rb", buffering=0, closefd=False) as file:
                file.seek(start + at)
                count = file.readinto(memory[at:])
        if not count:
            break
        at += count
    return at


def _drop_pages(path):
    """Drop the cached pages of a file that is about to be replaced, to make room for those of the new file
    (bench/bench_snapshot.py)."""
    with contextlib.suppress(OSError, AttributeError), open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path, mmap, max_seq_len, calibration=None, key=None):
    """The arguments of a Snapshot: settings, storage, token ids, metadata, salt."""
    with _opened(path, key) as content:
        return _snapshot_of(content, mmap, max_seq_len, calibration)


def from_bytes(data, calibration=None):
    """The arguments of a Snapshot, from the result of `to_bytes`; see `read`."""
    content = _BytesContent(data)
    content.check_header()
    return _snapshot_of(content, False, None, calibration)


def _snapshot_of(content, mmap, max_seq_len, calibration):
    opening = state.Opening(content.header, content.sides, max_seq_len, calibration)
    token_ids = content.token_ids(opening.seq_len)
    states = opening.take_mapped(content.map(), content.offsets) if check_flag(mmap, "mmap") else opening.take()
    _results(content.nbytes, content.fill, states)
    return opening.settings, opening.storage, token_ids, opening.metadata, opening.salt


def read_tensors(path, key=None):
    """Read a file of `write_tensors` and verify it: the header, and uint8 arrays by name."""
    with _opened(path, key) as content:
        tensors = {name: np.empty(shape, np.uint8) for name, shape in content.shapes.items()}  # never larger than the file
        _results(content.nbytes, content.fill, ((name, [array]) for name, array in tensors.items()))
    return content.header, tensors


@contextlib.contextmanager
def _opened(path, key):
    """The content of a file, after its structure and header are checked; errors name the file."""
    keys = {} if key is None else encryption.named_keys(key)
    try:
        path = checked_path(path, "path")
        if "\0" in path:
            raise ValueError("source must be a path, got bytes with a 0: Snapshot.from_bytes reads those of a file")
        while True:
            with open(path, "rb", buffering=0) as file:
                is_plain = not keys and file.read(encryption.MAGIC_BYTES) != encryption.FILE_MAGIC
                content = _Content(file, path) if is_plain else _EncryptedContent(file, keys)
                # Another process may have replaced the file between the two openings.
                if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                    content.check_header()
                    yield content
                    return
    except (CorruptFileError, IncompatibleSnapshotError) as error:
        raise type(error)(f"{path}: {error}") from None


@contextlib.contextmanager
def _sound():
    """Refuse what the library refuses."""
    try:
        yield
    except _import("safetensors").SafetensorError as error:
        raise CorruptFileError(f"not a sound safetensors file: {error}") from None


class _Content:
    """A file as the library describes it."""

    def __init__(self, file, path):
        self._file = file
        with _sound(), _import("safetensors").safe_open(path, framework="np"):
            self._describe(os.fstat(file.fileno()).st_size)

    def _describe(self, nbytes):
        """Read what the library has checked: JSON, after its length."""
        if sys.byteorder != "little":
            raise RuntimeError("kvfast reads its files on little-endian machines only")
        size = bytearray(8)
        self._read(memoryview(size), 0, "its header")
        text = bytearray(int.from_bytes(size, "little"))
        self._read(memoryview(text), len(size), "its header")
        header = json.loads(text)
        self._metadata = header.pop("__metadata__", None) or {}
        names = sorted(header, key=lambda name: header[name]["data_offsets"])
        self._dtypes = {name: header[name]["dtype"] for name in names}
        self.shapes = {name: tuple(header[name]["shape"]) for name in names}
        self.nbytes, self._xxhash = nbytes, _import("xxhash")

    def check_header(self):
        """Read the header, and verify its checksum before any of it is used."""
        try:
            self.header, checksums, digest = (self._metadata[name] for name in ("kvfast", "checksums", "digest"))
        except KeyError:
            raise CorruptFileError("a safetensors file, but not a kvfast file") from None
        if digest != _digest(self.header, checksums):
            raise CorruptFileError("the header is damaged: its checksum is wrong")
        try:
            self._checksums = json.loads(checksums)
        except (ValueError, RecursionError) as error:
            raise CorruptFileError(f"the checksums are not JSON: {error}") from None
        if not isinstance(self._checksums, dict) or self._checksums.keys() != self.shapes.keys():
            raise CorruptFileError("the checksums do not belong to these tensors")
        for name, dtype in self._dtypes.items():
            if dtype != "U8":
                raise CorruptFileError(f"{name} must have dtype U8, got {dtype}")
        self.sides = {name: shape for name, shape in self.shapes.items() if name != "token_ids"}
        # A valid file has no gaps, and ends with the last tensor.
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        self.offsets = dict(zip(sizes, accumulate(sizes.values(), initial=self.nbytes - sum(sizes.values()))))

    def token_ids(self, seq_len):
        """int64 of shape (seq_len,), or None."""
        if "token_ids" not in self.shapes:
            return None
        if self.shapes["token_ids"] != (seq_len, 8):
            raise CorruptFileError(f"token_ids must have shape {seq_len, 8}, got {self.shapes['token_ids']}")
        token_ids = np.empty((seq_len, 8), np.uint8)
        self.fill("token_ids", [token_ids])
        return token_ids.view("<i8").reshape(-1)

    def map(self):
        """The file as memory; changes to it stay in this process."""
        from mmap import ACCESS_COPY, mmap

        return mmap(self._file.fileno(), 0, access=ACCESS_COPY)

    def fill(self, name, rows, check=None):
        """Read a tensor into rows, each of them contiguous, and verify its checksum and, with a `check`, its blocks."""
        checksum, at, wrong = self._xxhash.xxh3_128(), self.offsets[name], None
        for row in rows:
            view = memoryview(row.reshape(-1))
            block = row.shape[-1] if check is not None and row.size else 1
            step = max(BYTES_AT_ONCE // block, 1) * block
            for start in range(0, len(view), step):
                piece = view[start : start + step]
                self._read(piece, at, name)
                checksum.update(piece)
                at += len(piece)
                try:
                    if check is not None and wrong is None:
                        check(piece)
                except CorruptFileError as error:  # which says less than a wrong checksum
                    wrong = error
        if self._checksums[name] != checksum.hexdigest():
            raise CorruptFileError(f"{name} is damaged: its checksum is wrong")
        if wrong is not None:
            raise CorruptFileError(f"{name} cannot be used: {wrong}")

    def _read(self, piece, at, name):
        """Fill a piece of memory with the bytes of the file from `at` on."""
        if read_at(self._file.fileno(), piece, at) < len(piece):
            raise CorruptFileError(f"the file ends inside {name}")


class _EncryptedContent(_Content):
    """An encrypted file. Those who can write one have the key, so the library need not check its structure."""

    def __init__(self, file, keys):
        self._file, head = file, bytearray(encryption.FILE_HEAD_BYTES)
        read_at(file.fileno(), memoryview(head), 0)
        if not head.startswith(encryption.FILE_MAGIC):
            raise CorruptFileError("not encrypted, or damaged: load it without a key, if you know who wrote it")
        self._cipher = encryption.cipher_of(bytes(head), keys)
        if self._cipher is None:
            raise IncompatibleSnapshotError(f"encrypted{' with another key' * bool(keys)}: load it with the key of `save`, or several")
        nbytes = int.from_bytes(head[encryption.HEAD_BYTES :], "little")
        if os.fstat(file.fileno()).st_size != encryption.file_bytes(nbytes):
            raise CorruptFileError("damaged: it was cut, or its length changed")
        self._describe(nbytes)

    def map(self):
        raise ValueError("mmap must be False for an encrypted file, which is decrypted while it is read")

    def _read(self, piece, at, name):
        while piece:
            number, skipped = divmod(at, encryption.PIECE_BYTES)
            data = memoryview(bytearray(encryption.PIECE_BYTES + encryption.TAG_BYTES))
            start = encryption.FILE_HEAD_BYTES + number * len(data)
            data = data[: read_at(self._file.fileno(), data, start)]
            part = encryption.decrypted(self._cipher, encryption.nonce_of(number), data)[skipped:][: len(piece)]
            if not part:
                raise CorruptFileError(f"the file ends inside {name}")
            piece[: len(part)] = part
            piece, at = piece[len(part) :], at + len(part)


class _BytesContent(_Content):
    """The bytes of a file."""

    def __init__(self, data):
        try:
            self._data = memoryview(data).tobytes()
        except TypeError:
            raise TypeError(f"a snapshot must be read from bytes, got {type(data).__name__}") from None
        with _sound():
            _import("safetensors").deserialize(self._data)
        self._describe(len(self._data))

    def _read(self, piece, at, name):
        piece[:] = self._data[at : at + len(piece)]


def _digest(*texts):
    return _import("xxhash").xxh3_128_hexdigest("\0".join(texts).encode(errors="replace"))


def _header_of(tensors, metadata):
    """The bytes before the first tensor: their length, and JSON, padded to a multiple of 8 as by the library."""
    header, at = {"__metadata__": metadata}, 0
    for name in sorted(tensors):
        tensor = tensors[name]
        header[name] = {"dtype": "U8", "shape": tensor.shape, "data_offsets": (at, at + tensor.nbytes)}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _import(name):
    with needed_for("files need", "files"):
        return import_module(name)
