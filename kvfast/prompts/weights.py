"""What tells the weights of a model from others."""

from __future__ import annotations

from pathlib import Path

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
BYTES_AT_ONCE = 1 << 24


def files_digest(path: str | Path) -> str | None:
    """A digest of the weights in a file or folder, all of their bytes. None if there are none."""
    from xxhash import xxh3_128

    path = Path(path)
    files = [path] if path.is_file() else sorted(one for one in path.glob("*") if one.suffix in WEIGHTS)
    found = xxh3_128()
    for file in files:
        found.update(f"{file.name} {file.stat().st_size} ".encode())
        with file.open("rb") as data:
            while some := data.read(BYTES_AT_ONCE):
                found.update(some)
    return found.hexdigest() if files else None
