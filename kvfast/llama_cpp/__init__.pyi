from os import PathLike
from pathlib import Path

__all__ = ["build", "load"]

def build(
    source: str | PathLike[str] | None = None, libraries: str | PathLike[str] | None = None, out: str | PathLike[str] | None = None
) -> Path: ...
def load(library: str | PathLike[str] | None = None, libraries: str | PathLike[str] | None = None) -> Path: ...
