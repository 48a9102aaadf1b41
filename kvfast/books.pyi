import numpy as np
from numpy.typing import NDArray

class Books:
    centroids: NDArray[np.float16]
    bounds: NDArray[np.int32]
    codes: NDArray[np.uint8]
    count: int
    def __init__(
        self, centroids: NDArray[np.float16], bounds: NDArray[np.int32], codes: NDArray[np.uint8], count: int
    ) -> None: ...
    def decode(self) -> NDArray[np.float32]: ...

def attend(
    queries: NDArray[np.float32],
    keys: Books,
    values: Books,
    visible: NDArray[np.intp],
    num_threads: int | None = ...,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
