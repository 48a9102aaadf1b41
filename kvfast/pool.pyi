from typing import Any

import numpy as np
from numpy.typing import NDArray

class BlockPool:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    num_gaps: int
    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        k_dtypes: list[str],
        v_dtypes: list[str],
        num_blocks: int,
        grows: bool = ...,
        is_shared: bool = ...,
    ) -> None: ...
    def abandon(self, table: Any) -> None: ...
    def settle(self) -> None: ...
    def map(self, memory: Any, num_blocks: int, offsets: list[Any]) -> None: ...
    def stream(self, layer: int, first: int, count: int, head: int, values: bool) -> NDArray[np.uint8]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def bytes_per_token(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    def dtypes(self, values: bool) -> list[str]: ...

def per_layer(dtype: Any, num_layers: int, name: str) -> list[str]: ...
