"""What of forgotten tokens stays in the memory of a process, run as a script of its own by `test_security`.

    python tests/support/forgotten_tokens.py SECURE

Every call that forgets tokens is made once for each kind of cache that has it, with keys, values and queries of one number, the
case's own. Then the memory is searched, with all caches still there: prints a JSON object of the runs found of each case.
"""

import gc
import json
import sys

import numpy as np
from process_memory import RUN, pieces

import kvfast

DIM, BLOCK = 64, 32
OPEN = kvfast.KVFormat("int4", per_channel=True, num_first_float_tokens=16, block_size=32)
DTYPES = {"float32": "float32", "float16": "float16", "int4": OPEN, "recent": kvfast.KVFormat("int8", num_recent_float_tokens=16)}
ROPE = kvfast.Rope()


class Case:
    """A cache, and what is written to it: tokens of others, and those to forget."""

    def __init__(self, cache, number):
        self.cache, self.secret, self.rng = cache, secret_of(number), np.random.default_rng(number)
        self.latent = hasattr(cache, "latent_dim")
        self.given = []

    def rows(self, n, is_secret):
        shape = (n, 2 * DIM) if self.latent else (n, 2, DIM)
        rows = np.full(shape, self.secret) if is_secret else self.rng.standard_normal(shape, np.float32)
        self.given.append(rows)
        return rows

    def append(self, n, is_secret=False, advance=True, cache=None):
        cache, rows = self.cache if cache is None else cache, self.rows(n, is_secret)
        cache.append(0, *[rows] * (1 if self.latent else 2))
        if advance:
            cache.advance(n)
        return self

    def secrets(self, n, **options):
        """Tokens to forget, which queries have asked for."""
        self.append(n, True, **options)
        q = np.full((3, 4, 2 * DIM if self.latent else DIM), self.secret)
        self.cache.attend(0, q, num_splits=2)[:] = 0
        q[:] = 0
        return self


def secret_of(number):
    """A number that float16 holds exactly, too."""
    return np.uint16(0x31A5 + 11 * number).view(np.float16).astype(np.float32)


def truncated(case):
    case.append(70).secrets(60).cache.truncate(70)


def truncated_to_a_branch(case):
    """The secrets are drafts of another branch, in front of those that stay."""
    case.append(70).secrets(20, advance=False).append(30, advance=False)
    case.cache.truncate(70, [20, 22, *range(40, 50)])


def truncated_to_a_branch_beside_a_fork(case):
    case.append(70).secrets(20, advance=False)
    fork = case.append(30, advance=False).cache.fork()
    case.cache.truncate(70, [20, 22, *range(40, 50)])
    fork.clear()


def truncated_beside_a_snapshot(case):
    snapshot = case.append(70).secrets(60).cache.snapshot()
    case.cache.truncate(70)
    del snapshot


def truncated_beside_a_fork(case):
    fork = case.append(70).secrets(60).cache.fork()
    case.cache.truncate(70)
    fork.clear()


def truncated_then_continued(case):
    snapshot = case.append(70).secrets(60).cache.snapshot()
    case.cache.truncate(70)
    case.append(9)
    del snapshot


def never_counted(case):
    case.append(70).secrets(20, advance=False).cache.truncate(70)


def left_out_of_a_snapshot(case):
    snapshot = case.append(70).secrets(20, advance=False).cache.snapshot(uncounted="drop")
    case.cache.truncate(70)
    return snapshot


def cleared(case):
    case.append(7).secrets(60).cache.clear()


def restored(case):
    snapshot = case.append(70).cache.snapshot()
    case.secrets(60).cache.restore(snapshot)


def dropped(case):
    case.append(70).secrets(30).append(40).cache.drop(70, 100, rope=ROPE)


def dropped_twice(case):
    case.append(40).secrets(20).append(10).secrets(20).append(40)
    case.cache.drop(70, 90, rope=ROPE)
    case.cache.drop(40, 60, rope=ROPE)


def dropped_at_the_start(case):
    case.secrets(45).append(60).cache.drop(0, 45, rope=ROPE)


def dropped_in_an_open_block(case):
    case.append(66).secrets(5).append(4).cache.drop(66, 71, rope=ROPE)


def dropped_beside_a_snapshot(case):
    snapshot = case.append(70).secrets(30).append(40).cache.snapshot()
    case.cache.drop(70, 100, rope=ROPE)
    del snapshot


def dropped_then_truncated(case):
    case.append(40).secrets(20).append(10).append(20, True).append(5)
    case.cache.drop(40, 60, rope=ROPE)
    case.cache.truncate(50)


def computed_again(case):
    """The chunk's first tokens are replaced."""
    chunk = case.cache.copy() if not case.cache.is_paged else case.cache.pool.new_sequence()
    case.append(20, True, cache=chunk).append(60, cache=chunk)
    case.append(50).cache.splice(chunk, rope=ROPE, recomputed=20)
    chunk.clear()


def gone_with_a_window(case):
    case.secrets(BLOCK)
    for _ in range(8):
        case.append(40)


def freed(case):
    case.append(70).secrets(60).cache.free()


def freed_beside_a_fork(case):
    fork = case.append(70).cache.fork()
    case.secrets(60).cache.free()
    return fork


PLAIN = [
    *(truncated, truncated_to_a_branch, truncated_to_a_branch_beside_a_fork, truncated_beside_a_snapshot),
    *(truncated_beside_a_fork, truncated_then_continued, never_counted, left_out_of_a_snapshot, cleared),
    restored,
]
SPLICED = [
    *(dropped, dropped_twice, dropped_at_the_start, dropped_in_an_open_block, dropped_beside_a_snapshot),
    *(dropped_then_truncated, computed_again),
]


def sequence(dtype, secure, **options):
    return kvfast.PagedKVCache(1, 2, DIM, num_blocks=24, block_size=BLOCK, dtype=dtype, secure=secure, **options).new_sequence()


KINDS = {
    "growing": (lambda dtype, secure: kvfast.KVCache(1, 2, DIM, dtype=dtype, block_size=BLOCK, secure=secure), PLAIN + SPLICED),
    "bounded": (lambda dtype, secure: kvfast.KVCache(1, 2, DIM, 300, dtype=dtype, block_size=BLOCK, secure=secure), PLAIN + SPLICED),
    "sequence": (sequence, [*PLAIN, *SPLICED, freed, freed_beside_a_fork]),
    "ring": (
        lambda dtype, secure: kvfast.RingKVCache(1, 2, DIM, 100, dtype=dtype, block_size=BLOCK, secure=secure),
        [*PLAIN, gone_with_a_window],
    ),
    "sequence with window": (lambda dtype, secure: sequence(dtype, secure, sliding_window=100), [*PLAIN, gone_with_a_window, freed]),
    "latent": (lambda dtype, secure: kvfast.MLAKVCache(1, DIM, DIM, dtype=dtype, block_size=BLOCK, secure=secure), PLAIN),
    "sequence of latents": (
        lambda dtype, secure: kvfast.PagedMLAKVCache(1, DIM, DIM, 24, BLOCK, dtype, secure).new_sequence(),
        [*PLAIN, freed],
    ),
}


def scheduled(number, dtype, secure):
    """Slots of another scheduler, which only `clear` forgets."""
    pool = kvfast.PagedKVCache(1, 2, DIM, num_blocks=8, block_size=BLOCK, dtype=dtype, secure=secure)
    rows, table = np.full((60, 2, DIM), secret_of(number)), np.arange(8, dtype=np.int32)[None]
    batch = pool.prepare_batch(table, [60], [0, 60], np.arange(60))
    pool.append_batch(0, rows, rows, batch)
    pool.attend_batch(0, rows, batch)[:] = 0
    rows[:] = 0
    pool.clear()
    return pool


def cases(secure):
    """Run all; yields the name of each with its number, and what it keeps."""
    number = 0
    for kind, (make, calls) in KINDS.items():
        for name, dtype in DTYPES.items():
            if "latent" in kind and name not in ("float32", "float16"):
                continue
            for call in calls:
                case = Case(make(dtype, secure), number)
                kept = call(case)
                for rows in case.given:
                    rows[:] = 0
                yield f"{kind}, {name}: {call.__name__}", number, (case, kept)
                number += 1
    for name, dtype in DTYPES.items():
        yield f"scheduler, {name}: clear", number, scheduled(number, dtype, secure)
        number += 1


def runs_of(words, numbers):
    """How often RUN words that are one and the same secret stand one after the other, by the secret's number.

    Nothing is sorted, as secrets that lie apart would then be runs in the memory that is searched.
    """
    changes = np.cumsum(words[1:] != words[:-1], dtype=np.int32)
    found = words[RUN:][(changes[RUN - 1 :] == changes[: -RUN + 1]) & (words[RUN:] != 0)]
    for word in set(found.tolist()) & numbers.keys():
        yield numbers[word], int((found == word).sum())


def search(numbers):
    """The runs of the secret of each number in the process's own memory, as float32 or float16."""
    kinds = {np.uint32: "float32", np.uint16: "float16"}
    wanted = {word: {int(secret_of(one).astype(kind).view(word)): one for one in numbers} for word, kind in kinds.items()}
    found = dict.fromkeys(numbers, 0)
    for piece in pieces():
        for word, known in wanted.items():
            for number, count in runs_of(piece.view(word), known):
                found[number] += count
    return found


def main():
    names, kept = {}, []
    for name, number, held in cases(sys.argv[1] == "True"):
        names[number] = name
        kept.append(held)
    gc.collect()
    found = search(list(names))
    print(json.dumps({names[number]: count for number, count in found.items()}))


if __name__ == "__main__":
    main()
