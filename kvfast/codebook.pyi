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

class Books:
    centroids: NDArray[np.float16]
    bounds: NDArray[np.int32]
    codes: NDArray[np.uint8]
    count: int
    def __init__(
        self, centroids: NDArray[np.float16], bounds: NDArray[np.int32], codes: NDArray[np.uint8], count: int
    ) -> None: ...

def attend(
    queries: NDArray[np.float32],
    keys: Books,
    values: Books,
    visible: NDArray[np.intp],
    num_threads: int | None = ...,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
