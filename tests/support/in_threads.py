"""Functions that run in threads at the same time. The error of one is that of the test."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor


def together(*works):
    """Let all run at once, each in a thread of its own, to their ends."""
    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(work) for work in works]:
            future.result()


@contextlib.contextmanager
def meanwhile(*works):
    """Call each again and again, in a thread of its own, until the block ends."""
    stop = threading.Event()

    def repeat(work):
        while not stop.is_set():
            work()

    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(repeat, work) for work in works]
        try:
            yield
        finally:
            stop.set()
    for future in futures:
        future.result()
