from typing import Any

from numpy.typing import ArrayLike, NDArray

class Options:
    made_for: int
    @property
    def attention_chunk_size(self) -> int: ...
    def __init__(
        self,
        out: NDArray[Any] | None = ...,
        scale: float | None = ...,
        causal: bool = ...,
        softcap: float | None = ...,
        sliding_window: int | None = ...,
        num_sink_tokens: int | None = ...,
        sinks: ArrayLike | None = ...,
        alibi_slopes: ArrayLike | None = ...,
        return_lse: bool = ...,
        num_splits: int = ...,
        num_threads: int | None = ...,
        attention_chunk_size: int | None = ...,
    ) -> None: ...
    def window_or(self, window: int | None) -> int | None: ...
    def sinks_or(self, num_sink_tokens: int) -> int: ...

def check_block_size(value: Any) -> int: ...
def check_size(value: Any, name: str, least: int, most: int) -> int: ...
