"""How many threads of NumPy's BLAS multiply: fewer while other processes take the processors' time."""

from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Any

SECONDS = 0.05  # of products, after which the share is looked at
LEAST_SHARE = 0.75  # of its time that a thread gets: alone nearly all, with a neighbour less (bench/studies/bench_neighbours.py)
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds with fewer threads until all are tried again, doubled each time that this is in vain


class ProductThreads:
    """Calls that multiply, with as many threads as get processors.

    The threads of OpenBLAS wait for each other awake, and a product ends with its last thread. Where other processes want the
    processors, all threads of a product wait until each had its turn, so that decoding slows down far more than by what the others
    take. A share below `LEAST_SHARE` of the calling thread's time halves the number of threads, for a while. Without threadpoolctl
    all threads are used always.
    """

    def __init__(self) -> None:
        self._wall_seconds, self._thread_seconds = 0.0, 0.0
        self._halvings, self._wait, self._all_again_at = 0, FIRST_WAIT, 0.0
        self._pool: Any = None

    def call(self, multiply: Callable[..., Any], *arguments: Any) -> Any:
        """The result of ``multiply(*arguments)``."""
        wall, cpu = perf_counter(), thread_time()
        if self._halvings:
            with self._pool.limit(limits=max(1, self._most >> self._halvings), user_api="blas"):
                result = multiply(*arguments)
        else:
            result = multiply(*arguments)
        now = perf_counter()
        self._wall_seconds += now - wall
        self._thread_seconds += thread_time() - cpu
        if self._wall_seconds >= SECONDS:
            self._decide(self._thread_seconds / self._wall_seconds, now)
            self._wall_seconds, self._thread_seconds = 0.0, 0.0
        return result

    def _decide(self, share: float, now: float) -> None:
        if self._halvings and now >= self._all_again_at:
            self._halvings = 0
        elif share < LEAST_SHARE:
            if not self._halvings:
                if not self._find_pool():
                    return
                # Soon after the last time, the neighbours are still there.
                self._wait = min(2 * self._wait, LONGEST_WAIT) if now < self._all_again_at + self._wait else FIRST_WAIT
                self._all_again_at = now + self._wait
            if self._most >> self._halvings > 1:
                self._halvings += 1

    def _find_pool(self) -> bool:
        """Whether there are threads to save."""
        try:
            from threadpoolctl import ThreadpoolController
        except ModuleNotFoundError:
            return False
        self._pool = ThreadpoolController().select(user_api="blas")
        self._most = max((one["num_threads"] for one in self._pool.info()), default=1)
        return self._most > 1
