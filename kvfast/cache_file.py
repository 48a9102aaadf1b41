"""Caches in files: safetensors with a versioned header and a checksum per tensor.

The library writes the file and checks its structure; the bytes of the blocks are read straight to where they
belong, or mapped.
"""

import contextlib
import json
import math
import os
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from mmap import ACCESS_COPY
from mmap import mmap as map_file

import numpy as np

from . import state
from ._openmp import get_num_threads
from .errors import CorruptFileError, IncompatibleSnapshotError

__all__ = ["load"]

ALIGNMENT = 4096     # of the tensors in a file, so that they can be mapped: a page, and above all whole cache lines
PIECE = 1 << 20      # bytes that are read and then summed while they are in the processor's cache


def load(path, mmap=False, max_seq_len=None):
    """Read a cache from a file that `KVCache.save` or `Snapshot.save` wrote.

    Parameters
    ----------
    path : path-like
    mmap : bool
        Do not read the blocks but map them: memory is read from the file when attention comes to it, and
        changes stay in this process. The checksums of the blocks are then not verified. The file must not be cut
        short while the cache lives; that `save` replaces it is harmless.
    max_seq_len : int, optional
        Reserve room for so many tokens, instead of what was saved.

    Returns
    -------
    KVCache or RingKVCache
        Of a `Sequence`, a `KVCache` with its block_size; ``Snapshot.load(path)`` can be restored into a sequence.

    Raises
    ------
    CorruptFileError
        If the file is truncated, damaged, or not one of kvfast.
    IncompatibleSnapshotError
        If it has a version that this kvfast does not know.
    ModuleNotFoundError
        Without the packages of ``kvfast[files]``.
    """
    return read(path, mmap, max_seq_len)[0]


def write(cache, token_ids, metadata, path):
    """Write the complete tokens of a cache. At any moment, the file at `path` is the old or the new one, and complete."""
    library, xxhash = _import("safetensors.numpy"), _import("xxhash")
    tensors = dict(state.sides_of(cache._buffer.copy(dense=True)))
    if token_ids is not None:
        # As bytes, like the others: tensors are sorted by their dtypes, and the blocks are to start at a page.
        tensors["token_ids"] = token_ids.astype("<i8").view(np.uint8).reshape(-1, 8)
    with ThreadPoolExecutor(get_num_threads()) as threads:
        sums = threads.map(xxhash.xxh3_128_hexdigest, tensors.values())
        checksums = json.dumps(dict(zip(tensors, sums)), separators=(",", ":"))
    header = state.header_of(cache, metadata)
    metadata = {"kvfast": header, "checksums": checksums, "digest": _digest(xxhash, header, checksums), "padding": ""}
    metadata["padding"] = " " * (-_header_bytes(tensors, metadata) % ALIGNMENT)

    path = os.path.realpath(path)
    part = f"{path}.{uuid.uuid4().hex}.part"
    try:
        try:
            library.save_file(tensors, part, metadata)
        except _import("safetensors").SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}") from None
        with open(part, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
    if os.name == "posix":
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read(path, mmap, max_seq_len):
    """The arguments of a Snapshot: cache, token ids, metadata."""
    safetensors, xxhash = _import("safetensors"), _import("xxhash")
    if sys.byteorder != "little":
        raise RuntimeError("kvfast reads its files on little-endian machines only")
    try:
        while True:
            with open(path, "rb", buffering=0) as file:
                content = _Content(safetensors, path)
                # Another process may have put a new file in its place between the two openings.
                if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                    return _read(file, content, mmap, max_seq_len, xxhash)
    except (CorruptFileError, IncompatibleSnapshotError) as error:
        raise type(error)(f"{os.fspath(path)}: {error}") from None


class _Content:
    """What the library tells of a file that it has found sound."""

    def __init__(self, safetensors, path):
        try:
            with safetensors.safe_open(path, framework="np") as file:
                metadata, names = file.metadata(), file.offset_keys()
                tensors = {name: file.get_slice(name) for name in names}
                dtypes = {name: tensor.get_dtype() for name, tensor in tensors.items()}
                self.shapes = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
        except safetensors.SafetensorError as error:
            raise CorruptFileError(f"not a sound safetensors file: {error}") from None
        try:
            self.header, self.checksums, self.digest = (metadata[name] for name in ("kvfast", "checksums", "digest"))
        except (KeyError, TypeError):
            raise CorruptFileError("a safetensors file, but not one of kvfast") from None
        for name, dtype in dtypes.items():
            if dtype != "U8":
                raise CorruptFileError(f"{name} must have dtype U8, got {dtype}")

    def offsets(self, size):
        """Where each tensor starts in a file of `size` bytes: sound ones have no gaps, and end with the last tensor."""
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        starts = accumulate(sizes.values(), initial=size - sum(sizes.values()))
        return dict(zip(sizes, starts))


def _read(file, content, mmap, max_seq_len, xxhash):
    if content.digest != _digest(xxhash, content.header, content.checksums):
        raise CorruptFileError("the header is damaged: its checksum is wrong")
    checksums = json.loads(content.checksums)
    offsets, shapes = content.offsets(os.fstat(file.fileno()).st_size), content.shapes
    ids_shape = shapes.pop("token_ids", None)
    opening = state.Opening(content.header, shapes, max_seq_len)
    token_ids = None
    if ids_shape is not None:
        if ids_shape != (opening.seq_len, 8):
            raise CorruptFileError(f"token_ids must have shape {opening.seq_len, 8}, got {ids_shape}")
        token_ids = np.empty(ids_shape, np.uint8)
        _fill(file, offsets["token_ids"], "token_ids", [token_ids], checksums, xxhash)
        token_ids = token_ids.view("<i8").reshape(-1)
    if mmap and opening.seq_len:
        for name in shapes:
            if offsets[name] % 64:
                raise ValueError(f"this file cannot be mapped: {name} starts at byte {offsets[name]}, no multiple of 64 "
                                 f"(did something else write it?); load it without mmap")
        opening.take(map_file(file.fileno(), 0, access=ACCESS_COPY), offsets)
    else:
        for name, side in opening.take():
            _fill(file, offsets[name], name, side, checksums, xxhash)
    return opening.cache, token_ids, opening.metadata


def _fill(file, offset, name, rows, checksums, xxhash):
    """Read a tensor into rows that are contiguous each, and verify its checksum."""
    checksum = xxhash.xxh3_128()
    file.seek(offset)
    for row in rows:
        view = memoryview(row).cast("B") if row.size else memoryview(b"")
        for start in range(0, len(view), PIECE):
            piece = view[start : start + PIECE]
            done = 0
            while done < len(piece):
                count = file.readinto(piece[done:])
                if not count:
                    raise CorruptFileError(f"the file ends inside {name}")
                done += count
            checksum.update(piece)
    if not isinstance(checksums, dict) or checksums.get(name) != checksum.hexdigest():
        raise CorruptFileError(f"{name} is damaged: its checksum is wrong")


def _digest(xxhash, *texts):
    return xxhash.xxh3_128_hexdigest("\0".join(texts).encode(errors="replace"))


def _header_bytes(tensors, metadata):
    """Bytes before the first tensor: a length, and JSON of which the library makes a multiple of 8."""
    header, at = {"__metadata__": metadata}, 0
    for name in sorted(tensors):
        tensor = tensors[name]
        header[name] = {"dtype": "U8", "shape": tensor.shape, "data_offsets": (at, at + tensor.nbytes)}
        at += tensor.nbytes
    return 8 + -(-len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()) // 8) * 8


def _import(name):
    try:
        return __import__(name, fromlist=["_"])
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f'files need the package {error.name}: pip install "kvfast[files]"', name=error.name) from None
