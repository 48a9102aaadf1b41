from os import PathLike
from pathlib import Path
from typing import Literal

from kvfast.llama_cpp.prompt_cache import LlamaPromptCache as LlamaPromptCache

__all__ = ["LlamaPromptCache", "build", "load"]

def build(
    source: str | PathLike[str] | None = None, libraries: str | PathLike[str] | None = None, out: str | PathLike[str] | None = None
) -> Path: ...
def load(
    library: str | PathLike[str] | None = None,
    libraries: str | PathLike[str] | None = None,
    precision: Literal["exact", "fast"] | None = None,
) -> Path: ...
