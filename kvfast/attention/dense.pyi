from typing import Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    out: NDArray[Any] | None = ...,
    scale: float | None = ...,
    causal: bool = ...,
    softcap: float | None = ...,
    sliding_window: int | None = ...,
    num_sink_tokens: int | None = ...,
    sinks: ArrayLike | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    return_lse: Literal[False] = ...,
    num_splits: int = ...,
    num_threads: int | None = ...,
    attention_chunk_size: int | None = ...,
    spans: ArrayLike | None = ...,
    clamp_spans: bool = ...,
    parents: ArrayLike | None = ...,
    chosen: ArrayLike | None = ...,
    chosen_run: int = ...,
    precision: str | None = ...,
) -> NDArray[Any]: ...
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    out: NDArray[Any] | None = ...,
    scale: float | None = ...,
    causal: bool = ...,
    softcap: float | None = ...,
    sliding_window: int | None = ...,
    num_sink_tokens: int | None = ...,
    sinks: ArrayLike | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    return_lse: Literal[True],
    num_splits: int = ...,
    num_threads: int | None = ...,
    attention_chunk_size: int | None = ...,
    spans: ArrayLike | None = ...,
    clamp_spans: bool = ...,
    parents: ArrayLike | None = ...,
    chosen: ArrayLike | None = ...,
    chosen_run: int = ...,
    precision: str | None = ...,
) -> tuple[NDArray[Any], NDArray[np.float32]]: ...
def merge_states(
    out_a: ArrayLike, lse_a: ArrayLike, out_b: ArrayLike, lse_b: ArrayLike
) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
