from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import Unpack

from kvfast.attention.options import AttendOptions

def attention(q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Unpack[AttendOptions]) -> Any: ...
def merge_states(
    out_a: ArrayLike, lse_a: ArrayLike, out_b: ArrayLike, lse_b: ArrayLike
) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
