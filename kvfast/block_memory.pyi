from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from kvfast.formats import KVFormat

class BlockMemory:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rope_dim: int | None
    block_size: int
    num_blocks: int
    num_gaps: int
    first_blocks: int
    secure: bool
    formats: list[KVFormat | None]
    def __new__(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        formats: list[KVFormat | None],
        num_blocks: int,
        grows: bool = ...,
        is_shared: bool = ...,
        rope_dim: int | None = ...,
        secure: bool = ...,
        v_head_dim: int | None = ...,
    ) -> Self: ...
    def bytes_for(self, blocks: int) -> int: ...
    def map(self, memory: Any, num_blocks: int, offsets: list[Any]) -> None: ...
    def stream(self, layer: int, first: int, count: int, head: int, values: bool) -> NDArray[np.uint8]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def bytes_per_token(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
