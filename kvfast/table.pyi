from kvfast.block_map import BlockMap

class BlockTable(BlockMap):
    length: int
    def give_up(self) -> None: ...
    @property
    def nbytes_alone(self) -> int: ...
