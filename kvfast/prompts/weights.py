"""What tells the weights of a model from others."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
SCALES = "adapter_config.json"  # of an adapter
BYTES_AT_ONCE = 1 << 24
SETTLED = 2e9  # nanoseconds after which a change of a file has another time than the one before, on any file system


def files_digest(path: str | Path) -> str | None:
    """A digest of the weights in a file or folder, all of their bytes. None if there are none.

    A file whose size, times and place are those that it had is not read again.
    """
    from xxhash import xxh3_128

    path = Path(path).expanduser().absolute()
    files = [path] if path.is_file() else sorted(one for one in path.glob("*") if one.suffix in WEIGHTS or one.name == SCALES)
    found = xxh3_128()
    for file in files:
        status = file.stat()
        times = status.st_mtime_ns, status.st_ctime_ns
        digest = _digest if abs(time.time_ns() - max(times)) > SETTLED else _digest.__wrapped__
        found.update(f"{file.name} {digest(file, (status.st_dev, status.st_ino, status.st_size, *times))} ".encode())
    return found.hexdigest() if files else None


@functools.lru_cache(1024)
def _digest(file: Path, status: tuple[Any, ...]) -> str:
    """A digest of a file while it has a status."""
    from xxhash import xxh3_128

    found = xxh3_128()
    with file.open("rb") as data:
        while some := data.read(BYTES_AT_ONCE):
            found.update(some)
    return found.hexdigest()
