from typing import Any

from typing_extensions import Self

def canonical_dtype(dtype: Any) -> str: ...

class Arena:
    nbytes: int
    def __new__(cls, size: int) -> Self: ...

class ArenaView: ...
