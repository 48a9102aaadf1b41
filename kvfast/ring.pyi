from kvfast.pool import BlockPool
from kvfast.table import BlockTable

class RingTable(BlockTable):
    window: int
    num_sink_tokens: int
    rollback: int
    evicted: int
    def __init__(self, pool: BlockPool, window: int, num_sink_tokens: int, rollback: int) -> None: ...
