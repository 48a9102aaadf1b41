from typing import Any

from numpy.typing import ArrayLike, NDArray

class ContiguousBuffer:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int | None
    length: int
    @property
    def nbytes(self) -> int: ...
    @property
    def bytes_per_token(self) -> int | float: ...
    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, max_seq_len: int | None, k_dtype: Any, v_dtype: Any
    ) -> None: ...
    def append(self, index: int, k: ArrayLike, v: ArrayLike) -> None: ...
    def attend(
        self,
        index: int,
        q: ArrayLike,
        out: NDArray[Any] | None,
        scale: float | None,
        causal: bool,
        softcap: float | None,
        sliding_window: int | None,
        sinks: ArrayLike | None,
        alibi_slopes: ArrayLike | None,
        return_lse: bool,
        num_splits: int,
        num_threads: int | None,
    ) -> Any: ...
    def advance(self, n: int) -> None: ...
    def layer_length(self, index: int) -> int: ...
    def truncate(self, n: int) -> None: ...
    def rows(self, index: int, values: bool) -> NDArray[Any]: ...
    def copy(self) -> ContiguousBuffer: ...
    def dtypes(self, values: bool) -> list[str]: ...
