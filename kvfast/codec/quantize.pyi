from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

def quantize(x: ArrayLike, bits: Literal[8, 4] = ...) -> tuple[NDArray[Any], NDArray[np.float32]]: ...
def dequantize(
    codes: ArrayLike,
    scales: ArrayLike,
    out: NDArray[np.float32] | None = ...,
    *,
    head_dim: int | None = ...,
) -> NDArray[np.float32]: ...
