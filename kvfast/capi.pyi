from typing import Any

from typing_extensions import Self

C_API: object

class Handle:
    def __new__(cls, cache: Any) -> Self: ...
