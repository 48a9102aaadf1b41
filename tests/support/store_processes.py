"""What processes do with a folder of values at the same time; each runs in a process of its own, and may be killed."""

import hashlib
import os
import random
import time

from store_values import taken

from kvfast.prompts.stores import open_store

KEYS, LARGEST = 300, 400_000


def content(number, version):
    """A value that tells whether all of it is there, and of one version."""
    data = random.Random(f"{number} {version}").randbytes(20_000 + number * 37_137 % (LARGEST - 20_064))
    return hashlib.sha256(data).digest() + number.to_bytes(32, "little") + data


def is_sound(number, data):
    return hashlib.sha256(data[64:]).digest() == data[:32] and int.from_bytes(data[32:64], "little") == number


def key_of(number):
    return f"c-{hashlib.sha256(str(number).encode()).hexdigest()}"


def work(url, max_bytes, seconds, seed, failed):
    """Random calls; sets `failed` if a value is wrong."""
    rng, store, end = random.Random(seed), open_store(url, max_bytes=max_bytes), time.monotonic() + seconds
    while time.monotonic() < end:
        number = int(KEYS * rng.random() ** 2)
        choice = rng.random()
        if choice < 0.45:
            taken(store, key_of(number), content(number, rng.randrange(3)))
        elif choice < 0.9:
            numbers = [number, rng.randrange(KEYS), rng.randrange(KEYS)]
            for one, value in zip(numbers, store.get_many([key_of(one) for one in numbers])):
                if value is None:
                    continue
                with value:
                    if not is_sound(one, bytes(value.read(0, len(value)))):
                        failed.value = 1
                store.touch([key_of(one)])
        elif choice < 0.95:
            store.contains_many([key_of(one) for one in range(number, number + 20)])
        elif choice < 0.98:
            store.delete([key_of(number)])
        else:
            store.close()
            store = open_store(url, max_bytes=max_bytes)
    store.close()


def open_at_once(url, barrier, failed):
    """Open a new folder at the same time as others, and use it."""
    barrier.wait()
    try:
        store = open_store(url, max_bytes=10_000_000)
        for i in range(10):
            number = os.getpid() * 10 + i
            taken(store, key_of(number), content(1, i))
            if not store.contains_many([key_of(number)])[0]:
                failed.value = 1
        store.close()
    except BaseException:
        failed.value = 2
        raise


def put_without_end(url):
    store = open_store(url)
    for number in range(10**6):
        taken(store, key_of(number), content(number, 0))


def put_with_small_files(url, limit, results):
    """Where no file may have more than `limit` bytes, as on a disk that is full."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = open_store(url)
    store.put(key_of(0), b"1")  # makes the index
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    for nbytes in (1000, 2 * limit, 1000):
        results.put(taken(store, key_of(nbytes), bytes(nbytes)))
    results.put(store.contains_many([key_of(1000), key_of(2 * limit)]))
    store.close()
