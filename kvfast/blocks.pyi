from typing import Any

def canonical_dtype(dtype: Any) -> str: ...

class Arena:
    nbytes: int
    def __init__(self, size: int) -> None: ...
