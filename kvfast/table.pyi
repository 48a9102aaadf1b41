import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from kvfast.pool import BlockPool

class BlockTable:
    pool: BlockPool
    length: int
    def __new__(cls, pool: BlockPool, *args: object) -> Self: ...
    def give_up(self) -> None: ...
    @property
    def nbytes_alone(self) -> int: ...
    def block_ids(self) -> NDArray[np.int32]: ...
