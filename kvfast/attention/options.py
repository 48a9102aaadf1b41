"""The keyword arguments of every `attend`, by name and type. `KVCache.attend` documents them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


class AttendOptions(TypedDict, total=False):
    """The keyword arguments of every `attend`, see `KVCache.attend`; of batches, `spans` and `tree_parents` are lists."""

    out: NDArray[Any] | None
    scale: float | None
    causal: bool
    softcap: float | None
    sliding_window: int | None
    num_sink_tokens: int | None
    sinks: ArrayLike | None
    alibi_slopes: ArrayLike | None
    return_lse: bool
    num_splits: int
    num_threads: int | None
    attention_chunk_size: int | None
    spans: Any
    clamp_spans: bool
    tree_parents: Any
    indices: ArrayLike | None
    index_block: int
    precision: str | None
