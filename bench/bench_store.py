"""Stores of prompts: time of a call by the number of values, and bytes per second next to plain reads of the same bytes.

    python bench/bench_store.py [--short]

A folder with an index of SQLite, and redis-server on loopback. Each row is the median of interleaved rounds. The last rows are
`PromptCache.restore` of a prompt in a new cache, next to plain reads of its values into new memory.
"""

import argparse
import hashlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np

import kvfast
from kvfast.prompts.stores import FolderStore, open_store

THREADS = min(4, os.cpu_count() or 1)
ASKED = 16  # keys of one call: a prompt of 4,096 tokens in chunks of 256
SMALL = 100  # bytes of a value where calls are timed
SMOLLM2, LLAMA = (30, 3, 64), (32, 8, 128)  # layers, KV heads, head_dim


def key(number):
    return f"c-{hashlib.sha256(number.to_bytes(8, 'little')).hexdigest()}"


def timed(call):
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def start_redis(folder):
    """A server on a free port of loopback, or None where there is none."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        return None, 0
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    server = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)], stdout=subprocess.DEVNULL
    )
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return server, port


def filled_folder(folder, count):
    """A folder with `count` values, of which the index is made in one scan."""
    for digits in range(256):
        Path(folder, f"{digits:02x}").mkdir(parents=True)
    value = bytes(SMALL)
    for i in range(count):
        name = key(i)
        with open(f"{folder}/{name[2:4]}/{name}", "xb", buffering=0) as file:
            file.write(value)
    store = FolderStore(folder, max_bytes=count * SMALL)  # each new value removes one
    seconds, _ = timed(lambda: store.touch([key(0)]))
    print(f"  index of {count:,} files made in {seconds:.1f} s")
    return store


def filled_redis(port, database, count):
    import redis

    client = redis.Redis(port=port, db=database)
    for start in range(0, count, 10_000):
        pipe = client.pipeline(transaction=False)
        for i in range(start, min(start + 10_000, count)):
            pipe.set(f"kvfast:{key(i)}", bytes(SMALL))
        pipe.execute()
    return open_store(f"redis://127.0.0.1:{port}/{database}")


def calls(store, count, rng, fresh):
    asked = [key(rng.randrange(count)) for _ in range(ASKED)]

    def get():
        for value in store.get_many(asked):
            if value is not None:
                with value:
                    value.read(0, len(value))

    return {
        f"contains_many of {ASKED}": lambda: store.contains_many(asked),
        f"get_many of {ASKED}": get,
        f"touch of {ASKED}": lambda: store.touch(asked),
        "put": lambda: store.put(key(next(fresh)), bytes(SMALL)),
    }


def look_ups(stores, rounds):
    """Print the time of each call, by the number of values."""
    rng, times = random.Random(0), {}
    fresh = iter(range(10**9, 2 * 10**9))
    for _ in range(rounds):
        for count, store in stores.items():
            for name, call in calls(store, count, rng, fresh).items():
                times.setdefault(name, {}).setdefault(count, []).append(timed(call)[0])
    for name, by_count in times.items():
        print(f"  {name:<22}" + "".join(f"{median(by_count[count]) * 1e6:>14.0f} us" for count in stores))


def throughput(name, plain, own, nbytes, rounds):
    """Print both, and the median of the ratios of rounds side by side."""
    times = [(timed(plain)[0], timed(own)[0]) for _ in range(rounds)]
    rates = [nbytes / median(column) / 1e6 for column in zip(*times)]
    ratio = median(first / second for first, second in times)
    print(f"  {name:<42}{rates[0]:>8.0f} MB/s{rates[1]:>8.0f} MB/s{ratio:>8.2f}")


def folder_throughput(folder, nbytes, count, rounds):
    store, names = FolderStore(folder), [key(i) for i in range(count)]
    for name in names:
        store.put(name, os.urandom(nbytes))
    memory = [memoryview(bytearray(nbytes)) for _ in range(min(8, count))]

    def plain_read(i):
        descriptor = os.open(f"{folder}/{names[i][2:4]}/{names[i]}", os.O_RDONLY)
        try:
            assert os.preadv(descriptor, [memory[i % len(memory)]], 0) == nbytes
        finally:
            os.close(descriptor)

    def read(pair):
        i, value = pair
        with value:
            value.read(0, nbytes, memory[i % len(memory)])

    with ThreadPoolExecutor(THREADS) as threads:
        throughput(
            f"folder, {count} of {nbytes / 1e6:g} MB, {THREADS} threads",
            lambda: list(threads.map(plain_read, range(count))),
            lambda: list(threads.map(read, enumerate(store.get_many(names)))),
            count * nbytes,
            rounds,
        )


def redis_throughput(port, nbytes, count, rounds):
    import redis

    store, client, names = open_store(f"redis://127.0.0.1:{port}/9"), redis.Redis(port=port, db=9), [key(i) for i in range(count)]
    for name in names:
        store.put(name, os.urandom(nbytes))
    for what, plain in {
        "kept": lambda: [client.get(f"kvfast:{name}") for name in names],
        "dropped": lambda: [len(client.get(f"kvfast:{name}")) for name in names],
    }.items():
        throughput(f"redis, {count} of {nbytes / 1e6:g} MB, GETs {what}", plain, lambda: store.get_many(names), count * nbytes, rounds)
    client.flushdb()


def filled_cache(shape, dtype, num_tokens):
    cache = kvfast.KVCache(*shape, max_seq_len=num_tokens, dtype=dtype)
    rows = np.random.default_rng(0).standard_normal((num_tokens, *shape[1:])).astype(np.float32)
    for layer in range(shape[0]):
        cache.append(layer, rows, rows)
    cache.advance(num_tokens)
    return cache


def restore_throughput(url, read, shape, dtype, num_tokens, rounds):
    """`read` gets the key of a value and returns the value, in new memory. A folder is read by threads, a server by one client."""
    prompt, spare = np.arange(num_tokens + 1), []
    with kvfast.PromptCache(url) as prompts:
        cache = filled_cache(shape, dtype, num_tokens)
        prompts.save(cache, prompt[:-1])
        del cache
        entries = list(prompts.store.entries())
        keys, nbytes = [entry.key for entry in entries], sum(entry.nbytes for entry in entries)

        def restore():
            spare[:] = [kvfast.KVCache(*shape, max_seq_len=num_tokens, dtype=dtype)]
            assert prompts.restore(spare[0], prompt) == num_tokens

        with ThreadPoolExecutor(1 if "://" in url else THREADS) as threads:
            name = f"{url.partition(':')[0] if '://' in url else 'folder'}, restore {nbytes / 1e6:.0f} MB {dtype}"
            throughput(name, lambda: list(threads.map(read, keys)), restore, nbytes, rounds)
            if "://" in url:
                throughput(f"{name}, dropped", lambda: sum(threads.map(lambda key: len(read(key)), keys)), restore, nbytes, rounds)
        prompts.clear()


def restores(folder, port, num_tokens, rounds):
    def of_file(key):
        with open(f"{folder}/{key[2:4]}/{key}", "rb", buffering=0) as file:
            value = bytearray(os.fstat(file.fileno()).st_size)
            assert file.readinto(value) == len(value)
            return value

    cases = [(SMOLLM2, "int4", num_tokens), (SMOLLM2, "int8", num_tokens), (LLAMA, "int4", num_tokens)]
    for case in cases:
        restore_throughput(str(folder), of_file, *case, rounds)
    if port:
        import redis

        client = redis.Redis(port=port, db=8)
        for case in cases:
            restore_throughput(f"redis://127.0.0.1:{port}/8", lambda key: client.get(f"kvfast:{key}"), *case, rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="1,000 values at most, prompts of 512 tokens, and fewer rounds")
    given = parser.parse_args()
    counts, rounds, many = ((100, 1000), 20, 4) if given.short else ((100, 10_000, 1_000_000), 300, 40)
    num_tokens, turns = (512, 3) if given.short else (4096, 9)
    with tempfile.TemporaryDirectory() as base:
        print("folder: values" + "".join(f"{count:>17,}" for count in counts))
        stores = {count: filled_folder(Path(base, str(count)), count) for count in counts}
        os.sync()  # so that nobody waits for the files that were just made
        look_ups(stores, rounds)
        server, port = start_redis(base)
        if server is None:
            print("no redis-server")
        try:
            if server is not None:
                print("redis: values " + "".join(f"{count:>17,}" for count in counts))
                look_ups({count: filled_redis(port, i, count) for i, count in enumerate(counts)}, rounds)
            print(f"throughput{'plain':>41}{'store':>13}{'ratio':>12}")
            for nbytes in (100_000, 1_600_000):
                folder_throughput(Path(base, f"values-{nbytes}"), nbytes, many * 2, turns)
            for nbytes in (100_000, 1_600_000) if server is not None else ():
                redis_throughput(port, nbytes, many, turns)
            restores(Path(base, "prompts"), port, num_tokens, turns)
        finally:
            if server is not None:
                server.kill()
                server.wait()


if __name__ == "__main__":
    main()
