import numpy as np
from numpy.typing import NDArray

def train(
    points: NDArray[np.float32],
    n: int,
    bounds: NDArray[np.int32],
    count: int,
    seed: int,
    num_threads: int | None = ...,
) -> NDArray[np.float32]: ...
def encode(
    points: NDArray[np.float32],
    n: int,
    bounds: NDArray[np.int32],
    count: int,
    centroids: NDArray[np.float32],
    num_threads: int | None = ...,
) -> NDArray[np.uint8]: ...
