from typing_extensions import Self

from kvfast.pool import BlockPool
from kvfast.table import BlockTable

class RingTable(BlockTable):
    window: int
    num_sink_tokens: int
    rollback: int
    evicted: int
    def __new__(cls, pool: BlockPool, window: int, num_sink_tokens: int, rollback: int) -> Self: ...
