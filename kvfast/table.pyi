import numpy as np
from numpy.typing import NDArray

from kvfast.pool import BlockPool

class BlockTable:
    pool: BlockPool
    length: int
    def __init__(self, pool: BlockPool) -> None: ...
    def give_up(self) -> None: ...
    def block_ids(self) -> NDArray[np.int32]: ...
