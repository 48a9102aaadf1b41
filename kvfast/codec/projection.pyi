from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

class Transform:
    def __init__(
        self,
        head_dim: int,
        norm: ArrayLike | None = ...,
        eps: float = ...,
        cos: ArrayLike | None = ...,
        sin: ArrayLike | None = ...,
        positions: ArrayLike | None = ...,
        interleaved: bool = ...,
        name: str = ...,
        rotation: Transform | None = ...,
    ) -> None: ...

class Projection: ...

def split_qkv_norm_rope(
    qkv: ArrayLike,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    cos: ArrayLike | None = ...,
    sin: ArrayLike | None = ...,
    positions: ArrayLike | None = ...,
    q_norm: ArrayLike | None = ...,
    k_norm: ArrayLike | None = ...,
    eps: float = ...,
    interleaved: bool = ...,
    num_threads: int | None = ...,
    v_head_dim: int | None = ...,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]: ...
def rotated(x: ArrayLike, cos: ArrayLike, sin: ArrayLike, interleaved: bool = ...) -> NDArray[Any]: ...
