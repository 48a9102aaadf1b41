"""What tells the weights of a model from others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
SCALES = "adapter_config.json"  # of an adapter
BYTES_AT_ONCE = 1 << 24
KNOWN: dict[Path, tuple[Any, str]] = {}  # the status of a file, and its digest while it has that
SETTLED = 2e9  # nanoseconds after which a change of a file has another time than the one before, on any file system


def files_digest(path: str | Path) -> str | None:
    """A digest of the weights in a file or folder, all of their bytes. None if there are none.

    A file whose size, times and place are those that it had is not read again.
    """
    from xxhash import xxh3_128

    files, found = _files(path), xxh3_128()
    for file in files:
        status, is_settled = _status(file)
        known, digest = KNOWN.get(file, (None, ""))
        if not is_settled or known != status:
            digest = _read(file)
        if is_settled:
            KNOWN[file] = status, digest
        found.update(f"{file.name} {digest} ".encode())
    return found.hexdigest() if files else None


def files_status(path: str | Path) -> list[Any] | None:
    """What changes with the files of `files_digest`, found without reading them. None if that is not sure: one has just changed, or
    cannot be reached."""
    try:
        found = [(file, *_status(file)) for file in _files(path)]
    except OSError:
        return None
    return found if all(is_settled for *_, is_settled in found) else None


def _files(path):
    path = Path(path).expanduser().absolute()
    return [path] if path.is_file() else sorted(one for one in path.glob("*") if one.suffix in WEIGHTS or one.name == SCALES)


def _status(file):
    """The size, times and place of a file, and whether any change shows in them from now on."""
    status = file.stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    return (status.st_dev, status.st_ino, status.st_size, *times), abs(time.time_ns() - max(times)) > SETTLED


def _read(file):
    from xxhash import xxh3_128

    found = xxh3_128()
    with file.open("rb") as data:
        while some := data.read(BYTES_AT_ONCE):
            found.update(some)
    return found.hexdigest()
