import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from kvfast.pool import BlockPool

class BlockMap:
    pool: BlockPool
    def __new__(cls, pool: BlockPool, *args: object) -> Self: ...
    def block_ids(self) -> NDArray[np.int32]: ...
    def block_row(self) -> NDArray[np.int32]: ...
