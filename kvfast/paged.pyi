from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvfast.attend_plan import AttendPlan
from kvfast.formats import KVFormat
from kvfast.fused import Transform
from kvfast.options import Options
from kvfast.pool import BlockPool
from kvfast.prefix import PrefixIndex
from kvfast.table import BlockTable

class Context: ...

class PagedBuffer:
    pool: BlockPool
    index: PrefixIndex
    is_external: bool
    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        formats: list[KVFormat],
        rope_dim: int | None = ...,
        secure: bool = ...,
        v_head_dim: int | None = ...,
        ring: tuple[int, int, int] | None = ...,
    ) -> None: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_owned(self) -> int: ...
    def owners(self) -> NDArray[np.int32]: ...
    @property
    def num_sequences(self) -> int: ...
    def new_table(self) -> BlockTable: ...
    def start(self, table: BlockTable, digests: list[bytes]) -> None: ...
    def fork(self, table: BlockTable, other: BlockTable, then: Callable[[], object]) -> None: ...
    def free(self, table: BlockTable) -> None: ...
    def clear(self) -> None: ...
    def blocks_needed(self, tables: list[BlockTable], counts: list[int]) -> int: ...
    def slot_mapping(self, tables: list[BlockTable], counts: list[int]) -> NDArray[np.int64]: ...
    def append_batch(self, layer: int, k: ArrayLike, v: ArrayLike | None, slot_mapping: ArrayLike) -> None: ...
    def write_batch(
        self,
        layer: int,
        qkv: ArrayLike,
        slot_mapping: ArrayLike,
        num_q_heads: int | None,
        of_q: Transform,
        of_k: Transform,
        out: NDArray[Any] | None,
        num_threads: int | None,
    ) -> NDArray[Any]: ...
    def attend_batch(
        self,
        layer: int,
        q: ArrayLike,
        tables: list[BlockTable] | None,
        block_table: ArrayLike | None,
        seq_lens: ArrayLike | None,
        cu_seqlens_q: ArrayLike | None,
        options: Options,
        cascade: bool,
        rope_q: ArrayLike | None = ...,
    ) -> Any: ...
    def explain_batch(
        self,
        layer: int,
        q: Any,
        num_q_heads: int | None,
        dtype: Any,
        tables: list[BlockTable] | None,
        block_table: ArrayLike | None,
        seq_lens: ArrayLike | None,
        cu_seqlens_q: ArrayLike | None,
        options: Options,
        cascade: bool,
    ) -> AttendPlan: ...
